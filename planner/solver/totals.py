"""Objective and memory of many placements at once, to rank them; what one of them costs says `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.solver.labels import Ints
from planner.solver.problem import Matrix, Option, Problem, Solution

Bools = NDArray[np.bool_]


class Totals:
    """The options of one problem as arrays, one row each; decisions alike have the same rows."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        rows: list[Option] = []
        first: dict[int, int] = {}
        for decision in problem.decisions:
            if id(decision.options) not in first:
                first[id(decision.options)] = len(rows)
                rows += decision.options
        self._first = np.array([first[id(d.options)] for d in problem.decisions], dtype=np.int64)
        self._price = np.array([problem.price(o.decode_ns, o.prefill_ns) for o in rows], dtype=np.int64)
        self._memory = np.array([o.memory for o in rows], dtype=np.int64)
        self._entry = np.array([o.entry for o in rows], dtype=np.int64)
        self._exit = np.array([o.exit for o in rows], dtype=np.int64)
        self._shares = np.zeros((len(rows), len(problem.shares)), dtype=bool)
        for row, option in enumerate(rows):
            self._shares[row, list(option.shares)] = True
        self._host = np.array([d.host for d in problem.devices])
        self._matrices: dict[tuple[int, int], Ints] = {}

    def of(self, solutions: Sequence[Solution]) -> tuple[Ints, Bools]:
        """Of each placement the objective, and whether it fits into the memory of devices and pools.

        One that fits may still break another rule.
        """
        rows = self._first + np.array([s.choices for s in solutions], dtype=np.int64)
        return self._objective(rows), self._fits(rows)

    def _objective(self, rows: Ints) -> Ints:
        problem = self._problem
        total: Ints = problem.price(problem.decode_ns, problem.prefill_ns) + self._price[rows].sum(axis=1)
        for edge in problem.edges:
            source, target = self._exit[rows[:, edge.source]], self._entry[rows[:, edge.target]]
            total += self._priced(edge.decode_ns, edge.prefill_ns)[source, target]
        for mixed in problem.mixed:
            places = [self._host[self._entry[rows[:, mixed.decisions]]]]
            if not mixed.layers_only:
                places.append(self._host[self._exit[rows[:, mixed.decisions]]])
            hosted = np.concatenate(places, axis=1)
            pays = hosted.any(axis=1) & ~hosted.all(axis=1)
            total += pays * problem.price(mixed.decode_ns, mixed.prefill_ns)
        return total

    def _priced(self, decode: Matrix, prefill: Matrix) -> Ints:
        key = id(decode), id(prefill)
        if key not in self._matrices:
            pairs = (zip(a, b, strict=True) for a, b in zip(decode, prefill, strict=True))
            self._matrices[key] = np.array([[self._problem.price(*p) for p in row] for row in pairs])
        return self._matrices[key]

    def _fits(self, rows: Ints) -> Bools:
        problem = self._problem
        memory: Ints = np.asarray(self._memory[rows].sum(axis=1), dtype=np.int64)
        asked: Bools = np.asarray(self._shares[rows].any(axis=1))
        for index, share in enumerate(problem.shares):
            memory[:, share.device] += asked[:, index] * share.size_bytes
        fits = np.ones(len(rows), dtype=bool)
        for index, device in enumerate(problem.devices):
            fits &= memory[:, index] <= device.capacity_bytes
        for index, pool in enumerate(problem.pools):
            members = [d.pool == index for d in problem.devices]
            fits &= memory[:, members].sum(axis=1) <= pool.capacity_bytes
        return fits
