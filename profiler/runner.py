"""Drives the measuring child processes: progress, crashes, continuation.

A crash or hang costs the one case it happened in; the next child takes up the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.errors import AtsplanError, EngineProblem
from planner.plan.load_spec import LoadSpec
from profiler.journal import Journal
from profiler.operators.cases import Job, job_of
from runtime.child.ask import Limits, TimeIsUp, stream
from runtime.load import dry_run

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Length:
    """How long whole-model runs are, in tokens and repeats."""

    prompt: int = 512
    gen: int = 24
    repeats: int = 3


@dataclass(slots=True)
class Stop:
    """When whole-model runs end: none begins that would end after `until_s` once there are `least` of them,
    and all are cut off at `last_s`; times of `time.monotonic`.
    """

    until_s: float = math.inf
    least: int = 0
    last_s: float = math.inf
    _begin_s: float = field(default_factory=time.monotonic)
    _longest_s: float = 0.0

    def now(self, runs: int) -> bool:
        """Whether to stop after a run that just ended, the `runs`-th."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._begin_s)
        self._begin_s = now
        return runs >= self.least and now + self._longest_s > self.until_s


SILENCE_S = 180.0  # no case takes as long; a child that says nothing hangs
REMOTE_SILENCE_S = 900.0  # all figures of a device behind a slow network
_PATIENT = Limits(math.inf, SILENCE_S)
_MEASURE, _DECODE = "profiler.operators.measure", "profiler.whole_model.decode"


def figures(engine: str | None, devices: Sequence[str], threads: int, limit_s: float) -> Iterator[Line]:
    """Lines about devices, places and links. Raises EngineProblem when the engine fails."""
    request: Line = {"ask": "figures", "engine": engine, "devices": list(devices), "threads": threads}
    request["limit_s"] = limit_s
    remote = any(name.startswith("RPC") for name in devices)
    limits = replace(_PATIENT, silence_s=REMOTE_SILENCE_S) if remote else _PATIENT
    with closing(stream(_MEASURE, request, engine or "libllama", limits)) as lines:
        yield from lines


def cases(
    jobs: Sequence[Job],
    engine: str | None,
    threads: int,
    until_s: float,
    journal: Journal,
    on_line: Callable[[Line], None],
    again: bool = False,
) -> None:
    """Measure every job that the journal does not know, or all `again`; `on_line` sees each result at once.

    All end about when `time.monotonic` says `until_s`, but none is hurried beyond sense.
    """

    def keep(line: Line) -> None:
        journal.add(line)
        on_line(line)

    known = {line["key"] for line in journal.lines if line["kind"] == "case"}
    left = [job for job in jobs if again or job.key not in known]
    while left:
        request: Line = {"ask": "cases", "engine": engine, "threads": threads, "until_s": until_s}
        done = _until_it_ends({**request, "jobs": [asdict(job) for job in left]}, keep)
        left = [job for job in left if job.key not in done]


def whole_model(
    model: Path,
    specs: Mapping[str, LoadSpec],
    engine: str | None,
    length: Length,
    on_line: Callable[[Line], None] = lambda line: None,
    stop: Stop | None = None,
) -> dict[str, Line]:
    """Decode and prefill times of a model under each spec, by key; a crash costs the run it happened in.

    Specs that `stop` leaves no time for are not in the result.
    """
    found: dict[str, Line] = {}
    stop = stop or Stop()
    while left := [key for key in specs if key not in found]:
        runs = [{"key": key, "spec": dry_run.to_json(specs[key])} for key in left]
        request: Line = {"engine": engine, "model": str(model.resolve()), "seed": 1, "runs": runs}
        started = left[0]
        limits = replace(_PATIENT, total_s=stop.last_s - time.monotonic())
        try:
            with closing(stream(_DECODE, request | asdict(length), engine or "libllama", limits)) as lines:
                for line in lines:
                    started = line["key"]
                    if line["kind"] == "run":
                        found[started] = line
                        on_line(line)
                        if stop.now(len(found)):
                            return found
        except TimeIsUp:
            break
        except AtsplanError as problem:
            lost = started if started not in found else next((k for k in left if k not in found), "")
            if not lost:  # it failed after its last run
                break
            found[lost] = {"kind": "run", "key": lost, "skipped": _failure(problem)}
            on_line(found[lost])
    return found


def _until_it_ends(request: Line, keep: Callable[[Line], None]) -> set[str]:
    """Keys that one child settled; the case in which it failed is settled as skipped."""
    done: set[str] = set()
    started = ""
    try:
        with closing(stream(_MEASURE, request, request["engine"] or "libllama", _PATIENT)) as lines:
            for line in lines:
                if line["kind"] == "start":
                    started = line["key"]
                    continue
                if line["kind"] == "case":
                    done.add(line["key"])
                keep(line)
    except AtsplanError as problem:
        keys = [job_of(data).key for data in request["jobs"]]
        lost = started if started and started not in done else next((k for k in keys if k not in done), "")
        if lost:  # else it failed after its last case
            done.add(lost)
            keep({"kind": "case", "key": lost, "skipped": _failure(problem)})
    return done


def _failure(problem: AtsplanError) -> str:
    return f"the engine failed: {problem.why if isinstance(problem, EngineProblem) else problem}"
