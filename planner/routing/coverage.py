"""How much of the routing a set of hot experts serves, chosen on some sources and judged on others.

All curves run over k = 0..n_expert hot experts of one layer: the share of routed choices they serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.plan.plan import ExpertOrder
from planner.powers import power
from planner.routing.expert_counts import Heat

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Tokens of one source at which half of the excess over uniform is believed. Published single-prompt
# profiles keep 0.53 (Qwen3-30B-A3B, 40 % resident) to 0.67 (Gemma-4-26B-A4B, 631 tokens) of it elsewhere.
HALF_TRUST_TOKENS = 512
PSEUDO_COUNT = 0.5  # Jeffreys' prior of a multinomial, per expert
MAX_FOLDS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Heat as arrays, one entry of the first axis a source (a prompt, a workload)."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    counts: Floats  # (sources, layers, experts)
    trust: Floats  # (sources, layers), 0..1: how much a source says about another prompt


def sources_of(heat: Heat) -> Sources:
    """Counts by source, phases of one source added; trust grows with the tokens seen.

    A source of unknown length is trusted like one of `HALF_TRUST_TOKENS`.
    """
    names, layers = heat.sources, heat.layers
    counts = np.zeros((len(names), len(layers), heat.n_expert))
    tokens = np.zeros(len(names))
    for part in heat.parts:
        source = names.index(part.source)
        tokens[source] += part.tokens or HALF_TRUST_TOKENS
        for layer, row in part.counts.items():
            counts[source, layers.index(layer)] += row
    seen = np.repeat(tokens[:, None], len(layers), axis=1)
    if heat.n_used:  # the last layer routes only the output rows of a prompt
        seen = np.minimum(seen, counts.sum(axis=2) / heat.n_used)
    seen = np.where(counts.sum(axis=2) > 0, seen, 0.0)
    return Sources(names, layers, counts, seen / (seen + HALF_TRUST_TOKENS))


def hot_order(heat: Heat, n_group: int = 1) -> tuple[ExpertOrder, ...]:
    """Experts of each layer, hot first by smoothed shares, ties by id.

    A long source weighs no more than another long one, so that one workload cannot drown the rest.
    With `n_group` > 1 (group-limited routing) groups move as blocks and experts only inside them.
    """
    if not heat.parts:
        return ()
    sources = sources_of(heat)
    orders = _orders(shares(sources), n_group)
    return tuple(
        ExpertOrder(layer=layer, order=tuple(int(e) for e in order))
        for layer, order in zip(sources.layers, orders, strict=True)
    )


def curves(heat: Heat, n_group: int = 1) -> dict[int, tuple[float, ...]]:
    """Concave coverage of each layer by its k hottest experts, as expected on tokens not seen yet.

    With several sources: chosen on all but one (at most ten folds), judged on that one. With a single
    source: its own curve, pulled towards uniform by the trust in it. Element 0 is 0, the last is 1.
    """
    if not heat.parts:
        return {}
    sources = sources_of(heat)
    rows = held_out(sources, n_group) if len(sources.names) > 1 else _discounted(sources, n_group)
    return {la: _concave(row) for la, row in zip(sources.layers, rows, strict=True)}


def held_out(sources: Sources, n_group: int = 1) -> Floats:
    """Leave-one-source-out coverage, (layers, experts + 1); needs two sources.

    Each fold weighs by the trust in what it was chosen on and judged on. A layer that only one
    source saw has no judge: its own curve is discounted instead.
    """
    total = np.zeros((len(sources.layers), sources.counts.shape[2] + 1))
    weight = np.zeros(len(sources.layers))
    for orders, trust, judges in folds(sources, n_group):
        for index in judges:
            w = sources.trust[index] * trust
            total += w[:, None] * cumulative(sources.counts[index], orders)
            weight += w
    alone = weight == 0
    total[alone] = _discounted(sources, n_group)[alone]
    return np.asarray(total / np.where(alone, 1.0, weight)[:, None])


def folds(sources: Sources, n_group: int = 1) -> Iterator[tuple[Ints, Floats, Sequence[int]]]:
    """Orders chosen on all sources but some, the trust in them (layers), and those left out to judge."""
    n = len(sources.names)
    fold_of = np.arange(n) % min(n, MAX_FOLDS)
    for fold in range(min(n, MAX_FOLDS)):
        train = _subset(sources, fold_of != fold)
        judges = [int(index) for index in np.flatnonzero(fold_of == fold)]
        yield _orders(shares(train), n_group), train.trust.sum(axis=0), judges


def cumulative(counts: Floats, orders: Ints) -> Floats:
    """Share of the counts (layers, experts) served by the first k of each order, k = 0..n_expert."""
    taken = np.take_along_axis(counts, orders, axis=1)
    total = np.maximum(taken.sum(axis=1, keepdims=True), 1e-300)
    curve = np.concatenate([np.zeros((len(taken), 1)), np.cumsum(taken, axis=1) / total], axis=1)
    curve[:, -1] = 1.0
    return np.asarray(curve)


def judge(heat: Heat, orders: Sequence[ExpertOrder]) -> dict[int, tuple[float, ...]]:
    """Coverage, on this heat, of hot sets chosen elsewhere; layers that both know."""
    by_layer = {o.layer: o.order for o in orders}
    total = {la: row for la, row in heat.total().items() if la in by_layer}
    if not total:
        return {}
    rows = cumulative(np.array([*total.values()], dtype=float), np.array([by_layer[la] for la in total]))
    return {la: tuple(map(float, row)) for la, row in zip(total, rows, strict=True)}


def expected_distinct(heat: Heat, n_tokens: int) -> dict[int, float]:
    """Experts that a batch of `n_tokens` independent tokens is expected to touch, by layer.

    1 - (1 - k p)^n summed over experts; empty when the experts per token are not known. Prompts repeat
    themselves, so it is an upper estimate of what streaming the layer's experts for a prompt must move.
    """
    if not heat.parts or not heat.n_used:
        return {}
    sources = sources_of(heat)
    inclusion = np.minimum(1.0, shares(sources) * heat.n_used)
    return {
        layer: math.fsum(1.0 - power(1.0 - chance, n_tokens) for chance in map(float, row))
        for layer, row in zip(sources.layers, inclusion, strict=True)
    }


def mean_curve(by_layer: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """The mean of the layers' curves: each layer routes equally many choices."""
    return tuple(map(float, np.mean([*by_layer.values()], axis=0)))


