"""Which placement `export` spells: the plan's own, the nearest of a stock tool, or a stock rule it records.

Nothing is spelt that is over a budget, nor anything predicted slower than a recorded rule that fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from commands.shared.console import ms, planning, say
from planner.errors import AnswerIsNo
from planner.site import SiteKind

if TYPE_CHECKING:
    from planner.check.check import Inputs
    from planner.plan.plan import Baseline, Plan
    from runtime.tools.options import Stock

Spell = Callable[["Plan"], "Stock"]
_SOLVED = "instead: the same request solved for what stock tools can be told"


@dataclass(eq=False)
class NothingFits(AnswerIsNo):
    """No placement that a stock tool can be told is known to fit."""

    path: str
    whys: tuple[str, ...]

    def message(self) -> str:
        return (
            f"{self.path}: no stock tool can be told a placement that fits: {'; '.join(self.whys)}; "
            "atsplan run loads the plan itself; else solve again with --contiguous, a larger --budget or "
            "a smaller --ctx"
        )


def choose(plan: Plan, path: str, inputs: Inputs, spell: Spell) -> tuple[Plan, Stock]:
    """The placement to export, as a plan with its cost and as options; what it is, is said.

    `spell` gives the options of a plan. Raises NothingFits.
    """
    from planner.check.recorded_rules import usable_rules
    from planner.model.structure import structure_of

    mine = spell(plan)
    for note in mine.notes:
        say(f"not expressible: {note}")
    over = over_budget(plan)
    for each in over:
        say(f"not exported: {each}")
    whys = list(over) if _same_memory(plan, mine) else [*mine.notes, *over]
    units = structure_of(inputs.inventory).units if inputs.inventory is not None else ()
    rules = usable_rules(plan, units)
    best = rules[0] if rules else None
    edited = plan.predicted.status == "edited"
    if not whys and (best is None or not _slower(plan, best) or edited):
        if best is not None and _slower(plan, best):
            say(f"note: its edits make it slower than the stock rule {best.name} ({best.setting})")
        return plan, mine
    solved = _solved(plan, inputs, spell, mine)
    if solved is not None and best is not None and not _faster(solved[0], best):
        solved = None
    near = _nearest(plan, inputs, spell, mine, whys) if whys != over else None
    if near is not None and best is not None and _slower(near[0], best):
        near = None
    if found := min(filter(None, (solved, near)), key=lambda each: _request_ns(each[0]), default=None):
        _say_instead(plan, found)
        return found
    for rule in rules:
        if found := _rule(plan, rule, inputs, spell, mine, whys):
            return found
    raise NothingFits(path, tuple(whys))


def _request_ns(plan: Plan) -> int:
    """What a request of the plan's workload takes."""
    return plan.predicted.tpot_ns * plan.workload.gen + plan.predicted.prefill_ns


def _say_instead(plan: Plan, found: tuple[Plan, Stock]) -> None:
    was, now = plan.predicted.tpot_ns, found[0].predicted.tpot_ns
    say(f"{found[1].notes[-1]}: predicted {ms(now)} a token, the plan itself {ms(was)}")


def _same_memory(plan: Plan, mine: Stock) -> bool:
    """Whether all weights, KV caches and states lie where the plan has them: at most the head is counted
    among another device's layers, with its weights kept on the CPU."""
    from planner.plan.load_spec import plan_layer_devices

    devices = plan_layer_devices(plan)
    own = any(placed.site.kind in (SiteKind.STRIPE, SiteKind.HYBRID) for placed in plan.units)
    return not own and _layers(mine, len(devices)) == devices[:-1]


def over_budget(plan: Plan) -> list[str]:
    """The devices that a plan fills beyond their budgets, one sentence each; host weights may be paged."""
    return [
        f"{use.name} needs {_mib(use.used_bytes)} MiB, its budget is {use.budget_bytes // 2**20} MiB"
        for use in plan.devices
        if use.over_bytes(plan.constraints.page) > 0
    ]


