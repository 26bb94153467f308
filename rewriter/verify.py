"""Proof that a rewritten model is its source in another order.

Both sides are read back by a second reader; every payload is compared by SHA-256 with
its experts put back into their original order, every metadata entry byte by byte, and the order of
the file against the plan in loops of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import AnswerIsNo, InputError
from planner.model.gguf.expert_orders import damaged
from planner.model.gguf.reader import ModelFile, read_model
from planner.model.inventory import Tensor
from planner.model.tensor_roles import Role, is_chunked, part_of
from planner.model.units import units_of
from planner.plan.patterns import hits, searcher
from planner.plan.plan import Plan
from planner.quoting import short
from rewriter.manifest import ManifestTensor
from rewriter.payloads import Payload, digests
from rewriter.second_reader import Seen, Weight, read_header
from rewriter.stamp import (
    EXPERTS,
    PLAN_DIGEST,
    PREFIX,
    SOURCE_HEADER,
    SOURCE_ORDER,
    SOURCE_TRAILING,
    plan_digests,
    read_stamp,
)
from rewriter.stamps import source_of, trailing_of

WEIGHTS_EXACT = "weights byte-exact: every tensor's bytes are those of the source"
WEIGHTS_PERMUTED = "weights byte-exact under the recorded permutation of experts"
LOGITS_EXACT = "logits bit-exact on the same backend: no expert moved"
LOGITS_CLOSE = "logits equal up to rounding, greedy tokens may differ in rare ties: experts moved"

Found = Mapping[str, tuple[Seen, Weight]]
Orders = Mapping[int, tuple[int, ...]]
Advance = Callable[[int], None]


@dataclass(eq=False)
class NotFaithful(AnswerIsNo):
    """A rewritten file that is not what source and plan make of it."""

    path: str
    problems: tuple[str, ...]

    def message(self) -> str:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.path}: not a faithful rewrite: {self.problems[0]}{more}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and what may be claimed."""

    tensors: tuple[ManifestTensor, ...]
    size_bytes: int  # of payloads, one side
    seconds: float
    moved_layers: tuple[int, ...]  # whose experts stand in another order than in the source

    @property
    def claims(self) -> tuple[str, ...]:
        return claims(bool(self.moved_layers))


def claims(moved: bool) -> tuple[str, ...]:
    """What a verified rewrite may promise, in words that hold."""
    return (WEIGHTS_PERMUTED, LOGITS_CLOSE) if moved else (WEIGHTS_EXACT, LOGITS_EXACT)


def verify(
    source: ModelFile, outputs: Sequence[Path], plan: Plan | None, advance: Advance = lambda _: None
) -> Verification:
    """Compare a rewritten model with its source and, when given, its plan.

    `outputs` are all files of the rewritten model in order. Raises NotFaithful with every
    difference found.
    """
    started = time.monotonic()
    ours = [read_header(path) for path in source.paths]
    theirs = [read_header(path) for path in outputs]
    problems = [*_metadata(ours, theirs), *_table(ours, theirs), *_offsets(theirs)]
    if plan is not None:
        problems += _stamp(source, theirs, plan)
        problems += _plan_order(source, theirs, plan)
        problems += _patterns(theirs, plan)
    _raise(outputs, problems)
    before, after = _orders(ours[0]), _orders(theirs[0])
    found = _compare(source, ours, theirs, before, after, advance)
    _raise(outputs, [*found[1], *_trailing(source, outputs, theirs[0]), *_unreadable(outputs)])
    size = sum(tensor.size_bytes for tensor in found[0])
    return Verification(found[0], size, time.monotonic() - started, _moved(before, after))


def _unreadable(outputs: Sequence[Path]) -> Iterator[str]:
    """What was written must be a model to the first reader too."""
    try:
        found = read_model(outputs[0]).paths
    except InputError as problem:
        yield f"it cannot be read back: {problem}"
        return
    if [path.name for path in found] != [path.name for path in outputs]:
        yield "other files are read back than were written"


