"""Budgets and reserves as a person writes them: `21500`, `21.5GiB`, `CUDA0=21500,CUDA1=8000`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from planner.constants import CPU
from planner.errors import OptionProblem
from planner.machine.profile import Device, Profile

EVERY = ""  # the key of a size without a device: each GPU that is not named
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)")
_UNITS = {
    "": 2**20,
    "b": 1,
    "k": 2**10,
    "kib": 2**10,
    "kb": 10**3,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "t": 2**40,
    "tib": 2**40,
    "tb": 10**12,
}
_ABSURD = 2**50  # a pebibyte
METAL = ("Metal", "MTL")
MACOS, UNIFIED = "macos", "unified"  # who shares a GPU's memory
_MAC = re.compile(
    r"\b(apple|i?mac(book|os)?|mac ?(studio|mini|pro)|metal|m[1-9] (ultra|max|pro))\b", re.IGNORECASE
)
_ONE_MEMORY = re.compile(
    r"\b(phone|iphone|ipad|tablet|android|snapdragon|adreno|mali|exynos|dimensity|mediatek|kirin|pixel|"
    r"galaxy|apu|unified|integrated|[ai]gpu|strix|ryzen ai|steam deck|van gogh|"
    r"radeon ([6-8][0-9]0m|80[4-6]0s)|(radeon|vega( [0-9]+)?|u?hd|iris( xe| plus)?|arc) graphics|"
    r"arc 1[0-9]0[tv]|"
    r"(lunar|meteor|arrow|panther) lake|jetson|orin|tegra|thor|gb10|dgx spark|raspberry|rk35[0-9]{2})\b",
    re.IGNORECASE,
)
# Cards, which have their own memory whatever machine they are in.
_CARD = re.compile(
    r"\b(rtx|gtx|geforce|quadro|tesla|titan|radeon pro|rx ?[0-9]{3,4}|instinct|arc [ab][0-9]{3}|egpu|"
    r"mi[0-9]{2,3}x?|[ahv]100|h200|b[23]00|l40s?|a[3-6]0(00)?)\b",
    re.IGNORECASE,
)
_MARKS = re.compile(r"\((r|c|tm)\)", re.IGNORECASE)  # which drivers write into names, and people leave out
_NO_CARD = 300 * 2**30  # more than the largest card has: what states it states the memory of a machine


def parse_budget(text: str, option: str = "--budget") -> Mapping[str, int]:
    """Bytes by device name; the key "" stands for every GPU that is not named.

    A bare number counts MiB. Raises OptionProblem for anything that is not a positive size, or a
    device given twice.
    """
    return _parse(text, option, zero=False)


def parse_reserve(text: str, option: str = "--reserve") -> Mapping[str, int]:
    """As `parse_budget`, for memory to keep free: zero is allowed."""
    return _parse(text, option, zero=True)


def _parse(text: str, option: str, *, zero: bool) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        device, equals, size = part.rpartition("=")
        device = device.strip()
        if equals and not device:
            raise OptionProblem(option, text, "no device before `=`")
        if device in found:
            raise OptionProblem(option, text, f"{device or 'the size without a device'} is given twice")
        found[device] = _bytes(size.strip(), option, text, zero=zero)
    return found


def _bytes(size: str, option: str, text: str, *, zero: bool) -> int:
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise OptionProblem(option, text, "expected a size such as 21500 (MiB), 21.5GiB or CUDA0=21500")
    count = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if count > _ABSURD:
        raise OptionProblem(option, text, "is more memory than any machine has")
    if count == 0 and not zero:
        raise OptionProblem(option, text, "a budget must be above zero")
    return count


def budgets_for(
    profile: Profile, given: Mapping[str, int], option: str = "--budget", *, hybrid: bool = False
) -> dict[str, int]:
    """The budget of each device that may be used, in the profile's order.

    GPUs that are not named stay unused, unless a size for every GPU is given; with nothing given each
    device offers what was free when profiled, less a headroom (twice that for `hybrid` models, which
    reprocess prompts when memory is tight). The CPU offers its free memory unless named. Raises
    OptionProblem for a device that is unknown, too small, or of unknown size.
    """
    known = {device.name: device for device in profile.devices}
    short = {name.partition("[")[0]: name for name in known}  # RPC0 for RPC0[host:port]
    given = {short.get(name, name): size for name, size in given.items()}
    for name, size in given.items():
        if name != EVERY and name not in known:
            raise OptionProblem(option, name, f"no such device; there are {', '.join(known)}")
        if name != EVERY:
            _fits(known[name], size, option, profile)
    found: dict[str, int] = {}
    for device in profile.devices:
        size = _budget(device, given, option, hybrid, profile)
        if size:
            found[device.name] = size
    return found


def _budget(device: Device, given: Mapping[str, int], option: str, hybrid: bool, profile: Profile) -> int:
    if device.name in given:
        return given[device.name]
    available = device.free_bytes or device.memory_bytes
    if device.kind == "cpu" and available:
        return available
    if EVERY in given and device.kind != "cpu":
        if device.kind == "rpc" and not device.memory_bytes:
            raise OptionProblem(option, device.name, "the server does not tell its memory: name it")
        _fits(device, given[EVERY], option, profile)
        return given[EVERY]
    if device.kind != "cpu" and given and set(given) != {CPU}:
        return 0
    if not available:
        raise OptionProblem(
            option, device.name, "the device does not say how much memory it has: give a budget"
        )
    available = min(available, working_set(device, profile) or available)
    return max(available - headroom(available, spills(profile)) * (2 if hybrid else 1), 0)


def _fits(device: Device, size: int, option: str, profile: Profile) -> None:
    ceiling = working_set(device, profile)
    if ceiling and size > ceiling:
        more = ": the rest is its system's"
        if shared_by(device, profile) == MACOS:
            more = "; sudo sysctl iogpu.wired_limit_mb=… raises that (then profile again)"
        raise OptionProblem(
            option,
            f"{device.name}={size // 2**20}",
            f"the system lets this GPU use {ceiling // 2**20} MiB of its "
            f"{device.memory_bytes // 2**20}{more}",
        )
    if device.memory_bytes and size > device.memory_bytes:
        has = device.memory_bytes // 2**20
        raise OptionProblem(option, f"{device.name}={size // 2**20}", f"the device has {has} MiB in all")


def tight(device: Device, used_bytes: int, profile: Profile) -> str:
    """What to say when a plan leaves a GPU less than its headroom; "" when it leaves enough."""
    there = device.free_bytes or device.memory_bytes
    left, wanted = there - used_bytes, headroom(there, spills(profile))
    if device.kind == "cpu" or not there or left >= wanted:
        return ""
    why = "graphs and pools grow for hours after loading"
    if spills(profile):
        why += ", and this driver then moves memory to the host without a word, ten times slower"
    return f"{device.name}: {max(left, 0) // 2**20} MiB stay free, {wanted // 2**20} are usual: {why}"


def headroom(available: int, spilling: bool = False) -> int:
    """What to leave free where nobody set a budget: graphs and pools grow for hours after loading.

    More under a driver that moves what does not fit to host memory instead of failing.
    """
    if spilling:
        return max(2**30, available * 10 // 100)
    return max(512 * 2**20, available * 4 // 100)


def spills(profile: Profile) -> bool:
    """Whether the driver moves what does not fit to shared host memory silently (Windows' WDDM)."""
    known = profile.fingerprint
    return known.driver.lower().startswith("wddm") or known.os.lower().startswith("windows")


def working_set(device: Device, profile: Profile) -> int:
    """What a GPU may use of a memory that it shares with all else; 0 where it is told, or has its own.

    macOS: two thirds up to 36 GiB, three quarters above; any other system: three quarters. A local device
    whose total is smaller than the machine's memory states its working set already.
    """
    kind = shared_by(device, profile)
    if not kind:
        return 0
    host = device.memory_bytes
    if device.kind != "rpc":
        host = profile.fingerprint.memory_bytes or max(
            (d.memory_bytes for d in profile.devices if d.kind == "cpu"), default=0
        )
        if device.memory_bytes * 100 < host * 95:
            return 0
    return host * 2 // 3 if kind == MACOS and host <= 36 * 2**30 else host * 3 // 4


def shared_by(device: Device, profile: Profile) -> str:
    """The system that shares a GPU's memory: as the profile says, by the backend or kind, or by what a
    described device is called; "" for memory of its own. A measured remote device reports what it may use.
    """
    if device.kind == "cpu":
        return ""
    if device.shared is not None:
        return device.shared
    if device.name.startswith(METAL):
        return MACOS
    if device.kind == "igpu":
        return UNIFIED
    name = _MARKS.sub("", device.description)
    if profile.measured or _CARD.search(name):
        return ""
    if _MAC.search(name):
        return MACOS
    one = _ONE_MEMORY.search(name) or device.memory_bytes > _NO_CARD
    return UNIFIED if one else ""
