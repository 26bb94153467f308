"""NVIDIA GPUs through nvidia-ml-py where it is installed: use while measuring, memory really free again.

No context is made on any device; without the library or a GPU every question has no answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

_PAUSE_S = 0.2
_SETTLED_BYTES = 64 * 2**20  # drivers keep a little
_PATIENCE_S = 60.0


class Watch:
    """Mean GPU utilisation in percent while the block runs; `percent` stays None where nothing can tell."""

    def __init__(self, devices: Mapping[str, int]) -> None:
        self.percent: float | None = None
        self._wanted = any(name.startswith("CUDA") for name in devices)
        self._done = threading.Event()
        self._samples: list[float] = []
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

    def _sample(self) -> None:
        with _nvml() as nvml:
            if nvml is None:
                return
            handles = _handles(nvml)
            while handles and not self._done.wait(_PAUSE_S):
                rates = [nvml.nvmlDeviceGetUtilizationRates(h).gpu for h in handles]
                self._samples.append(max(rates))


def wait_until_free(devices: Mapping[str, int], patience_s: float = _PATIENCE_S) -> bool:
    """Wait until no process of ours holds memory on an NVIDIA GPU; False when it did not settle in time.

    Without the library True: the engine lived in a child that has ended.
    """
    if not any(name.startswith("CUDA") for name in devices):
        return True
    with _nvml() as nvml:
        if nvml is None:
            return True
        deadline = time.monotonic() + patience_s
        last = _used(nvml)
        while time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            now = _used(nvml)
            if last - now < _SETTLED_BYTES:
                return True
            last = now
        return False


def available() -> bool:
    """Whether GPU figures can be had here."""
    with _nvml() as nvml:
        return nvml is not None and nvml.nvmlDeviceGetCount() > 0


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: all the same to us
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]


def _used(nvml: Any) -> int:
    return sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in _handles(nvml))
