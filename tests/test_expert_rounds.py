"""The list of cells and the whole way through it, with small models and without a GPU."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rounds import experts as bench
from benchmarks.rounds import live
from benchmarks.rounds.consumer import CompetingStream
from benchmarks.rounds.live import Live, Work
from benchmarks.rounds.paired import Bench, Cell, Journal, whole_rounds
from planner.errors import EngineProblem
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from profiler.routed.model import habits_of
from profiler.routed.presets import PRESETS
from runtime.engine.libllama import Engine
from runtime.session.session import Session


def test_every_cell_differs_from_the_base_in_one_factor_or_in_routing_and_residency() -> None:
    base, *others = bench.CELLS
    assert base.factors == bench.BASE and base.factors["preset"] in PRESETS
    twelve = [c for c in bench.CELLS if c.factors["residency"] in (25, 50)]
    assert len({(c.factors["preset"], c.factors["residency"]) for c in twelve}) == 12
    assert len({cell.name for cell in bench.CELLS}) == len(bench.CELLS)
    for cell in others:
        start, long = (bench.LONG, "long") if cell.name.startswith("long") else (bench.BASE, "")
        changed = [name for name in start if cell.factors[name] != start[name]]
        named = [f"{name}={cell.factors[name]}" for name in changed]
        alone = len(changed) <= 1 or changed == ["preset", "residency"]
        assert alone and cell.name == ",".join([*filter(None, [long]), *named])
    assert {cell.factors["preset"] for cell in bench.CELLS} <= PRESETS.keys()


def test_presets_of_one_size_share_a_file(tmp_path: Path) -> None:
    models = bench.Models(tmp_path, "small", {})
    strong, inventory = models.ready("strong")
    stamp = strong.stat().st_mtime_ns
    assert models.ready("strong")[0].stat().st_mtime_ns == stamp and inventory.number("expert_count") == 128
    moderate, again = models.ready("moderate")
    assert moderate == strong and habits_of(strong) == PRESETS["moderate"].habits and again is inventory
    other, _ = models.ready("gpt-oss")
    assert other != strong and len(list(tmp_path.iterdir())) == 2


def test_the_whole_way_in_a_real_engine(tmp_path: Path) -> None:
    """Files made, cores limited, contenders loaded and taking turns, a table of ratios; without a GPU."""
    factors = {**bench.BASE, "preset": "gpt-oss", "prompt": 32, "cores": 1}
    journal = Journal(tmp_path / "runs.jsonl")
    journal.begin({"cpu": "here"})
    models = bench.Models(tmp_path, "small", {})
    rivals = {name: make for name, make in bench.RIVALS.items() if name != "fit"}  # which needs a GPU
    made = bench.contenders(models, "", "", Work((), depth=16, gen=4), rivals)
    within = bench.around(CompetingStream("host"))
    assert Bench(journal, made, rounds=2, within=within).run([Cell("base", factors)])
    records = journal.records()
    runs = [r for r in records if r["kind"] == "run"]
    assert {r["contender"] for r in runs} == rivals.keys(), [r.get("why") for r in records]
    assert len(whole_rounds(records, "base", list(rivals))) == 2
    assert all(r["cores"] == 1 and "rate of host memory" in r["not_paced"] for r in runs)
    assert len({r["digest"] for r in runs}) == 1  # the same model, the same tokens
    text = bench.report(journal, "n-cpu-moe")
    assert "| base | decode_ns | all in VRAM |" in text and "| base | prefill32_ns | ngl |" in text


def test_sequences_that_arrive_together(tmp_path: Path) -> None:
    """Of one model two contenders: the first and the last first token, steps of all, and the same logits."""
    factors = {**bench.BASE, "preset": "gpt-oss", "prompt": 24, "seqs": 4, "depth": 12}
    journal = Journal(tmp_path / "runs.jsonl")
    journal.begin({"cpu": "here"})
    rivals = {name: bench.RIVALS[name] for name in ("all in VRAM", "n-cpu-moe")}
    made = bench.contenders(bench.Models(tmp_path, "small", {}), "", "", Work((), depth=512, gen=4), rivals)
    assert Bench(journal, made, rounds=1).run([Cell("seqs=4", factors)])
    runs = [r for r in journal.records() if r["kind"] == "run"]
    assert len(runs) == 2 and len({r["digest"] for r in runs}) == 1
    assert all(0 < r["first24_ns"] <= r["last24_ns"] and r["decode_ns"] > 0 for r in runs)
    assert "| seqs=4 | last24_ns | all in VRAM |" in bench.report(journal, "n-cpu-moe")


def test_tokens_of_sequences_that_arrive_together_are_theirs_alone(tmp_path: Path) -> None:
    """What follows each of three prompts, read together and decoded together, or each alone."""
    path = bench.Models(tmp_path, "small", {}).ready("gpt-oss")[0]
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=768, n_seq=3, n_batch=32, n_ubatch=16), threads=1)
    engine, length = Engine.find(None), 21
    with Session(engine, path, spec) as session:
        run = live._Run(engine, session.context, session.n_vocab, path)
        streams = np.stack([run.tokens(length + 1, seed) for seed in range(3)])

        def likely(row: int) -> int:
            address = engine.lib.llama_get_logits_ith(session.context, row)
            return int(np.argmax((ctypes.c_float * run.n_vocab).from_address(address)))

        alone = []
        for stream in streams:
            run.prefill(stream[:length])
            run.decode(stream[length:].copy(), length)
            alone.append(likely(-1))
        done = run.arrivals(list(streams[:, :length]))
        assert done[0] < done[1] == done[2]  # of 63 tokens 32 are a batch
        run.together(streams[:, length], length)
        assert [likely(row) for row in range(3)] == alone and len(set(alone)) > 1


def test_a_contender_that_dies_is_recorded_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=256), threads=1)
    with pytest.raises(EngineProblem, match="broken"), Live("", path, spec):
        pass
    small = bench.Models(tmp_path, "small", {}).ready("gpt-oss")[0]
    with Live("", small, spec, Work((), 0, 4)) as session:
        assert session.measure(0)["decode_ns"] > 0
        assert session._process is not None
        os.killpg(session._process.pid, signal.SIGKILL)
        with pytest.raises(EngineProblem, match="SIGKILL"):
            session.measure(1)


def test_another_contender_is_plugged_in_by_name() -> None:
    assert bench.plugged("benchmarks.rounds.experts:n_cpu_moe") is bench.n_cpu_moe
