"""How much of its files a process has taken in: what it read, and what it mapped and touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.child.meanwhile import repeated

_EVERY_S = 0.25
_KIB = 1024


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Who hears how the load of a model goes."""

    compiling: Callable[[], None] = lambda: None  # the device for experts in slots, before the load
    taken: Callable[[int], None] = lambda taken: None  # bytes so far, from a thread, where the system tells
    over: Callable[[], None] = lambda: None  # all is where it belongs


UNHEARD = LoadProgress()


def taken_bytes(pid: int) -> int | None:
    """Bytes that a process has read, and those of mapped files that it has in memory, from /proc.

    None where the system does not tell: it is no Linux, or the process is gone. An engine reads weights or
    maps them, and gives back no mapped page before all weights are where they belong.
    """
    folder = Path(f"/proc/{pid}")
    try:
        read = re.search(r"^rchar: (\d+)$", (folder / "io").read_text(), re.M)
        mapped = re.search(r"^RssFile:\s+(\d+) kB$", (folder / "status").read_text(), re.M)
    except OSError:
        return None
    return int(read[1]) + int(mapped[1]) * _KIB if read and mapped else None


@contextmanager
def taking_in(pid: int, tell: Callable[[int], None], every_s: float = _EVERY_S) -> Iterator[None]:
    """Tell, at first and again and again while the block runs, what a process has taken in since it began.

    Nothing where the system does not tell.
    """
    before = taken_bytes(pid)
    if before is not None:
        tell(0)

    def look(ended: Callable[[], bool]) -> None:
        now = taken_bytes(pid)
        if before is not None and now is not None and not ended():
            tell(max(now - before, 0))

    with repeated(look, every_s):
        yield
