"""Starting and ending processes: in groups of their own, tied to this one, each death told in a sentence."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from runtime.child.environment import environment
from runtime.engine.logs import cause

Process = subprocess.Popen[bytes]
TimedOut = subprocess.TimeoutExpired

_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 10.0


def start(
    command: Sequence[str],
    *,
    given: bool = False,
    one_log: bool = False,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Process:
    """Start a program with its output in pipes, in a group of its own: Ctrl-C reaches this process alone.

    `given`: its standard input is a pipe, else empty. `one_log`: errors go where output goes.
    `variables` stand in for `environment()`. The system ends it when this process is gone.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE if given else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if one_log else subprocess.PIPE,
        cwd=cwd,
        env=dict(variables) if variables is not None else environment(),
        start_new_session=True,
        preexec_fn=tie(),
    )


def run(
    command: Sequence[str],
    timeout_s: float,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The status of a program and all that it prints, output before errors. Raises TimedOut, OSError."""
    done = subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=cwd,
        env=dict(variables) if variables is not None else environment(),
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def follow(command: Sequence[str], cwd: Path | None = None, **variables: str) -> int:
    """Run a program that prints to this one's output; its status, 128 below zero for none.

    It has a group of its own, so that Ctrl-C is heard once: here, and passed on politely.
    """
    together = environment() | variables
    with subprocess.Popen(list(command), cwd=cwd, env=together, start_new_session=True) as step:
        try:
            return step.wait()
        except KeyboardInterrupt:
            step.terminate()
            if step.wait() == 130:
                return 130
            raise


def end(process: Process, patience_s: float = _PATIENCE_S) -> None:
    """End a process and all of its group: TERM, and KILL after `patience_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def wait(process: Process, patience_s: float) -> bool:
    """Whether a process ends by itself in time."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def death(code: int, lines: Iterable[str]) -> str:
    """Why a process ended: the most telling line of its log, and how it ended."""
    said, how = cause(list(lines)), _how(code)
    return f"{said} ({how})" if said else f"{how}, without a message"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        how = f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
    if -code == signal.SIGKILL:
        how += ", as the system does to whom has taken the last memory"
    if -code == signal.SIGILL:
        how += ": this build uses instructions that this processor lacks"
    return how


def tie(parent: int = 0) -> Callable[[], None] | None:
    """For the child before its program begins: have Linux end it when its parent is gone, however it went.

    `parent`: its number, where it is not this process.
    """
    if sys.platform != "linux":
        return None
    # Looked up here: between fork and exec no lock may be taken, which another thread might have held.
    prctl, parent = ctypes.CDLL(None).prctl, parent or os.getpid()

    def tied() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it went while we were being born

    return tied
