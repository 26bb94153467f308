"""Drives the measuring child processes: progress, crashes, hangs, continuation.

A crash or hang costs the one case it happened in; the next child takes up the rest.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import EngineProblem
from planner.plan.load_spec import LoadSpec
from profiler.journal import Journal
from profiler.operators.cases import Job, job_of
from runtime.engine.logs import cause
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


def figures(engine: str | None, devices: Sequence[str], threads: int, limit_s: float) -> Iterator[Line]:
    """Lines about devices, places and links. Raises EngineProblem when the engine fails."""
    request: Line = {"ask": "figures", "engine": engine, "devices": list(devices), "threads": threads}
    request["limit_s"] = limit_s
    with Child("profiler.operators.measure", request) as child:
        yield from child.lines()
    if child.failure:
        raise EngineProblem(engine or "libllama", child.failure)


def cases(
    jobs: Sequence[Job],
    engine: str | None,
    threads: int,
    until_s: float,
    journal: Journal,
    on_line: Callable[[Line], None],
) -> None:
    """Measure every job that the journal does not know; `on_line` sees each result as it comes.

    All end about when `time.monotonic` says `until_s`, but none is hurried beyond sense.
    """

    def keep(line: Line) -> None:
        journal.add(line)
        on_line(line)

    known = {line["key"] for line in journal.lines if line["kind"] == "case"}
    left = [job for job in jobs if job.key not in known]
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
        with Child("profiler.whole_model.decode", request | asdict(length), stop.last_s) as child:
            for line in child.lines():
                started = line["key"]
                if line["kind"] == "run":
                    found[started] = line
                    on_line(line)
                    if stop.now(len(found)):
                        return found
        if child.late:
            break
        if child.failure:
            lost = started if started not in found else next((k for k in left if k not in found), "")
            if not lost:  # it failed after its last run
                break
            found[lost] = {"kind": "run", "key": lost, "skipped": f"the engine failed: {child.failure}"}
            on_line(found[lost])
    return found


def _until_it_ends(request: Line, keep: Callable[[Line], None]) -> set[str]:
    """Keys that one child settled; the case in which it failed is settled as skipped."""
    done: set[str] = set()
    started = ""
    with Child("profiler.operators.measure", request) as child:
        for line in child.lines():
            if line["kind"] == "start":
                started = line["key"]
                continue
            if line["kind"] == "case":
                done.add(line["key"])
            keep(line)
    if child.failure:
        keys = [job_of(data).key for data in request["jobs"]]
        lost = started if started and started not in done else next(k for k in keys if k not in done)
        done.add(lost)
        keep({"kind": "case", "key": lost, "skipped": f"the engine failed: {child.failure}"})
    return done


class Child:
    """A Python child process that answers a request with JSON lines; killed when the block ends early."""

    def __init__(self, module: str, request: Line, last_s: float = math.inf) -> None:
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the child
        )
        self._said: deque[str] = deque(maxlen=20)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._request = request
        self._last_s = last_s

    def __enter__(self) -> Child:
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child that died at once is found below
            self._process.stdin.write(json.dumps(self._request))
            self._process.stdin.close()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def lines(self) -> Iterator[Line]:
        """Lines as they appear, to the end of the child; one that falls silent is killed."""
        assert self._process.stdout is not None
        watch = _Watch(self._process, self._last_s)
        try:
            for text in self._process.stdout:
                watch.reset()
                if text.startswith("{"):  # an engine may print to stdout as well
                    yield json.loads(text)
        finally:
            watch.stop()
        self._process.wait()
        self._reader.join(timeout=5)

    @property
    def late(self) -> bool:
        """Whether the child was cut off because its time was up."""
        return bool(self._process.returncode) and time.monotonic() >= self._last_s

    @property
    def failure(self) -> str:
        """Why the child failed: what it said last, or the signal that ended it; "" when all is well."""
        code = self._process.returncode
        if not code:
            return ""
        said = cause(list(self._said)) if self._said else ""
        if code > 0:
            return said or f"exit code {code}"
        how = f"ended by {signal.Signals(-code).name}"
        return f"{said} ({how})" if said else how

    def _drain(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for line in self._process.stderr:
                if line.strip():
                    self._said.append(line.strip())


class _Watch:
    """Kills a process after a silence, and when its time is up."""

    def __init__(self, process: subprocess.Popen[str], last_s: float) -> None:
        self._process, self._last_s = process, last_s
        self._timer = self._start()

    def reset(self) -> None:
        self._timer.cancel()
        self._timer = self._start()

    def stop(self) -> None:
        self._timer.cancel()

    def _start(self) -> threading.Timer:
        left_s = max(self._last_s - time.monotonic(), 0.0)
        timer = threading.Timer(min(SILENCE_S, left_s), self._process.kill)
        timer.daemon = True
        timer.start()
        return timer
