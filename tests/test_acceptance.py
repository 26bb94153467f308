"""Acceptance by position out of what real servers wrote, and out of one that is started here."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT

from planner.constants import PPM
from planner.drafts.acceptance import Acceptance, NoAcceptance, Step, counted, of_steps, of_totals
from planner.drafts.server_texts import acceptance_in, steps_in
from runtime.tools.llama_server import find_program, serving

MODELS = ROOT / "tests" / "data"
# One request to b10068 (llama-server) and to b11549 (xllamacpp), which drafted alike.
REQUEST = (
    "0.00.775.202 I slot print_timing: id  1 | task 0 | draft acceptance = 0.70492 "
    "(   43 accepted /    61 generated), mean len =  3.69\n"
)
STATISTICS = (
    "0.00.775.249 I spec common_specu: statistics     draft-simple: #calls(b,g,a) =    1     16     16, "
    "#gen drafts =     16, #acc drafts =    13, #gen tokens =     61, #acc tokens =    43, "
    "#mean acc len = 3.69, #acc rate/pos = (0.812, 0.750, 0.625, 0.500), dur(b,g,a) = 0.000, 110.526, "
    "0.005 ms\n"
)
METRICS = """
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 61
llamacpp:spec_decode_num_accepted_tokens_total 43
llamacpp:spec_decode_num_drafts_total 16
llamacpp:predicted_tokens_seconds 12.0853
# HELP llamacpp:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 13
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 12
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="3"} 8
"""
STEP = "slot x: id  0 | task 1 | accepted  {}/ {} draft tokens\n"
# n-grams of b10068 that found something to say in 3 of 12 steps.
SELDOM = (
    "spec common_specu: statistics     ngram-simple: #calls(b,g,a) =    1     12      3, "
    "#gen drafts =      3, #acc drafts =     3, #gen tokens =     12, #acc tokens =     9, "
    "#mean acc len = 4.00, "
    "#acc rate/pos = (1.000, 1.000, 0.667, 0.333), dur(b,g,a) = 0.000, 0.1, 0.0 ms\n"
)


@pytest.mark.parametrize("text", [STATISTICS, METRICS, REQUEST + STATISTICS], ids=["log", "metrics", "both"])
def test_positions_as_the_server_counts_them(text: str) -> None:
    found = acceptance_in(text, "log").by_position
    assert found == (812500, 750000, 625000, 500000)


def test_a_line_a_request_gives_the_rate_that_accepts_as_much() -> None:
    found = acceptance_in(REQUEST, "log")
    assert found.by_position == ()
    share = found.each_ppm / PPM
    assert 16 * sum(share**i for i in range(1, 5)) == pytest.approx(43, rel=1e-4)


def test_steps_without_a_draft_count_as_steps() -> None:
    found = acceptance_in(SELDOM, "log")
    assert found.by_position == (250000, 250000, 166666, 83333)


def test_totals_of_several_lines_of_statistics_are_not_added_up() -> None:
    assert acceptance_in(STATISTICS * 3, "log") == acceptance_in(STATISTICS, "log")
    assert acceptance_in(REQUEST * 3, "log") == acceptance_in(REQUEST, "log")


def test_a_draft_that_the_end_of_a_text_cut_short_counts_only_where_it_reached() -> None:
    found = of_steps([Step(4, 4), Step(4, 1), Step(1, 1)])
    assert found.by_position == (1000000, 500000, 500000, 500000)
    assert of_steps([]) == Acceptance(0) and of_steps([Step(3, 0)]) == Acceptance(0, (0,))


def test_shares_never_rise_whatever_a_file_says() -> None:
    assert counted([5, 9, 2], 10).by_position == (500000, 500000, 200000)
    assert counted([99], 10).by_position == (PPM,)
    assert of_totals(0, 10, 5) == Acceptance(0) and of_totals(10, 10, 5).each_ppm == PPM


D = "9" * 5000  # more digits than Python reads as a number


@pytest.mark.parametrize(
    "text",
    [
        REQUEST.replace("43 accepted", f"{D} accepted"),
        REQUEST.replace("61 generated", f"{D} generated"),
        REQUEST.replace("3.69", "."),
        REQUEST.replace("3.69", D),
        STATISTICS.replace("     16     16", f"     {D}     16"),
        STATISTICS.replace("0.812, 0.750", "0.8.1, 0 9"),
        STATISTICS.replace("0.812", D),
        STEP.format(3, D) + STEP.format(D, 4),
        STEP.replace("task 1", f"task {D}").format(3, 4),
        METRICS.replace("} 13", "} e+e"),
    ],
)
def test_numbers_that_none_can_be_are_shares_still(text: str) -> None:
    found = acceptance_in(text, "log")
    assert all(0 <= share <= PPM for share in (found.each_ppm, *found.by_position))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing of drafts\n",
        "llamacpp:spec_decode_num_drafts_total 0\n",
        "llamacpp:spec_decode_num_drafts_total 1e999\n" * 2 + "llamacpp:spec_decode_num_drafts_total ..\n",
        "draft acceptance = 0.5 ( accepted / generated)\n",
    ],
)
def test_texts_that_tell_nothing(text: str) -> None:
    with pytest.raises(NoAcceptance, match="tells nothing of drafted tokens"):
        acceptance_in(text, "log")


def test_a_running_server_is_read_right(computing_server: Path) -> None:
    """Its answer, its log of steps, its sums and, in newer builds, its metrics agree with each other."""
    words = [
        "-m",
        MODELS / "tiny-moe.gguf",
        "-md",
        MODELS / "tiny-moe-64.gguf",
        "--spec-type",
        "draft-simple",
    ]
    more = "--spec-draft-n-max 4 --device none --spec-draft-device none -c 256 -np 1 -t 1 -fit off --metrics"
    log: list[str] = []
    with serving(
        find_program(str(computing_server)), [*map(str, words), *more.split(), "-lv", "5"], on_line=log.append
    ) as server:
        told = _complete(server.url)
        metrics = urllib.request.urlopen(server.url + "/metrics", timeout=30).read().decode()
    text = "\n".join(log)
    steps = [step for one in steps_in(text).values() for step in one]
    summed = [line for line in log if re.search("statistics +draft-simple", line)]
    assert steps and summed
    # The step that ends a text writes no line of its own.
    assert 0 <= told["draft_n"] - sum(step.drafted for step in steps) <= 4
    assert 0 <= told["draft_n_accepted"] - sum(step.accepted for step in steps) <= 4
    by_step, by_sums = acceptance_in(text, "log"), acceptance_in(summed[-1], "log")
    assert len(by_step.by_position) == len(by_sums.by_position) == 4
    for one, other in zip(by_step.by_position, by_sums.by_position, strict=True):
        assert abs(one - other) < PPM // 10
    if "spec_decode_num_drafts_total" in metrics:  # b10434 and later
        for one, other in zip(acceptance_in(metrics, "m").by_position, by_sums.by_position, strict=True):
            assert abs(one - other) <= 1000


def _complete(url: str) -> dict[str, Any]:
    asked = {"prompt": "The old man said ", "n_predict": 120, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)["timings"]
    return found
