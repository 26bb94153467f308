"""Engine work in a child process: an abort of the engine becomes one line, never the end of this program.

A request goes in as JSON on stdin, an answer comes back as JSON on stdout, the engine's log on stderr.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import AtsplanError, EngineProblem, InputError
from runtime.logs import cause

Answer = dict[str, Any]


class Relayed(EngineProblem):
    """A problem that the child found; its line is complete already."""

    def message(self) -> str:
        return self.why


def ask(module: str, request: Mapping[str, Any], engine: str, timeout_s: float = 600) -> Answer:
    """Run `python -m module` on a request and return its answer.

    Raises EngineProblem with the engine's last message when the child dies, InputError or
    EngineProblem when the child answers with one.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        output, log = process.communicate(json.dumps(request).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise EngineProblem(engine, f"no answer within {timeout_s:.0f} s") from None
    finally:
        end(process)
    said = log.decode(errors="replace").splitlines()
    if process.returncode:
        raise EngineProblem(engine, _death(process.returncode, cause(said)))
    answer: Answer = json.loads(output)
    if "problem" in answer:
        raise _problem(answer, engine)
    return answer


def serve(work: Callable[[Answer], Answer]) -> None:
    """The child's side: answer one request from stdin; for `if __name__ == "__main__"` of a module."""
    # The engine may print to stdout: keep the answer's channel to ourselves.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = work(json.load(sys.stdin))
    except AtsplanError as problem:
        answer = {"problem": str(problem), "exit_code": problem.exit_code}
    with channel:
        json.dump(answer, channel)


def end(process: subprocess.Popen[bytes], patience_s: float = 10) -> None:
    """End a child and all it started: TERM to the process group, KILL after `patience_s`."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _death(code: int, said: str) -> str:
    if code < 0:
        try:
            how = f"ended by {signal.Signals(-code).name}"
        except ValueError:
            how = f"ended by signal {-code}"
    else:
        how = f"ended with status {code}"
    return f"{said} ({how})" if said else f"{how}, without a message"


def _problem(answer: Answer, engine: str) -> AtsplanError:
    if answer["exit_code"] == InputError.exit_code:
        return InputError(answer["problem"])
    return Relayed(engine, answer["problem"])
