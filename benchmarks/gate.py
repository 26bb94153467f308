"""What it costs to check all plans in git: python -m benchmarks.gate [--runs 3] [--solve] [--beside FOLDER]

Processor seconds of `atsplan check plans`, user and system, worker processes included: more processes make a
check end sooner, not cheaper. The median of some runs, beside what is wanted. A machine that others use too
counts the same work differently from minute to minute: `--beside` takes turns with another checkout of this
program, which checks its own plans.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from runtime.child.environment import python

ROOT = Path(__file__).resolve().parent.parent
WANTED = {False: 5 / 61, True: 25 / 61}  # processor seconds a plan on an idle machine of two cores


def cpu_seconds(folder: Path, *, solve: bool) -> float:
    """One check of all plans in a process of its own, its children included."""
    command = python("-m", "atsplan", "check", "plans", *([] if solve else ["--no-resolve"]))
    own = {**os.environ, "PYTHONPATH": str(folder)}
    before = os.times()
    subprocess.run(command, cwd=folder, env=own, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the median and the single runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--solve", action="store_true", help="Solve every plan again, as CI does.")
    parser.add_argument("--beside", type=Path, help="Another checkout, to take turns with.")
    asked = parser.parse_args()
    folders = [ROOT] if asked.beside is None else [asked.beside.resolve(), ROOT]
    found: dict[Path, list[float]] = {folder: [] for folder in folders}
    for _ in range(asked.runs):
        for folder, seconds in found.items():
            seconds.append(cpu_seconds(folder, solve=asked.solve))
    for folder, seconds in found.items():
        told = ", ".join(f"{each:.1f}" for each in seconds)
        print(f"{statistics.median(seconds):.1f} CPU s ({told}) {folder.name}")
    plans = len([*(ROOT / "plans").glob("*--*.yaml")])
    print(f"wanted less than {WANTED[asked.solve] * plans:.1f} CPU s for {plans} plans", file=sys.stderr)


if __name__ == "__main__":
    main()
