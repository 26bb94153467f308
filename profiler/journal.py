"""What an interrupted profile had measured, kept outside the output folder so that the next run continues.

A file of lines, each of JSON behind a checksum over it and all lines before: half a line at the end is what
an interruption leaves, anything else that does not fit is damage, and the file is put aside.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.records import digest
from profiler import summarise
from runtime.cache.folder import cache_folder, distrust, made, put_aside

Line = dict[str, Any]
MAX_AGE_S = 24 * 3600  # a machine changes: an older beginning is not continued
_MAX_BYTES = 64 * 2**20  # the longest profiles have some thousand lines
_SCHEMA = 1
_APPEND = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
_HEAD = {"kind": "journal", "schema": _SCHEMA}

# What the later stages take from a line of each kind; lines on devices and links are tried out as a whole.
_NUMBER = (int, float)
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "machine": {"facts": dict},
    "engine": {"text": str},
    "device": {"name": str, "device_kind": str, "stream_bytes_per_s": int},
    "place": {"place": dict},
    "zero-copy": {"device": str, "bytes_per_s": int},
    "link": {"source": str, "target": str},
    "link-end": {"load": _NUMBER},
    "case": {"key": str},
    "run": {"key": str, "model": str},
    "slots": {"key": str, "of": list},
    "stream": {"device": str, "bytes_per_s": int, "slowed": list},
    "heat": {"events": int},
}
# A result has these, or `skipped` with the reason.
_RESULT: Mapping[str, Mapping[str, type]] = {
    "case": {"time_ns": int, "spread_ns": int, "samples": int},
    "run": {"decode_ns": list, "paged_bytes": int},
    "slots": dict.fromkeys(
        ("decode_ns", "prompt_ns", "cpu", "uploaded", "cpu_ns", "expert_bytes", "device_ns", "bus_start_ns"),
        int,
    )
    | {"cpu_start_ns": int},
}


class Journal:
    """Lines of the measuring process in the user's cache folder, one file a machine, engine and request.

    `damage` is a sentence on a file that could not be used; "" for none.
    """

    def __init__(self, *identity: str, folder: Path | None = None) -> None:
        name = digest(*identity).removeprefix("sha256:")[:24]
        self.path = (folder or cache_folder()) / f"profile-{name}.jsonl"
        self.lines: list[Line] = []
        self.damage = ""
        self._sum = self._whole = 0  # checksum of the lines so far, and their bytes in the file
        self._usable = True  # whether the file is ours to write
        self._read()

    def add(self, line: Line) -> None:
        """Keep a line; a folder that cannot be written only costs the continuation."""
        self.lines.append(line)
        if not self._usable:
            return
        try:
            if not self._whole:
                made(self.path.parent)
                self._write(_HEAD)
            self._write(line)
        except OSError:
            return

    def forget(self) -> None:
        """Begin anew: what is known belongs to something else."""
        self.finish()
        self.lines = []

    def finish(self) -> None:
        """The profile is complete: forget."""
        self._sum = self._whole = 0
        if self._usable:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _write(self, line: Line) -> None:
        """Append a line. What an interruption left of another after the whole ones goes."""
        text, total = _sealed(line, self._sum)
        with os.fdopen(os.open(self.path, _APPEND, 0o600), "wb") as file:
            file.truncate(self._whole)
            file.seek(self._whole)
            file.write(text)
        self._sum, self._whole = total, self._whole + len(text)

    def _read(self) -> None:
        try:
            why = distrust(self.path) or self._take()
        except FileNotFoundError:
            return
        except OSError as problem:
            why = problem.strerror or str(problem)
        if why:
            self.damage = f"{self.path}: {why}: {put_aside(self.path)}, the profile begins anew"
            self.lines, self._sum, self._whole = [], 0, 0
            self._usable = not os.path.lexists(self.path)

    def _take(self) -> str:
        """Read the lines of a file that is ours; what is wrong with them, "" for nothing."""
        found = self.path.stat()
        if time.time() - found.st_mtime > MAX_AGE_S:
            self.finish()
            return ""
        if found.st_size > _MAX_BYTES:
            return "is longer than any profile"
        *whole, _ = self.path.read_bytes().split(b"\n")
        for number, text in enumerate(whole, 1):
            line, self._sum = _opened(text, self._sum)
            if line is None:
                return f"line {number} is damaged"
            self._whole += len(text) + 1
            self.lines.append(line)
        if self.lines and self.lines[0] != _HEAD:
            return "is of another version of this program"
        del self.lines[:1]
        return _useless(self.lines)


def _sealed(line: Line, before: int) -> tuple[bytes, int]:
    """A line as it stands in the file, and the checksum to go on with."""
    text = json.dumps(line).encode()
    total = zlib.crc32(text, before)
    return b"%08x %s\n" % (total, text), total


def _opened(text: bytes, before: int) -> tuple[Line | None, int]:
    """The line that `_sealed` wrote; None for anything else."""
    total = zlib.crc32(text[9:], before)
    if text[:9] != b"%08x " % total:
        return None, total
    try:
        line = json.loads(text[9:])
    except ValueError:
        return None, total
    return (line if isinstance(line, dict) else None), total


def _useless(lines: Sequence[Line]) -> str:
    """Why lines that are whole cannot be continued from; "" when they can."""
    for line in lines:
        kind = str(line.get("kind"))
        if kind not in _FIELDS:
            return f"has a line of unknown kind {kind}"
        wanted = dict(_FIELDS[kind])
        if "skipped" not in line:
            wanted |= _RESULT.get(kind, {})
        for name, types in wanted.items():
            if not isinstance(line.get(name), types):
                return f"has a line of kind {kind} without {name}"
    try:
        summarise.devices(lines), summarise.links(lines), summarise.streams(lines), summarise.slowdowns(lines)
    except (KeyError, TypeError, ValueError) as problem:
        return f"its lines do not fit together ({type(problem).__name__})"
    if any(line["kind"] == "link-end" for line in lines) != any(line["kind"] == "engine" for line in lines):
        return "its devices were not measured to the end"
    return ""
