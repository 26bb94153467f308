"""Eight conversations at once on a real server: nothing lost, clients that vanish, a server that is killed;
copies of a recurrent state that save computing a conversation anew.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT
from small_plans import server_plan

from planner.constants import MIB
from planner.memory.kv_cache import state_bytes
from planner.model.gguf.reader import read_model
from planner.model.structure import structure_of
from planner.plan.load_spec import LoadSpec, load_spec, map_devices
from planner.workload import Workload
from runtime.bench.conversations import Conversation, Turn, ask, together
from runtime.tools.llama_server import Server, find_program, serving
from runtime.tools.options import options, stock

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"
CLIENTS, TOKENS = 8, 12
TEXTS = [
    [f"The {who} said that ", ". And the other ", " went to the "]
    for who in ("king", "queen", "baker", "miller", "sailor", "doctor", "farmer", "lawyer")
]


@contextmanager
def served(
    engine: Path, model: Path, n_seq: int, n_ctx: int, *more: str, log: list[str] | None = None
) -> Iterator[Server]:
    """A plan for some sequences at once, served as it is exported, on the CPU."""
    made = server_plan(MODEL)
    work = made.workload.model_copy(update={"n_ctx": n_ctx, "n_seq": n_seq})
    spec = map_devices(load_spec(made.model_copy(update={"workload": work})), {"Vulkan0": "CPU"})
    if model != MODEL:
        spec = LoadSpec((), (), 0, (), work)
    words = [word for pair in options(stock(spec, 5), str(model)) for word in pair if word]
    hear = log.append if log is not None else lambda line: None
    with serving(
        find_program(str(engine)), [*words, *more, "-t", "1"], on_line=hear, timeout_s=120
    ) as server:
        yield server


def busy(server: Server) -> int:
    """Slots at work."""
    slots: Any = server.get("/slots")
    return sum(slot["is_processing"] for slot in slots)


def whole(turns: Sequence[Turn]) -> bool:
    """Three turns, each with its answer and its times."""
    return len(turns) == 3 and all(
        not t.failure and t.tokens == TOKENS and t.first_ns > 0 and t.token_ns > 0 for t in turns
    )


def test_eight_at_once_lose_nothing_whoever_vanishes(computing_server: Path) -> None:
    with served(computing_server, MODEL, CLIENTS, 2048) as server:
        everyone = together(server.url, [Conversation(texts) for texts in TEXTS], TOKENS)
        assert all(map(whole, everyone))
        # What was said before is remembered: a later turn computes its own words alone.
        for turns in everyone:
            assert turns[0].remembered <= 4  # the word that all begin with, where another slot has it
            for before, turn in pairwise(turns):
                assert turn.remembered >= before.remembered + before.prompt_tokens
        leaving = [Conversation(texts, leaves=1 if n % 2 else -1) for n, texts in enumerate(TEXTS)]
        some = together(server.url, leaving, TOKENS)
        for n, turns in enumerate(some):
            if n % 2:
                assert turns[-1].failure == "left" and len(turns) == 2
            else:
                assert whole(turns)
                # Batches of other sizes may round otherwise; the first answer has the same prompt alone.
                assert turns[0].text == everyone[n][0].text
        until = time.monotonic() + 20
        while busy(server) and time.monotonic() < until:
            time.sleep(0.05)
        assert busy(server) == 0
        # No slot is lost: all eight are there again.
        assert all(map(whole, together(server.url, [Conversation(t) for t in TEXTS], TOKENS)))


def test_a_killed_server_is_started_again_and_goes_on(computing_server: Path) -> None:
    first, second, third = TEXTS[0]
    with served(computing_server, MODEL, 1, 256) as server:
        one = ask(server.url, first, TOKENS)
        two = ask(server.url, first + one.text + second, TOKENS, 1)
        assert not one.failure and not two.failure
        os.kill(server.process.pid, signal.SIGKILL)
        assert "9" in server.outlive() or "kill" in server.outlive().lower()
        lost = ask(server.url, first + one.text + second, TOKENS, 1, timeout_s=10)
        assert lost.failure and not lost.tokens
    with served(computing_server, MODEL, 1, 256) as server:
        # The client still has all that was said: the answer is the same, computed anew.
        again = ask(server.url, first + one.text + second, TOKENS, 1)
        assert again.text == two.text and again.remembered == 0
        assert not ask(server.url, first + one.text + second + again.text + third, TOKENS, 2).failure


# Copies of a recurrent state.


def computed(server: Server, prompt: Sequence[int], log: list[str]) -> int:
    """Tokens of a prompt that the server computed, by its log: random weights often speak no text."""
    wanted = {"prompt": list(prompt), "n_predict": 4, "temperature": 0, "cache_prompt": True}
    data, before = json.dumps(wanted).encode(), len(_prompts(log))
    request = urllib.request.Request(server.url + "/completion", data, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as problem:
        assert problem.code == 500
    until = time.monotonic() + 20
    while len(_prompts(log)) == before and time.monotonic() < until:
        time.sleep(0.05)
    return _prompts(log)[-1]


def _prompts(log: list[str]) -> list[int]:
    return [int(m[1]) for line in log if (m := re.search(r"prompt eval time = .* ms / +(\d+) tokens", line))]


@pytest.mark.parametrize("kept", [0, 4])
def test_checkpoints_save_a_conversation_from_being_computed_anew(
    computing_server: Path, gdn_model: Path, kept: int
) -> None:
    """And each has the size that the plan counts: the recurrent state of one sequence."""
    log: list[str] = []
    first = [(7 * n) % 64 + 40 for n in range(300)]
    more = ("--ctx-checkpoints", str(kept), "-lv", "4")
    with served(computing_server, gdn_model, 1, 512, *more, log=log) as server:
        assert computed(server, first, log) == 300
        # What follows replaces the answer that was given: a state cannot be cut as a cache can.
        again = computed(server, [*first, *first[:20]], log)
    assert again < 40 if kept else again == 320
    made = re.compile(r"created context checkpoint .* size = ([0-9.]+) MiB")
    sizes = {m[1] for line in log if (m := made.search(line))}
    state = sum(state_bytes(structure_of(read_model(gdn_model).inventory), Workload(n_ctx=512)))
    assert sizes == ({f"{state / MIB:.3f}"} if kept else set())
