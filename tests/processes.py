"""Counting what a command leaves behind: processes by descent, and the memory they hold."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Children of a process, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(stat)
        if fields and fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


def alive(pids: Iterable[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    states = {pid: _stat(Path(f"/proc/{pid}/stat")) for pid in pids}
    return {pid for pid, fields in states.items() if fields and fields[0] != "Z"}


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(true: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _stat(path: Path) -> list[str]:
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
