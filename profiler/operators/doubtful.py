"""Timings that no kernel explains: a machine that stood still for a moment, not an operator.

More work does not take far less time, far more work does not take the same, and no pass takes fifty times
what the device's own figures allow. Such cases are measured again at another moment, and refused if they
stay so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from planner.machine.op_time import STATE_OPS, Case, bytes_read, operations
from profiler.operators.cases import Job

Line = Mapping[str, Any]
SHRINKS = 3  # times longer than a case with more work, beyond what a change of kernel brings
GROWS = 8  # times the work that must show in the time of a case as long as _LONG_NS
SHOWS = 1.25
BEYOND = 50  # times what memory and arithmetic of the device take
SPREAD = 1.0  # interquartile range over median
_LONG_NS = 1_000_000


def settled(lines: Iterable[Line]) -> dict[str, Line]:
    """The line that counts of each case: of several measurements the fastest, as a stall only adds."""
    found: dict[str, Line] = {}
    for line in lines:
        if line["kind"] == "case" and _nanoseconds(line) <= _nanoseconds(found.get(line["key"], {})):
            found[line["key"]] = line
    return found


def _nanoseconds(line: Line) -> float:
    return float(line.get("time_ns", math.inf))


def doubtful(jobs: Iterable[Job], lines: Sequence[Line]) -> dict[str, str]:
    """Why a case is not believed, by its key; of two that contradict each other the one that took longer."""
    times = {key: line for key, line in settled(lines).items() if "time_ns" in line}
    timed = [job for job in jobs if job.key in times]
    found: dict[str, str] = {}
    for group in _alike(timed):
        for one, more in permutations(group, 2):
            why = _contradicted(one.case, times[one.key]["time_ns"], more.case, times[more.key]["time_ns"])
            if why:
                found.setdefault(one.key, why)
    devices = {line["name"]: line for line in lines if line["kind"] == "device"}
    for job in timed:
        why = _beyond(job, times[job.key], devices.get(job.place.device))
        if why:
            found.setdefault(job.key, why)
    return found


def _alike(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Cases that differ in batch and depth only, and cases that differ in their size only."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        case = job.case
        groups.setdefault((case.op, case.type, case.shape, case.used, job.place), []).append(job)
        size = len(case.shape), case.batch, case.depth
        groups.setdefault((case.op, case.type, size, case.used, job.place), []).append(job)
    yield from groups.values()


def _contradicted(one: Case, ns: int, more: Case, more_ns: int) -> str:
    """Why `one` cannot take so long beside a case of more work; "" when it can."""
    if one.batch > more.batch or one.depth > more.depth or not _within(one.shape, more.shape):
        return ""
    if ns > SHRINKS * more_ns:
        return f"{_us(ns)} for {_size(one, more)} beside {_us(more_ns)} for {_size(more, one)}"
    grown = min(bytes_read(more) / max(bytes_read(one), 1), operations(more) / max(operations(one), 1))
    if ns > _LONG_NS and grown >= GROWS and more_ns < SHOWS * ns:
        return f"{_us(ns)} for {_size(one, more)} as for {_size(more, one)}, {grown:.0f} times the work"
    return ""


def _within(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether no side of one shape is longer than that of the other."""
    return all(one <= other for one, other in zip(small, large, strict=True))


def _beyond(job: Job, line: Line, device: Line | None) -> str:
    ns = line["time_ns"]
    if line["spread_ns"] > SPREAD * ns and line["samples"] > 1:
        return f"passes lie {line['spread_ns'] / ns:.1f} times its {_us(ns)} apart"
    if device is None or job.place.kind != "own" or job.case.op in STATE_OPS or ns < _LONG_NS:
        return ""
    seconds = bytes_read(job.case) / device["stream_bytes_per_s"]
    seconds = max(seconds, operations(job.case) / max(device["flops_per_s"], 1))
    allowed = BEYOND * (seconds * 1e9 + device["op_overhead_ns"])
    return f"{_us(ns)}, {BEYOND} times what {job.place.device} needs at most" if ns > allowed else ""


def _size(case: Case, other: Case) -> str:
    words = [f"batch {case.batch}"] if case.batch != other.batch else []
    words += [f"depth {case.depth}"] if case.depth != other.depth else []
    words += ["x".join(map(str, case.shape))] if case.shape != other.shape else []
    return " and ".join(words)


def _us(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= _LONG_NS else f"{ns / 1e3:.1f} us"
