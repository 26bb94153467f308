"""NVIDIA's management library: through nvidia-ml-py, or where that is not installed the driver's own.

The package wraps the very library that the driver brings. No context is made on any device.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment, all processes together."""

    used_bytes: int
    percent: int  # of the time that some kernel ran


class Nvml(Protocol):
    """The few questions asked of the management library; each raises what its reader raises."""

    def count(self) -> int:
        """GPUs there are."""

    def read(self, index: int) -> Reading:
        """One of them, in the order of their PCI addresses."""

    def name(self, index: int) -> str:
        """The product's name."""

    def at(self, pci_id: str) -> int:
        """The number of the one at a PCI address."""

    def slowdown_bits(self, index: int) -> int:
        """Why its clocks are lowered now: bits of nvmlDeviceGetCurrentClocksThrottleReasons."""

    def close(self) -> None:
        """Let go of the library."""


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
        except Exception:  # no package, no library, no driver, no permission: all the same here
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

    def at(self, pci_id: str) -> int:
        return int(self._nvml.nvmlDeviceGetIndex(self._nvml.nvmlDeviceGetHandleByPciBusId(pci_id)))

    def slowdown_bits(self, index: int) -> int:
        device = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))

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

    def at(self, pci_id: str) -> int:
        device, number = c.c_void_p(), c.c_uint()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_id.encode(), c.byref(device))
        self._call("nvmlDeviceGetIndex", device, c.byref(number))
        return number.value

    def slowdown_bits(self, index: int) -> int:
        bits = c.c_ulonglong()
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._device(index), c.byref(bits))
        return bits.value

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _device(self, index: int) -> c.c_void_p:
        device = c.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, c.byref(device))
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} returned {status}")
