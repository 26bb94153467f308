"""What the host has left: the kernel's figure, or less where a control group limits this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.host_memory_left import host_memory_left

MIB = 2**20


@pytest.mark.parametrize(
    ("limit", "left"),
    [("max", 8000), (str(4000 * MIB), 4000 - 3000 + 1200), (str(64000 * MIB), 8000), ("", 8000)],
)
def test_the_smaller_of_machine_and_control_group(limit: str, left: int, tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text(f"MemTotal: {16000 * 1024} kB\nMemAvailable: {8000 * 1024} kB\nHugePages_Total: 0\n")
    group.mkdir()
    if limit:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(str(3000 * MIB))
        (group / "memory.stat").write_text(f"anon {1800 * MIB}\nfile {1200 * MIB}\n")
    assert host_memory_left(meminfo, group) == left * MIB


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert host_memory_left(tmp_path / "none") is None
