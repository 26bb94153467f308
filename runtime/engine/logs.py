"""What the engine says: which of its lines explains a failure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping

DEBUG = 1  # ggml_log_level
CONTINUED = 5

_ABORT = re.compile(r"^(?:\S*/)?[\w.-]+\.(?:cpp|cc|c|cu|cuh|h|hpp|m|mm):\d+: (.+)")
# Of the native library of hybrid experts: what the engine says then is what follows from it.
_OURS = re.compile(r"hybrid experts: (?!note: )")
_FOLLOWS = 20  # lines: an abort that comes later than that has another cause
_CAUSE = re.compile(
    r"error loading model|out of memory|failed to allocate|cannot run the operation|requires|not supported"
    r"|no such|unable to|invalid|what\(\):",
    re.IGNORECASE,
)
# What some lines mean to those who do not know the engine's sources.
_MEANING: Mapping[str, str] = {
    "std::bad_alloc": "no memory is left",
    "MemoryError": "no memory is left",
    "cannot run the operation (NONE)": (
        "it is larger than one buffer of the device may be, or of a type the device does not know"
    ),
    "_Host buffer": "host memory for weights is short, not the device's (--mmap maps the file instead)",
    "Remote RPC server crashed": "the server of a remote device is gone",
}
_TRACEBACK = "Traceback (most recent call last)"  # Python's: its last line names the exception
_FAILED = re.compile(r"error|fail|abort|exception", re.IGNORECASE)
_PREFIX = re.compile(r"^(?:[\w~:]+: |what\(\):\s+)(?=\S)")


_BUFFER = re.compile(r"(?P<buffer>\S+)\s+(?P<item>KV|RS) buffer size =\s*(?P<mib>[\d.]+) MiB")


def cache_buffers(lines: Iterable[str]) -> dict[str, dict[str, int]]:
    """Bytes of KV caches ("KV") and recurrent states ("RS") by buffer name, as printed: to 10 KiB."""
    found: dict[str, dict[str, int]] = {}
    for line in lines:
        if said := _BUFFER.search(line):
            sizes = found.setdefault(said["item"], {})
            size = round(float(said["mib"]) * 2**20)
            sizes[said["buffer"]] = sizes.get(said["buffer"], 0) + size
    return found


class Tail:
    """The last lines of a log, fed in fragments."""

    def __init__(self, lines: int = 200) -> None:
        self.lines: deque[str] = deque(maxlen=lines)
        self._open = ""

    def add(self, level: int, text: str) -> None:
        """One log call: a fragment, a line or several lines."""
        *whole, self._open = (self._open + text).split("\n")
        self.lines.extend(line for line in whole if line.strip())

    def cause(self) -> str:
        """The line that explains a failure; "" when nothing was said."""
        return cause([*self.lines, self._open])


def cause(lines: list[str]) -> str:
    """The most telling line: an abort's own message, else a named cause, else the last line of failure."""
    line = _telling(lines)
    meaning = next((meaning for words, meaning in _MEANING.items() if words in line), "")
    return f"{line}: {meaning}" if meaning else line


def _telling(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    ours = max((i for i, line in enumerate(said) if _OURS.match(line)), default=None)
    aborts = [(i, abort[1]) for i, line in enumerate(said) if (abort := _ABORT.match(line))]
    if ours is not None and not (aborts and aborts[-1][0] > ours + _FOLLOWS):
        return said[ours]
    if aborts:
        return aborts[-1][1]
    if any(line.startswith(_TRACEBACK) for line in said):
        return said[-1]
    for pattern in (_CAUSE, _FAILED):
        for line in said:
            if pattern.search(line):
                return _PREFIX.sub("", line)
    return said[-1] if said else ""