def _subset(sources: Sources, keep: NDArray[np.bool_]) -> Sources:
    names = tuple(n for n, k in zip(sources.names, keep, strict=True) if k)
    return Sources(names, sources.layers, sources.counts[keep], sources.trust[keep])


def shares(sources: Sources) -> Floats:
    """Smoothed share of each expert, (layers, experts): trusted sources count alike."""
    counts = sources.counts + PSEUDO_COUNT
    each = counts / counts.sum(axis=2, keepdims=True)
    trust = sources.trust[:, :, None]
    uniform = 1.0 / counts.shape[2]
    return np.asarray(
        np.where(trust.sum(0) > 0, (trust * each).sum(0) / np.maximum(trust.sum(0), 1e-12), uniform)
    )


def _orders(rows: Floats, n_group: int) -> Ints:
    """Expert ids, hot first, (layers, experts)."""
    rounded = np.round(rows, 12)  # sums of floats must not decide ties
    if n_group <= 1:
        return np.asarray(np.argsort(-rounded, axis=1, kind="stable"))
    blocks = rounded.reshape(len(rounded), n_group, -1)
    inside = np.argsort(-blocks, axis=2, kind="stable")
    among = np.argsort(-np.round(blocks.sum(axis=2), 11), axis=1, kind="stable")
    ids = inside + np.arange(n_group)[None, :, None] * blocks.shape[2]
    return np.asarray(np.take_along_axis(ids, among[:, :, None], axis=1).reshape(rounded.shape))


def _discounted(sources: Sources, n_group: int) -> Floats:
    """Coverage expected from all sources together, pulled towards uniform by their trust."""
    pooled = sources.counts.sum(axis=0)
    own = cumulative(_posterior(pooled), _orders(shares(sources), n_group))
    uniform = np.linspace(0.0, 1.0, own.shape[1])
    trust = sources.trust.max(axis=0)[:, None]
    return np.asarray(uniform + trust * (own - uniform))


def _posterior(counts: Floats) -> Floats:
    """Posterior mean share of each expert, so that the luck of the hottest is not taken for heat.

    Dirichlet prior around uniform, its weight from the counts' own spread by the method of moments:
    counts no more uneven than chance give uniform shares. Rows (layers, experts) add up to 1.
    """
    n, experts = counts.sum(axis=1, keepdims=True), counts.shape[1]
    mean = np.maximum(n / experts, 1e-12)
    spread = ((counts - mean) ** 2 / mean).sum(axis=1, keepdims=True) / max(1, experts - 1)
    weight = np.where(spread > 1.0, (n - spread) / np.maximum(spread - 1.0, 1e-12), np.inf)
    weight = np.clip(weight, 0.0, 1e15)
    return np.asarray((counts + weight / experts) / np.maximum(n + weight, 1e-12))


def _concave(curve: Floats) -> tuple[float, ...]:
    """The least-squares concave curve with the same ends: increments pooled until they fall."""
    sums: list[float] = []
    sizes: list[int] = []
    for step in np.diff(curve):
        sums.append(float(step))
        sizes.append(1)
        while len(sums) > 1 and sums[-2] * sizes[-1] < sums[-1] * sizes[-2]:
            last, size = sums.pop(), sizes.pop()
            sums[-1] += last
            sizes[-1] += size
    steps = [s / n for s, n in zip(sums, sizes, strict=True) for _ in range(n)]
    made = np.minimum(1.0, np.concatenate([[0.0], np.cumsum(steps)]))
    made[-1] = 1.0
    return tuple(map(float, made))
