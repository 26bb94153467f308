"""What a list of overrides does to the tensors of a model, by the engine's rule: search, first match wins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.block_names import block_of
from planner.model.inventory import Inventory, Tensor
from planner.plan.patterns import hits, listed, searcher
from planner.plan.plan import Override

# What Python's re and ECMAScript read alike; backslash only before punctuation.
_COMMON = re.compile(r"(?:[\w.^$|()\[\]*+?:=!-]|\\[^\w\s])*")
_OPTIONAL_TAIL = re.compile(r"[*?]$|\*\)$|\{0,")

MOST_OTHERS = 256  # patterns of a list that are not of this program's own form; later ones match nothing
# The engine's own matcher goes back and tries again: it must not be given what takes it an age.
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_FEW = 4
_STRANGE = "uses syntax that the engine and this program may read differently"


@dataclass(frozen=True, slots=True)
class Match:
    """One override and the tensors it places."""

    pattern: str
    buffer: str
    tensors: tuple[str, ...]  # those that no earlier pattern took, in file order
    lost: tuple[str, ...]  # those it matches but an earlier pattern takes
    size_bytes: int
    layers: tuple[int, ...]
    faults: tuple[str, ...] = field(default=())


def matches(inventory: Inventory, overrides: Sequence[tuple[str, str]]) -> tuple[Match, ...]:
    """What each (pattern, buffer) places, with its faults: no match, shadowed, loose ends, bad syntax."""
    places = {tensor.name: place for place, tensor in enumerate(inventory.tensors)}
    taken: dict[str, int] = {}
    found = []
    others = 0
    for index, (pattern, buffer) in enumerate(overrides):
        others += listed(pattern) is None
        every = sorted(places[name] for name in hits(pattern, places)) if others <= MOST_OTHERS else []
        tensors = [inventory.tensors[place] for place in every]
        mine = [t for t in tensors if t.name not in taken]
        taken.update((t.name, index) for t in mine)
        lost = tuple(t.name for t in tensors if taken[t.name] != index)
        found.append(_match(pattern, buffer, mine, lost))
    return tuple(found)


def placed(inventory: Inventory, overrides: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Tensor name to the buffer of the first override that matches it; absent when none does."""
    return {name: m.buffer for m in matches(inventory, overrides) for name in m.tensors}


def disagreements(
    inventory: Inventory, overrides: Iterable[Override], wanted: Mapping[str, str]
) -> tuple[str, ...]:
    """Proof that overrides place exactly `wanted` (tensor to buffer): () when they do, else what is wrong."""
    listed = tuple(overrides)
    found = matches(inventory, [(o.pattern, o.buffer) for o in listed])
    wrong = [f"override {m.pattern}: {fault}" for m in found for fault in m.faults]
    for override, match in zip(listed, found, strict=True):
        if override.tensors != len(match.tensors):
            wrong.append(
                f"override {override.pattern}: places {len(match.tensors)} tensors, not {override.tensors}"
            )
    actual = {name: m.buffer for m in found for name in m.tensors}
    for name in sorted(actual.keys() | wanted.keys()):
        have, want = actual.get(name, "its layer's device"), wanted.get(name, "its layer's device")
        if have != want:
            wrong.append(f"tensor {name}: the overrides put it on {have}, its site needs {want}")
    return tuple(wrong)


def _match(pattern: str, buffer: str, mine: Sequence[Tensor], lost: tuple[str, ...]) -> Match:
    layers = sorted({n for t in mine if (n := block_of(t.name)) is not None})
    return Match(
        pattern=pattern,
        buffer=buffer,
        tensors=tuple(t.name for t in mine),
        lost=lost,
        size_bytes=sum(t.size_bytes for t in mine),
        layers=tuple(layers),
        faults=tuple(_faults(pattern, mine, lost)),
    )


def _faults(pattern: str, mine: Sequence[Tensor], lost: Sequence[str]) -> Iterable[str]:
    if searcher(pattern) is None:
        yield "not a regular expression that can be matched in bounded time"
        if not _COMMON.fullmatch(pattern):
            yield _STRANGE
        return
    if _REPEATED_GROUP.search(pattern) or len(_REPEATS.findall(pattern)) > _FEW:
        yield "repeats so much that the engine, which tries every way, may never end"
    if not _COMMON.fullmatch(pattern):
        yield _STRANGE
    if not mine and not lost:
        yield "matches no tensor"
    if not mine and lost:
        yield "loses every tensor to an earlier pattern"
    if mine and lost:
        yield f"loses {len(lost)} tensors to earlier patterns"
    if not (pattern.startswith("^") and pattern.endswith("$")):
        yield _loose(pattern, mine)


def _loose(pattern: str, mine: Sequence[Tensor]) -> str:
    """Why an unanchored pattern is a risk, with the layers it bleeds into when it does."""
    if _OPTIONAL_TAIL.search(pattern):
        return "its tail may match nothing: it reaches further than it reads"
    named = {int(n) for n in re.findall(r"blk(?:\\\.|\.)([0-9]{1,9})(?![\d\]*+?|-])", pattern)}
    reached = {n for t in mine if (n := block_of(t.name)) is not None}
    beyond = sorted(n for n in reached - named if any(str(n).startswith(str(k)) for k in named))
    if named and beyond:
        return f"not anchored: also reaches layers {', '.join(map(str, beyond))}"
    return "not anchored with ^ and $"
