"""More memory never hurts and less context never stops fitting, on real models."""

from __future__ import annotations

import pytest
from planning_models import MIB, dense, machine, plan, problem_of, real

from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.largest_context import Keep, largest_context
from planner.passes.refusal import Infeasible
from planner.plan.engine_settings import EngineSettings
from planner.plan.request import Pin, Request
from planner.site import ON_CPU
from planner.solver.solve import Limits, Solved, solve
from planner.workload import Workload

MODELS = ("Qwen3.6-35B-A3B-q4_K", "gpt-oss-20b-MXFP4", "gemma-4-26B-A4B-Q4_K_M", "Qwen3.6-27B-q4_K")
STEP = 256


def optimum(model: Inventory, profile: Profile, budget: str, workload: Workload) -> int | None:
    """The solver's own optimum, without the margin by which a stock rule is preferred."""
    budgets = budgets_for(profile, parse_budget(budget))
    found = solve(problem_of(model, profile, Request(budgets, workload, page=True)))
    assert found.solution is None or found.status == "optimal"
    return found.objective_ns if found.solution else None


@pytest.mark.parametrize("name", MODELS)
def test_more_budget_is_never_slower(name: str) -> None:
    model, before = real(name), None
    for mib in (3000, 3001, 8000, 16000, 23000):
        now = optimum(model, machine(), str(mib), Workload())
        if before is not None:
            # Times are rounded to a ten-thousandth of the fastest token there is, whatever fits.
            assert now is not None and now <= before, mib
        before = now if now is not None else before
    assert before is not None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("no_cpu", [True, False])
def test_what_fits_a_context_fits_every_smaller_one(name: str, no_cpu: bool) -> None:
    model, profile = real(name), machine()
    budgets = budgets_for(profile, {"CUDA0": 21_500 * MIB})
    request = Request(budgets, Workload(n_ctx=131_072), lowest_ctx=STEP, no_cpu=no_cpu, page=True)
    largest, keep = largest_context(Case(structure_of(model), profile, request), EngineSettings())
    whole = no_cpu or keep is Keep.ALL
    for n_ctx in {largest, max(largest - STEP, STEP), max(largest - 2 * STEP, STEP), largest // 2, STEP}:
        if n_ctx:
            short = {"prompt": min(512, n_ctx // 2), "gen": min(256, n_ctx // 2)}
            made = plan(model, "21500", workload=Workload(n_ctx=n_ctx, **short), no_cpu=whole, page=True)
            assert all(use.used_bytes <= use.budget_bytes for use in made.devices if use.kind != "cpu")
    if keep is Keep.ALL and largest < 131_072:
        with pytest.raises(Infeasible):
            plan(model, "21500", workload=Workload(n_ctx=largest + STEP), no_cpu=whole, page=True)


def test_the_largest_context_on_five_unequal_cards() -> None:
    """Less than a layer of room: the context that is found must still place everything."""
    one = machine()
    card, cpu = one.device("CUDA0"), one.device("CPU")
    sizes = (1000, 800, 700, 650, 600)
    cards = tuple(
        card.model_copy(update={"name": f"CUDA{n}", "memory_bytes": 2 * g * MIB, "free_bytes": 2 * g * MIB})
        for n, g in enumerate(sizes)
    )
    links = tuple(
        li.model_copy(
            update={
                side: f"CUDA{n}" if value == "CUDA0" else value
                for side, value in (("source", li.source), ("target", li.target))
            }
        )
        for n in range(len(sizes))
        for li in one.links
    )
    profile = one.model_copy(update={"devices": (*cards, cpu), "links": links})
    model = dense([8192] * 20)
    budget = ",".join(f"CUDA{n}={g}" for n, g in enumerate(sizes))
    budgets = budgets_for(profile, parse_budget(budget))
    request = Request(budgets, Workload(n_ctx=131_072), lowest_ctx=1024, no_cpu=True)
    largest, keep = largest_context(Case(structure_of(model), profile, request), EngineSettings())
    assert keep is Keep.ALL and largest % STEP == 0
    for n_ctx in (largest, largest - STEP):
        made = plan(model, budget, on=profile, workload=Workload(n_ctx=n_ctx), no_cpu=True, limit_s=2)
        assert {p.unit for p in made.units if p.site == ON_CPU} == {"token_embd"}
        assert all(use.used_bytes <= use.budget_bytes for use in made.devices)


def test_no_pin_betters_a_search_that_runs_out_of_work() -> None:
    """Without its neighbours the free answer was 1 % slower than the one with the output head pinned."""
    model, profile, limits = real("Qwen3.6-35B-A3B-q4_K"), machine("rtx3090-rtx3060-ddr4"), Limits(1.0)
    budgets = budgets_for(profile, parse_budget("CUDA0=8000,CUDA1=6000"))

    def found(*pins: Pin) -> Solved:
        return solve(problem_of(model, profile, Request(budgets, Workload(), pins=pins)), None, limits)

    free = found()
    assert free.status == "feasible" and free == found()
    assert all(free.objective_ns <= found(Pin("output*", gpu)).objective_ns for gpu in ("CUDA0", "CUDA1"))
