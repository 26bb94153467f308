"""Hybrid experts as contenders of benchmarks.rounds.experts, at no more VRAM than the stock rules hold:

    python -m benchmarks.rounds.experts … --ours "all lanes=benchmarks.rounds.hybrid_contender:all_lanes"

Slots hold the experts that are hottest on a stream of the same habits and another seed than the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.gpu import contenders as rules
from benchmarks.rounds.experts import Setup
from benchmarks.rounds.paired import Session
from planner.plan.load_spec import HYBRID_BANKS, LoadSpec
from planner.site import Site, SiteKind
from profiler.routed import codes, stream
from profiler.routed.presets import PRESETS

SEEN = 8192  # tokens of the stream that the slots are chosen on
_SEED = 77


def all_lanes(setup: Setup) -> Session:
    """Device, CPU and bus at once."""
    return slotted(setup, 2)


def cpu_lane(setup: Setup) -> Session:
    """Device and CPU at once; the bus brings nothing while decoding."""
    return slotted(setup, 0)


def one_bank(setup: Setup) -> Session:
    """All lanes; a prompt brings a layer's experts when the layer has chosen, not before."""
    return slotted(setup, 2, banks=1)


def forwarding(setup: Setup) -> Session:
    """Everything in slots: what the device in the way costs."""
    shape = rules.shape_of(setup.inventory)
    return setup.live(rules.Contender("forwarding", "", _spec(setup, shape, shape.n_experts, 0, 1)))


def slotted(setup: Setup, guests: int, banks: int = HYBRID_BANKS) -> Session:
    """As many slots in every layer as the cell's share holds, guests and the stage counted."""
    shape = rules.shape_of(setup.inventory)
    k = slots_of(setup.share, shape.n_experts, len(shape.moe_layers), guests, banks)
    return setup.live(
        rules.Contender("hybrid", f"{k} slots, {guests} guests", _spec(setup, shape, k, guests, banks))
    )


def is_usual(factors: Mapping[str, Any]) -> bool:
    """Whether a cell decodes one sequence behind the usual depth; journals of before have no such factors."""
    return factors.get("seqs", 1) == 1 and factors.get("depth") is None


def slots_of(share: float, n_experts: int, n_layers: int, guests: int, banks: int) -> int:
    """Slots of each layer that a share of all expert bytes pays for, guests and the stage counted."""
    stage = -(-banks * n_experts // n_layers)
    # The stock rule holds a layer's copy for prompts beside its share: worth two slots a layer and more, of
    # which slices of the graph, captured apart, take a part. Measured VRAM stays 1 to 2 % below the rule's.
    # Of few large experts such a slot is more than the slices leave.
    return max(int(share * n_experts) - guests - stage + (2 if n_experts >= 128 else 1), 1)


def _spec(setup: Setup, shape: rules.Shape, k: int, guests: int, banks: int) -> LoadSpec:
    plain = rules.whole(shape, setup.workload).spec
    orders = hot_orders(str(setup.cell.factors["preset"]), shape.n_layers)
    buffer = str(Site(SiteKind.HYBRID, setup.device, k, guests))
    return replace(
        plain,
        overrides=((rf"^blk\.\d+\.(?:{'|'.join(shape.kinds)})\.weight$", buffer),),
        residents=tuple((layer, shape.n_experts, orders[layer][:k]) for layer in shape.moe_layers),
        guests=tuple((layer, guests) for layer in shape.moe_layers),
        banks=banks,
        use_mmap=False,
    )


@cache
def hot_orders(preset: str, layers: int) -> tuple[tuple[int, ...], ...]:
    """Expert ids of every layer, most chosen first."""
    habits = PRESETS[preset].habits
    drawn = stream.codes_of(habits, SEEN, _SEED)
    chosen = codes.chosen_by_code(habits, layers)
    found = []
    for layer in range(layers):
        count = np.bincount(chosen[layer][drawn].ravel(), minlength=habits.n_expert)
        found.append(tuple(int(e) for e in np.argsort(-count, kind="stable")))
    return tuple(found)
