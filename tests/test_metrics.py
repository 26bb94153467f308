"""Figures for Prometheus: of run as a file, of serve as a page, of a server's log line by line."""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from engines import ROOT
from prometheus_client.parser import text_string_to_metric_families
from small_plans import server_plan

from atsplan import main
from commands.serve import _heard, _metrics
from planner.plan.load_spec import load_spec, map_devices
from planner.plan.plan import Plan, Speculation, to_text
from planner.records import digest
from runtime.hybrid.device import Block, Report, read_report
from runtime.metrics.endpoint import metrics_page
from runtime.metrics.registry import Metrics, Request
from runtime.metrics.server_log import listening
from runtime.tools.llama_server import NoPort, find_program, free_port, serving
from runtime.tools.options import options, stock

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"
LOG = """\
slot print_timing: id  1 | task 0 | prompt eval time =      50.00 ms /    17 tokens (    0.81 ms per token)
slot print_timing: id  1 | task 0 |        eval time =     600.00 ms /    60 tokens (    3.40 ms per token)
slot print_timing: id  1 | task 0 | draft acceptance = 0.70492 ( 43 accepted / 61 generated), mean len =  3.69
"""
SUMS = (
    "spec common_specu: statistics     draft-simple: #calls(b,g,a) =    1     16     16, "
    "#gen drafts =     16, #acc drafts =    13, #gen tokens =     61, #acc tokens =    43, "
    "#mean acc len = 3.69, "
    "#acc rate/pos = (0.812, 0.750, 0.625, 0.500), dur(b,g,a) = 0.000, 110.526, 0.005 ms"
)


class Samples(dict[tuple[str, ...], float]):
    """Values by name and label values, in whatever order the labels are written."""

    def __getitem__(self, key: tuple[str, ...]) -> float:
        return super().__getitem__((key[0], *sorted(key[1:])))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and super().__contains__((key[0], *sorted(key[1:])))


def samples(text: str) -> Samples:
    """Every sample of a text, as another parser reads it."""
    found = Samples()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.values())] = sample.value
    return found


@pytest.fixture(scope="module")
def made() -> Plan:
    return server_plan(MODEL)


def metrics_of(plan: Plan) -> Metrics:
    return Metrics(plan, digest(to_text(plan)))


def test_a_plan_alone_tells_its_prediction_and_memory(made: Plan) -> None:
    found = samples(metrics_of(made).text())
    assert found["atsplan_plan_info", made.model.name, made.machine.name, digest(to_text(made))] == 1
    assert found["atsplan_predicted_tpot_seconds",] == made.predicted.tpot_ns / 1e9
    for use in made.devices:
        assert found["atsplan_device_bytes", use.name, "weights", "plan"] == use.weights_bytes
    assert not any("draft" in key[0] or "expert" in key[0] for key in found)


def test_a_server_log_is_counted_as_it_comes(made: Plan) -> None:
    metrics = metrics_of(made)
    hear = listening(metrics)
    for line in LOG.splitlines() * 2:
        hear(line)
    found = samples(metrics.text())
    assert found["atsplan_tokens_total",] == 120 and found["atsplan_prompt_tokens_total",] == 34
    assert found["atsplan_prompt_seconds_total",] == pytest.approx(0.1)
    assert (
        found["atsplan_tpot_seconds_bucket", "0.01"] == 2
        and found["atsplan_tpot_seconds_bucket", "0.0075"] == 0
    )
    assert found["atsplan_ttft_seconds_count",] == 2 and found["atsplan_ttft_seconds_sum",] == pytest.approx(
        0.1
    )
    assert found["atsplan_draft_proposed_tokens_total",] == 122
    assert found["atsplan_draft_accepted_tokens_total",] == 86 and found["atsplan_drafts_total",] == 32
    hear(SUMS)  # from now on the server's own sums count, by position too
    for line in LOG.splitlines():
        hear(line)
    found = samples(metrics.text())
    assert [found["atsplan_draft_accepted_at_total", str(n)] for n in (1, 2, 3, 4)] == [13, 12, 10, 8]
    assert found["atsplan_draft_proposed_tokens_total",] == 61
    wanted = 10_000_000 / made.predicted.tpot_ns
    assert found["atsplan_tpot_over_predicted_ratio",] == pytest.approx(wanted)