def _mib(size: int) -> int:
    return -(-size // 2**20)


def _in_mib(text: str) -> str:
    """A limit of the solver, which speaks of bytes."""
    whole = re.sub(r"needs ([0-9]+) bytes", lambda m: f"needs {_mib(int(m[1]))} MiB", text)
    return re.sub(r"(budget|has) ([0-9]+)( bytes)?", lambda m: f"{m[1]} {int(m[2]) // 2**20} MiB", whole)


def _slower(plan: Plan, rule: Baseline) -> bool:
    """Whether a request of the plan's workload takes longer than by a rule."""
    from planner.check.recorded_rules import objective_ns

    return _request_ns(plan) > objective_ns(plan, rule)


def _faster(plan: Plan, rule: Baseline) -> bool:
    """Whether a plan beats a rule by more than a hundredth: else the rule, which is simpler, stands."""
    from planner.check.recorded_rules import objective_ns

    return 100 * _request_ns(plan) < 99 * objective_ns(plan, rule)


def _solved(plan: Plan, inputs: Inputs, spell: Spell, mine: Stock) -> tuple[Plan, Stock] | None:
    """The plan's request solved again for what tools can be told; None without inputs, or where none fits."""
    from planner.check.for_stock import solved_for_stock
    from planner.plan.load_spec import plan_layer_devices

    if inputs.inventory is None or inputs.profile is None or inputs.heat_missing(plan):
        return None
    with planning("for stock tools") as watch:
        made = solved_for_stock(plan, inputs.inventory, inputs.profile, inputs.known, watch)
    if made is None or over_budget(made):
        return None
    again = spell(made)
    if _layers(again, len(plan_layer_devices(made))) != plan_layer_devices(made)[:-1]:
        return None
    return made, replace(again, notes=(*mine.notes, _SOLVED), exact=False)


def _nearest(
    plan: Plan, inputs: Inputs, spell: Spell, mine: Stock, whys: list[str]
) -> tuple[Plan, Stock] | None:
    """The nearest legal plan, priced; None, said, when it cannot be priced, told or does not fit."""
    from planner.check.reprice import edited
    from planner.plan.load_spec import plan_layer_devices
    from planner.plan.stock import stock_plan

    if inputs.inventory is None or inputs.profile is None:
        say("its cost is not known: give --inventory and --profile to price the nearest plan")
        return None
    try:
        legal = edited(stock_plan(plan), inputs.inventory, inputs.profile, inputs.known)
    except AnswerIsNo as problem:
        say(f"the nearest plan of a stock tool does not do: {_in_mib(str(problem))}")
        whys.append(f"the nearest plan: {_in_mib(str(problem))}")
        return None
    again = spell(legal)
    if _layers(again, len(plan_layer_devices(legal))) != plan_layer_devices(legal)[:-1]:
        whys.append(f"the nearest plan: {'; '.join(again.notes)}")
        return None
    done = "instead: as many layers on the CPU as planned, but the first ones"
    if legal.layers == plan.layers:
        done = "instead: the experts of whole layers on the CPU"
    return legal, replace(again, notes=(*mine.notes, done), exact=False)


def _layers(placed: Stock, count: int) -> tuple[str, ...]:
    """The device of each layer without the output head, which holds neither KV cache nor state."""
    from planner.plan.engine_rules import spec_layer_devices

    return spec_layer_devices(placed.spec, count - 1)[:-1]


def _rule(
    plan: Plan, rule: Baseline, inputs: Inputs, spell: Spell, mine: Stock, whys: list[str]
) -> tuple[Plan, Stock] | None:
    """A recorded rule, with the inputs at hand priced again; None when that says it does not fit."""
    from planner.check.recorded_rules import flags, objective_ns, rule_plan
    from planner.check.reprice import edited
    from planner.model.structure import structure_of
    from runtime.tools.expert_rule import ExpertRule, patterns

    told = rule_plan(plan, rule, structure_of(inputs.inventory).units if inputs.inventory else ())
    if inputs.inventory is not None and inputs.profile is not None and not inputs.heat_missing(plan):
        try:
            told = edited(told, inputs.inventory, inputs.profile, inputs.known)
        except AnswerIsNo as problem:
            whys.append(f"the stock rule {rule.name} ({rule.setting}): {_in_mib(str(problem))}")
            return None
        if _slower(told, rule):
            whys.append(
                f"the stock rule {rule.name} ({rule.setting}): a request takes {ms(_request_ns(told))}, "
                f"recorded are {ms(objective_ns(plan, rule))}"
            )
            return None
    asked = flags(rule.setting)
    assert asked is not None
    placed = spell(told)
    if (asked.experts or asked.every) and not asked.pins:
        n_blocks = told.layers[-1].last
        count = n_blocks if asked.every else asked.experts
        own = ExpertRule(count, asked.every, ())
        spec = replace(placed.spec, overrides=patterns(count, every=asked.every))
        placed = replace(placed, spec=spec, rule=own)
    now, was = told.predicted.tpot_ns, plan.predicted.tpot_ns
    done = f"instead: the plan's stock rule {rule.name} ({rule.setting})"
    say(f"{done}: predicted {ms(now)} a token, the plan itself {ms(was)}")
    return told, replace(placed, notes=(*mine.notes, done), exact=False)
