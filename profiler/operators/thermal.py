"""Whether processors slowed themselves down: counters of the kernel, and what NVIDIA's driver says."""

from __future__ import annotations

import contextlib
from pathlib import Path

from runtime.engine import gpu_usage

_CPU = Path("/sys/devices/system/cpu")
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that mean heat or a lack of power.
_REASONS = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


def cpu_events(root: Path = _CPU) -> int:
    """How often cores have been slowed down by heat since the system started."""
    counters = root.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    return sum(int(text) for path in counters if (text := _read(path)).isdigit())


def gpu_reasons() -> tuple[str, ...]:
    """Why NVIDIA cards run below their clocks right now, each reason once; () without card or reason."""
    return reasons(gpu_usage.slowdown_bits())


def reasons(bits: int) -> tuple[str, ...]:
    """The words for a set of bits."""
    return tuple(dict.fromkeys(word for bit, word in _REASONS.items() if bits & bit))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
