"""How many tokens to draft a step: a plan for each length, and the one whose accepted token is cheapest.

A longer draft makes a step's pass over the model dearer (more experts are touched, the CPU computes more)
and yields more tokens, each less likely. The placement is solved again for each length, since it changes
what the best one is; without a draft its memory is free for the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.cost.unit_time import calibration_for
from planner.errors import AnswerIsNo
from planner.machine.profile import Profile
from planner.memory.memory import Reserve
from planner.memory.reserves import Extras, reserves
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.passes.make_plan import make_plan
from planner.passes.predict import predict
from planner.passes.record import indistinct_ppm, search_of
from planner.plan.plan import Plan, Speculation
from planner.plan.request import SolveOptions
from planner.workload import Workload

LONGEST = 7  # drafted tokens: with the model's own next one, the batches of 2 to 8 that profiles hold
# DeepSeek-V3's NextN block accepts 3.20 tokens a step of seven drafted (model card of nebius/MTP-DeepSeek-V3-
# 0324): 0.70 each. Small models drafting for large ones: 0.53 to 0.75 (Leviathan et al. 2023, table 2).
PUBLISHED_PPM = 700_000
_PPM = 10**6


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts, and how often it is right."""

    accept_ppm: int
    extras: Extras  # with the draft model, or none: then the model's own NextN block drafts
    gpu: str  # the device of what names none
    longest: int = LONGEST


def draft_ns(draft: Inventory, profile: Profile, workload: Workload, device: str) -> int:
    """One token of a draft model that lies on one device as a whole, sampling included."""
    alone = workload.model_copy(update={"mtp": False})
    layers = (device,) * (layers_of(draft).n_all + 1)
    return predict(draft, profile, alone, layers, {}).tpot_ns


def best_length(
    inventory: Inventory,
    profile: Profile,
    budgets: Mapping[str, int],
    workload: Workload,
    options: SolveOptions,
    drafting: Drafting,
) -> Plan:
    """The plan with the draft length that serves a request soonest; its notes tell the other lengths.

    To draft nothing is one of them, and kept unless another is faster beyond doubt. Work and time are
    for all lengths together. Raises what the plan without a draft raises when no length has a plan.
    """
    work_s = options.work_s / (drafting.longest + 1)
    each = Speculation(
        accept_ppm=drafting.accept_ppm, tokens=0, **_drafter(inventory, profile, workload, drafting)
    )
    plans: dict[int, Plan] = {}
    for tokens in range(drafting.longest, -1, -1):
        if tokens and options.deadline.over():
            continue
        speculation = each.model_copy(update={"tokens": tokens})
        work, lines = _beside(inventory, workload, drafting, tokens)
        asked = replace(
            options,
            speculation=speculation,
            reserves=lines,
            work_s=work_s,
            deadline=options.deadline.part(1 / (tokens + 1)),
        )
        try:
            plans[tokens] = make_plan(inventory, profile, budgets, work, asked)
        except AnswerIsNo:
            if tokens == 0 and not plans:
                raise
    chosen = _choice(plans, indistinct_ppm(calibration_for(profile, inventory.table_digest())))
    told = ", ".join(f"{n}: {plans[n].predicted.tpot_ns / 1e6:.2f} ms" for n in sorted(plans))
    note = f"drafted tokens a step and time of a token, acceptance {drafting.accept_ppm / _PPM:g}: {told}"
    changed = {"notes": (*plans[chosen].notes, note), "search": search_of(options.deadline)}
    return plans[chosen].model_copy(update=changed)


def _choice(plans: Mapping[int, Plan], margin_ppm: int) -> int:
    objective = {n: plan.predicted.objective_ns for n, plan in plans.items()}
    best = min(objective, key=lambda n: (objective[n], n))
    if 0 in objective and objective[0] <= objective[best] + objective[best] * margin_ppm // _PPM:
        return 0
    return best


def _drafter(
    inventory: Inventory, profile: Profile, workload: Workload, drafting: Drafting
) -> dict[str, Any]:
    """The fields of a Speculation that say who drafts."""
    draft, device = drafting.extras.draft, drafting.extras.draft_device or drafting.gpu
    if draft is None:
        return {"draft_ns": calibration_for(profile, inventory.table_digest()).token_ns}
    return {
        "draft": draft.name,
        "table_digest": draft.table_digest(),
        "device": device,
        "draft_ns": draft_ns(draft, profile, workload, device),
    }


def _beside(
    inventory: Inventory, workload: Workload, drafting: Drafting, tokens: int
) -> tuple[Workload, tuple[Reserve, ...]]:
    """The workload and the memory beside the model for one length."""
    own = drafting.extras.draft is None
    work = workload.model_copy(update={"mtp": own and tokens > 0})
    extras = replace(drafting.extras, rollback=tokens)
    if not tokens:
        extras = replace(extras, draft=None)
    return work, reserves(inventory, work, extras, gpu=drafting.gpu)
