"""Text profiles: the program's own two, plain counts, moe-trace CSVs, demand traces, route_trace tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.errors import FieldProblem, FileProblem
from planner.file_kinds import kind_of, named
from planner.model.routed_layers import MoeShape
from planner.quoting import short
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.routing.expert_counts import Phase
from planner.routing.found import Found, RawPart, StepCost
from planner.routing.trace import Heard, Row, lines_of

_DEMAND = re.compile(r"step=(\d+) layer=(\d+) ids=(\d+(?:,\d+)*)[ \t]*")
_LEDGER = re.compile(r"(?<![\w.])(step|misses|ms|latency_ms)=(\d+(?:\.\d+)?)")
_INTEGERS = re.compile(r"-?\d+(,-?\d+)+")


def parse(text: str, path: str, shape: MoeShape | None, heard: Heard) -> Found:
    """Any text profile; FileProblem says what was seen when it is none."""
    if (kind := kind_of(text)) not in ("", "heat file", "routing trace"):
        raise FileProblem(path, f"is {named(kind)}, a routing profile is needed")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if first == heats.MAGIC or first.startswith("# heat:"):
        return _own_heat(text, path)
    if first == traces.MAGIC or first.startswith("# trace:"):
        trace = traces.from_text(text, path, heard)
        return Found("trace.csv", trace.n_expert, trace.n_used, trace=trace)
    if any(_DEMAND.fullmatch(line) for line in text.splitlines()):
        return _demand(text, path, heard)
    header = next((line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"), "")
    names = [name.strip().lower() for name in header.split(",")]
    if {"layer", "expert", "count"} <= set(names):
        return _plain_counts(text, path, names, heard)
    if {"turn", "phase", "step", "layer", "slot", "expert"} <= set(names):
        return _route_trace(text, path, names, heard)
    if {"rank", "layer", "expert"} <= set(names):
        raise FileProblem(path, "an order of experts without counts: coverage cannot be judged from it")
    return _bare_integers(text, path, shape, heard)


def _own_heat(text: str, path: str) -> Found:
    heat = heats.from_text(text, path)
    parts = [
        RawPart(p.source, p.phase, p.tokens, rows, p.domain, p.depth)
        for p in heat.parts
        for rows in ({la: dict(enumerate(row)) for la, row in p.counts.items()},)
    ]
    return Found("heat.csv", heat.n_expert, heat.n_used, parts, model=heat.model)


def _fields(text: str, path: str, names: Sequence[str], heard: Heard) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a table with a header, by column name; comment lines are left out."""
    seen_header = False
    for number, line in enumerate(lines_of(text, heard), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if not seen_header:
            seen_header = True
            continue
        values = [v.strip() for v in line.split(",")]
        if len(values) != len(names):
            raise FieldProblem(path, number, "", f"{len(values)} fields, the header has {len(names)}")
        yield number, dict(zip(names, values, strict=True))


def _whole(row: dict[str, str], name: str, path: str, number: int) -> int:
    value = row[name]
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise FieldProblem(path, number, name, f"{short(value)} is no whole number")
    return int(value)


def _plain_counts(text: str, path: str, names: Sequence[str], heard: Heard) -> Found:
    counts: dict[int, Counter[int]] = {}
    for number, row in _fields(text, path, names, heard):
        layer, expert, count = (_whole(row, n, path, number) for n in ("layer", "expert", "count"))
        counts.setdefault(layer, Counter())[expert] += count
    return Found("layer,expert,count", parts=[RawPart("import", Phase.MIXED, 0, counts)])


def _demand(text: str, path: str, heard: Heard) -> Found:
    """`step= layer= ids=` lines, every step and routing layer present, the last of repeats wins."""
    rows: dict[tuple[int, int], tuple[int, ...]] = {}
    ledger: list[StepCost] = []
    for line in lines_of(text, heard):
        if found := _DEMAND.fullmatch(line):
            rows[int(found[1]), int(found[2])] = tuple(dict.fromkeys(int(i) for i in found[3].split(",")))
        elif "misses=" in line:
            ledger.append(_ledger_line(dict(_LEDGER.findall(line)), len(ledger)))
    steps, layers = max(s for s, _ in rows) + 1, max(la for _, la in rows) + 1
    if len(rows) != steps * layers:
        step, layer = next((s, la) for s in range(steps) for la in range(layers) if (s, la) not in rows)
        raise FileProblem(path, f"demand trace with a hole: step {step} layer {layer} is missing")
    ordered: list[Row] = [(0, True, step, layer, rows[step, layer]) for step, layer in sorted(rows)]
    trace = traces.make("", 0, ["import"], ordered)
    return Found("demand trace", trace=trace, ordinal=True, ledger=ledger)


def _ledger_line(fields: dict[str, str], index: int) -> StepCost:
    ms = float(fields.get("ms", fields.get("latency_ms", "0")))
    step = int(float(fields.get("step", str(index))))
    return StepCost(step, int(float(fields.get("misses", "0"))), round(ms * 1e6))


def _route_trace(text: str, path: str, names: Sequence[str], heard: Heard) -> Found:
    """`route_trace v1`: one row a chosen expert, columns by name, facts of the model in `#` lines."""
    said = dict(re.findall(r"\b(n_expert|n_expert_used)\s*[=:]\s*(\d+)", text[: text.find("\n", 4096)]))
    chosen: dict[tuple[int, int, int, int], dict[int, int]] = {}
    for number, row in _fields(text, path, names, heard):
        turn, phase, step, layer, slot, expert = (
            _whole(row, n, path, number) for n in ("turn", "phase", "step", "layer", "slot", "expert")
        )
        if phase > 1:
            raise FieldProblem(path, number, "phase", "expected 0 (prefill) or 1 (decode)")
        chosen.setdefault((turn, phase, step, layer), {})[slot] = expert
    turns = {turn: place for place, turn in enumerate(sorted({key[0] for key in chosen}))}
    rows: list[Row] = [
        (turns[turn], phase == 1, step, layer, tuple(e for _, e in sorted(slots.items())))
        for (turn, phase, step, layer), slots in chosen.items()
    ]
    trace = traces.make("", 0, [f"turn-{turn}" for turn in turns], rows)
    n_expert, n_used = int(said.get("n_expert", "0")), int(said.get("n_expert_used", "0"))
    return Found("route_trace v1", n_expert, n_used, trace=trace)


def _bare_integers(text: str, path: str, shape: MoeShape | None, heard: Heard) -> Found:
    """Integers without a header: two columns are choices, more are positions with their experts."""
    rows = [
        tuple(map(int, line.split(",")))
        for line in (raw.replace(" ", "").strip() for raw in lines_of(text, heard))
        if _INTEGERS.fullmatch(line)
    ]
    if not rows:
        first = next((line for line in text.splitlines() if line.strip()), "")
        start = short(first, 40)
        raise FileProblem(path, f"no routing profile that this program knows: it starts with {start}")
    widths = {len(row) for row in rows}
    if widths == {2}:
        return _choices([(layer, expert) for layer, expert in rows])
    if min(widths) == 2:
        raise FileProblem(path, "rows of two and of more columns: neither a list of choices nor a trace")
    if widths == {3} and (shape is None or shape.n_used != 1):
        if shape is None:
            raise FileProblem(path, "three columns without a header: start it with a line layer,expert,count")
        return _plain_counts("layer,expert,count\n" + text, path, ["layer", "expert", "count"], heard)
    return _positions(rows)


def _choices(rows: Sequence[tuple[int, int]]) -> Found:
    counts: dict[int, Counter[int]] = {}
    for layer, expert in rows:
        if min(layer, expert) >= 0:
            counts.setdefault(layer, Counter())[expert] += 1
    return Found("layer,expert choices", parts=[RawPart("import", Phase.MIXED, 0, counts)])


def _positions(rows: Sequence[tuple[int, ...]]) -> Found:
    """`pos,layer,id0,…`: pos counts decode steps of a run, negative while the prompt is read.

    Runs may follow each other in one file: a position that falls back starts the next one.
    """
    made: list[Row] = []
    run, last = 0, -1
    for pos, layer, *ids in rows:
        if layer < 0:
            continue
        if last >= 0 and pos < last:
            run += 1
        last = pos
        kept = tuple(dict.fromkeys(i for i in ids if i >= 0))
        if kept:
            made.append((run, pos >= 0, max(pos, 0), layer, kept))
    trace = traces.make("", 0, [f"run-{index + 1}" for index in range(run + 1)], made)
    return Found("moe-trace positions", trace=trace)