def test_lines_of_no_sense_change_nothing(made: Plan) -> None:
    metrics = metrics_of(made)
    hear, before = listening(metrics), samples(metrics.text())
    for line in (
        "",
        "print_timing:",
        "draft acceptance = x",
        LOG[:40],
        "eval time = ms / tokens",
        "\0\x1b[31m",
    ):
        hear(line)
    after = samples(metrics.text())
    assert {k: v for k, v in after.items() if "created" not in k[0]} == {
        k: v for k, v in before.items() if "created" not in k[0]
    }


def test_numbers_in_a_log_that_none_can_be_do_not_end_the_counting(made: Plan) -> None:
    """A log holds what clients send: who hears it goes on whatever stands in a line."""
    metrics, digits = metrics_of(made), "9" * 5000
    hear = listening(metrics)
    for line in LOG.splitlines():
        for number in ("17", "60", "50.00", "600.00", "43", "61", "3.69"):
            hear(line.replace(f" {number} ", f" {digits} ").replace(number, digits))
            hear(line.replace(number, "1.2.3"))
    for number in ("16", "61", "43", "0.812"):
        hear(SUMS.replace(number, digits))
    hear(SUMS)
    assert samples(metrics.text())["atsplan_draft_accepted_at_total", "1"] == 13


def block(layer: int, hits: int) -> Block:
    counts: dict[str, Any] = dict.fromkeys(Block.__dataclass_fields__, 0)
    rows = {"row_choices": (8, 8, 0), "row_hits": (8, hits, 0)}
    texts = {"kind": "exps", "resident": (), "chosen": (), **rows}
    return Block(**{**counts, **texts, "block": layer, "hits": hits, "cpu": 3, "wait_ns": 2_000_000_000})


def test_experts_in_slots_are_told_layer_by_layer(made: Plan) -> None:
    metrics = metrics_of(made)
    fields: dict[str, Any] = dict.fromkeys(Report.__dataclass_fields__, 0)
    blocks = (block(0, 5), block(7, 7))
    told = {"name": "HYBRID0", "wraps": "CUDA0", "contexts": (), "blocks": blocks, "freed": ()}
    report = Report(**{**fields, **told})
    assert read_report(json.dumps(asdict(report))) == report  # as a child process hands it over
    metrics.lanes([report])
    found = samples(metrics.text())
    assert found["atsplan_expert_choices_total", "CUDA0", "7", "slot"] == 7
    assert found["atsplan_expert_choices_total", "CUDA0", "0", "cpu"] == 3
    assert found["atsplan_expert_wait_seconds_total", "CUDA0", "0", "router"] == 2
    assert found["atsplan_expert_uploads_total", "CUDA0", "0"] == 0
    # All layers together, by rank in a step; no step had a third token.
    assert found["atsplan_expert_row_choices_total", "CUDA0", "1"] == 16
    assert found["atsplan_expert_row_hits_total", "CUDA0", "1"] == 5 + 7
    assert ("atsplan_expert_row_hits_total", "CUDA0", "2") not in found


@pytest.mark.parametrize("name", ['a "b" c', "back\\slash", "new\nline", 'x"} 1\nfake_metric 9', "\udcff"])
def test_names_out_of_files_stay_labels(made: Plan, name: str) -> None:
    hostile = made.model_copy(update={"model": made.model.model_copy(update={"name": name})})
    found = samples(Metrics(hostile, "d").text())
    told = name.encode("utf-8", "backslashreplace").decode()
    assert ("atsplan_plan_info", told, made.machine.name, "d") in found
    assert not any(key[0].startswith("fake") for key in found)


