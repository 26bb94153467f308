"""What is built once for several plans: none of them is another one than alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from planning_models import machine, moe, priced, real

from commands.shared.inputs import known_of_heat
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.reprice import reprice
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.host_memory import HostMemory
from planner.passes.case import Built
from planner.passes.make_plan import make_plan
from planner.passes.stock_rules import Placer, realise
from planner.plan.known import Known
from planner.plan.plan import Plan, to_text
from planner.plan.request import Pin, Request
from planner.site import ON_CPU, Site
from planner.solver.clock import Clock
from planner.workload import Workload

HEAT = Path(__file__).parents[1] / "plans/inputs/Qwen3-30B-A3B.heat.csv"
MACHINE = machine("rtx3060-12gb-ddr4")
MODEL = real("Qwen3-30B-A3B-Q4_K_M")
WORK = Workload(n_ctx=4096)


@pytest.fixture(scope="module")
def cases() -> list[tuple[Request, Known]]:
    """Requests that share a model and a machine, and differ in all else that prices may depend on."""
    hot = known_of_heat(HEAT, MODEL, WORK)
    budgets = budgets_for(MACHINE, parse_budget("9000"))
    less = budgets_for(MACHINE, parse_budget("7000"))
    return [
        (Request(budgets, WORK), Known()),
        (Request(budgets, WORK), hot),
        (Request(budgets, WORK, hybrid=True), hot),
        (Request(less, WORK, host_memory=HostMemory.MAPPED), hot),
        (Request(budgets, WORK, pins=(Pin("blk.[0-3].experts", "cpu"),)), Known()),
        (
            Request(budgets, WORK.model_copy(update={"n_ubatch": 1024, "type_k": "q8_0", "type_v": "q8_0"})),
            hot,
        ),
    ]


def made(request: Request, known: Known, built: Built | None = None) -> Plan:
    return make_plan(MODEL, MACHINE, request, known, clock=Clock(20), built=built)


def test_plans_in_any_order_are_those_alone(cases: list[tuple[Request, Known]]) -> None:
    alone = [made(*case) for case in cases]
    assert len(set(map(to_text, alone))) == len(cases)
    built, order = Built(), list(range(len(cases)))
    Random(7).shuffle(order)
    for n in order:
        request, known = cases[n]
        plan = made(request, known, built)
        assert to_text(plan) == to_text(alone[n])
        again = reprice(plan, MODEL, MACHINE, known, built).plan
        assert again.predicted.objective_ns == plan.predicted.objective_ns
        inputs = Inputs(MODEL, MACHINE, known)
        assert check_plan(plan, to_text(plan), "p", inputs, CheckOptions(resolve=False), built) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_placer_that_was_asked_before_answers_as_a_new_one(seed: int) -> None:
    random = Random(seed)
    problem = priced(moe(6), machine(), Request(budgets_for(machine(), parse_budget("3000")), Workload()))
    placer, devices = Placer(problem), ("CPU", "CUDA0")
    experts = [unit.name for unit in problem.model.units if unit.name.endswith("experts")]
    found = 0
    for _ in range(60):
        homes = [random.choice(devices) for _ in range(problem.model.layers.n_all + 1)]
        away = random.sample(experts, random.randrange(len(experts)))
        sites = {name: random.choice((ON_CPU, Site.on("CUDA0"))) for name in away}
        new = realise(problem, homes, sites)
        assert placer.solution(homes, sites) == new
        found += new is not None
    assert found > 0
