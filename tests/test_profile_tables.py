"""What profile shows of its cases: few, the worst, with what of the model they affect; the rest is a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.profile.tables import all_cases, report
from planner.machine import presets
from planner.machine.op_time import Case
from planner.machine.profile import OpTiming
from planner.model.inventory import from_text
from profiler.journal import Journal
from profiler.operators.cases import NOT_SUPPORTED, Job, Place
from profiler.session import Measured
from profiler.summarise import Verdict

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "plans" / "inputs" / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
PROFILE = presets.load("rtx4090-ddr5")
OWN = Place("CUDA0", "CUDA0", "own")


def verdict(
    shape: tuple[int, ...], spread: float | None, batch: int = 1, why: str = "not believed"
) -> Verdict:
    case = Case("MUL_MAT", "q4_K", shape, batch)
    if spread is None:
        return Verdict(Job(case, OWN), None, why)
    timing = OpTiming(
        op=case.op, type=case.type, shape=shape, batch=batch, device="CUDA0", buffer="CUDA0",
        time_ns=10_000, spread_ns=round(10_000 * spread), samples=9,
    )  # fmt: skip
    return Verdict(Job(case, OWN), timing)


def measured(*found: Verdict) -> Measured:
    streams = {d.name: 10**12 for d in PROFILE.devices}
    return Measured(PROFILE, found, streams, Journal("tables"))


def test_shown_are_the_worst_with_what_they_affect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steady = [verdict((2048, 4096), 0.01, batch) for batch in range(1, 101)]
    bad = [verdict((2048, 512), None), verdict((4096, 2048), 0.6), verdict((64, 64), 0.3)]
    none = verdict((32, 32), None, why=NOT_SUPPORTED)
    made = measured(*steady, *bad, none)
    report(made, PROFILE, from_text(TABLE.read_text(), TABLE.name), False)
    told = capsys.readouterr().out
    assert "103 cases measured: 100 steady, 2 unsteady, 1 refused; --table FILE writes them all" in told
    lines = [line.split() for line in told.splitlines() if line.startswith(" MUL_MAT")]
    assert [words[2] for words in lines] == ["2048x512", "4096x2048", "64x64"]
    assert "blk.0.attn_k.weight and" in told and "blk.0.attn_output.weight and 47 more" in told
    assert "calibration" in told  # of the generated model
    rows = all_cases(made.verdicts, made.streams).splitlines()
    assert len(rows) == 105 and rows[101].endswith(",not believed")


def test_a_quiet_machine_takes_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report(measured(verdict((2048, 4096), 0.01)), PROFILE, None, False)
    told = capsys.readouterr().out
    assert "1 cases measured: 1 steady, 0 unsteady, 0 refused" in told and "MUL_MAT" not in told
