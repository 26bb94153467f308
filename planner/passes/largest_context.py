"""The largest context that still fits the way the model should be placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial

from planner.constants import CELL_STEP, CPU
from planner.cost.build_problem import Priced, analyse, build_problem
from planner.cost.paged import over_resident, resident_problem
from planner.left_out import no_pandas
from planner.passes.case import Case
from planner.passes.refusal import Infeasible, because, overfilled_by_extras, refuse, unavoidable
from planner.plan.engine_settings import EngineSettings
from planner.solver.problem import Decision, Edge, Option, Problem
from planner.solver.solve import Limits, any_placement, solve
from planner.workload import Workload

_AFTER = 16  # everything from the context to the recorded plan, in terms of building one problem


class Keep(Enum):
    """What the GPUs must have room for, best first."""

    ALL = "every layer whole on a GPU"
    CACHE = "room on the GPUs for every layer's KV and state"
    ANY = "any placement"


def largest_context(case: Case, settings: EngineSettings, guess: int = 0) -> tuple[int, Keep]:
    """The largest context from the lowest to the workload's, under the best rule that the lowest keeps.

    Contexts are multiples of 256, the engine's own step. With `no_cpu` only the first rule counts. What
    runs beside the model is counted anew for each context. `guess` is tried first.
    When the clock ends the search it is the largest that was shown to fit, and the lowest where none was.
    Raises Infeasible, which names the floor, when even the lowest does not fit.
    """
    request, lowest = case.limits, case.request.lowest_ctx

    def kept(n_ctx: int, keep: Keep) -> bool:
        return fits(case, settings, with_context(request.workload, n_ctx), keep)

    for keep in (Keep.ALL,) if request.no_cpu else Keep:
        if kept(lowest, keep):
            return bisect(partial(kept, keep=keep), lowest, request.workload.n_ctx, guess), keep
    if case.clock.deadline.over():
        return lowest, Keep.ANY
    floor = _priced(case, settings, with_context(request.workload, lowest), Keep.ANY)
    refusal = overfilled_by_extras(floor, request) or unavoidable(floor, request) or refuse(floor, request)
    why = f"not even a context of {lowest} cells fits"
    raise because(case.fault, Infeasible(refusal.needs, refusal.hints, why))


def fits(case: Case, settings: EngineSettings, workload: Workload, keep: Keep = Keep.ANY) -> bool:
    """Whether some placement for this workload fits: prompts' host weights copied to a GPU or not, and the
    CPU alone.
    """
    if case.clock.deadline.over():
        return False
    request = case.limits
    ways = [settings]
    if keep is not Keep.ALL and not request.no_cpu:
        ways.append(replace(settings, op_offload=False))
        if keep is Keep.ANY and not request.pins and request.first_on_cpu is None:
            ways.append(replace(settings, gpus=False))
    return any(_fits(case, way, workload, keep) for way in ways)


def bisect(fits: Callable[[int], bool], low: int, high: int, guess: int = 0) -> int:
    """The largest multiple of the engine's step up to `high` that fits; `low` is known to."""
    if fits(high):
        return high
    good, bad = low // CELL_STEP, -(-high // CELL_STEP)
    tried = [n for n in (guess // CELL_STEP, guess // CELL_STEP + 1) if good < n < bad]
    while bad - good > 1:
        middle = tried.pop(0) if tried and good < tried[0] < bad else (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * CELL_STEP) else (good, middle)
    return max(good * CELL_STEP, low)


def with_context(workload: Workload, n_ctx: int) -> Workload:
    """The use with another context, and no deeper than it."""
    return workload.model_copy(update={"n_ctx": n_ctx, "depth": min(workload.depth, n_ctx)})


def _priced(case: Case, settings: EngineSettings, workload: Workload, keep: Keep) -> Priced:
    request = replace(case.limits, no_cpu=case.limits.no_cpu or keep is Keep.ALL)
    model = analyse(case.structure, settings.workload(workload))
    settings = settings.with_extra_models(case.structure, request.extra_models, workload)
    priced = build_problem(model, case.profile, request, settings, case.known)
    if keep is not Keep.CACHE:
        return priced
    hosts = {i for i, d in enumerate(priced.problem.devices) if d.host}
    kv, state = priced.model.kv, priced.model.state

    def narrowed(decision: Decision) -> Decision:
        if not kv.get(decision.name) and not state.get(decision.name):
            return decision
        return replace(decision, options=tuple(o for o in decision.options if o.entry not in hosts))

    return replace(
        priced, problem=replace(priced.problem, decisions=tuple(map(narrowed, priced.problem.decisions)))
    )


@no_pandas
def _fits(case: Case, settings: EngineSettings, workload: Workload, keep: Keep) -> bool:
    deadline = case.clock.deadline
    if deadline.over():
        return False
    began = deadline.look()
    priced = _priced(case, settings, workload, keep)
    deadline.keep(began, _AFTER)
    if overfilled_by_extras(priced, case.limits) or unavoidable(priced, case.limits):
        return False
    if not priced.settings.gpus and any(r.opens and r.device != CPU for r in priced.settings.reserves):
        return False  # a GPU is open all the same
    limits = Limits(2.0, deadline=deadline)
    problem = resident_problem(priced)
    found = any_placement(problem, limits)
    if found.solution is not None and not over_resident(priced, found.solution):
        return True
    if found.status != "infeasible":  # not in the order that was tried, or too much beside paged weights
        found = solve(free_of_charge(problem), None, limits)
    return found.solution is not None and not over_resident(priced, found.solution)


def free_of_charge(problem: Problem) -> Problem:
    """The same limits with nothing to pay: any placement that fits is as good as another."""

    def free(option: Option) -> Option:
        return replace(option, decode_ns=0, prefill_ns=0)

    zero = tuple((0,) * len(problem.devices) for _ in problem.devices)
    return replace(
        problem,
        decisions=tuple(replace(d, options=tuple(map(free, d.options))) for d in problem.decisions),
        edges=tuple(Edge(e.source, e.target, zero, zero) for e in problem.edges),
        mixed=(),
        decode_ns=0,
        prefill_ns=0,
    )
