"""Copies that take their share of the link between host and GPU, in a process of their own.

    python -m benchmarks.rounds.link_stream cuda:0      copies as told on stdin, lines of `STREAMS BUSY`
    python -m benchmarks.rounds.link_stream cuda:0 0.3  measures for 0.3 s and prints what it got, in GB/s

STREAMS copies run at once, each for the share BUSY of the time. `host` instead of `cuda:N` copies inside
host memory: the same on a machine without a GPU.
"""

from __future__ import annotations

import ctypes as c
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

PIECE_BYTES = 4 * 2**20  # short, so that the link is shared evenly over any millisecond


class HostLink:
    """Copies inside host memory."""

    def __init__(self) -> None:
        self._from, self._to = ((c.c_ubyte * PIECE_BYTES)() for _ in range(2))

    def copy(self) -> None:
        """Move one piece and wait for it."""
        c.memmove(self._to, self._from, PIECE_BYTES)


class CudaLink:
    """Copies from pinned host memory to a GPU, on a stream of their own."""

    def __init__(self, device: int) -> None:
        self._lib = c.CDLL("libcuda.so.1")
        handle, context = c.c_int(), c.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", c.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", c.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self._host, self._there, self._stream = c.c_void_p(), c.c_uint64(), c.c_void_p()
        self._call("cuMemHostAlloc", c.byref(self._host), c.c_size_t(PIECE_BYTES), 0)
        self._call("cuMemAlloc_v2", c.byref(self._there), c.c_size_t(PIECE_BYTES))
        self._call("cuStreamCreate", c.byref(self._stream), 1)

    def copy(self) -> None:
        """Move one piece and wait for it."""
        size = c.c_size_t(PIECE_BYTES)
        self._call("cuMemcpyHtoDAsync_v2", self._there, self._host, size, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._lib, name)(*arguments):
            raise SystemExit(f"CUDA driver: {name} returned {code}")


def opened(kind: str) -> HostLink | CudaLink:
    """A link by its name; in the thread that will copy."""
    if kind == "host":
        return HostLink()
    name, _, device = kind.partition(":")
    if name != "cuda" or not device.isdigit():
        raise SystemExit(f"{kind}: expected host or cuda:N")
    return CudaLink(int(device))


def probe(kind: str, seconds: float) -> float:
    """What a copy gets now, in GB/s."""
    link = opened(kind)
    for _ in range(8):
        link.copy()
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        link.copy()
        count += 1
    return count * PIECE_BYTES / (now - start) / 1e9


@dataclass(slots=True)
class Load:
    """How much is copied now; threads read it as they go."""

    streams: int = 0
    busy: float = 0.0


def work(kind: str, load: Load, index: int) -> None:
    """One stream: copies while it is among the first `streams`, else waits."""
    link = opened(kind)
    while True:
        if index >= load.streams or load.busy <= 0:
            time.sleep(0.005)
            continue
        start = time.perf_counter()
        link.copy()
        took = time.perf_counter() - start
        if load.busy < 1:
            time.sleep(took * (1 / load.busy - 1))


def main() -> None:
    """Measure once, or copy as told until stdin ends."""
    if len(sys.argv) > 2:
        print(f"{probe(sys.argv[1], float(sys.argv[2])):.3f}")
        return
    load, threads = Load(), 0
    for line in sys.stdin:
        streams, busy = line.split()
        load.busy, load.streams = float(busy), int(streams)
        while threads < load.streams:
            threading.Thread(target=work, args=(sys.argv[1], load, threads), daemon=True).start()
            threads += 1
        print("copying", streams, busy, flush=True)


if __name__ == "__main__":
    main()
