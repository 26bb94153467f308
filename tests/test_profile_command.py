"""atsplan profile on this machine: real timings, crashes that cost one case, interruption, continuation."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from atsplan import main
from planner.machine.op_time import Case, lookup
from planner.machine.profile import Profile, from_text
from profiler import runner
from profiler.journal import Journal
from profiler.operators.cases import Job, Place

OWN = Place("CPU", "CPU", "own")


def atsplan(*arguments: str | Path, cache: Path, seconds: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "atsplan", "profile", *map(str, arguments)),
            *("--threads", "1", "--seconds", str(seconds)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(cache),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "COLUMNS": "200",
        },
    )


@pytest.fixture(scope="module")
def made(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, str, Path]:
    """A profile of the small dense model, its table, and the cache folder it used."""
    folder = tmp_path_factory.mktemp("profile")
    out = folder / "profile.yaml"
    cases = ("--table", folder / "cases.csv", "--no-calibration", "--ubatch", "32", "--depth", "0")
    process = atsplan(dense_model, "-o", out, *cases, cache=folder)
    table, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return from_text(out.read_text(), str(out)), table, folder


def test_a_profile_holds_every_operator_of_the_model(made: tuple[Profile, str, Path]) -> None:
    profile, table, folder = made
    assert profile.measured
    assert profile.device("CPU").threads == 1
    assert {"MUL_MAT", "GET_ROWS", "FLASH_ATTN_EXT", "RMS_NORM"} <= {t.op for t in profile.timings}
    assert {t.batch for t in profile.timings if t.op == "MUL_MAT"} >= {1, 2, 8, 32}
    assert all(t.samples >= 1 and t.time_ns > 0 for t in profile.timings)
    assert "GB/s" in table
    found = list(csv.DictReader((folder / "cases.csv").read_text().splitlines()))
    assert any(row["operator"] == "MUL_MAT q8_0 256x512" for row in found)
    priced = [int(row["time_ns"]) for row in found if row["time_ns"]]
    assert sorted(priced) == sorted(t.time_ns for t in profile.timings)
    assert all(row["dropped"] for row in found if not row["time_ns"])
    assert f"{len(found)} cases measured: " in table or "no kernels for" in table
    assert table.count("MUL_MAT") < len(found)  # shown are the worst only
    assert list((folder / "atsplan").iterdir()) == []  # nothing is left to continue


def test_the_planner_finds_what_was_measured(made: tuple[Profile, str, Path]) -> None:
    profile = made[0]
    timing = next(t for t in profile.timings if t.op == "MUL_MAT" and t.buffer == "CPU" and t.batch == 1)
    found = lookup(profile, "MUL_MAT", timing.type, timing.shape, 1, "CPU")
    assert (found.ns, found.measured) == (timing.time_ns, True)


EVERY_OPERATOR = (
    Case("MUL_MAT", "q6_K", (256, 128), 1),
    Case("MUL_MAT", "iq2_xxs", (256, 128), 8),
    Case("MUL_MAT", "mxfp4", (256, 128), 2),
    Case("MUL_MAT", "q8_0", (64, 32, 4), 1),  # one matrix a head
    Case("MUL_MAT_ID", "q4_K", (256, 64, 8), 1, used=2),
    Case("MUL_MAT_ID", "q4_K", (256, 64, 8), 16, used=2),
    Case("GET_ROWS", "q4_K", (256, 512), 4),
    Case("FLASH_ATTN_EXT", "f16", (64, 4, 2), 1),
    Case("FLASH_ATTN_EXT", "q8_0", (64, 4, 2), 16, depth=300),
    Case("GATED_DELTA_NET", "f32", (64, 64, 4), 1),
    Case("GATED_DELTA_NET", "f32", (64, 64, 4), 16),
    Case("UNFUSED_DELTA_NET", "f32", (64, 64, 4), 1),
    Case("SSM_SCAN", "f32", (128, 64, 8), 1),  # Mamba-2
    Case("SSM_SCAN", "f32", (16, 1, 512), 16),  # Mamba-1
    Case("RMS_NORM", "f32", (256,), 16),
)


def test_every_operator_can_be_measured(tmp_path: Path) -> None:
    journal = Journal("every", folder=tmp_path)
    repack = Place("CPU", "CPU_REPACK", "repack")
    jobs = [Job(case, OWN) for case in EVERY_OPERATOR]
    jobs += [Job(case, repack) for case in EVERY_OPERATOR if case.op.startswith("MUL_MAT")]
    runner.cases(jobs, None, 1, time.monotonic(), journal, lambda line: None)
    lines = {line["key"]: line for line in journal.lines if line["kind"] == "case"}
    assert [k for job in jobs[: len(EVERY_OPERATOR)] if "time_ns" not in lines[k := job.key]] == []
    left_out = {line["skipped"] for line in lines.values() if "skipped" in line}
    assert left_out <= {"not supported by the device"}


def test_an_engine_that_dies_in_one_case_costs_that_case_only(tmp_path: Path) -> None:
    good, other = Case("MUL_MAT", "f32", (256, 64), 1), Case("MUL_MAT", "f16", (256, 64), 1)
    deadly = Case("MUL_MAT", "q4_K", (100, 64), 1)  # no whole block: ggml aborts
    unknown = Case("NO_SUCH_OP", "f32", (64,), 1)
    jobs = [Job(case, OWN) for case in (good, deadly, unknown, other)]
    journal = Journal("test", folder=tmp_path)
    runner.cases(jobs, None, 1, time.monotonic(), journal, lambda line: None)
    lines = {line["key"]: line for line in journal.lines if line["kind"] == "case"}
    assert [("time_ns" in lines[job.key]) for job in jobs] == [True, False, False, True]
    assert "the engine failed" in lines[jobs[1].key]["skipped"]
    assert "NO_SUCH_OP" in lines[jobs[2].key]["skipped"]


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_continues(dense_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    arguments = (dense_model, "-o", out, "--no-calibration", "--ubatch", "32", "--depth", "0")
    # Time enough for all cases: after the third there are seconds of work left, however fast the machine.
    first = atsplan(*arguments, cache=tmp_path, seconds=8)
    kept = _wait_for_cases(tmp_path / "atsplan", first)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130 and len(kept) > 0, said
    assert "to continue" in said
    assert not out.exists()
    second = atsplan(*arguments, cache=tmp_path)
    _, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert "continuing an interrupted profile" in said
    assert kept <= {_key(t) for t in from_text(out.read_text(), "").timings if t.buffer == "CPU"}


def _wait_for_cases(folder: Path, process: subprocess.Popen[str]) -> set[str]:
    """Keys of the first cases that a running profile has written down."""
    while process.poll() is None:
        for path in folder.glob("*.jsonl") if folder.is_dir() else ():
            lines = [json.loads(text[9:]) for text in path.read_text().splitlines() if text.endswith("}")]
            done = {line["key"] for line in lines if line["kind"] == "case" and "time_ns" in line}
            if len(done) >= 3:
                return {
                    " ".join(key.split()[:4])
                    for key in done
                    if "RMS_NORM" not in key and "GET_ROWS" not in key
                }
        time.sleep(0.02)
    return set()


def _key(timing: object) -> str:
    shape = "x".join(map(str, timing.shape))  # type: ignore[attr-defined]
    return f"{timing.op} {timing.type} {shape} b{timing.batch}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("missing.gguf",), 2, "missing.gguf"),
        (("-o", "nowhere/profile.yaml"), 2, "no folder"),
        (("--engine", "/nowhere"), 3, "/nowhere"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], code: int, text: str, tmp_path: Path) -> None:
    process = atsplan(*arguments, "--no-calibration", cache=tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert text in said
    assert "Traceback" not in said


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Not left out: the profile would look whole."""
    out = tmp_path / "p.yaml"
    own = CliRunner(env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    result = own.invoke(main, ["profile", "--device", "CUDA7", "-o", str(out)])
    assert (result.exit_code, result.stdout) == (3, "")
    assert re.fullmatch(r"atsplan: no device CUDA7 on this machine \(there is .*CPU\)\n", result.stderr)
    assert not out.exists()
