"""Commands on a terminal of their own: what a person sees who waits for one."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines import ENVIRONMENT, ROOT

_RUN = "import atsplan; atsplan.main()"
_AT_ONCE = f"from commands.shared import console; console._SHOWN_AFTER_S = 0.0; {_RUN}"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Seen:
    """What came of a command."""

    status: int
    screen: str  # all that was ever written to the terminal, without colours and moves of the cursor
    out: str  # standard output, a pipe


def on_a_terminal(
    *words: object,
    at_once: bool = True,
    until: str = "",
    columns: int = 80,
    cwd: Path = ROOT,
    more: Mapping[str, str] | None = None,
) -> Seen:
    """Run atsplan with its standard error on a terminal, a bar shown `at_once` or when it is due.

    It is interrupted, as by Ctrl-C, when standard output has the pattern `until`.
    """
    ours, theirs = pty.openpty()
    child = [sys.executable, "-c", _AT_ONCE if at_once else _RUN, *map(str, words)]
    own = {"TERM": "xterm", "COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        child,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=cwd,
        env={**ENVIRONMENT, **own, **(more or {})},
    ) as done:
        os.close(theirs)
        assert done.stdout is not None
        out = b""
        if until:
            while line := done.stdout.readline():
                out += line
                if re.search(until, line.decode()):
                    done.send_signal(signal.SIGINT)
                    break
        told = "".join(iter(lambda: _read(ours), ""))
        out += done.stdout.read()
    os.close(ours)
    return Seen(done.returncode, _CODES.sub("", told), out.decode())


def _read(terminal: int) -> str:
    """What comes next; nothing where nobody writes to it any more."""
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
