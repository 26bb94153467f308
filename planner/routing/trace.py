"""A routing trace: which experts each token asked for, in order; its text form and its counts.

`trace.csv` has one row a token and layer; ids in the router's order, best first:

    # trace: 1
    # model: sha256:…
    # experts: 128
    # source: prompt-1
    source,phase,step,layer,ids
    0,decode,0,3,17 4 99
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.errors import FieldProblem
from planner.file_kinds import mistaken
from planner.quoting import heat_name
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import MAX_EXPERTS, MAX_LAYERS, Heat, Part, Phase

Ints = NDArray[np.int32]

MAGIC = "# trace: 1"
COLUMNS = "source,phase,step,layer,ids"
MAX_USED = 128  # experts of a token; models use up to some 22
MAX_STEPS = 1 << 31
DUMMY_RUN = 64  # rows of one layer in a row with the same choice
_FREQUENT = 5  # of so many rows one with the same choice is too many to be text
_MANY_CHOICES = 1000  # ways to choose, from which on that holds
PAD = -1  # in `ids`, where a row has fewer experts than the widest


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Rows in order of evaluation; all arrays have one entry a row."""

    model: str  # table digest, "" when not known
    n_expert: int
    sources: tuple[str, ...]
    source: Ints  # index into `sources`
    decode: NDArray[np.bool_]  # False: prefill
    step: Ints  # pass of the model, counted from 0 in each source and phase
    layer: Ints
    ids: Ints  # (rows, experts per token)

    @property
    def n_used(self) -> int:
        """Experts of a token, 0 for an empty trace."""
        return int(self.ids.shape[1]) if len(self.ids) else 0


Heard = Callable[[float], None]  # is told what share of a file lies behind, now and then
_LINES = 4096  # between two times that it is told


def unheard(share: float) -> None:
    """For whom nobody waits."""


def lines_of(text: str, heard: Heard) -> Iterator[str]:
    """The lines of a text, one after the other."""
    behind, whole = 0, max(len(text), 1)
    for number, line in enumerate(text.splitlines()):
        if number % _LINES == 0:
            heard(behind / whole)
        behind += len(line) + 1
        yield line
    heard(1.0)


Row = tuple[int, bool, int, int, tuple[int, ...]]  # source, decode, step, layer, ids


def make(model: str, n_expert: int, sources: Iterable[str], rows: Iterable[Row]) -> Trace:
    """A trace from rows."""
    listed = list(rows)
    width = max((len(row[4]) for row in listed), default=0)
    if width > MAX_USED:
        raise ValueError(f"{width} experts for a token")
    ids = np.full((len(listed), width), PAD, dtype=np.int32)
    for index, row in enumerate(listed):
        ids[index, : len(row[4])] = row[4]
    columns = [np.array([row[i] for row in listed], dtype=np.int32) for i in (0, 2, 3)]
    decode = np.array([row[1] for row in listed], dtype=bool)
    return Trace(model, n_expert, tuple(sources), columns[0], decode, columns[1], columns[2], ids)


def join(traces: Iterable[Trace]) -> Trace:
    """Several traces of one model, one after the other."""
    listed = list(traces)
    width = max(t.ids.shape[1] for t in listed)
    starts = np.cumsum([0, *(len(t.sources) for t in listed)])
    return Trace(
        next((t.model for t in listed if t.model), ""),
        max(t.n_expert for t in listed),
        tuple(name for t in listed for name in t.sources),
        np.concatenate([t.source + start for t, start in zip(listed, starts, strict=False)]).astype(np.int32),
        np.concatenate([t.decode for t in listed]),
        np.concatenate([t.step for t in listed]),
        np.concatenate([t.layer for t in listed]),
        np.concatenate(
            [np.pad(t.ids, ((0, 0), (0, width - t.ids.shape[1])), constant_values=PAD) for t in listed]
        ),
    )


