"""What it costs to check all plans in git: python -m benchmarks.gate [--runs 3] [--solve]

Processor seconds of `atsplan check plans`, user and system, worker processes included: more processes make a
check end sooner, not cheaper. The median of some runs, beside what it was before and what it shall be.
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
# Processor seconds for 61 plans on an idle machine of two cores: before layers shared what is alike; wanted.
BASELINE = {False: (7.2, 5), True: (50, 25)}


def cpu_seconds(*, solve: bool) -> float:
    """One check of all plans in a process of its own, its children included."""
    command = python("-m", "atsplan", "check", "plans", *([] if solve else ["--no-resolve"]))
    before = os.times()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the median and the single runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--solve", action="store_true", help="Solve every plan again, as CI does.")
    asked = parser.parse_args()
    found = [cpu_seconds(solve=asked.solve) for _ in range(asked.runs)]
    was, wanted = BASELINE[asked.solve]
    print(f"{statistics.median(found):.1f} CPU s ({', '.join(f'{each:.1f}' for each in found)})")
    print(f"before {was} CPU s, wanted less than {wanted}", file=sys.stderr)


if __name__ == "__main__":
    main()
