"""What NVIDIA GPUs say of themselves while something is measured: memory in use, utilisation.

Read through nvidia-ml-py, or where that is not installed from the driver's own library, which it wraps.
No context is made on any device; without a driver every question has no answer.
"""

from __future__ import annotations

import ctypes as c
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

_PAUSE_S = 0.2
_CUDA = re.compile(r"CUDA(\d+)")


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment, all processes together."""

    used_bytes: int
    percent: int  # of the time that some kernel ran


class Nvml(Protocol):
    """The few questions asked of the management library."""

    def count(self) -> int:
        """GPUs there are."""

    def read(self, index: int) -> Reading:
        """One of them, in the order of their PCI addresses."""

    def name(self, index: int) -> str:
        """The product's name."""

    def close(self) -> None:
        """Let go of the library."""


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


@contextmanager
def nvml() -> Iterator[Nvml | None]:
    """The management library; None where it, a driver or the permission is missing."""
    library = _open()
    try:
        yield library
    finally:
        if library is not None:
            library.close()


def _open() -> Nvml | None:
    for kind in (_Package, _Driver):
        try:
            return kind()
        except Exception:  # no package, no library, no driver, no permission: all the same to us
            continue
    return None


class _Package:
    """Through nvidia-ml-py."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml

    def count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def read(self, index: int) -> Reading:
        device = self._nvml.nvmlDeviceGetHandleByIndex(index)
        percent = 0
        with suppress(self._nvml.NVMLError):  # a GPU divided by MIG tells its memory but no utilisation
            percent = self._nvml.nvmlDeviceGetUtilizationRates(device).gpu
        return Reading(self._nvml.nvmlDeviceGetMemoryInfo(device).used, percent)

    def name(self, index: int) -> str:
        return str(self._nvml.nvmlDeviceGetName(self._nvml.nvmlDeviceGetHandleByIndex(index)))

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class _Driver:
    """Through libnvidia-ml, which comes with the driver."""

    def __init__(self) -> None:
        self._library = c.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")

    def count(self) -> int:
        number = c.c_uint()
        self._call("nvmlDeviceGetCount_v2", c.byref(number))
        return number.value

    def read(self, index: int) -> Reading:
        device = self._device(index)
        memory = (c.c_uint64 * 3)()  # nvmlMemory_t: total, free, used
        rates = (c.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
        self._call("nvmlDeviceGetMemoryInfo", device, memory)
        self._library.nvmlDeviceGetUtilizationRates(device, rates)
        return Reading(memory[2], rates[0])

    def name(self, index: int) -> str:
        room = c.create_string_buffer(96)
        self._call("nvmlDeviceGetName", self._device(index), room, len(room))
        return room.value.decode(errors="replace")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _device(self, index: int) -> c.c_void_p:
        device = c.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, c.byref(device))
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} returned {status}")