def _trailing(source: ModelFile, outputs: Sequence[Path], first: Seen) -> Iterator[str]:
    """What lies behind the last tensor lies behind it again; older rewrites did not keep it."""
    kept = trailing_of(source, source_of(source, read_stamp(source)))
    if kept is None or (PLAN_DIGEST in first.entries and SOURCE_TRAILING not in first.entries):
        return
    size = outputs[-1].stat().st_size
    jobs = [
        Payload(source.paths[kept.shard], kept.start, kept.length),
        Payload(outputs[-1], max(size - kept.length, 0), kept.length),
    ]
    before, after = digests(jobs, lambda _: None)
    if before != after:
        yield f"the {kept.length} bytes behind the last tensor differ"


def _moved(before: Orders, after: Orders) -> tuple[int, ...]:
    """Layers whose experts stand in another order than in the source that was compared."""
    layers = sorted(before.keys() | after.keys())
    pairs = {n: (before.get(n), after.get(n)) for n in layers}
    return tuple(n for n, (old, new) in pairs.items() if _composed(old, new) != _composed(new, old))


def _composed(order: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...]:
    return order if order is not None else tuple(range(len(other or ())))


def _raise(outputs: Sequence[Path], problems: list[str]) -> None:
    if problems:
        raise NotFaithful(str(outputs[0]), tuple(problems))


def _metadata(ours: list[Seen], theirs: list[Seen]) -> Iterator[str]:
    """Every entry of the source, byte by byte; nothing new but what speaks of layout."""
    expected = {key: seen for seen in reversed(ours) for key in seen.entries if not _speaks_of_layout(key)}
    first = theirs[0]
    for key, seen in expected.items():
        if key not in first.entries:
            yield f"metadata key {key} is missing"
        elif seen.value(key) != first.value(key):
            yield f"metadata key {key} differs"
    for seen in theirs:
        for key in seen.entries:
            if key not in expected and not _speaks_of_layout(key):
                yield f"metadata key {key} was added"


def _speaks_of_layout(key: str) -> bool:
    return key == "general.alignment" or key.startswith((PREFIX, "split."))


def _table(ours: list[Seen], theirs: list[Seen]) -> Iterator[str]:
    """The same tensors with the same types and dimensions."""
    left, right = _weights(ours), _weights(theirs)
    for name in sorted(left.keys() - right.keys()):
        yield f"tensor {name} is missing"
    for name in sorted(right.keys() - left.keys()):
        yield f"tensor {name} was added"
    for name in sorted(left.keys() & right.keys()):
        if (left[name][1].dims, left[name][1].kind) != (right[name][1].dims, right[name][1].kind):
            yield f"tensor {name} has another type or shape"
    if sum(len(seen.weights) for seen in theirs) != len(right):
        yield "a tensor appears in two shards"


def _weights(files: list[Seen]) -> Found:
    return {name: (seen, weight) for seen in files for name, weight in seen.weights.items()}


def _offsets(theirs: list[Seen]) -> Iterator[str]:
    """Table order is data order, and every payload starts on the alignment: the engine insists on both."""
    for seen in theirs:
        last = -1
        for name, weight in seen.weights.items():
            if (weight.start - seen.data_start) % seen.alignment:
                yield f"tensor {name} is not aligned to {seen.alignment}"
            if weight.start <= last:
                yield f"tensor {name} lies before the one that precedes it in the table"
            last = weight.start


def _stamp(source: ModelFile, theirs: list[Seen], plan: Plan) -> Iterator[str]:
    first = theirs[0]
    if first.text(PLAN_DIGEST) not in plan_digests(plan):
        yield "it was made by another plan"
    recorded = read_header(source.paths[0]).text(SOURCE_HEADER) or source.inventory.header_digest
    if first.text(SOURCE_HEADER) != recorded:
        yield "it was made from another source"
    if first.numbers(SOURCE_ORDER) != _original_places(source, theirs):
        yield "its record of the original order is wrong"
    orders = _orders(first)
    for wanted in plan.experts:
        if orders.get(wanted.layer, tuple(range(len(wanted.order)))) != wanted.order:
            yield f"experts of layer {wanted.layer} are not in the order of the plan"
    for layer in sorted(orders.keys() - {wanted.layer for wanted in plan.experts}):
        yield f"experts of layer {layer} are in an order that the plan does not ask for"


