"""Our choice of hot experts in the files that patched engines read, within a byte budget.

Engines order by count: what is exported are counts that make them choose what was chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.model.routed_layers import MoeShape
from planner.quoting import json_text
from planner.routing.coverage import hot_order, shares, sources_of
from planner.routing.expert_counts import Heat

Choice = Mapping[int, Sequence[int]]  # layer -> hot experts, hottest first

PERF_SCHEMA = "llama.cpp.moe_layer_perf.v1"
MAX_ROWS = 1 << 20  # of a position CSV; larger counts are replaced by the smallest that keep the order


def choose(
    heat: Heat, expert_bytes: Mapping[int, int], budget_bytes: int, per_layer: int = 0
) -> dict[int, list[int]]:
    """Hot experts of all layers within a budget, as the patched engines fill it.

    Greedy by score (share of the layer's choices, in the smoothed heat), then layer, then expert; what
    does not fit is skipped and smaller ones behind it may still fit. `per_layer` 0: no cap.
    """
    sources = sources_of(heat)
    share = shares(sources)
    ranked = sorted(
        (-round(float(share[index, expert]), 12), layer, expert)
        for index, layer in enumerate(sources.layers)
        for expert in range(heat.n_expert)
    )
    chosen: dict[int, list[int]] = {layer: [] for layer in sources.layers}
    left = budget_bytes
    for _, layer, expert in ranked:
        size = expert_bytes[layer]
        if size <= left and not 0 < per_layer <= len(chosen[layer]):
            chosen[layer].append(expert)
            left -= size
    return chosen


def choose_uniform(heat: Heat, shape: MoeShape, budget_bytes: int, per_layer: int = 0) -> Choice:
    """Equally many hot experts in every layer with heat, as many as the budget holds."""
    one_each = sum(shape.expert_bytes[layer] for layer in heat.layers)
    slots = min(budget_bytes // max(1, one_each), per_layer or heat.n_expert, heat.n_expert)
    return {layer: list(order)[:slots] for layer, order in all_experts(heat).items()}


def all_experts(heat: Heat) -> Choice:
    """Every expert of every layer, hottest first."""
    return {entry.layer: entry.order for entry in hot_order(heat)}


def perf_json(heat: Heat, choice: Choice) -> str:
    """`llama.cpp.moe_layer_perf.v1` with the counts of the chosen experts."""
    total = heat.total()
    layers = [
        {"layer": la, "experts": [[e, max(1, total[la][e])] for e in sorted(experts)]}
        for la, experts in sorted(choice.items())
        if experts
    ]
    root: dict[str, Any] = {
        "schema": PERF_SCHEMA,
        "enabled": True,
        "mode": "full",
        "n_expert": heat.n_expert,
        "n_expert_used": heat.n_used,
        "layers": layers,
    }
    return json_text(root, None) + "\n"


def positions_csv(heat: Heat, choice: Choice) -> str:
    """`pos,layer,id0,…` rows whose sums rank the chosen experts as here; its reader ignores the rest.

    True counts when they fit in about a million ids, else the smallest counts that keep the order.
    """
    total = heat.total()
    k = max(2, heat.n_used)  # two ids a row at least: three columns tell this format from plain choices
    if sum(total[la][e] for la, experts in choice.items() for e in experts) > MAX_ROWS:
        counts = {la: _ranks(experts) for la, experts in choice.items()}
    else:
        counts = {la: _counts(total[la], experts) for la, experts in choice.items()}
    lines = [line for layer, row in sorted(counts.items()) for line in _rows(layer, row, k)]
    return "\n".join(lines) + "\n"


def _rows(layer: int, counts: Mapping[int, int], k: int) -> list[str]:
    """Rows of at most k different experts in which each appears as often as its count."""
    ids = [expert for expert, count in counts.items() for _ in range(count)]
    height = max(-(-len(ids) // k), max(counts.values(), default=0))
    padded = ids + [-1] * (k * height - len(ids))
    return [f"{pos},{layer},{','.join(map(str, padded[pos::height]))}" for pos in range(height)]


def _ranks(experts: Sequence[int]) -> dict[int, int]:
    """The smallest counts that order the experts so: ties go to the lower id in the reader."""
    counts: dict[int, int] = {}
    level, after = 0, -1
    for expert in reversed(experts):
        level += after < expert
        counts[expert] = level
        after = expert
    return dict(reversed(counts.items()))


def _counts(row: Sequence[int], experts: Sequence[int]) -> dict[int, int]:
    """True counts where they order the experts as chosen, raised where smoothing chose otherwise."""
    counts: dict[int, int] = {}
    level, after = 1, -1
    for expert in reversed(experts):
        level = max(level + (after < expert and bool(counts)), row[expert])
        counts[expert] = level
        after = expert
    return dict(reversed(counts.items()))


def perms_json(heat: Heat) -> str:
    """perms.json of mbolt: the hot-first order as every layout, with counts by original id."""
    total, orders = heat.total(), all_experts(heat)
    tokens = sum(p.tokens for p in heat.parts)
    layers = []
    for layer, order in orders.items():
        order = list(order)
        layers.append(
            {
                "layer": layer,
                "clique_perm": order,
                "chain_perm": order,
                "heat_perm": order,
                "heat": list(total[layer]),
                "lift": {},
                "n_clusters": 0,
                "cluster_sizes": [],
                "top_cliques": [],
            }
        )
    root = {
        "n_layers": len(layers),
        "n_expert": heat.n_expert,
        "n_tokens": tokens,
        "train_frac": 1.0,
        "train_tokens": tokens,
        "layers": layers,
    }
    return json_text(root, None) + "\n"
