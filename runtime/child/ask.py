"""Engine work in a child process: an abort of the engine becomes one line, never the end of this program.

A request goes in, events and at last an answer come out (runtime.child.serve is the other side); the last
lines of the engine's log explain a death.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

from planner.errors import EngineProblem, InputError
from runtime.child import process
from runtime.child.environment import python
from runtime.child.process import Process

Answer = dict[str, Any]
Events = Generator[Answer, None, Answer]

_LINES = 400  # of the log, kept to explain a death
_LINE_BYTES = 1 << 16  # a longer line is cut: an engine may print without end
_LAST_LINES = 10  # of those, given with a death
_PARTING_S = 60.0  # for a child that has answered: to free a large model takes a while


class Relayed(EngineProblem):
    """A problem that the child found; its line is complete already."""

    def message(self) -> str:
        return self.why


@dataclass(eq=False)
class Died(EngineProblem):
    """A child that ended without an answer, or was ended because it was silent for too long."""

    lines: tuple[str, ...]  # the last ones of its log


class TimeIsUp(Died):
    """A child that was ended because it gave no answer in time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a child may take: for all of it, and from one event to the next."""

    total_s: float = 600.0
    silence_s: float = math.inf


def ask(
    module: str,
    request: Mapping[str, Any],
    engine: str,
    timeout_s: float = 600,
    on_event: Callable[[Answer], None] = lambda event: None,
    on_start: Callable[[int], None] = lambda pid: None,
) -> Answer:
    """Give a request to `module` in a child process, its events to `on_event`, and return its answer.

    `on_start` hears the child's number. Errors of `stream`.
    """
    with closing(stream(module, request, engine, Limits(timeout_s), on_start)) as events:
        while True:
            try:
                event = next(events)
            except StopIteration as ended:
                answer: Answer = ended.value
                return answer
            on_event(event)


def stream(
    module: str,
    request: Mapping[str, Any],
    engine: str,
    limits: Limits | None = None,
    on_start: Callable[[int], None] = lambda pid: None,
) -> Events:
    """The events of `module`, run in a child process on a request; the generator returns the answer.

    To be closed (`contextlib.closing`) by whom may not read to the end: no child outlives it.
    An event {"engine": name} says which build the child has loaded: problems from then on name it.
    Raises Died with the engine's last message when the child dies, TimeIsUp when it takes too long,
    InputError or EngineProblem when the child answers with one.
    """
    child = process.start(python("-m", module), given=True)
    log: deque[str] = deque(maxlen=_LINES)
    reader = threading.Thread(target=_drain, args=(child.stderr, log), daemon=True)
    watch = _Watch(child, limits or Limits())
    answer = None
    try:
        reader.start()
        watch.start()
        on_start(child.pid)
        for event in _messages(child, request, watch):
            if "answer" in event:
                answer = event["answer"]
                break
            engine = event.get("engine", engine)
            yield event
        process.wait(child, _PARTING_S)
    finally:
        watch.stop()
        process.end(child)
        reader.join(5)
        _close(child)
    return _outcome(answer, engine, child.returncode, watch, log)


def _messages(child: Process, request: Mapping[str, Any], watch: _Watch) -> Iterator[Answer]:
    """What a child says, to its end or to a message that it could not finish."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return  # it died before reading: the log tells why
    while True:
        watch.heard()
        line = child.stdout.readline()
        watch.heard()
        if not line.endswith(b"\n"):
            return
        message: Answer = json.loads(line)
        yield message


def _outcome(answer: Answer | None, engine: str, code: int, watch: _Watch, log: deque[str]) -> Answer:
    """The answer, or what is known of why there is none."""
    if answer is None:
        lines = tuple(line for line in log if line.strip())[-_LAST_LINES:]
        if watch.why:
            raise (TimeIsUp if watch.time_is_up else Died)(engine, watch.why, lines)
        raise Died(engine, process.death(code, log), lines)
    if "problem" in answer:
        if answer["exit_code"] == InputError.exit_code:
            raise InputError(answer["problem"])
        raise Relayed(engine, answer["problem"])
    return answer


class _Watch:
    """Ends a process that is late; `why` says so afterwards."""

    def __init__(self, child: Process, limits: Limits) -> None:
        self.why, self.time_is_up = "", False
        self._child, self._limits = child, limits
        self._begin = self._heard = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def heard(self) -> None:
        """The child has said something, or is listened to only from now on."""
        self._heard = time.monotonic()

    def stop(self) -> None:
        """The child may take as long as it likes."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._pause()):
            in_all, silent = self._left()
            if min(in_all, silent) > 0:
                continue
            self.time_is_up = in_all <= 0
            self.why = (
                f"no answer within {self._limits.total_s:.0f} s"
                if self.time_is_up
                else f"said nothing for {self._limits.silence_s:.0f} s"
            )
            process.end(self._child, 1)
            return

    def _pause(self) -> float:
        return min(max(min(self._left()), 0.0), threading.TIMEOUT_MAX)

    def _left(self) -> tuple[float, float]:
        """Seconds for all of it, and to the next event."""
        now = time.monotonic()
        return self._begin + self._limits.total_s - now, self._heard + self._limits.silence_s - now


def _drain(stream: IO[bytes] | None, log: deque[str]) -> None:
    while stream and (line := stream.readline(_LINE_BYTES)):
        log.append(line.decode(errors="replace").rstrip())


def _close(child: Process) -> None:
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.close()
            except BrokenPipeError:
                continue
