"""The plans of atsplan's own solver as contenders, from a profile of this machine and a routing trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu.contenders import GPU, Contender
from planner.machine.budgets import budgets_for
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.passes.make_plan import make_plan
from planner.plan.known import Known
from planner.plan.load_spec import load_spec
from planner.plan.plan import ExpertOrder, Plan
from planner.plan.request import Request
from planner.routing.coverage import expected_distinct, judge
from planner.routing.expert_counts import Heat, Part, Phase
from planner.solver.clock import Clock
from planner.workload import Workload


def solve(
    inventory: Inventory,
    profile: Profile,
    budget_bytes: int,
    whole_bytes: int,
    work: Workload,
    choices: Mapping[str, Sequence[int]],
    stripes: bool,
) -> tuple[Contender, Plan]:
    """The best placement for decode and prefill of `work`; experts already lie hot first in the file.

    `budget_bytes` counts as VRAM was measured, `whole_bytes` what the model wholly in VRAM took then: a
    plan counts more (the driver's context) and estimates the rest, so that it is given the same difference.
    """
    known, clock = known_of(inventory, choices, work, stripes), Clock(10.0)
    roomy = Request(budgets_for(profile, {}), work, stripes=False)
    free = make_plan(inventory, profile, roomy, known, clock=clock)
    everything = next(use for use in free.devices if use.name == GPU).used_bytes + budget_bytes - whole_bytes
    request = Request(budgets_for(profile, {GPU: everything}), work, stripes=stripes)
    plan = make_plan(inventory, profile, request, known, clock=clock)
    sites = [unit.site.memory for unit in plan.units if unit.unit.endswith("experts")]
    counts = ", ".join(f"{sites.count(site)} {site}" for site in dict.fromkeys(sites))
    name = "plan" if stripes else "plan without stripes"
    return Contender(name, f"experts: {counts}", load_spec(plan)), plan


def known_of(
    inventory: Inventory, choices: Mapping[str, Sequence[int]], work: Workload, stripes: bool
) -> Known:
    """Curves of the file's own order of experts on the trace; none for a dense model."""
    if not choices:
        return Known()
    counts = {int(layer): tuple(row) for layer, row in choices.items()}
    n_expert, n_used = inventory.number("expert_count"), inventory.number("expert_used_count")
    counts = {layer: row + (0,) * (n_expert - len(row)) for layer, row in counts.items()}
    tokens = sum(next(iter(counts.values()))) // n_used
    part = Part("trace", Phase.MIXED, tokens, counts)
    heat = Heat(inventory.table_digest(), n_expert, n_used, (part,))
    orders = tuple(ExpertOrder(layer=layer, order=tuple(range(n_expert))) for layer in sorted(counts))
    return Known(
        curves=judge(heat, orders) if stripes else {},
        distinct=expected_distinct(heat, work.n_ubatch),
    )
