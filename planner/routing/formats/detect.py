"""Routing profiles and traces of other tools: recognised by content, checked, made heat.

`read` looks at the bytes, never at the file's name. What a format does not say (number of experts,
model) comes from the model's shape when one is given; ids outside the model are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.errors import FileProblem
from planner.model.gguf.header import Bytes
from planner.model.routed_layers import MoeShape
from planner.quoting import short
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.routing.expert_counts import Heat, NoCount, Part, WrongModel, heat_of_model
from planner.routing.formats import binary, json
from planner.routing.formats import text as texts
from planner.routing.found import Found, StepCost
from planner.routing.trace import Heard, Trace, unheard


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A profile in the program's own terms."""

    format: str
    heat: Heat
    trace: Trace | None
    ledger: Sequence[StepCost]
    notes: tuple[str, ...]


def read(
    data: Bytes, path: str, shape: MoeShape | None = None, n_expert: int = 0, heard: Heard = unheard
) -> Imported:
    """Heat, and the trace when there is one, of any supported file.

    `n_expert` helps where neither the file nor a shape says it; `heard` is told how far it is.
    Raises FileProblem or FieldProblem for what cannot be read and WrongModel for ids, layers or counts that
    do not fit the model.
    """
    try:
        found = _parse(data, path, shape, heard)
    except (OverflowError, ValueError):
        raise FileProblem(path, "broken routing profile: a number that no trace holds") from None
    experts = _n_expert(found, path, shape, n_expert)
    notes = found.notes
    if not (found.n_expert or shape or n_expert):
        notes += (f"number of experts taken from the largest id: {experts}; name the model to check it",)
    found = _by_layer(found, path, shape)
    _check_ids(found, path, shape)
    trace = replace(found.trace, n_expert=experts) if found.trace else None
    if trace and (why := traces.fault(trace)):
        raise FileProblem(path, f"broken routing profile: {why}")
    trace, said = _without_dummies(trace)
    notes += said
    with _counts_of(path):
        heat = traces.heat_of(trace) if trace else _heat(found, experts)
    if found.orders:
        heat = heats.original(heat, found.orders)
        trace = original_ids(trace, found.orders) if trace else None
        notes += ("positions mapped back to original expert ids by the file's own permutation",)
    if shape:
        heat = heat_of_model(heat, shape, path)
        trace = replace(trace, model=shape.digest) if trace else None
    if not heat.parts:
        raise FileProblem(path, f"{found.format} without a single routed choice")
    shares = _normalised(heat)
    with _counts_of(path):
        heat = with_tokens(heat)
    return Imported(found.format, heat, trace, found.ledger, notes + shares)


@contextmanager
def _counts_of(path: str) -> Iterator[None]:
    """What no routing can have given is a fault of the file."""
    try:
        yield
    except NoCount as problem:
        raise FileProblem(path, f"broken routing profile: {problem}") from None


def _without_dummies(trace: Trace | None) -> tuple[Trace | None, tuple[str, ...]]:
    """The trace without runs of one repeated choice and without choices that no text makes so often, and
    what is said of them.
    """
    notes: tuple[str, ...] = ()
    if trace is not None:
        often = "are one choice of a fifth of all tokens, or several such"
        for found, what in (
            (traces.repeated, f"repeat one choice for {traces.DUMMY_RUN} tokens and more"),
            (traces.frequent, often),
        ):
            trace, said = _without(trace, found(trace), what)
            notes += said
    return trace, notes


def _without(trace: Trace, dummies: NDArray[np.bool_], what: str) -> tuple[Trace, tuple[str, ...]]:
    count, rows = int(dummies.sum()), len(dummies)
    if not count:
        return trace, ()
    ids = " ".join(str(i) for i in trace.ids[int(dummies.argmax())].tolist() if i >= 0)
    told = f"{count} of {rows} rows {what} (experts {ids}): dummies or one repeated token"
    if count == rows:
        return trace, (f"{told}, nothing follows from them",)
    return traces.select(trace, ~dummies), (f"{told}, left out",)


def original_ids(trace: Trace, orders: Mapping[int, Sequence[int]]) -> Trace:
    """A trace by original id, from one by position in a permuted file."""
    ids = trace.ids.copy()
    for layer, order in orders.items():
        rows = trace.layer == layer
        table = np.append(np.asarray(order, dtype=np.int32), np.int32(traces.PAD))  # PAD indexes the last
        ids[rows] = table[trace.ids[rows]]
    return replace(trace, ids=ids)


