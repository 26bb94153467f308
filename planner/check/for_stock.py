"""A plan's request solved again for what stock tools can be told: CPU layers first, no single experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.check.reprice import known_of, request_of, settings_of
from planner.errors import AnswerIsNo
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.largest_context import fits
from planner.passes.make_plan import make_plan
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.plan.request import Request
from planner.solver.clock import Clock

_WORK_S = 5.0  # of counted work: an export is not to take as long as solving


def solved_for_stock(
    plan: Plan,
    inventory: Inventory,
    profile: Profile,
    known: Known,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Plan | None:
    """The fastest placement that a stock tool can be told under the plan's request; None where none fits.

    As few layers on the CPU as memory allows; weights of the others may be kept there by overrides. `watch`
    is told of the problems solved and expected.
    """
    settings = replace(settings_of(plan), slots=False)
    asked = replace(request_of(plan), stripes=False, hybrid=False)
    known = known_of(plan, known)
    case = Case(structure_of(inventory), profile, asked, known)
    count = _fewest(case, asked, settings)
    if count is None:
        return None
    try:
        return make_plan(
            inventory, profile, _counted(asked, count), known, settings, Clock(_WORK_S, watch=watch)
        )
    except AnswerIsNo:
        return None


def _counted(request: Request, count: int) -> Request:
    return replace(request, first_on_cpu=count)


def _fewest(case: Case, asked: Request, settings: EngineSettings) -> int | None:
    """The fewest first layers on the CPU with which the others fit; None where none do."""

    def fit(count: int) -> bool:
        return fits(replace(case, request=_counted(asked, count)), settings, asked.workload)

    low, high = 0, case.structure.layers.n_main - 1
    if fit(low):
        return low
    if not fit(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle, high)
    return high
