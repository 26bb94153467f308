"""What the documents say works: every command of a ```console block runs, and shows what is shown.

In such a block a line `$ …` is a command; `# exit 1` at its end says that it fails so. The lines below it
must stand in its output, in that order, and `…` stands for anything; numbers may differ where something is
measured, those of a described machine may not. `model.gguf` is a generated mixture of experts; the commands
of one document run in one folder, one after the other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from copies import ENDS
from engines import ROOT

from benchmarks import draw_rooms
from benchmarks.rounds import drifting, paired
from commands.demo import write_moe
from planner.site import SiteKind

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_NUMBER = re.compile(r"\d[\d\u202f ]*(?:[.,]\d+)?(?:e[+-]?\d+)?")
_WILD = "…"
_FIGURED = re.compile(r"atsplan (fit|solve|sweep|machines|inventory)\b")  # the same figures everywhere


@dataclass(frozen=True, slots=True)
class Example:
    """One command of a document and what it says of it."""

    line: int
    command: str
    exit_code: int
    output: tuple[str, ...]


def examples(text: str) -> Iterator[Example]:
    """The commands of a document in order."""
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1)) + 1
        yield from _commands(block[1].replace("\\\n", "\0").split("\n"), first)


def _commands(lines: list[str], first: int) -> Iterator[Example]:
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(lines, first):
        if line.startswith("$ "):
            found.append((number, line[2:].replace("\0", ""), []))
        elif found and line.strip():
            found[-1][2].append(line)
    for number, command, output in found:
        code = re.search(r"\s*# exit (\d+)$", command)
        yield Example(
            number, command[: code.start()] if code else command, int(code[1]) if code else 0, tuple(output)
        )


def like(line: str, exact: bool = False) -> re.Pattern[str]:
    """What an output line may look like for a documented one; `exact`: with these numbers."""
    text = " ".join(re.sub(r"─+", "─", line).split())
    parts = text.split(_WILD)
    if exact:
        pieces = list(map(re.escape, parts))
    else:
        pieces = [r"[\d., ]*".join(map(re.escape, _NUMBER.split(part))) for part in parts]
    return re.compile(".*".join(pieces).replace(r"\ ", r"\s*"))


def misses(output: str, documented: tuple[str, ...], exact: bool = False) -> list[str]:
    """Documented lines that do not follow each other in the output."""
    shown = [" ".join(re.sub(r"─+", "─", line).split()) for line in output.splitlines()]
    at, missing = 0, []
    for line in documented:
        if line.strip() == _WILD:
            continue
        found = next((i for i in range(at, len(shown)) if like(line, exact).fullmatch(shown[i])), None)
        if found is None:
            missing.append(line)
        else:
            at = found + 1
    return missing


def run(example: Example, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "COLUMNS": "160", "GGML_NO_BACKTRACE": "1"}
    return subprocess.run(
        ["bash", "-c", example.command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_runs_and_shows_what_is_shown(document: Path, tmp_path: Path) -> None:
    write_moe(tmp_path / "model.gguf")
    (tmp_path / "plans").symlink_to(ROOT / "plans")
    for example in examples(document.read_text(encoding="utf-8")):
        done = run(example, tmp_path)
        place = f"{document.name}:{example.line}: {example.command}"
        assert done.returncode == example.exit_code, f"{place}\n{done.stdout}"
        exact = _FIGURED.match(example.command) is not None and "--profile" not in example.command
        assert not misses(done.stdout, example.output, exact), f"{place}\n{done.stdout}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_of_the_project(document: Path) -> None:
    prose = _FENCED.sub("", document.read_text(encoding="utf-8"))
    for target, _ in _LINK.findall(prose):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_readme_shows_the_whole_way() -> None:
    shown = " ".join(
        example.command for example in examples((ROOT / "README.md").read_text(encoding="utf-8"))
    )
    for name in ("profile", "solve", "rewrite", "run", "check"):
        assert f"atsplan {name}" in shown


_MEASURES = ("decode_ns", "prefill512_ns")
_VISITS = ("lanes", "slots", "twelve")
_PLANNED = "h200-2026-12-01-cells"


def test_measured_gains_are_those_of_the_results() -> None:
    """Each figure of experts in slots, as it stands in the documents, computed from every run again."""
    results = ROOT / "benchmarks" / "results"
    lanes = [run for name in _VISITS for run in _runs(results / f"h200-2026-11-30-{name}.jsonl")]
    readme, measured, findings = (
        (ROOT / name).read_text(encoding="utf-8").replace("(95 %: ", "(")
        for name in ("README.md", "docs/measured.md", "docs/findings-hybrid.md")
    )
    before = {cell: [_gain(lanes, cell, each) for each in _MEASURES] for cell in {r["cell"] for r in lanes}}
    above = before.pop("residency=10")[0]  # which took more than it may
    assert not above.equal_vram and "no cell was left out but 10 % in VRAM" in findings
    for both in before.values():
        assert f"{_said(both[0])} | {both[0].rounds} | {_said(both[1])}" in findings, both
    planned = _runs(results / f"{_PLANNED}.jsonl")
    solved = {
        cell: [_gain(planned, cell, each, "plan") for each in _MEASURES]
        for cell in {r["cell"] for r in planned}
    }
    for cell, both in solved.items():
        equal = _said(_gain(planned, cell, "decode_ns"))
        times = [_middle(planned, cell, each) for each in ("n-cpu-moe", "all_lanes", "plan")]
        row = f"| {times[0]:.2f} ms | {times[1]:.2f} ms, {equal} | {times[2]:.2f} ms | "
        assert f"{row}{_said(both[0])} | {both[0].rounds} | {_said(both[1])} |" in findings, cell
    gains = before | solved
    assert len(gains) == 15 and all(decode.low >= 0.98 and decode.equal_vram for decode, _ in gains.values())
    decode = {cell: both[0].mean for cell, both in gains.items()}
    prompts = sorted(both[1].mean for both in gains.values())
    best, worst = max(decode, key=decode.__getitem__), min(decode, key=decode.__getitem__)
    assert (best, worst) == ("preset=gpt-oss", "preset=uniform,residency=25")
    assert f"decode {decode[worst]:.2f} to {decode[best]:.2f} times as fast" in readme
    assert f"tokens {prompts[0]:.2f} to {prompts[-1]:.2f} times" in readme
    assert f"tokens {prompts[0]:.2f}× to {prompts[-1]:.2f}×" in measured
    guide = (ROOT / "docs/guides/experts-12gb.md").read_text(encoding="utf-8")
    assert f"{decode[worst]:.2f} to {decode[best]:.2f} times as fast in decoding" in guide
    assert f"{prompts[0]:.2f} to {prompts[-1]:.2f} times in prompts" in guide
    for cell, both in gains.items():
        assert _said(both[0]) in measured, cell
        if cell in (best, worst, "base"):
            assert all(_said(each) in readme for each in both), cell
            assert f"ours with {_less(both[0])} % less VRAM" in readme, cell
    fit = [paired.compare(lanes, "base", "all_lanes", "fit", each) for each in _MEASURES]
    assert all(each is not None and _said(each) in findings for each in fit)
    more = f"{paired.VRAM_TOLERANCE:.0%}".replace("%", " %") + " more"
    assert more in readme and more in measured


def test_what_slots_bring_with_and_without_routing_is_what_the_readme_says() -> None:
    """For the machine and the model of its first example, by the lever that fit shows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(e.command for e in examples(readme) if e.command.startswith("atsplan fit"))
    told = []
    for asked in (command, re.sub(r"--heat \S+ ", "", command)):
        done = run(Example(0, f"{asked} --json 2>/dev/null", 0, ()), ROOT)
        lanes = next(lever for lever in json.loads(done.stdout)["levers"] if lever["name"] == "lanes")
        told.append(lanes["before_ns"] / lanes["after_ns"])
    assert f"(`--heat`): {told[0]:.2f}×,\nwithout them {told[1]:.2f}×" in readme


