"""What a plan comes to in a sentence: how it fits, what it gains over stock rules, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands.shared.console import ms

if TYPE_CHECKING:
    from planner.plan.plan import Baseline, Plan

ALL, EXPERTS, LAYERS = "fits", "fits with experts in host memory", "fits with layers in host memory"
_LOOKED_UP = ("token_embd", "per_layer")  # tables that the engine keeps on the host
_SAME = 0.01  # a gain that no measurement shows
_CLEARLY_PPM = 300_000


def verdict(plan: Plan) -> str:
    """How a plan fits: wholly on GPUs, with experts in host memory, or with whole layers there."""
    from planner.site import SiteKind

    if all(use.kind == "cpu" for use in plan.devices if use.used_bytes):
        return "fits in host memory: the CPU computes all of it"
    there = [
        line.unit
        for line in plan.units
        if line.site.kind is not SiteKind.GPU and not line.unit.startswith(_LOOKED_UP)
    ]
    if not there:
        return ALL
    return EXPERTS if all("experts" in unit for unit in there) else LAYERS


def best_stock(plan: Plan) -> Baseline | None:
    """The stock rule with a GPU that answers a request first."""
    from planner.check.recorded_rules import objective_ns

    rules = [b for b in plan.baselines if b.feasible and b.name != "all-cpu"]
    return min(rules, key=lambda b: objective_ns(plan, b), default=None)


def gain(plan: Plan) -> str:
    """What the plan gains over the best stock rule under its flags, and whether that can be told."""
    from planner.check.recorded_rules import objective_ns

    stock = best_stock(plan)
    if stock is None or not plan.predicted.tpot_ns:
        return "no stock rule with a GPU fits"
    factor = objective_ns(plan, stock) / max(plan.predicted.objective_ns, 1)
    if plan.predicted.status == "baseline" or abs(factor - 1) < _SAME:
        return "the plan is as fast as the best stock rule: use that one"
    within = "" if factor - 1 > told_apart_ppm(plan) / 10**6 else ", less than the predictions' own error"
    took = ms(plan.predicted.tpot_ns)
    return f"the plan takes {took} a token, a request {factor:.2f}x as fast as by the best stock rule{within}"


def doubt(plan: Plan, hybrid: Plan | None = None) -> str:
    """How sure the rows of a table are, each by itself and one against another."""
    wide = f"each row ±{plan.predicted.error_ppm / 1e4:.0f} %"
    if hybrid is not None:
        wide += f", hybrid ±{hybrid.predicted.error_ppm / 1e4:.0f} %"
    if plan.machine.measured:
        return f"{wide}; rows share the machine, so one against another is surer"
    return f"{wide}, since the machine is assumed; all rows move together, so one against another is surer"


def told_apart_ppm(plan: Plan) -> int:
    """How much faster another plan must be: both share the machine, so most of a wide error cancels out."""
    return min(plan.predicted.error_ppm, _CLEARLY_PPM)


def rates(tpot_ns: int, error_ppm: int) -> tuple[float, float, float]:
    """Tokens/s, and between what, for a predicted time with that relative error."""
    rate, error = 1e9 / max(tpot_ns, 1), error_ppm / 10**6
    return rate, rate / (1 + error), rate * (1 + error)
