"""The solver's own plan as a contender of benchmarks.rounds.experts, at the memory of `--n-cpu-moe`:

    ATSPLAN_PROFILE=profile.yaml python -m benchmarks.rounds.experts … \\
        --ours "plan=benchmarks.rounds.planned_contender:planned"

The profile is of this machine and visit (`atsplan profile MODEL`). Routing statistics are a stream of the
same habits and another seed than the measured one. The budget is what the planner counts for the cell's rule.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.gpu import contenders as rules
from benchmarks.rounds.experts import Setup
from benchmarks.rounds.hybrid_contender import SEEN, hot_orders
from benchmarks.rounds.paired import Session
from planner.constants import CPU
from planner.machine.budgets import budgets_for
from planner.machine.profile import Profile, from_text
from planner.model.inventory import Inventory
from planner.passes.make_plan import make_plan
from planner.plan.known import Known
from planner.plan.load_spec import load_spec
from planner.plan.plan import ExpertOrder, Plan
from planner.plan.request import Pin, Request
from planner.routing.coverage import expected_distinct, judge
from planner.routing.expert_counts import Heat, Part, Phase
from planner.workload import Workload
from profiler.routed import codes, stream
from profiler.routed.presets import PRESETS

PROFILE = "ATSPLAN_PROFILE"
_SEED = 79  # of the stream that says how many choices the slots serve


def planned(setup: Setup) -> Session:
    """What `solve --hybrid` with routing statistics chooses."""
    path = Path(os.environ[PROFILE])
    profile = from_text(path.read_text(), str(path))
    preset, share = str(setup.cell.factors["preset"]), setup.share
    plan = plan_for(profile, setup.inventory, preset, share, setup.workload, setup.device)
    return setup.live(rules.Contender("plan", told(plan), load_spec(plan)))


def plan_for(
    profile: Profile, inventory: Inventory, preset: str, share: float, work: Workload, device: str
) -> Plan:
    """The plan for the memory that the rule holds with this share of the experts in VRAM."""
    shape = rules.shape_of(inventory)
    first = shape.moe_layers[: rules.layers_on_cpu(shape, share)]
    pins = tuple(Pin(f"blk.{layer}.ffn_*_exps.weight", CPU) for layer in first)
    roomy = Request(budgets_for(profile, {}), work, pins=pins, stripes=False)
    rule = make_plan(inventory, profile, roomy, Known())
    held = next(use.used_bytes for use in rule.devices if use.name == device)
    request = Request(budgets_for(profile, {device: held}), work, hybrid=True, stripes=False)
    return make_plan(inventory, profile, request, known_of(inventory, preset, shape.n_layers, work))


def known_of(inventory: Inventory, preset: str, layers: int, work: Workload) -> Known:
    """Hot orders of one stream, and what they serve on another."""
    habits = PRESETS[preset].habits
    orders = tuple(
        ExpertOrder(layer=layer, order=order) for layer, order in enumerate(hot_orders(preset, layers))
    )
    heat = Heat(
        inventory.table_digest(),
        habits.n_expert,
        habits.n_used,
        (Part("stream", Phase.MIXED, SEEN, _counts(preset, layers)),),
    )
    return Known(judge(heat, orders), orders, expected_distinct(heat, work.n_ubatch))


@cache
def _counts(preset: str, layers: int) -> dict[int, tuple[int, ...]]:
    habits = PRESETS[preset].habits
    drawn = stream.codes_of(habits, SEEN, _SEED)
    chosen = codes.chosen_by_code(habits, layers)
    return {
        layer: tuple(np.bincount(chosen[layer][drawn].ravel(), minlength=habits.n_expert).tolist())
        for layer in range(layers)
    }


def told(plan: Plan) -> str:
    """Where the experts are, and what it is predicted to take."""
    sites = [str(unit.site) for unit in plan.units if unit.unit.endswith("experts")]
    counts = ", ".join(f"{sites.count(site)} {site}" for site in sorted(set(sites)))
    return f"{counts}; predicted {plan.predicted.tpot_ns / 1e6:.2f} ms"