def test_loads_and_what_was_tried_are_those_of_the_results() -> None:
    """Loading since memory is locked meanwhile, the cell that is left out, the change that was taken out."""
    results = ROOT / "benchmarks" / "results"
    findings = " ".join((ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8").split())
    twelve, slots = (_runs(results / f"h200-2026-11-30-{name}.jsonl") for name in ("twelve", "slots"))
    loads: dict[tuple[str, str], dict[str, float]] = {}
    for run in twelve:
        if run["visit"].partition("-")[2] > "20261130T2244":
            loads.setdefault((run["visit"], run["cell"]), {})[run["contender"]] = run["load_s"]
    ours, rule = ([pair[name] for pair in loads.values()] for name in ("all_lanes", "n-cpu-moe"))
    shares = [one / other for one, other in zip(ours, rule, strict=True)]
    assert len({cell for _, cell in loads}) == 11
    assert (
        f"Loading: {min(ours):.1f} to {max(ours):.1f} s where the rule takes {min(rule):.1f} to" in findings
    )
    assert f"{max(rule):.1f} in the same visit, {min(shares):.2f} to {max(shares):.2f} times" in findings
    left_out = [
        median(r["decode_ns"] / 1e6 for r in twelve if (r["cell"], r["contender"]) == ("residency=10", name))
        for name in ("all_lanes", "n-cpu-moe")
    ]
    assert "than the rule ({:.1f} ms against {:.1f})".format(*left_out) in findings
    told = [
        paired.compare(slots, cell, "told more", "all_lanes", "decode_ns")
        for cell in ("base", "preset=strong", "preset=uniform", "residency=25")
    ]
    base, strong, uniform, quarter = (each for each in told if each is not None)
    words = f"Base {_said(base)}, strong {_said(strong)}, uniform {uniform.mean:.2f}×"
    assert f"{words}, a quarter {quarter.mean:.2f}× of before" in findings


def test_measured_gains_of_long_prompts_and_a_shared_bus_are_those_of_the_results() -> None:
    results = ROOT / "benchmarks" / "results"
    long = _runs(results / "h200-2026-11-30-prompts.jsonl", "1-20261130T182221")
    shared = _runs(results / "h200-2026-11-30-lanes-fewer-slots.jsonl")
    ahead = _gain(long, "long", "prefill4096_ns", "all lanes")
    beside = [_gain(shared, "link=25.0", each) for each in _MEASURES]
    page = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    for found in (ahead, *beside):
        assert _said(found) in page and f"{_less(found)} % less" in page and found.equal_vram, found


def _said(found: paired.Ratio) -> str:
    return f"{found.mean:.2f}× ({found.low:.2f}–{found.high:.2f})"


def test_measured_gains_of_following_are_those_of_the_results() -> None:
    """Of the rules that the planner tried first, computed from every token again."""
    path = ROOT / "benchmarks" / "results" / "h200-2026-11-30-drifting-shifting.json"
    gains, back, lost, spared = [], [], [], []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        rows = {row["name"]: row for row in cell["contenders"]}
        (right, wrong), stock = (rows[f"{topic}+2"]["phase_ms"] for topic in "BA"), rows["ncmoe"]
        for name in ("lfu:32:100+2", "lfu:32:25+2"):
            ours = rows[name]
            gains.append(median(stock["ms"]) / median(ours["ms"]))
            back.append((wrong[1] - ours["phase_ms"][1]) / (wrong[1] - right[1]))
            spared.append(1 - ours["vram_mib"] / stock["vram_mib"])
            lost += [ours["phase_ms"][turn] / wrong[turn] - 1 for turn in (0, 2)]
    page = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    assert f"decode {min(gains):.2f}× to {max(gains):.2f}×" in page
    assert f"{_span(back)} % of what the wrong slots lose comes back" in page
    assert f"right already {_span(lost)} % is lost" in page
    assert f"ours with {_span(spared)} % less VRAM" in page


_ROUTINGS = {
    "right": "`shifting`, A",
    "right-short-search": "`shifting`, A, since",
    "qwen3-30b": "qwen3-30b",
    "olmoe": "olmoe",
}


@pytest.mark.parametrize("routing", _ROUTINGS)
def test_measured_gains_on_demand_are_those_of_the_results(routing: str) -> None:
    """Each row of the table, and its part of the summary, computed from every token and round again."""
    path = ROOT / "benchmarks" / "results" / f"h200-2026-12-01-drifting-{routing}.json"
    pages = [
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/measured.md", "docs/findings-hybrid.md")
    ]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in cell["contenders"]:
            rows.setdefault(row["name"], []).append(row)
        static, ours = rows["A+2"], rows["lfu:32:100:2+2"]
        share = f"{100 * cell['share']:.0f} %"
        over = drifting.over_seed(cell, *ours)
        stock = [median(row["ms"]) for row in rows.get("ncmoe", ())]
        gains = [f"{stock[0] / median(row['ms']):.2f}×" for row in ours if stock]
        columns = [
            f"{_ROUTINGS[routing]}, {share}",
            f"{len(ours[0]['rounds_ms'])}",
            "".join(f"{ms:.2f}" for ms in stock),
            *(", ".join(f"{median(row['ms']):.2f}" for row in some) for some in (static, ours)),
            ", ".join(gains),
            ", ".join(f"{fmean(some[0]['hits']):.2f}" for some in (static, ours)),
            "; ".join(f"{mean:.3f} ({low:.3f}–{high:.3f})" for mean, low, high in over),
        ]
        line = "".join(f"| {column} " if column else "| " for column in columns) + "|"
        assert line in pages[1], line
        if gains:
            spared = [1 - row["vram_mib"] / rows["ncmoe"][0]["vram_mib"] for row in ours]
            assert all(0.045 <= each < 0.115 for each in spared), spared
            assert " and ".join(sorted(gains)) in pages[0]
        elif routing == "right":
            lost = (
                f"{100 * over[0][0] - 100:.1f} % ({100 * over[0][1] - 100:.1f}–{100 * over[0][2] - 100:.1f})"
            )
            assert all(lost in page for page in pages), lost
        else:
            mean, low, high = over[0]
            assert all(f"{mean:.3f} ({low:.3f}–{high:.3f})" in page for page in pages)


def _span(shares: list[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f}"


def _runs(path: Path, visit: str = "") -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if visit in ("", row["visit"]) and row["kind"] == "run"]


def _gain(rows: list[dict[str, Any]], cell: str, measure: str, ours: str = "all_lanes") -> paired.Ratio:
    found = paired.compare(rows, cell, ours, "n-cpu-moe", measure)
    assert found is not None
    return found


def _middle(rows: list[dict[str, Any]], cell: str, contender: str) -> float:
    """Milliseconds a token, the median of the runs."""
    return float(
        median(r["decode_ns"] / 1e6 for r in rows if (r["cell"], r["contender"]) == (cell, contender))
    )


def _less(found: paired.Ratio) -> str:
    return f"{100 * (1 - found.vram[0] / found.vram[1]):.0f}"


BENCHMARKS = sorted(
    {
        match[0]
        for path in DOCUMENTS
        for match in re.findall(r"`python ((-m )?benchmarks([./]\w+)+)", path.read_text(encoding="utf-8"))
    }
)


# Imports once what all of them need, then asks each in a copy of itself.
_HELP = (
    """
import json, os, runpy, shlex, sys
import click, numpy, yaml
import planner.passes.make_plan, commands.solve.solve, runtime.bench.measure
sys.path[0:0] = [""]
for line in sys.stdin:
    words = shlex.split(line)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        code = 1
        try:
            sys.argv = [words[-1], "--help"]
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
            code = 0
"""
    + ENDS
    + """    os.close(theirs)
    with os.fdopen(ours, errors="replace") as told:
        text = told.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]), flush=True)
"""
)


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str]]:
    """Exit code and output of every benchmark that is asked for help."""
    asked = "".join(f"{command.removeprefix('python ')}\n" for command in BENCHMARKS)
    child = [sys.executable, "-P", "-c", _HELP]
    done = subprocess.run(
        child, cwd=ROOT, input=asked, capture_output=True, text=True, timeout=240, check=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {command: (code, text) for command, (code, text) in zip(BENCHMARKS, told, strict=True)}


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmarks_named_in_the_documents_start(command: str, helps: dict[str, tuple[int, str]]) -> None:
    """They need models, hours or a GPU; that they are there and take their options is seen here."""
    code, text = helps[command]
    assert code == 0, text
    assert "usage:" in text.lower()


def test_examples_are_read_and_compared() -> None:
    block = "$ atsplan a \\\n    --b  # exit 1\nsize 12 606 MiB, … here\n\n$ c\n"
    text = f"x\n```console\n{block}```\n```\n$ d\n```\n"
    first, second = examples(text)
    assert (first.line, first.exit_code, second.command) == (3, 1, "c")
    assert first.command.split() == ["atsplan", "a", "--b"]
    assert not misses("before\nsize  7.5 MiB, nothing here\n", first.output)
    assert misses("size many MiB, nothing here", first.output)
    assert misses("b 1\na 1", ("a 1", "b 2")) == ["b 2"]
    assert not misses("a 1 MiB", ("a 2 …",)) and misses("a 1 MiB", ("a 2 …",), exact=True)
    assert not misses("a  2 MiB", ("a 2 …",), exact=True)


def test_the_picture_of_the_rooms_is_what_the_code_is() -> None:
    page = draw_rooms.PAGE.read_text(encoding="utf-8")
    assert draw_rooms.with_picture(page) == page, "python -m benchmarks.draw_rooms makes it again"


def test_the_glossary_has_the_words_of_the_program_in_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    told = {"heat", "stripe", "site", "unit", "reserve", "state", "split", "gap", "bound", "lift", "coverage"}
    assert told | {kind.value for kind in SiteKind if kind.value in ("stripe", "hybrid")} <= set(words)
    assert all(f"`{kind.value}:" in page or f"`{kind.value}`" in page for kind in SiteKind)


def test_the_site_builds_and_no_link_is_broken(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "guides" / "budget" / "index.html").is_file()
