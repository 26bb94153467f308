"""The Lagrangian relaxation of a chain: every memory priced by a multiplier, the rest solved backwards.

It is asked for thousands of multipliers. Decisions that are alike are priced once for each; along the chain
only the best option of every port is compared, in plain floats: their sums round as the arrays' own would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.solver.capacities import Bools, Floats
from planner.solver.labels import NEVER, Ints
from planner.solver.stages import Stage, stage_cost, stage_over

LEAST, _MOST = 1e-9, 1e9  # multipliers of one memory: where a search for the best begins, and gives up
_PIECES = 50  # of a dual that are looked at; some six are enough


@dataclass(frozen=True, slots=True)
class _Kind:
    """Decisions that are alike in one scenario, and of their prices what no multiplier changes."""

    stage: Stage
    allowed: Bools
    by_port: Ints  # the options, those of one port together
    first: Ints  # of each port that some option has, in `by_port`
    ports: Ints  # which these are
    turning: bool  # whether a limit on changes of device has a price here
    over: list[list[float]]
    turned: Floats


def _kind(stage: Stage, allowed: Bools) -> _Kind:
    by_port = np.argsort(stage.port, kind="stable")
    ports, first = np.unique(stage.port[by_port], return_index=True)
    over = stage.before.astype(np.float64)
    turning = bool(stage.turns.any())
    return _Kind(stage, allowed, by_port, first, ports, turning, over.tolist(), over[:, stage.entry])


@dataclass(frozen=True, slots=True)
class _Priced:
    """Decisions that are alike, at some multipliers."""

    reduced: Floats  # by option; infinite where it is not allowed
    least: list[float]  # of the options of each port
    over: list[list[float]]  # by the port before and the entry device
    turned: Floats  # the same by the port before and the option


@dataclass(frozen=True, slots=True)
class Bound:
    """A relaxation: suffix costs by decision and the port before it, at given multipliers."""

    multipliers: Floats
    suffix: Floats  # (decisions + 1, ports)
    value: float
    priced: tuple[_Priced, ...]  # by kind of decision


@dataclass(frozen=True, slots=True)
class Attained:
    """A placement that attains a relaxation: what it uses of each limit, its cost, its options."""

    memory: Ints
    cost: int
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A straight piece of the dual of one memory: a placement that attains the relaxation at a multiplier."""

    at: float  # that multiplier
    slope: int  # by how much the placement overfills the memory
    placement: Attained

    def meets(self, other: _Piece) -> float:
        """The multiplier where it crosses another one."""
        return (other.placement.cost - self.placement.cost) / (self.slope - other.slope)


@dataclass(frozen=True, slots=True)
class Top:
    """Where the dual of one memory is highest, and the cheapest placement that fits of those on the way."""

    multiplier: float
    fits: Attained | None


class Relaxation:
    """The chain of one scenario: options that are allowed, what is left of each memory."""

    def __init__(
        self,
        stages: Sequence[Stage],
        allowed: Sequence[Bools],
        ports: Sequence[tuple[int, int]],
        devices: int,
        fixed_ns: int,
        capacity: Ints,
    ) -> None:
        self._stages, self._fixed_ns, self._capacity = stages, fixed_ns, capacity
        self._entries, self._devices = [entry for entry, _ in ports], devices
        kinds: dict[tuple[int, bytes], int] = {}
        self._alike: list[_Kind] = []
        self._kinds: list[int] = []  # of each decision
        for stage, mine in zip(stages, allowed, strict=True):
            key = id(stage), mine.tobytes()
            if key not in kinds:
                kinds[key] = len(kinds)
                self._alike.append(_kind(stage, mine))
            self._kinds.append(kinds[key])
        self._turning = any(kind.turning for kind in self._alike)

    def bound(self, multipliers: Floats) -> Bound:
        """Relax every memory into the cost and solve the chain backwards."""
        priced = tuple(self._priced(kind, multipliers) for kind in self._alike)
        after = [0.0] * len(self._entries)
        rows = [after]
        for kind in reversed(self._kinds):
            one = priced[kind]
            by_entry = [math.inf] * self._devices
            for entry, least, rest in zip(self._entries, one.least, after, strict=True):
                if (total := least + rest) < by_entry[entry]:
                    by_entry[entry] = total
            after = [min(map(float.__add__, row, by_entry)) for row in one.over]
            rows.append(after)
        rest = math.fsum(float(m * c) for m, c in zip(multipliers, self._capacity, strict=True))
        value = min(after) + self._fixed_ns - rest
        return Bound(multipliers, np.array(rows[::-1]), value if math.isfinite(value) else NEVER, priced)

    def _priced(self, kind: _Kind, multipliers: Floats) -> _Priced:
        stage = kind.stage
        reduced = np.where(kind.allowed, stage_cost(stage, multipliers), np.inf)
        least = np.full(len(self._entries), np.inf)
        least[kind.ports] = np.minimum.reduceat(reduced[kind.by_port], kind.first)
        if not kind.turning:
            return _Priced(reduced, least.tolist(), kind.over, kind.turned)
        over = stage_over(stage, multipliers)
        return _Priced(reduced, least.tolist(), over.tolist(), over[:, stage.entry])

    def walk(self, bound: Bound) -> Attained:
        """The placement that attains a relaxation."""
        at = int(bound.suffix[0].argmin())
        used, cost = np.zeros(len(self._capacity), dtype=np.int64), self._fixed_ns
        choices = []
        for i, kind in enumerate(self._kinds):
            stage, one = self._stages[i], bound.priced[kind]
            choice = int((one.reduced + bound.suffix[i + 1][stage.port] + one.turned[at]).argmin())
            used += stage.memory[:, choice]
            if self._turning:
                used += stage.turns[:, at, stage.entry[choice]]
            cost += int(stage.cost[choice] + stage.before[at, stage.entry[choice]])
            choices.append(choice)
            at = int(stage.port[choice])
        return Attained(used, cost, tuple(choices))

    def top(self, near: float) -> Top:
        """The best multiplier of one memory, looked for from one `near` it.

        The dual is concave, of straight pieces, and what attains it at a multiplier is one of them. Where a
        piece that rises and one that falls cross, a third lies below them, or the dual is highest.
        """
        low = self._piece(0.0)
        if low.slope <= 0:
            return Top(0.0, low.placement)
        high = self._piece(near)
        while high.slope > 0:
            if high.at >= _MOST:
                return Top(high.at, None)
            low, high = high, self._piece(high.at * 8)
        fits = high.placement
        for _ in range(_PIECES):
            near = min(max(low.meets(high), low.at), high.at)
            met = self._piece(near)
            if met.slope in (low.slope, high.slope):
                break
            low, high = (met, high) if met.slope > 0 else (low, met)
            fits = min(fits, high.placement, key=lambda placement: placement.cost)
        return Top(near, fits)

    def _piece(self, multiplier: float) -> _Piece:
        placement = self.walk(self.bound(np.array([multiplier])))
        return _Piece(multiplier, int(placement.memory[0] - self._capacity[0]), placement)
