"""Repeated timings reduced to a median and a spread, and the gate against impossible ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

WARM_PASSES = 3  # page faults, clocks, and a CUDA graph that is captured in the third run
MIN_PASSES = 5
MAX_PASSES = 40
GATE = 1.10  # a case may beat the best stream by this much: the stream itself has a spread


@dataclass(frozen=True, slots=True)
class Sample:
    """Time of one operator over the passes that count."""

    time_ns: int
    spread_ns: int  # interquartile range
    samples: int
    best_ns: int  # fastest pass


def repeat(run: Callable[[], None], limit_s: float, before: Callable[[], None] | None = None) -> list[int]:
    """Nanoseconds of each pass after the warm-up; `before` runs untimed ahead of every pass."""
    times: list[int] = []
    warm = 1 if before else WARM_PASSES  # what runs before is warm-up enough
    end = perf_counter_ns() + int(limit_s * 1e9)
    for index in range(warm + MAX_PASSES):
        if before:
            before()
        start = perf_counter_ns()
        run()
        now = perf_counter_ns()
        if index >= warm:
            times.append(now - start)
        if now > end and len(times) >= MIN_PASSES:
            break
    return times


def reduce(times_ns: Sequence[int], nodes: int, fixed_ns: int = 0) -> Sample:
    """Median and interquartile range of one node; `fixed_ns` is what every pass costs beside its nodes, at
    most half of it.
    """
    each = sorted(max(t - fixed_ns, t // 2) / nodes for t in times_ns)
    quarter = len(each) // 4
    spread = each[-1 - quarter] - each[quarter]
    return Sample(max(round(statistics.median(each)), 1), round(spread), len(each), max(round(each[0]), 1))


def possible(bytes_read: int, time_ns: int, stream_bytes_per_s: int) -> bool:
    """Whether a time can be true: no operator reads memory faster than the machine streams it."""
    return bytes_read * 1e9 / time_ns <= GATE * stream_bytes_per_s
