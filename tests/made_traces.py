"""Routing traces made for tests: given step by step, or with the locality of text."""

from __future__ import annotations

import numpy as np

from planner.routing import trace as traces
from planner.routing.trace import Trace


def trace_of(steps: list[list[list[int]]], n_expert: int = 6) -> Trace:
    """Decode trace of one source: steps[step][layer] = ids."""
    rows = [(0, True, s, la, tuple(ids)) for s, layers in enumerate(steps) for la, ids in enumerate(layers)]
    return traces.make("", n_expert, ["a"], rows)


def local_trace(steps: int, layers: int, n_expert: int, k: int, stick: float, seed: int = 1) -> Trace:
    """Zipf routing in which each expert stays for the next step with probability `stick`."""
    rng = np.random.default_rng(seed)
    grid: list[list[list[int]]] = [[] for _ in range(steps)]
    for _ in range(layers):
        base = np.log(rng.permutation(1 / np.arange(1, n_expert + 1)))
        ids = np.arange(k)
        for step in range(steps):
            score = rng.gumbel(size=n_expert) + base
            score[ids[rng.random(k) < stick]] += 9
            ids = np.argsort(-score)[:k]
            grid[step].append([int(i) for i in ids])
    return trace_of(grid, n_expert)
