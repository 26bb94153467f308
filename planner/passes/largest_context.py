"""The largest context that still fits the way the model should be placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial

from planner.constants import CELL_STEP
from planner.cost.build_problem import Priced, analyse, build_problem
from planner.passes.case import Case
from planner.passes.refusal import Infeasible, OutOfTime, refuse, unavoidable
from planner.plan.engine_settings import EngineSettings
from planner.solver.problem import Decision, Edge, Option, Problem
from planner.solver.solve import Limits, solve
from planner.workload import Workload


class Keep(Enum):
    """What a longer context must not push off the GPUs, best first."""

    ALL = "every layer whole on a GPU"
    CACHE = "every layer's KV and state on a GPU"
    ANY = "any placement"


def largest_context(case: Case, settings: EngineSettings) -> tuple[int, Keep]:
    """The largest context from the lowest to the workload's, under the best rule that the lowest keeps.

    Contexts are multiples of 256, the engine's own step. With `no_cpu` only the first rule counts.
    Raises Infeasible, which names the floor, when even the lowest does not fit.
    """
    request, lowest = case.request, case.request.lowest_ctx

    def kept(n_ctx: int, keep: Keep) -> bool:
        return fits(case, settings, with_context(request.workload, n_ctx), keep)

    for keep in (Keep.ALL,) if request.no_cpu else Keep:
        if kept(lowest, keep):
            return bisect(partial(kept, keep=keep), lowest, request.workload.n_ctx), keep
    if case.clock.deadline.over():
        raise OutOfTime
    floor = _priced(case, settings, with_context(request.workload, lowest), Keep.ANY)
    refusal = unavoidable(floor, request) or refuse(floor, request)
    raise Infeasible(refusal.needs, refusal.hints, f"not even a context of {lowest} cells fits")


def fits(case: Case, settings: EngineSettings, workload: Workload, keep: Keep = Keep.ANY) -> bool:
    """Whether some placement for this workload fits, prompts' host weights copied to a GPU or not."""
    if case.clock.deadline.over():
        return False
    whole = keep is Keep.ALL or case.request.no_cpu
    ways = (settings,) if whole else (settings, replace(settings, op_offload=False))
    return any(_fits(_priced(case, way, workload, keep), case) for way in ways)


def bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest multiple of the engine's step up to `high` that fits; `low` is known to."""
    if fits(high):
        return high
    good, bad = low // CELL_STEP, -(-high // CELL_STEP)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * CELL_STEP) else (good, middle)
    return max(good * CELL_STEP, low)


def with_context(workload: Workload, n_ctx: int) -> Workload:
    """The use with another context, and no deeper than it."""
    return workload.model_copy(update={"n_ctx": n_ctx, "depth": min(workload.depth, n_ctx)})


def _priced(case: Case, settings: EngineSettings, workload: Workload, keep: Keep) -> Priced:
    request = replace(case.request, no_cpu=case.request.no_cpu or keep is Keep.ALL)
    model = analyse(case.structure, workload)
    priced = build_problem(model, case.profile, request, settings, case.known)
    if keep is not Keep.CACHE:
        return priced
    hosts = {i for i, d in enumerate(priced.problem.devices) if d.host}
    kept = {**priced.model.kv, **priced.model.state}

    def narrowed(decision: Decision) -> Decision:
        if not kept.get(decision.name):
            return decision
        return replace(decision, options=tuple(o for o in decision.options if o.entry not in hosts))

    return replace(
        priced, problem=replace(priced.problem, decisions=tuple(map(narrowed, priced.problem.decisions)))
    )


def _fits(priced: Priced, case: Case) -> bool:
    if unavoidable(priced, case.request) is not None:
        return False
    limits = Limits(2.0, deadline=case.clock.deadline)
    return solve(free_of_charge(priced.problem), None, limits).solution is not None


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