def select(trace: Trace, keep: NDArray[np.bool_] | NDArray[np.intp]) -> Trace:
    """The rows of a trace where `keep` holds, or that it counts, in its order."""
    return replace(
        trace,
        source=trace.source[keep],
        decode=trace.decode[keep],
        step=trace.step[keep],
        layer=trace.layer[keep],
        ids=trace.ids[keep],
    )


def repeated(trace: Trace) -> NDArray[np.bool_]:
    """Rows of runs in which a layer chooses the same experts in the same order, token after token.

    No text does that: such rows are dummies of an engine's start, or one token repeated.
    """
    order = np.lexsort((trace.step, trace.layer, trace.decode, trace.source))
    columns = [trace.source, trace.decode, trace.layer, *trace.ids.T]
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        same &= np.diff(column[order].astype(np.int64)) == 0
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1]) if len(order) else np.zeros(0, dtype=np.int64)
    lengths = np.diff([*starts, len(order)])
    found = np.zeros(len(order), dtype=bool)
    found[order] = np.repeat(lengths >= DUMMY_RUN, lengths)
    return found


def frequent(trace: Trace) -> NDArray[np.bool_]:
    """Rows whose choice is that of a fifth of all rows of their source and layer, wherever these stand.

    Of 4471 real tokens of one layer (OLMoE) the choice seen most was that of 0.3 %. Padding between real
    tokens is found by this, not by its runs. Of few experts a fifth may well choose alike: they are left.
    """
    found = np.zeros(len(trace.ids), dtype=bool)
    if math.comb(max(trace.n_expert, trace.n_used), trace.n_used) < _MANY_CHOICES or not len(found):
        return found
    columns = np.column_stack([trace.source, trace.layer, trace.ids]).astype(np.int64)
    _, group, rows = np.unique(columns[:, :2], axis=0, return_inverse=True, return_counts=True)
    _, choice, alike = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    mine = alike[choice.reshape(-1)]
    return np.asarray((mine >= DUMMY_RUN) & (mine * _FREQUENT >= rows[group.reshape(-1)]))


def fault(trace: Trace) -> str:
    """What no router can have chosen, and `from_text` would refuse; "" for nothing."""
    if trace.n_used > MAX_USED:
        return f"{trace.n_used} experts for a token, at most {MAX_USED} can be"
    for what, column in (("layer", trace.layer), ("step", trace.step)):
        if len(column) and int(column.min()) < 0:
            return f"{what} {int(column.min())}"
    ids = np.sort(trace.ids, axis=1)
    twice = ((np.diff(ids, axis=1) == 0) & (ids[:, 1:] != PAD)).any(axis=1)
    if twice.any():
        row = int(twice.argmax())
        return f"a token of layer {int(trace.layer[row])} that chose one expert twice"
    return ""


def heat_of(trace: Trace, n_used: int | None = None) -> Heat:
    """Counts by source and phase; tokens are the rows of the layer that saw most."""
    group = trace.source.astype(np.int64) * 2 + trace.decode
    order = np.argsort(group, kind="stable")
    parts = []
    layers = np.unique(group * (1 << 31) + trace.layer)  # of each source and phase
    heats.check_size(len(layers), trace.n_expert)
    for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        if not len(rows):
            continue
        phase = Phase.DECODE if trace.decode[rows[0]] else Phase.PREFILL
        parts.append(_part(trace, rows, trace.sources[trace.source[rows[0]]], phase))
    return heats.make(trace.model, trace.n_expert, trace.n_used if n_used is None else n_used, parts)


def _part(trace: Trace, rows: NDArray[np.int64], name: str, phase: Phase) -> Part:
    layers, place = np.unique(trace.layer[rows], return_inverse=True)
    ids = trace.ids[rows]
    cell = (place[:, None] * trace.n_expert + ids)[ids >= 0]
    counts = np.bincount(cell, minlength=len(layers) * trace.n_expert).reshape(len(layers), -1)
    tokens = int(np.bincount(place).max())
    return Part(
        name, phase, tokens, {int(la): tuple(row.tolist()) for la, row in zip(layers, counts, strict=True)}
    )


