"""Host memory that can still be had: the machine's, or what the control group of this process leaves."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def host_memory_left(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """Bytes that programs can have now; None where the system does not say.

    The engine reports a CPU as entirely free.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    room = sizes.get("MemAvailable", sizes.get("MemFree"))
    return None if room is None else min(room, _group_memory_left(group, room))


def _group_memory_left(group: Path, otherwise: int) -> int:
    """What the control group leaves; its share of the page cache can be given back."""
    try:
        limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return otherwise
    return int(limit) - used + int(counts.get("file", 0)) if limit.strip().isdecimal() else otherwise
