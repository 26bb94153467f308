"""Digests of tensor payloads, read back on two threads."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from planner.errors import MachineError

READ_BYTES = 4 << 20  # buffer of one thread
THREADS = 2  # one for each side of a comparison; hashing runs outside the interpreter lock


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes to digest: `order[p]` is the original number of the slice at position p, () for one piece."""

    path: Path
    start: int
    length: int
    order: tuple[int, ...] = ()


class PayloadCut(MachineError):
    """A file ended before a payload did."""

    def message(self) -> str:
        return f"{self.args[0]}: ends before byte {self.args[1]}"


def digests(payloads: Sequence[Payload], advance: Callable[[int], None]) -> list[str]:
    """SHA-256 of each payload, slices taken in their original order; hex.

    Order of results as given; OSError and PayloadCut when a file cannot be read.
    """
    stop = threading.Event()
    lock = threading.Lock()

    def on_progress(count: int) -> None:
        with lock:
            advance(count)

    pool = ThreadPoolExecutor(THREADS)
    try:
        return list(pool.map(lambda payload: _digest(payload, on_progress, stop), payloads))
    finally:
        stop.set()  # an interrupt must not wait for the rest of a large model
        pool.shutdown(wait=True, cancel_futures=True)


def _digest(payload: Payload, advance: Callable[[int], None], stop: threading.Event) -> str:
    state = hashlib.sha256()
    buffer = memoryview(bytearray(min(READ_BYTES, max(payload.length, 1))))
    handle = os.open(payload.path, os.O_RDONLY)
    try:
        for start, length in _pieces(payload):
            end = start + length
            while start < end and not stop.is_set():
                got = os.preadv(handle, [buffer[: min(len(buffer), end - start)]], start)
                if not got:
                    raise PayloadCut(str(payload.path), end)
                state.update(buffer[:got])
                start += got
                advance(got)
    finally:
        os.close(handle)
    return state.hexdigest()


def _pieces(payload: Payload) -> Iterator[tuple[int, int]]:
    """The slices in original order, as (start, length)."""
    if not payload.order:
        yield payload.start, payload.length
        return
    size = payload.length // len(payload.order)
    for position in sorted(range(len(payload.order)), key=payload.order.__getitem__):
        yield payload.start + position * size, size