def _original_places(source: ModelFile, theirs: list[Seen]) -> tuple[int, ...]:
    """Where each tensor of the output stood in the original source."""
    recorded = read_header(source.paths[0]).numbers(SOURCE_ORDER)
    names = [tensor.name for tensor in source.inventory.tensors]
    place = dict(zip(names, recorded or range(len(names)), strict=True))
    return tuple(place.get(name, -1) for seen in theirs for name in seen.weights)


def _patterns(theirs: list[Seen], plan: Plan) -> Iterator[str]:
    """Each override of the plan still finds as many tensors as it announces, first match first."""
    left = {name for seen in theirs for name in seen.weights}
    for override in plan.overrides:
        if searcher(override.pattern) is None:
            yield f"override {short(override.pattern)} is no pattern"
            return
        found = set(hits(override.pattern, left))
        left -= found
        if (count := len(found)) != override.tensors:
            yield f"override {override.pattern} matches {count} tensors, the plan says {override.tensors}"


def _plan_order(source: ModelFile, theirs: list[Seen], plan: Plan) -> Iterator[str]:
    """Each site's tensors stand together, in the order of the graph."""
    place: dict[str, tuple[str, int]] = {}
    sites = {placement.unit: placement.site.memory for placement in plan.units}
    for index, unit in enumerate(units_of(source.inventory).units):
        for name in unit.tensors:
            place[name] = (sites.get(unit.name, "unplaced"), index)
    left: set[str] = set()
    memory, last = "", -1
    for name in (name for seen in theirs for name in seen.weights):
        here, index = place.get(name, ("", -1))
        if here in left:
            yield f"tensor {name} stands apart from the others of {here}"
        elif here != memory:
            left.add(memory)
            memory = here
        elif index < last:
            yield f"tensor {name} stands after tensors that the graph reads later"
        last = index


def _orders(first: Seen) -> Orders:
    keys = [key for key in first.entries if key.startswith(EXPERTS)]
    layers = {key: key[len(EXPERTS) :] for key in keys}
    for key, layer in layers.items():
        if not (layer.isascii() and layer.isdecimal() and len(layer) < 6):
            raise damaged(str(first.path), key)
    return {int(layer): first.numbers(key) for key, layer in layers.items()}


def _compare(
    source: ModelFile, ours: list[Seen], theirs: list[Seen], before: Orders, after: Orders, advance: Advance
) -> tuple[tuple[ManifestTensor, ...], list[str]]:
    left, right = _weights(ours), _weights(theirs)
    jobs: list[Payload] = []
    for tensor in source.inventory.tensors:
        for side, orders in ((left, before), (right, after)):
            seen, weight = side[tensor.name]
            order = slices(tensor, orders)
            jobs.append(Payload(seen.path, weight.start, tensor.size_bytes, order))
    results = digests(jobs, advance)
    tensors = []
    problems = []
    for n, tensor in enumerate(source.inventory.tensors):
        if results[2 * n] != results[2 * n + 1]:
            problems.append(f"tensor {tensor.name} has other bytes")
        tensors.append(ManifestTensor(name=tensor.name, size_bytes=tensor.size_bytes, sha256=results[2 * n]))
    return tuple(tensors), problems


def slices(tensor: Tensor, orders: Orders) -> tuple[int, ...]:
    """The original number of the slice at each position, () for a tensor without expert axis."""
    part = part_of(tensor)
    order = orders.get(part.layer) if part.layer is not None else None
    if not order or part.role not in (Role.EXPERTS, Role.EXPERT_SMALL, Role.ROUTER):
        return ()
    axis = tensor.shape[-1]
    if axis == len(order):
        return order
    if is_chunked(tensor.name) and len(order) % axis == 0:
        size = len(order) // axis
        return tuple(order[n] // size for n in range(0, len(order), size))
    return ()