def _parse(data: Bytes, path: str, shape: MoeShape | None, heard: Heard) -> Found:
    head = bytes(data[0:4096])
    if not head.strip():
        raise FileProblem(path, "empty file")
    if parser := binary.parser_for(head):
        return parser(data, path)
    try:
        text = bytes(data[0 : len(data)]).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileProblem(
            path, "no routing profile that this program knows: neither text nor a known binary"
        ) from None
    if text.lstrip().startswith(("{", "[")):
        return json.parse(text, path, heard)
    return texts.parse(text, path, shape, heard)


def _n_expert(found: Found, path: str, shape: MoeShape | None, asked: int) -> int:
    said = shape.n_expert if shape else asked
    if found.n_expert and said and found.n_expert != said:
        raise WrongModel(path, f"{found.n_expert} experts a layer, the model has {said}")
    largest = _largest(found)
    experts = found.n_expert or said or largest + 1
    if largest >= experts > 0:
        raise WrongModel(path, f"expert id {largest}, the model has {experts} experts")
    if not 0 < experts <= heats.MAX_EXPERTS:
        raise FileProblem(path, f"broken routing profile: {short(str(experts), 20)} experts in a layer")
    return experts


def _largest(found: Found) -> int:
    if found.trace:
        return int(found.trace.ids.max(initial=0))
    return max((e for p in found.parts for row in p.counts.values() for e in row), default=0)


def _by_layer(found: Found, path: str, shape: MoeShape | None) -> Found:
    """Turn places among the routing layers into model layers."""
    if not found.ordinal:
        return found
    if shape is None:
        note = "layers are counted among the layers that route; name the model to get model layers"
        return replace(found, notes=(*found.notes, note))
    assert found.trace is not None
    if len(found.trace.layer) and int(found.trace.layer.max()) >= len(shape.layers):
        raise WrongModel(
            path, f"{int(found.trace.layer.max()) + 1} routing layers, it has {len(shape.layers)}"
        )
    layers = np.array(shape.layers, dtype=np.int32)[found.trace.layer]
    return replace(found, trace=replace(found.trace, layer=layers), ordinal=False)


def _check_ids(found: Found, path: str, shape: MoeShape | None) -> None:
    named = (
        {int(la) for la in np.unique(found.trace.layer)}
        if found.trace
        else {la for p in found.parts for la, row in p.counts.items() if any(row.values())}
    )
    for layer in (min(named, default=0), max(named, default=0)):
        if not 0 <= layer < heats.MAX_LAYERS:
            raise FileProblem(path, f"broken routing profile: layer {short(str(layer), 20)}")
    if shape is None or found.ordinal:
        return
    strangers = sorted(named - set(shape.layers))
    if strangers:
        raise WrongModel(path, f"layer {strangers[0]} routes here, but not in the model")
    if found.trace and shape.n_used and found.trace.n_used > shape.n_used:
        raise WrongModel(path, f"{found.trace.n_used} experts a token, the model uses {shape.n_used}")


def _heat(found: Found, n_expert: int) -> Heat:
    heats.check_size(sum(len(p.counts) for p in found.parts), n_expert)
    parts = [
        Part(
            p.source,
            p.phase,
            p.tokens,
            {la: tuple(row.get(e, 0) for e in range(n_expert)) for la, row in p.counts.items()},
            p.domain,
            p.depth,
        )
        for p in found.parts
    ]
    return heats.make(found.model, n_expert, found.n_used, parts)


def with_tokens(heat: Heat) -> Heat:
    """Tokens of parts that do not say, from the layer that saw most; not of shares, which counted none.

    What heat is trusted with hangs on them, so whoever judges heat reads it with these.
    """
    if not heat.n_used or _normalised(heat):
        return heat
    parts = [
        p if p.tokens else replace(p, tokens=max(map(sum, p.counts.values())) // heat.n_used)
        for p in heat.parts
    ]
    return heats.make(heat.model, heat.n_expert, heat.n_used, parts)


def _normalised(heat: Heat) -> tuple[str, ...]:
    """Notes on parts whose layers all add up to the same power of ten: shares, not tokens."""
    for part in heat.parts:
        sums = {sum(row) for row in part.counts.values()}
        if len(sums) == 1 and len(part.counts) > 1 and str(sums.pop()).rstrip("0") == "1" and not part.tokens:
            return ("every layer adds up to the same power of ten: normalised counts, tokens not known",)
    return ()
