"""SECURITY.md: every promise names tests that exist, and its figures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import fuzz

from commands.shared import console, heat_files
from planner.yaml_reader import MAX_DEPTH, MAX_DIGITS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()


def promises() -> list[list[str]]:
    """The cells of the table's rows."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_every_promise_names_its_tests() -> None:
    assert len(promises()) > 8
    for name, how, tests in promises():
        paths = re.findall(r"`(tests/\w+\.py)`", tests)
        assert name and how and paths, name
        for path in paths:
            assert "def test_" in (ROOT / path).read_text(), path


def test_its_figures_are_those_of_the_code() -> None:
    for told in (
        f"at most {fuzz.CPU_SECONDS:g} s of CPU time",
        f"{fuzz.GROWTH_BYTES >> 20} MB for a file",
        f"nesting ends at {MAX_DEPTH} levels",
        f"numbers at {MAX_DIGITS} digits",
        f"texts at {console.TEXT_BYTES >> 20} MiB",
        f"traces at {heat_files.MOST_BYTES >> 30} GiB",
    ):
        assert told in PAGE, told
