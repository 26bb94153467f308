"""Fewer cores and a slower link for all alike, and words for what was slowed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from engines import ROOT

from benchmarks.rounds import consumer
from benchmarks.rounds.consumer import (
    ByEnvironment,
    CompetingStream,
    NotPaced,
    Pace,
    calibrated,
    conditions,
    pick,
)

FREE = 55.0


class Link:
    """A link that streams share evenly: what one more of them gets while others copy part of the time."""

    def __init__(self, free: float = FREE) -> None:
        self.free, self.asked = free, list[tuple[int, float]]()

    def left(self, streams: int, busy: float) -> float:
        self.asked.append((streams, busy))
        return self.free * (1 - busy) + self.free / (streams + 1) * busy


@pytest.mark.parametrize("rate", [5.0, 12.0, 25.0, 40.0])
def test_competing_copies_leave_the_asked_rate(rate: float) -> None:
    link = Link()
    streams, busy, found = calibrated(link.left, rate)
    assert abs(found - rate) <= consumer.NEAR * rate
    assert link.asked[-1] == (streams, busy)  # the load that stays is the one that was measured last
    assert FREE / (streams + 1) <= rate < FREE / (streams // 2 + 1)  # the fewest streams that can do it


def test_a_link_that_is_slow_already_is_left_alone_or_refused() -> None:
    assert calibrated(Link(12.2).left, 12.0)[:2] == (0, 0.0)
    with pytest.raises(NotPaced, match="slower than that by itself"):
        calibrated(Link(8.0).left, 12.0)


def test_copies_that_do_not_slow_the_link_are_told() -> None:
    with pytest.raises(NotPaced, match="16 competing streams leave more"):
        calibrated(lambda streams, busy: FREE, 12.0)
    answers = iter([FREE, 10.0, *[11.8] * 20, 12.0])
    streams, _, found = calibrated(lambda streams, busy: next(answers), 12.0)
    assert streams == 1 and found == 11.8

    restless = iter([FREE, 10.0, *range(20, 40)])
    with pytest.raises(NotPaced, match="do not hold it"):
        calibrated(lambda streams, busy: next(restless), 12.0)


def test_a_stream_in_a_process_of_its_own_takes_its_share_and_ends() -> None:
    """The real protocol, over host memory in place of a bus: at no rate is anything asserted of speed."""
    free = consumer.probe("host")
    assert free > 0
    with pytest.raises(NotPaced, match="slower than that by itself"), CompetingStream("host").at(free * 1e3):
        pass
    with CompetingStream("host").at(None) as pace:
        assert pace.how == "nothing" and pace.asked is None and pace.measured > 0 and not pace.paced
    assert not [pid for pid in _children() if b"link_stream" in _words(pid)]


def _children() -> list[str]:
    return [
        pid.name
        for pid in Path("/proc").iterdir()
        if pid.name.isdigit() and f"\nPPid:\t{os.getpid()}\n" in _read(pid / "status")
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _words(pid: str) -> bytes:
    return _read(Path("/proc") / pid / "cmdline").encode()


def test_the_child_copies_as_told() -> None:
    command = [sys.executable, "-m", "benchmarks.rounds.link_stream", "host"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, input="2 0.5\n0 0\n", capture_output=True, text=True, env=environment, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines() == ["copying 2 0.5", "copying 0 0"]
    wrong = subprocess.run(
        [*command[:-1], "bus", "0.1"], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert wrong.returncode and wrong.stderr.strip() == "bus: expected host or cuda:N"


def test_children_get_the_cores_and_this_process_gets_its_own_back() -> None:
    before = os.sched_getaffinity(0)
    with conditions(1, None, CompetingStream("host")) as now:
        code = "import os; print(len(os.sched_getaffinity(0)))"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == "1" and len(now.cores) == 1
        record = now.record()
    assert os.sched_getaffinity(0) == before
    assert record["cores"] == 1 and record["cores_of"] == len(before)
    assert ("number of cores" in record["paced"]) == (len(before) > 1)
    assert "rate of host memory" in record["not_paced"]
    with pytest.raises(ValueError, match="999 cores"), conditions(999, None, CompetingStream("host")):
        pass
    assert os.sched_getaffinity(0) == before


def test_physical_cores_come_before_their_second_threads() -> None:
    def siblings(cpu: int) -> str:
        return f"{cpu % 4},{cpu % 4 + 4}"

    assert pick(set(range(8)), 4, siblings) == [0, 1, 2, 3]
    assert pick(set(range(8)), 6, siblings) == [0, 1, 2, 3, 4, 5]
    assert pick({0, 4, 1, 5}, 2, siblings) == [0, 1]


def test_a_device_that_paces_itself_takes_over() -> None:
    seen: list[Mapping[str, str]] = []

    def measure(environment: Mapping[str, str]) -> float:
        seen.append(environment)
        return int(environment["PACE"]) / 1e9 if environment else FREE

    pacer = ByEnvironment("the device", "PACE", ("copies", "reads"), ("latency",), measure)
    with conditions(None, 12.0, pacer) as now:
        assert now.environment == {"PACE": "12000000000"}
        text = now.said()
    assert "12.0 GB/s, asked for 12.0, slowed by the device" in text
    assert "slowed: copies, reads\nnot slowed: latency, speed of the GPU" in text
    with pacer.at(None) as free:
        assert free == Pace("nothing", None, FREE)
    deaf = ByEnvironment("the device", "PACE", (), (), lambda environment: FREE)
    with pytest.raises(NotPaced, match=r"asked for 25\.0 GB/s, measured 55\.0: the device does not hold it"):
        deaf.at(25.0).__enter__()
