"""A second reader of GGUF files, for verification: it shares no code with the first.

It reads through a file object instead of a map, keeps nothing but where things are, and believes
the file only as far as it can be checked against the reader that made the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from planner.errors import FileProblem

_WIDTH = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)  # bytes of a value by GGUF type; 8 text, 9 array
_U32, _TEXT, _ARRAY = 4, 8, 9
_LONGEST = 1 << 16  # bytes of a name


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a value, its type word included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as the table announces it; `start` counts from the start of the file."""

    dims: tuple[int, ...]
    kind: int
    start: int


@dataclass(slots=True)
class Seen:
    """One file."""

    path: Path
    entries: dict[str, Span] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)  # in the order of the table
    alignment: int = 32
    data_start: int = 0

    def value(self, key: str) -> bytes:
        """The raw bytes of a value with its type; empty when there is none."""
        span = self.entries.get(key)
        if span is None:
            return b""
        with self.path.open("rb") as file:
            file.seek(span.start)
            return file.read(span.end - span.start)

    def numbers(self, key: str) -> tuple[int, ...]:
        """An array of unsigned 32-bit numbers; empty when absent."""
        raw = self.value(key)
        if len(raw) < 16:
            return ()
        _, element, count = struct.unpack_from("<IIQ", raw)
        if element != _U32 or len(raw) != 16 + 4 * count:
            raise FileProblem(str(self.path), f"damaged: {key} is no array of 32-bit numbers")
        return struct.unpack_from(f"<{count}I", raw, 16)

    def text(self, key: str) -> str:
        """A text; empty when absent."""
        return self.value(key)[12:].decode("utf-8", errors="replace")


def read_header(path: Path) -> Seen:
    """Read the header of a file; FileProblem when it cannot be one."""
    seen = Seen(path)
    try:
        with path.open("rb") as file:
            _read_header(file, seen)
    except (struct.error, UnicodeDecodeError, IndexError, OverflowError):
        raise FileProblem(str(path), "the second reader cannot follow this header") from None
    return seen


def _read_header(file: BinaryIO, seen: Seen) -> None:
    magic, _, n_weights, n_entries = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise FileProblem(str(seen.path), "the second reader finds no GGUF here")
    for _ in range(n_entries):
        key = _text(file)
        start = file.tell()
        _skip_value(file, _word(file))
        seen.entries[key] = Span(start, file.tell())
    if "general.alignment" in seen.entries:
        seen.alignment = struct.unpack("<II", seen.value("general.alignment"))[1]
    found = list(_table(file, n_weights))
    end = file.tell()
    seen.data_start = end + (-end) % seen.alignment
    for name, dims, kind, offset in found:
        seen.weights[name] = Weight(dims, kind, seen.data_start + offset)


def _table(file: BinaryIO, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(count):
        name = _text(file)
        n_dims = _word(file)
        if n_dims > 4:
            raise IndexError
        dims = struct.unpack(f"<{n_dims}Q", file.read(8 * n_dims))
        kind, offset = struct.unpack("<IQ", file.read(12))
        yield name, dims, kind, offset


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        file.seek(_long(file), 1)
    elif kind == _ARRAY:
        element, count = _word(file), _long(file)
        if element == _TEXT:
            for _ in range(count):
                file.seek(_long(file), 1)
        else:
            file.seek(_WIDTH[element] * count, 1)
    else:
        file.seek(_WIDTH[kind], 1)


def _text(file: BinaryIO) -> str:
    length = _long(file)
    if length > _LONGEST:
        raise IndexError
    return file.read(length).decode("utf-8")


def _word(file: BinaryIO) -> int:
    return int(struct.unpack("<I", file.read(4))[0])


def _long(file: BinaryIO) -> int:
    return int(struct.unpack("<Q", file.read(8))[0])
