"""What this machine is: processor, cores, caches, memory, NUMA, driver, load; from the system's own files."""

from __future__ import annotations

import ctypes as c
import datetime
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.machine.profile import Fingerprint
from runtime.engine import locate

_CPU = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores and hardware threads this process may use."""

    physical: int
    usable: int


@dataclass(frozen=True, slots=True)
class Caches:
    """The last cache, all its copies together."""

    last_bytes: int


def cores() -> Cores:
    """Physical cores among the hardware threads this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(_CPU / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in allowed}
    usable = min(len(allowed), _quota() or len(allowed))
    return Cores(physical=max(min(len(siblings), usable), 1), usable=max(usable, 1))


def caches() -> Caches:
    """Bytes of the outermost cache; 32 MiB when the system does not say."""
    best: dict[str, int] = {}
    level = 0
    for entry in sorted(_CPU.glob("cpu[0-9]*/cache/index[0-9]*")):
        here = int(_read(entry / "level") or 0)
        if here > level:
            level, best = here, {}
        if here == level:
            best[_read(entry / "shared_cpu_list") or str(entry)] = _size(_read(entry / "size"))
    return Caches(sum(best.values()) or 32 * 2**20)


def memory_bytes() -> tuple[int, int]:
    """Total and available main memory, within the limit of the control group."""
    text = _read(Path("/proc/meminfo"))
    total, free = (
        int(m[1]) * 1024 if (m := re.search(rf"{key}:\s+(\d+) kB", text)) else 0 for key in _MEMORY
    )
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    if limit.isdigit():
        total = min(total, int(limit))
        used = int(_read(Path("/sys/fs/cgroup/memory.current")) or 0)
        free = min(free, max(int(limit) - used, 0))
    return total, free


_MEMORY = ("MemTotal", "MemAvailable")


def cpu_name() -> str:
    """The processor's own name."""
    found = re.search(r"model name\s*:\s*(.+)", _read(Path("/proc/cpuinfo")))
    return found[1].strip() if found else platform.processor() or platform.machine()


def numa() -> str:
    """Node map and memory policy, such as `0:0-31 1:32-63 default`; "" with one node."""
    nodes = {n.name[4:]: _read(n / "cpulist") for n in sorted(_NODES.glob("node[0-9]*"))}
    if len(nodes) < 2:
        return ""
    cpus = " ".join(f"{name}:{cpulist}" for name, cpulist in nodes.items())
    return f"{cpus} {_policy()}"


def _policy() -> str:
    """The policy that most memory of this process lies under: default, interleave:0-1, bind:0 …"""
    maps = _read(Path("/proc/self/numa_maps"))
    words = [line.split()[1] for line in maps.splitlines() if len(line.split()) > 1]
    return max(set(words), key=words.count) if words else "default"


def driver() -> str:
    """Kernel driver of NVIDIA cards, "" without; WDDM is named because it spills silently."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _read(Path("/proc/driver/nvidia/version")))
    if found:
        return f"nvidia {found[1]}"
    return "wddm" if os.name == "nt" else ""


def load() -> float:
    """Runnable processes beside this one over the last minute, as a share of the cores."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    return max(os.getloadavg()[0], 0.0) / cores().usable


def fingerprint(engine: str) -> Fingerprint:
    """What timings of this machine belong to."""
    return Fingerprint(
        cpu=cpu_name(),
        cores=cores().physical,
        memory_bytes=memory_bytes()[0],
        os=f"{platform.system().lower()} {platform.release()}",
        engine=engine,
        driver=driver(),
        numa=numa(),
    )


class _Props(c.Structure):
    """struct ggml_backend_dev_props, up to the PCI address."""

    _fields_ = (
        ("name", c.c_char_p),
        ("description", c.c_char_p),
        ("free", c.c_size_t),
        ("total", c.c_size_t),
        ("type", c.c_int),
        ("device_id", c.c_char_p),
        ("room", c.c_char * 128),
    )


def device_id(library: Any, device: int) -> str:
    """PCI address of a ggml device, "" when the engine does not say."""
    try:
        get = library.ggml_backend_dev_get_props
    except AttributeError:
        return ""
    props = _Props()
    get.restype, get.argtypes = None, (c.c_void_p, c.c_void_p)
    get(device, c.addressof(props))
    found = (props.device_id or b"").decode(errors="replace")
    return found if re.fullmatch(r"[0-9a-fA-F:.]{7,16}", found) else ""


def _quota() -> int:
    """Processors the control group grants, 0 without a limit."""
    words = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(words) == 2 and words[0].isdigit():
        return max(int(words[0]) // int(words[1]), 1)
    return 0


def _size(text: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text.rstrip("KMG") or 0) * units.get(text[-1:], 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def gpus() -> str:
    """Display controllers by PCI address, vendor and device: `0000:01:00.0 10de:2684`; "" without any."""
    found = []
    for device in sorted(_PCI.glob("*")):
        if _read(device / "class").startswith("0x03"):
            vendor, kind = (_read(device / name).removeprefix("0x") for name in ("vendor", "device"))
            found.append(f"{device.name} {vendor}:{kind}")
    return ", ".join(found)


def library_state(engine: str | None) -> str:
    """An engine by its files, without loading it: where it is, how large, and when it last changed."""
    place = locate.find(engine)
    if not place.path.is_absolute():
        return place.label
    files = [f.stat() for f in place.path.parent.glob("*.so*") if f.is_file()]
    if not files:
        return place.label
    changed = datetime.datetime.fromtimestamp(max(f.st_mtime for f in files), datetime.UTC)
    size = sum(f.st_size for f in files)
    return f"{place.label}, {size} bytes of {changed:%Y-%m-%d %H:%M:%S}"
