"""What a token costs the host in every layer of experts: calls to the device, and time, beside a baseline.

    python -m benchmarks.hybrid.host_work ENGINE_FOLDER [--against REVISION] [--rounds N] [--lane]

Needs a C++ compiler and no GPU: the device computes nothing and its calls cost nothing, so that what is left
is our own work (with --lane: the CPU lane's reading of experts). Calls are counted, the same every time;
times are the least of the rounds, in which the programs take turns: other work on the machine adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runtime.hybrid import build

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "native"
CALLS = ("graphs", "uploads", "reads", "waits", "events")


def sources(revision: str, folder: Path) -> Path:
    """The native library's sources as they were in a revision; "": as they are."""
    if not revision:
        return build.SOURCES
    inside = build.SOURCES.relative_to(ROOT).as_posix()
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, inside], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / inside


def program(native: Path, target: Path) -> Path:
    """The benchmark with those sources of the library."""
    compiler = next(c for c in build.compilers() if "ziglang" not in c)
    parts = [*sorted(native.glob("*.cpp")), TESTS / "engine.cpp", TESTS / "slow_device.cpp"]
    options = ["-std=c++17", "-O3", "-DNDEBUG", "-pthread", f"-I{native}", f"-I{TESTS}"]
    own = Path(__file__).with_suffix(".cpp")
    line = [compiler[0], *options, *map(str, parts), str(own), "-ldl", "-o", str(target)]
    subprocess.run(line, check=True)
    return target


def measured(path: Path, engine: Path, what: str) -> dict[str, dict[str, float]]:
    """Figures by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(path), str(engine), what], capture_output=True, text=True, check=True, env=environment
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {figures.pop("what"): figures for figures in found}


def best(rounds: Sequence[dict[str, dict[str, float]]], case: str, key: str) -> float:
    """The least time, or the highest rate."""
    values = [each[case][key] for each in rounds]
    return max(values) if key.endswith("gb_s") else min(values)


def table(names: Sequence[str], rounds: dict[str, list[dict[str, dict[str, float]]]], key: str) -> str:
    """Markdown: a row for every case and program."""
    calls = CALLS if key == "least_ns" else ()
    lines = [
        f"| case | sources | {key} | {' | '.join(calls)} |",
        f"|{'---|' * (3 + len(calls) + (not calls))}",
    ]
    for case in rounds[names[0]][0]:
        for name in names:
            counts = " | ".join(f"{rounds[name][0][case][call]:.2f}" for call in calls)
            lines.append(f"| {case} | {name} | {best(rounds[name], case, key):.1f} | {counts} |")
    return "\n".join(lines)


def main() -> None:
    """Build, run in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--against", default="", help="a revision of this repository")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lane", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        programs = (
            {options.against: program(sources(options.against, folder), folder / "before")}
            if options.against
            else {}
        )
        programs["now"] = program(build.SOURCES, folder / "now")
        what = "lane" if options.lane else "host"
        rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in programs}
        for _ in range(options.rounds):
            for name, path in programs.items():
                rounds[name].append(measured(path, options.engine, what))
    print(table(list(programs), rounds, "best_gb_s" if options.lane else "least_ns"))


if __name__ == "__main__":
    main()