def to_text(trace: Trace) -> str:
    """Canonical `trace.csv`."""
    head = [MAGIC, f"# model: {trace.model}".rstrip(), f"# experts: {trace.n_expert}"]
    head += [f"# source: {heat_name(name)}" for name in trace.sources]
    phases = ("prefill", "decode")
    lines = [
        f"{source},{phases[decode]},{step},{layer},{' '.join(str(i) for i in ids if i >= 0)}"
        for source, decode, step, layer, ids in zip(
            trace.source.tolist(),
            trace.decode.tolist(),
            trace.step.tolist(),
            trace.layer.tolist(),
            trace.ids.tolist(),
            strict=True,
        )
    ]
    return "\n".join([*head, COLUMNS, *lines]) + "\n"


def from_text(text: str, path: str, heard: Heard = unheard) -> Trace:
    """Trace from `trace.csv` text; FieldProblem names the line of what is wrong."""
    if why := mistaken(text, "routing trace"):
        raise FieldProblem(path, 1, "", why)
    head: dict[str, str] = {}
    sources: list[str] = []
    rows: list[Row] = []
    n_expert = 0
    for number, line in enumerate(lines_of(text, heard), start=1):
        if line == COLUMNS and not n_expert:
            n_expert = _experts(head, path, number)
        elif line.startswith("#"):
            name, _, value = (s.strip() for s in line[1:].partition(":"))
            if n_expert or name not in ("trace", "model", "experts", "source"):
                raise FieldProblem(path, number, name, "unknown key")
            if name == "model" and not heats.is_digest(value):
                raise FieldProblem(path, number, name, "expected the digest of a tensor table, or nothing")
            if name == "source":
                sources.append(value)
            head[name] = value
        elif line.strip():
            rows.append(_row(line, n_expert, len(sources), path, number))
    if not n_expert:
        raise FieldProblem(path, 0, "", f"no line {COLUMNS}")
    return make(head.get("model", ""), n_expert, sources, rows)


def _experts(head: dict[str, str], path: str, number: int) -> int:
    if head.get("trace") != "1":
        raise FieldProblem(path, 1, "trace", f"expected the first line {MAGIC}")
    text = head.get("experts", "")
    if not (text.isascii() and text.isdigit() and len(text) < 10) or not 0 < int(text) <= MAX_EXPERTS:
        raise FieldProblem(path, number, "experts", "expected the number of experts of a layer")
    return int(text)


def _row(line: str, n_expert: int, n_sources: int, path: str, number: int) -> Row:
    fields = line.split(",")
    numbers = [*fields[:1], *fields[2:4], *"".join(fields[4:]).split()]
    try:
        if not all(map(heats.whole, numbers)):
            raise ValueError
        source, step, layer = int(fields[0]), int(fields[2]), int(fields[3])
        ids = tuple(int(i) for i in fields[4].split())
    except (ValueError, IndexError):
        raise FieldProblem(path, number, "", f"expected {COLUMNS}") from None
    if not n_expert or len(fields) != 5 or fields[1] not in ("decode", "prefill") or not ids:
        raise FieldProblem(path, number, "", f"expected {COLUMNS}")
    if max(step, layer) >= MAX_STEPS or layer >= MAX_LAYERS:
        raise FieldProblem(path, number, "step", f"step {step:.3g} of layer {layer:.3g} cannot be")
    if len(ids) > MAX_USED:
        raise FieldProblem(path, number, "ids", f"{len(ids)} experts for a token, at most {MAX_USED} can be")
    if not 0 <= source < n_sources or min(step, layer) < 0:
        raise FieldProblem(
            path, number, "source", f"{n_sources} sources are named, steps and layers count up"
        )
    if min(ids) < 0 or max(ids) >= n_expert or len(set(ids)) != len(ids):
        raise FieldProblem(path, number, "ids", f"expected different ids below {n_expert}")
    return source, fields[1] == "decode", step, layer, ids
