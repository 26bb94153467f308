"""Operators of a device behind a network, timed on a real ggml-rpc-server over loopback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from planner.machine.op_time import Case
from profiler import runner
from profiler.journal import Journal
from profiler.operators.cases import Job, Place
from profiler.runner import Line

CASE = Case("MUL_MAT", "f16", (2048, 2048), 16)
LEAST_NS = 2 * 2048 * 2048 * 16 * 10**9 // 10**12  # at 1 TFLOP/s, of one thread


def test_a_case_is_timed_there(
    rpc_server: str, computing_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = f"RPC0[{rpc_server}]"
    job = Job(CASE, Place(device, device, "host"))  # its own memory would be streamed at length too
    journal, lines = Journal("rpc"), list[Line]()
    runner.cases([job], str(computing_server), 1, time.monotonic() + 0.1, journal, lines.append)
    (found,) = [line for line in lines if line["kind"] == "case"]
    assert found["key"] == job.key and found["time_ns"] > 0
    # The pass is waited for: 134 million operations take a thread longer than to send them.
    assert found["time_ns"] > LEAST_NS
