"""What docs/findings-hybrid.md says of what was tried on a GPU and left out, computed from the results."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

from engines import ROOT

_RESULTS = ROOT / "benchmarks" / "results"


def test_what_was_tried_without_copies_is_that_of_the_results() -> None:
    """Each row of the table, by contenders: as it is, kernels, queued before."""
    page = (ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8")
    rows = {
        "qwen3-30b, 16 layers, 50 %, first visit": ("kernels", 0.5, 2),
        "the same, 25 %": ("kernels", 0.25, 2),
        "qwen3-30b, 50 %, second visit": ("hold", 0.5, 2),
        "`shifting`, A, 50 %": ("hold-shifting", 0.5, 2),
        "strong, 16 layers, 75 %": ("hold-strong", 0.75, 2),
    }
    for what, (name, share, guests) in rows.items():
        lines = [(what, guests)] + ([("the same", 0)] if name != "kernels" else [])
        lines += [("the same, 25 %", n) for n in (2, 0)] if what.endswith("second visit") else []
        found = json.loads(_tried(name).read_text(encoding="utf-8"))["cells"]
        for label, number in lines:
            wanted = 0.25 if "25 %" in label else share
            (cell,) = (each for each in found if each["share"] == wanted)
            said = [
                ", ".join(
                    f"{row['phase_ms'][0]:.2f}"
                    for row in cell["contenders"]
                    if row["name"] == f"{way}+{number}"
                )
                for way in ("A", "kernels", "hold")
            ]
            line = "".join(f"| {part} " if part else "| " for part in (label, str(number), *said)) + "|"
            assert line in page, line


def test_what_was_tried_of_beginning_ahead_is_that_of_the_results() -> None:
    page = " ".join((ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8").split())
    told = []
    for name, share in (("shifting", 0.5), ("shifting", 0.25), ("strong", 0.75)):
        found = json.loads(_tried(f"ahead-{name}").read_text(encoding="utf-8"))["cells"]
        (cell,) = (each for each in found if each["share"] == share)
        told += [
            f"{row['phase_ms'][0]:.2f}"
            for way in ("ahead", "A")
            for row in cell["contenders"]
            if row["name"] == f"{way}+2"
        ]
    words = (
        "Medians: `shifting` {} and {} against {} and {} at 50 %, {} and {} against {} and {} at 25 %, "
        "strong at 75 % {} and {} against {} and {}."
    )
    assert words.format(*told) in page


def test_round_trips_are_those_of_the_results() -> None:
    page = (ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8")
    text = _RESULTS.joinpath("h200-2026-12-01-round-trips.txt").read_text(encoding="utf-8")
    first, second = (
        {line[:60].strip(): re.findall(r"median +([\d.]+)", line)[0] for line in part.splitlines()}
        for part in text.removeprefix("first machine\n").split("second machine\n")
    )
    rows = {
        "the graph alone": "graph alone, launch to event",
        "two copies to the device, the graph, two copies back": "now: 2 H2D, graph, 2 D2H, event",
        "one copy, the graph, two back": "now, 1 H2D",
        "kernels that read and write": "now, H2D and D2H as kernels in graph",
        "the same, queued before": "gate by second stream: both as kernels",
    }
    lines = page.splitlines()
    for begins, key in rows.items():
        (line,) = (each for each in lines if each.startswith(f"| {begins}") and each.endswith("µs |"))
        told = re.findall(r"([\d.]+), ([\d.]+) µs \|$", line)
        assert told == [(f"{float(first[key]):.1f}", f"{float(second[key]):.1f}")], line


def test_where_the_time_of_the_lane_goes_is_that_of_the_results() -> None:
    page = " ".join((ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8").split())
    text = _RESULTS.joinpath("h200-2026-12-01-lane.txt").read_text(encoding="utf-8")
    inside = [line.split() for line in text.splitlines() if re.match(r"[1-5] \d", line)]
    pairs = [tuple(f"{float(line[at]):.0f}" for at in (6, 8)) for line in inside]
    for words in (
        "done after {}, the result is there after {}",
        "with two {} and {}",
        "three {} and {}",
        "four {} and {}",
    ):
        assert words.format(*pairs.pop(0)) in page, words
    ends = [float(line[8]) for line in inside]
    steps = [b - a for a, b in pairwise(ends)]
    assert f"{min(steps):.0f} to {max(steps):.0f} µs (2.65 MB" in page
    ways = {
        line.split(" | ")[0]: [float(part.split()[1]) for part in line.split(" | ")[1:]]
        for line in text.splitlines()
        if " | " in line
    }
    ratios = {
        name: [one / other for one, other in zip(ends[1:], ways["as it is"][1:], strict=True)]
        for name, ends in ways.items()
        if name != "as it is"
    }
    spans = {name: f"{min(each):.2f} to {max(each):.2f}" for name, each in ratios.items()}
    assert f"waiting in place ({spans['waits in place']} times)" in page
    assert f"while doing so ({spans['and second level, 4 KiB']})" in page
    assert f"nothing asked ahead {spans['and nothing ahead']}" in page
    assert f"past the caches {spans['and past the caches']}" in page
    others = [each for name, each in ratios.items() if "ahead" not in name and "past" not in name]
    assert f"{max(map(max, others)):.2f} times as long" in page
    assert min(min(each) for each in others[2:]) > 0.965  # those that are not named


def test_what_lanes_measured_after_loading_is_that_of_the_results() -> None:
    page = " ".join((ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8").split())
    text = _RESULTS.joinpath("h200-2026-12-01-drifting-right-short-search.json").read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    static = [row for cell in cells for row in cell["contenders"] if row["name"] == "A+2"]
    found = sorted(row["lanes"]["cpu_bytes_us"] / 1000 for row in static)
    assert "found {:.0f}, {:.0f}, {:.0f} and {:.0f} GB/s".format(*found) in page
    good, bad = (median(row["ms"]) for row in static[2:])
    assert f"{bad:.2f} against {good:.2f} ms a token at 25 %" in page


def _tried(name: str) -> Path:
    return _RESULTS / f"h200-2026-12-01-tried-{name}.json"
