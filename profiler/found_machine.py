"""The parts of this machine as its system tells them: nothing is measured, nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from profiler import host

_GENERATION = {"8.0": 3, "16.0": 4, "32.0": 5}  # GT/s of a lane
_DDR = {0x1A: 4, 0x22: 5}  # SMBIOS 3.7, 7.18.2
_MODULE = 17  # SMBIOS structure: memory device
_SPEED, _CONFIGURED, _SIZE, _KIND = 0x15, 0x20, 0x0C, 0x12


@dataclass(frozen=True, slots=True)
class FoundMachine:
    """What is known of this machine; "" for what is not told."""

    gpu: str  # as the driver names it; "none" where there is no card of NVIDIA's
    pcie: str  # 4x16
    ram_bytes: int
    cores: int
    memory: str  # ddr5-6000x2


def found_machine(root: Path = Path("/")) -> FoundMachine:
    """The first GPU of NVIDIA's driver with its slot, memory and cores. `root`: of the system's own files."""
    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = [name for card in cards if (name := _model(card))]
    slot = _slot(root / "sys/bus/pci/devices" / cards[0].parent.name) if names else ""
    return FoundMachine(
        names[0] if names else "none", slot, host.memory_bytes()[0], host.cores().physical, _memory(root)
    )


def _model(path: Path) -> str:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "Model"), "")


def _slot(device: Path) -> str:
    """Generation that card and slot can do (it falls while nothing is done) and lanes that are connected."""
    generation = _GENERATION.get(_text(device / "max_link_speed").partition(" ")[0], 0)
    lanes = _text(device / "current_link_width").strip()
    return f"{generation}x{lanes}" if generation and lanes.isdecimal() and lanes != "0" else ""


def _memory(root: Path) -> str:
    """Kind and rate where the firmware's table may be read; one or two modules alike are as many channels."""
    try:
        table = (root / "sys/firmware/dmi/tables/DMI").read_bytes()
    except OSError:
        return ""
    modules = list(_modules(table))
    if not 1 <= len(modules) <= 2 or len(set(modules)) > 1:
        return ""  # with more of them the number of channels is not told
    kind, rate = modules[0]
    return f"ddr{_DDR[kind]}-{rate}x{len(modules)}" if kind in _DDR and rate else ""


def _modules(table: bytes) -> Iterator[tuple[int, int]]:
    """Kind and rate in MT/s of each module that is there (SMBIOS 3.7, 6.1.2 and 7.18)."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        body = table[at : at + length]
        if length < 4 or len(body) < length:
            return
        if kind == _MODULE and length > _SPEED + 1 and body[_SIZE : _SIZE + 2] not in (b"\0\0", b"\xff\xff"):
            place = _CONFIGURED if length > _CONFIGURED + 1 else _SPEED
            yield body[_KIND], int.from_bytes(body[place : place + 2], "little")
        end = table.find(b"\0\0", at + length)
        if end < 0:
            return
        at = end + 2


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
