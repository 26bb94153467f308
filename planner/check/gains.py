"""What a plan gains over stock rules, and how much of it is due to flags that these may be given too."""

from __future__ import annotations

from dataclasses import dataclass

from planner.check.recorded_rules import objective_ns
from planner.plan.load_spec import pins_host_weights
from planner.plan.plan import Baseline, Plan
from planner.plan.stock_rule import PLAIN
from planner.workload import ENGINE_UBATCH


@dataclass(frozen=True, slots=True)
class Gains:
    """How many times as fast a request is answered: by the flags alone, by the placement beside them."""

    rule: Baseline  # the best as the engine runs it unless told
    flags: tuple[str, ...]  # what the plan tells it
    by_flags: float
    by_placement: float


def best_rule(plan: Plan) -> Baseline | None:
    """The stock rule that answers a request first, under the plan's flags, pins and limits."""
    rules = [b for b in plan.baselines if b.feasible]
    return min(rules, key=lambda b: objective_ns(plan, b), default=None)


def gains(plan: Plan) -> Gains | None:
    """Flags and placement apart; None of a plan without flags of its own, or beside which no rule fits."""
    best = best_rule(plan)
    if plan.untuned is None or best is None:
        return None
    tuned = objective_ns(plan, best)
    return Gains(
        plan.untuned,
        flags_of(plan),
        objective_ns(plan, plan.untuned) / max(tuned, 1),
        tuned / max(plan.predicted.objective_ns, 1),
    )


def flags_of(plan: Plan) -> tuple[str, ...]:
    """What a plan tells the engine beside the placement, as llama.cpp spells it."""
    told = {
        "--no-mmap": pins_host_weights(plan),
        PLAIN: not plan.op_offload,
        "--no-repack": plan.repack is False,
        f"-ub {plan.workload.n_ubatch}": plan.workload.n_ubatch != ENGINE_UBATCH,
    }
    return tuple(flag for flag, given in told.items() if given)


def gains_text(plan: Plan) -> str:
    """The same as a sentence; "" where there is nothing to tell apart."""
    found = gains(plan)
    if found is None or not found.flags:
        return ""
    if {f"{found.by_flags:.3f}", f"{found.by_placement:.3f}"} == {"1.000"}:
        return ""
    rule = found.rule
    return (
        f"A request is answered {found.by_flags * found.by_placement:.3f} times as fast as by the best stock "
        f"rule without flags ({rule.name}, {rule.setting}): {found.by_flags:.3f} times by "
        f"{' '.join(found.flags)}, which it could be given too, and {found.by_placement:.3f} times by the "
        "placement."
    )
