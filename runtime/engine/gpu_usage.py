"""What NVIDIA GPUs say of themselves while something is measured: memory in use, utilisation, slowdowns.

Without a driver every question has no answer.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from runtime.engine.nvml import Nvml, Reading, nvml

_PAUSE_S = 0.2
_CUDA = re.compile(r"CUDA(\d+)")


class Watch:
    """NVIDIA GPUs while the block runs; figures stay None where nothing can tell.

    `peak_bytes` is the most memory in use above what was in use before; `percent` the mean utilisation of
    the busiest GPU after `begin()`.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self.percent: float | None = None
        self.peak_bytes: int | None = None
        self._devices = tuple(devices)
        self._wanted = nvidia(self._devices)
        self._done, self._counting = threading.Event(), threading.Event()
        self._samples: list[int] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._wanted:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(5)
        if self._samples:
            self.percent = sum(self._samples) / len(self._samples)

    def begin(self) -> None:
        """From now on utilisation counts."""
        self._counting.set()

    def _sample(self) -> None:
        # A GPU that is lost while it is watched ends the watching, not the measuring.
        with suppress(Exception), nvml() as library:
            if library is None or not library.count():
                return
            idle = sum(one.used_bytes for one in readings(library, self._devices).values())
            while not self._done.wait(_PAUSE_S):
                now = readings(library, self._devices).values()
                used = sum(one.used_bytes for one in now) - idle
                self.peak_bytes = max(self.peak_bytes or 0, used)
                if self._counting.is_set():
                    self._samples.append(max(one.percent for one in now))


def nvidia(devices: Iterable[str]) -> bool:
    """Whether these device names are NVIDIA GPUs' under CUDA, one at least."""
    return any(name.startswith("CUDA") for name in devices)


def used(devices: Iterable[str] = ()) -> Mapping[str, int]:
    """Bytes in use on the NVIDIA GPUs behind these device names; empty where nothing can tell."""
    with suppress(Exception), nvml() as library:  # a GPU that is lost, a driver that refuses
        if library is not None:
            return {f"GPU {n}": one.used_bytes for n, one in readings(library, devices).items()}
    return {}


def name_at(pci_id: str) -> str:
    """What `used` calls the NVIDIA GPU at a PCI address; "" where nothing can tell."""
    with suppress(Exception), nvml() as library:
        if library is not None:
            return f"GPU {library.at(pci_id)}"
    return ""


def slowdown_bits() -> int:
    """Why NVIDIA GPUs run below their clocks now, all together; bits of nvmlClocksThrottleReasons.

    0 where none does, and where nothing can tell.
    """
    bits = 0
    with suppress(Exception), nvml() as library:  # a function that newer drivers may drop
        if library is not None:
            for index in range(library.count()):
                bits |= library.slowdown_bits(index)
    return bits


def available() -> bool:
    """Whether GPU figures can be had here."""
    with nvml() as library:
        return library is not None and library.count() > 0


def readings(library: Nvml, devices: Iterable[str] = ()) -> dict[int, Reading]:
    """The GPUs behind these device names now, by their number here; all where that cannot be told."""
    everyone = range(library.count())
    chosen = _behind(devices, everyone) if len({library.name(n) for n in everyone}) == 1 else None
    return {index: library.read(index) for index in (chosen or everyone)}


def _behind(devices: Iterable[str], everyone: range) -> list[int] | None:
    """Numbers of the GPUs that CUDA0 … are, as CUDA counts those of one product; None when unknown."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = list(everyone) if shown is None else [int(n) for n in shown.split(",") if n.strip().isdigit()]
    wanted = {int(m[1]) for name in devices if (m := _CUDA.fullmatch(name))}
    known = all(n < len(visible) and visible[n] in everyone for n in wanted)
    return sorted(visible[n] for n in wanted) if wanted and known else None
