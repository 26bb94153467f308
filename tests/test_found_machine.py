"""What a system tells of itself, from files as Linux has them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from atsplan import main
from profiler.found_machine import found_machine

BUS = "0000:01:00.0"


def module(kind: int, rate: int, size: int = 16384) -> bytes:
    """A memory device of SMBIOS 3: 34 bytes with its configured rate, and its two strings."""
    body = bytearray(34)
    body[0], body[1], body[0x12] = 17, 34, kind
    struct.pack_into("<H", body, 0x0C, size)
    struct.pack_into("<H", body, 0x15, 4800)
    struct.pack_into("<H", body, 0x20, rate)
    return bytes(body) + b"DIMM 0\0Bank\0\0"


def system(root: Path, *modules: bytes, model: str = "NVIDIA GeForce RTX 4070", width: str = "16") -> Path:
    card, slot = root / "proc/driver/nvidia/gpus" / BUS, root / "sys/bus/pci/devices" / BUS
    tables = root / "sys/firmware/dmi/tables"
    for folder in (card, slot, tables):
        folder.mkdir(parents=True)
    (card / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 130\n")
    (slot / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    (slot / "current_link_width").write_text(f"{width}\n")
    bios = bytes([0, 24]) + bytes(22) + b"Vendor\0\0"
    (tables / "DMI").write_bytes(bios + b"".join(modules))
    return root


def test_card_slot_and_memory_are_read(tmp_path: Path) -> None:
    found = found_machine(system(tmp_path, module(0x22, 6000), module(0x22, 0, size=0), module(0x22, 6000)))
    assert (found.gpu, found.pcie, found.memory) == ("NVIDIA GeForce RTX 4070", "4x16", "ddr5-6000x2")
    assert found.cores >= 1 and found.ram_bytes > 2**28


@pytest.mark.parametrize(
    "modules",
    [
        (),
        (module(0x22, 6000),) * 4,
        (module(0x22, 6000), module(0x22, 5600)),
        (module(0x18, 1600),),
        (module(0x22, 0),),
        (module(0x22, 6000)[:20],),
        (bytes([17, 0, 0, 0]) * 9,),
    ],
)
def test_what_is_not_told_is_not_guessed(tmp_path: Path, modules: tuple[bytes, ...]) -> None:
    assert found_machine(system(tmp_path, *modules)).memory == ""


def test_an_empty_system_and_a_slot_that_sleeps(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    empty = found_machine(tmp_path / "none")
    assert (empty.gpu, empty.pcie, empty.memory) == ("none", "", "")
    assert found_machine(system(tmp_path / "a", width="0")).pcie == ""


def test_fit_plans_for_this_machine_once_its_memory_is_known() -> None:
    model = Path(__file__).parent.parent / "plans/inputs/Qwen3.5-0.8B-q8_0.inventory.yaml"
    found = CliRunner().invoke(main, ["fit", str(model), "--memory", "ddr4-3200", "--no-levers"])
    assert "found here: " in found.stderr and " cores, ddr4-3200" in found.stderr
    assert found.exit_code in (0, 1, 2), (
        found.output
    )  # as large as the machine of the test, whatever card it has
