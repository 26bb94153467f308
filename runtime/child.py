"""Engine work in a child process: an abort of the engine becomes one line, never the end of this program.

The request goes in as JSON on stdin; events and at last the answer come back as lines of JSON on stdout;
the engine's log goes to stderr, whose last lines explain a death.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from planner.errors import AtsplanError, EngineProblem, InputError
from runtime.engine.logs import cause

Answer = dict[str, Any]
Emit = Callable[[Answer], None]

_LINES = 400  # of the log, kept to explain a death
_LAST_LINES = 10  # of those, given with a death
_PR_SET_PDEATHSIG = 1


class Relayed(EngineProblem):
    """A problem that the child found; its line is complete already."""

    def message(self) -> str:
        return self.why


@dataclass(eq=False)
class Died(EngineProblem):
    """A child that ended without an answer, or gave none in time."""

    lines: tuple[str, ...]  # the last ones of its log


def ask(
    module: str,
    request: Mapping[str, Any],
    engine: str,
    timeout_s: float = 600,
    on_event: Emit = lambda event: None,
) -> Answer:
    """Run `python -m module` on a request, give its events to `on_event`, return its answer.

    An event {"engine": name} says which build the child has loaded: problems from then on name it.
    Raises Died with the engine's last message when the child dies or gives no answer in time,
    InputError or EngineProblem when the child answers with one. No child outlives the call.
    """
    name = [engine]

    def hear(event: Answer) -> None:
        name[0] = event.get("engine", name[0])
        on_event(event)

    process = _start([sys.executable, "-m", module])
    log: deque[str] = deque(maxlen=_LINES)
    reader = threading.Thread(target=_drain, args=(process.stderr, log), daemon=True)
    late = threading.Event()
    timer = threading.Timer(timeout_s, _stop_late, (process, late))
    try:
        reader.start()
        timer.start()
        answer = _converse(process, request, hear)
        process.wait()
    finally:
        timer.cancel()
        end(process)
        reader.join(5)
        _close(process)
    if late.is_set():
        raise Died(name[0], f"no answer within {timeout_s:.0f} s", _last(log))
    if answer is None:
        raise Died(name[0], _death(process.returncode, cause(list(log))), _last(log))
    if "problem" in answer:
        raise _problem(answer, name[0])
    return answer


def serve(work: Callable[[Answer], Answer]) -> None:
    """The child's side: answer one request from stdin; for `if __name__ == "__main__"` of a module."""
    serve_events(lambda request, emit: work(request))


def serve_events(work: Callable[[Answer, Emit], Answer]) -> None:
    """The same for work that has something to tell on the way."""
    die_with_parent()
    # The engine may print to stdout: keep the answer's channel to ourselves.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: Answer) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    with channel:
        try:
            emit({"answer": work(json.load(sys.stdin), emit)})
        except AtsplanError as problem:
            emit({"answer": {"problem": str(problem), "exit_code": problem.exit_code}})


def end(process: subprocess.Popen[bytes], patience_s: float = 10) -> None:
    """End a child and all it started: TERM to its process group, KILL after `patience_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def environment() -> dict[str, str]:
    """This process's environment for children: no debugger on aborts, the same import path."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def death(code: int, lines: Iterable[str]) -> str:
    """Why a process ended: its most telling line and how it ended."""
    return _death(code, cause(list(lines)))


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )


def _converse(process: subprocess.Popen[bytes], request: Mapping[str, Any], on_event: Emit) -> Answer | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    except BrokenPipeError:
        return None  # it died before reading: the log tells why
    for line in process.stdout:
        event = json.loads(line)
        if "answer" in event:
            answer: Answer = event["answer"]
            return answer
        on_event(event)
    return None


def _drain(stream: IO[bytes] | None, log: deque[str]) -> None:
    for line in stream or ():
        log.append(line.decode(errors="replace").rstrip())


def _last(log: deque[str]) -> tuple[str, ...]:
    return tuple(line for line in log if line.strip())[-_LAST_LINES:]


def _stop_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    end(process, 1)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.close()
            except BrokenPipeError:
                continue


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent is gone, however the parent went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _death(code: int, said: str) -> str:
    if code < 0:
        try:
            how = f"ended by {signal.Signals(-code).name}"
        except ValueError:
            how = f"ended by signal {-code}"
        if -code == signal.SIGKILL:
            how += ", as the system does to whom has taken the last memory"
        if -code == signal.SIGILL:
            how += ": this build uses instructions that this processor lacks"
    else:
        how = f"ended with status {code}"
    return f"{said} ({how})" if said else f"{how}, without a message"


def _problem(answer: Answer, engine: str) -> AtsplanError:
    if answer["exit_code"] == InputError.exit_code:
        return InputError(answer["problem"])
    return Relayed(engine, answer["problem"])
