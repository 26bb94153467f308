"""Partial placements as arrays, and the removal of those that another beats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEVER = 1 << 62  # a cost above every placement's
_SAMPLE = 256  # labels that all others are compared with, fewer where there are many others
_EFFORT = 600_000
_SWEEP = 8  # of the sample, after which those that are beaten are put away


@dataclass(frozen=True, slots=True)
class Labels:
    """Partial placements: cost, what they use of each limit, the port they end on, where they came from."""

    cost: Ints
    memory: Ints
    port: Ints
    parent: Ints
    choice: Ints

    @property
    def size(self) -> int:
        return len(self.cost)

    def take(self, which: NDArray[np.generic]) -> Labels:
        return Labels(
            self.cost[which], self.memory[:, which], self.port[which], self.parent[which], self.choice[which]
        )


def joined(parts: list[Labels]) -> Labels:
    return Labels(
        np.concatenate([p.cost for p in parts]),
        np.concatenate([p.memory for p in parts], axis=1),
        np.concatenate([p.port for p in parts]),
        np.concatenate([p.parent for p in parts]),
        np.concatenate([p.choice for p in parts]),
    )


def pareto(labels: Labels) -> Labels:
    """Labels that no other beats: exact with one memory, almost with several."""
    if labels.size < 2:
        return labels
    memory = labels.memory
    if not len(memory):
        return labels.take(np.array([int(labels.cost.argmin())]))
    if len(memory) == 1:
        order = np.lexsort((labels.cost, memory[0]))
        cost = labels.cost[order]
        before = np.concatenate([[NEVER], np.minimum.accumulate(cost)[:-1]])
        return labels.take(order[cost < before])
    if len(memory) == 2 and int(memory[1].max()) < _SAMPLE:  # memory and changes of the layer device
        return joined([_pareto_at(labels, int(turns)) for turns in np.unique(memory[1])])
    order = np.lexsort((*memory[::-1], labels.cost))
    labels = labels.take(order)
    same = np.zeros(labels.size, dtype=bool)
    same[1:] = True
    for row in labels.memory:
        same[1:] &= row[1:] == row[:-1]
    return _sampled(labels.take(~same))


def _pareto_at(labels: Labels, turns: int) -> Labels:
    at = np.flatnonzero(labels.memory[1] == turns)
    order = at[np.lexsort((labels.cost[at], labels.memory[0][at]))]
    cost = labels.cost[order]
    before = np.concatenate([[NEVER], np.minimum.accumulate(cost)[:-1]])
    return labels.take(order[cost < before])


def _sampled(labels: Labels) -> Labels:
    """Remove what some label of a sample beats; labels come sorted by cost."""
    count = min(_SAMPLE, max(_EFFORT // labels.size, 8), labels.size)
    left, rows = np.arange(labels.size), list(labels.memory)
    alive = np.ones(labels.size, dtype=bool)
    for n, pick in enumerate(np.unique(np.linspace(0, labels.size - 1, count).astype(np.int64)), 1):
        at = int(left.searchsorted(pick))
        if at == len(left) or left[at] != pick or not alive[at]:
            continue
        # Row by row: numpy reduces along a short first axis several times as slowly.
        less = rows[0][at + 1 :] < rows[0][at]
        for row in rows[1:]:
            less |= row[at + 1 :] < row[at]
        alive[at + 1 :] &= less
        if not n % _SWEEP:
            left, rows = left[alive], [row[alive] for row in rows]
            alive = np.ones(len(left), dtype=bool)
    return labels.take(left[alive])
