"""Tables in 80 letters: rendered by real commands, no line too long, no word or figure broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOE = "plans/inputs/Qwen3.6-35B-A3B-q4_K.inventory.yaml"
TWO_GPUS = ("--machine", "2x-rtx4060ti-16gb", "--budget", "CUDA0=5000,CUDA1=4000", "-c", "32k")
SOLVE = ("solve", "plans/inputs/gpt-oss-20b-MXFP4.inventory.yaml", *TWO_GPUS)
COMMANDS = [
    SOLVE,
    ("solve", MOE, "--machine", "rtx4060-8gb-ddr5", "--budget", "7000"),
    ("inventory", MOE),
    ("sweep", MOE, "--machine", "rtx4060-8gb-ddr5", "--budgets", "5000:7000:1000"),
    ("doctor",),
    ("machines",),
]


def shown(*words: str, columns: str = "") -> str:
    """What a real process writes into a pipe."""
    keep = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "atsplan", *words],
        cwd=ROOT,
        env={**keep, **({"COLUMNS": columns} if columns else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tables(text: str) -> list[list[str]]:
    """Lines of each table: those above and below a rule, up to an empty line."""
    lines = text.splitlines()
    found = []
    for at in (i for i, line in enumerate(lines) if "──" in line):
        first = max((i for i in range(at) if not lines[i].strip()), default=-1) + 1
        last = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
        found.append(lines[first:last])
    return found


@pytest.mark.parametrize("columns", ["", "80"])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_table_fits_and_breaks_no_word(words: tuple[str, ...], columns: str) -> None:
    narrow = tables(shown(*words, columns=columns))
    wide = tables(shown(*words, columns="400"))
    assert narrow and len(narrow) == len(wide)
    for less, more in zip(narrow, wide, strict=True):
        assert max(map(len, less)) <= 80
        rule = next(i for i, line in enumerate(less) if "──" in line)
        body = re.sub(r" ?MiB", "", "\n".join(more))
        for word in "\n".join(less[rule + 1 :]).split():
            assert word == "MiB" or word in body.split(), f"{word} is a part of a word"


def test_a_column_that_says_nothing_is_left_out() -> None:
    text = shown("solve", MOE, "--machine", "rtx4060-8gb-ddr5", "--budget", "7000")
    head = tables(text)[0][0]
    assert "weights" in head and "cache" not in head


def test_a_number_is_the_same_in_every_command(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    solved = shown("solve", MOE, "--machine", "rtx4060-8gb-ddr5", "--budget", "7000", "-o", str(plan))
    told = shown("explain", str(plan))
    used = re.search(r"([0-9 ]+) of 7 000 MiB of CUDA0 are used", told)
    assert used and used[1]
    row = next(line for line in solved.splitlines() if line.lstrip().startswith("CUDA0"))
    assert used[1].strip() in row


def test_a_refusal_is_data_too() -> None:
    words = (
        "solve",
        MOE,
        "--machine",
        "rtx4060-8gb-ddr5",
        "--budget",
        "7000",
        "--no-cpu",
        "-c",
        "128k",
        "--json",
    )
    done = subprocess.run(
        [sys.executable, "-m", "atsplan", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    data = json.loads(done.stdout)
    assert done.returncode == 1 and not data["feasible"] and data["error"] in done.stderr
    need = data["needs"][0]
    assert need["shortage_bytes"] == need["needed_bytes"] - need["budget_bytes"] > 0
    parts = [
        name for name in need if name not in ("device", "budget_bytes", "needed_bytes", "shortage_bytes")
    ]
    assert sum(need[part] for part in parts) == need["needed_bytes"]
