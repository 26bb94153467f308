"""What a parser of routing profiles got out of a file, before it is held against a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.routing.expert_counts import Phase
from planner.routing.trace import Trace

Sparse = Mapping[int, Mapping[int, int]]  # layer -> expert -> count


@dataclass(frozen=True, slots=True)
class RawPart:
    """Counts as a file has them."""

    source: str
    phase: Phase
    tokens: int
    counts: Sparse
    domain: str = ""
    depth: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """One line of a ledger: what a planning step missed and, when measured, how long it took."""

    step: int
    misses: int
    time_ns: int  # 0: not measured


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a parser got out of a file, before it is held against a model."""

    format: str
    n_expert: int = 0  # 0: the file does not say
    n_used: int = 0
    parts: Sequence[RawPart] = ()
    trace: Trace | None = None
    ordinal: bool = False  # layers are counted among the layers that route
    orders: Mapping[int, Sequence[int]] = field(default_factory=dict)  # ids are positions: original ids
    ledger: Sequence[StepCost] = ()
    model: str = ""  # table digest, where the file says it
    notes: tuple[str, ...] = ()
