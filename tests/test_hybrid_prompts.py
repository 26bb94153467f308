"""Prompts whose experts are brought by the queues of a real GPU backend: the logits of the device itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import python
from hybrid_runs import Ran, Run, distance, run_all

from planner.plan.load_spec import HYBRID_RING_BYTES
from profiler.synth.synth import SynthSpec, write

EXACT = 2e-4
# Prompts of 8 to 12 tokens, and of more than 16, end the software GPU by itself (docs/findings-hybrid.md).
PROMPT = tuple(3 + token for token in range(14))
# Brought whatever the CPU could do. Seven choices for each expert: a layer ahead where there are two banks.
STAGED: dict[str, Any] = {"slots": 3, "guests": 1, "cpu_tokens": 4, "cpu_bytes_us": 1, "bus_bytes_us": 10**6}


@pytest.fixture(scope="module", autouse=True)
def software_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On the device itself."""
    model = write(
        tmp_path_factory.mktemp("prompts") / "moe.gguf",
        SynthSpec("qwen3moe", type="f32", skew=1.0, n_used=4),
    )
    return Run(model, wraps="Vulkan0", prompt=PROMPT)


def staged(ran: Ran) -> int:
    """Layers whose experts were brought for a prompt."""
    assert ran.report is not None
    return sum(block.staged for block in ran.report.freed)


def test_a_layer_ahead_and_as_it_chooses(run: Run, node_engine: Path, tmp_path: Path) -> None:
    """Several loads: the device looks at graphs of the one before, and at those of ours in between."""
    lanes = [run.on(**STAGED, banks=banks) for banks in (1, 2, 1, 2)]
    plain, *ran = run_all([run, *lanes], tmp_path, node_engine)
    for answer in ran:
        assert distance(plain.logits, answer.logits) < EXACT
        assert staged(answer) > 0
    one, two = (answer.report.stage_bytes for answer in ran[:2] if answer.report)
    assert two == 2 * one


def test_mapped_pages_through_locked_memory_and_without(run: Run, node_engine: Path, tmp_path: Path) -> None:
    """Small chunks are refilled many times in a layer; measured, either way may be the faster one here."""
    mapped, settings = replace(run, mmap=True), {**STAGED, "memory": "mapped"}
    ways: dict[str, dict[str, Any]] = {
        "refused": {"ring": False},
        "taken": {"ring": True},
        "taken, small": {"ring": True, "ring_chunk": 5000},
        "taken, one bank": {"ring": True, "ring_chunk": 5000, "banks": 1},
        "measured": {"ring_chunk": 5000},
        "unused": {},  # too little for the library's own chunks
    }
    runs = [mapped.on(**settings, **more) for more in ways.values()]
    plain, *ran = run_all([mapped, *runs], tmp_path, node_engine)
    for way, answer in zip(ways, ran, strict=True):
        report = answer.report
        assert report is not None
        assert distance(plain.logits, answer.logits) < EXACT, way
        assert staged(answer) > 0
        measured = way == "measured"
        assert report.ring == way.split(",")[0] or (measured and report.ring in ("slower", "taken"))
        assert (report.ring_bytes_us > 0) == (report.paged_bytes_us > 0) == measured
        assert (report.ring_bytes > 0) == (report.ring == "taken")
        assert way != "taken" or report.ring_bytes == HYBRID_RING_BYTES


def test_pinned_experts_need_no_detour(run: Run, node_engine: Path, tmp_path: Path) -> None:
    (answer,) = run_all([run.on(**STAGED, ring=True, memory="pinned")], tmp_path, node_engine)
    assert answer.report is not None
    assert staged(answer) > 0
    assert (answer.report.ring, answer.report.ring_bytes) == ("unused", 0)


def test_a_device_without_locked_memory_goes_on_as_before(run: Run, tmp_path: Path) -> None:
    on_cpu = replace(run, wraps="CPU", mmap=True)
    settings = {**STAGED, "memory": "mapped", "ring": True}
    plain, answer = run_all([on_cpu, on_cpu.on(**settings)], tmp_path)
    assert distance(plain.logits, answer.logits) < EXACT
    assert answer.report is not None
    assert staged(answer) > 0
    assert answer.report.ring == "refused"


def test_the_benchmark_has_every_way_in_one_process(tmp_path: Path) -> None:
    ways = [f"hybrid:8+1@{way}" for way in ("pinned", "mapped", "ring", "paged")]
    words = ["--device", "CPU", "--small", "--layers", 2, "--work", tmp_path, "--contenders", ",".join(ways)]
    few = ["--rounds", 2, "--tokens", 4, "--prompt", 64, "--ubatch", 64, "--threads", 1]
    done = python("-m", "benchmarks.rounds.hybrid_device", *words, *few, limit_s=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row for row in json.loads(done.stdout)["contenders"]}
    assert list(rows) == ways
    assert {row["ring"] for row in rows.values()} == {"refused"}  # the CPU locks no memory
    for name, row in rows.items():
        assert len(row["prompt_tps"]) == 2
        assert set(row["prompts_over"]) == set(ways) - {name}