def test_the_page_is_for_this_machine_and_ends(made: Plan) -> None:
    metrics, port = metrics_of(made), free_port("127.0.0.1")
    metrics.drafted([(4, 2), (4, 4)])
    with metrics_page(metrics, port) as url:
        assert url == f"http://127.0.0.1:{port}/metrics"
        found = samples(urllib.request.urlopen(url, timeout=60).read().decode())
        assert [found["atsplan_draft_accepted_at_total", str(n)] for n in (1, 2, 3, 4)] == [2, 2, 1, 1]
        with pytest.raises(NoPort), metrics_page(metrics, port):
            pass
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=2)


def test_a_served_plan_counts_its_requests_and_drafts(computing_server: Path, made: Plan) -> None:
    """The page beside a real server: tokens, times and drafts by position of what it was asked."""
    drafts = Speculation(draft="tiny-moe-64", device="CPU", accept_ppm=700_000, tokens=3, draft_ns=1)
    plan = made.model_copy(update={"speculation": drafts})

    job: Any = SimpleNamespace(plan=plan)
    spec = map_devices(load_spec(made), {"Vulkan0": "CPU"})
    placed = stock(spec, 5)
    words = [word for pair in options(placed, str(MODEL)) for word in pair if word]
    draft = [
        "--spec-type",
        "draft-simple",
        "-md",
        str(MODEL.with_name("tiny-moe-64.gguf")),
        "--spec-draft-n-max",
        "3",
    ]
    with ExitStack() as stack:
        port = free_port("127.0.0.1")
        metrics = _metrics(job, stack, port, "127.0.0.1", None)
        hear, more = _heard(metrics, [*words, *draft], lambda line: None)
        program = find_program(str(computing_server))
        server = stack.enter_context(serving(program, [*words, *draft, *more, "-t", "1"], on_line=hear))
        asked = {"prompt": "The old man said ", "n_predict": 60, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + "/completion", json.dumps(asked).encode(), headers)
        told = json.load(urllib.request.urlopen(request, timeout=240))["timings"]
        for _ in range(100):  # the line of sums comes after the answer
            time.sleep(0.1)
            found = samples(
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
            )
            if ("atsplan_draft_accepted_at_total", "1") in found:
                break
    assert found["atsplan_tokens_total",] == 60 and found["atsplan_tpot_seconds_count",] == 1
    assert found["atsplan_draft_proposed_tokens_total",] == told["draft_n"]
    assert found["atsplan_draft_accepted_tokens_total",] == told["draft_n_accepted"]
    by_position = [found["atsplan_draft_accepted_at_total", str(n)] for n in (1, 2, 3)]
    assert by_position == sorted(by_position, reverse=True)
    assert abs(sum(by_position) - told["draft_n_accepted"]) <= 2  # the server rounds its rates


def test_run_writes_its_figures(tmp_path: Path, made: Plan) -> None:
    path, target = tmp_path / "plan.yaml", tmp_path / "run.prom"
    path.write_text(to_text(made))
    words = ["run", str(MODEL), "--plan", str(path), "--device-map", "Vulkan0=CPU", "--threads", "1"]
    words += ["-p", "The old man", "--raw", "-n", "12", "--ignore-eos", "--json", "--prometheus", str(target)]
    done = CliRunner().invoke(main, [*words, "--draft", str(MODEL.with_name("tiny-moe-64.gguf"))])
    assert done.exit_code == 0, done.output
    told, found = json.loads(done.stdout), samples(target.read_text())
    assert found["atsplan_tokens_total",] == len(told["tokens"]) == 12
    assert found["atsplan_draft_accepted_tokens_total",] == told["accepted"]
    assert found["atsplan_draft_proposed_tokens_total",] == told["guessed"] > 0
    assert found["atsplan_device_bytes", "CPU", "model", "engine"] == told["memory"]["CPU"]["model"]
    assert found["atsplan_ttft_seconds_sum",] == pytest.approx(told["prefill_ns"] / 1e9)


def test_a_request_of_unknown_times_is_counted_without_them(made: Plan) -> None:
    metrics = metrics_of(made)
    metrics.request(Request(5, 0, 1, 0))
    found = samples(metrics.text())
    assert found["atsplan_tokens_total",] == 1 and found["atsplan_tpot_seconds_count",] == 0
