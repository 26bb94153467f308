"""One record says what fills a device: its parts are the solver's totals, and the plan's lines."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from planning_models import MIB, dense, machine, moe, plan, priced, real

from planner.cost.build_problem import analyse
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.profile import Profile
from planner.memory.memory import NOTHING, Memory, Reserve, together
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.load_spec import plan_layer_devices
from planner.plan.plan import CachePoint
from planner.plan.request import Request
from planner.solver.evaluate import evaluate
from planner.solver.solve import solve
from planner.workload import Workload

CURVE = (CachePoint(share_ppm=250_000, hit_ppm=900_000), CachePoint(share_ppm=500_000, hit_ppm=980_000))
PAIR = machine("2x-rtx4060ti-16gb")
CASES: dict[str, tuple[Inventory, Profile, str, dict[str, Any]]] = {
    "dense": (dense([6144] * 8), machine(), "900", {}),
    "experts": (moe(), machine(), "1500", {}),
    "cache": (moe(), machine(), "1500", {"known": Known(cache=CURVE)}),
    "slots": (moe(), machine(), "1500", {"hybrid": True}),
    "two GPUs": (moe(), PAIR, "1200", {}),
    "state": (real("Qwen3.6-27B-q4_K"), machine(), "9000", {"settings": EngineSettings(op_offload=False)}),
    "reserve": (
        moe(),
        machine(),
        "2500",
        {"settings": EngineSettings(reserves=(Reserve(name="x", device="CUDA0", size_bytes=7),))},
    ),
}


def test_records_add_up_part_by_part() -> None:
    one, two = Memory(1, 2, 3, 4, 5, 6, 7), Memory(10, 20, 30, 40, 50, 60, 70)
    assert astuple(one + two) == (11, 22, 33, 44, 55, 66, 77)
    assert (one + two).total == 231  # all but mapped tables
    assert together([]) == NOTHING and together([one, two, one]) == one + two + one


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_every_option_and_every_share_are_its_total(name: str) -> None:
    model, profile, budget, way = CASES[name]
    more = {"hybrid": way.pop("hybrid")} if "hybrid" in (way := dict(way)) else {}
    request = Request(budgets_for(profile, parse_budget(budget)), Workload(n_ctx=8192), **more)
    made = priced(model, profile, request, **way)
    problem, ledger = made.problem, made.ledger
    for decision in problem.decisions:
        for option in decision.options:
            assert tuple(held.total for held in ledger.of(decision, option)) == option.memory
    assert [held.total for held in ledger.shares] == [share.size_bytes for share in problem.shares]
    found = solve(problem)
    assert found.solution is not None
    held = ledger.held(problem, found.solution)
    assert tuple(each.total for each in held) == evaluate(problem, found.solution).memory
    assert sum(each.kv for each in held) == sum(made.model.kv.values())
    assert sum(each.state for each in held) == sum(made.model.state.values())


@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_what_its_layers_hold(name: str) -> None:
    model, profile, budget, way = CASES[name]
    work = Workload(n_ctx=8192)
    made = plan(model, budget, on=profile, workload=work, stripes=False, **way)
    kept, homes = analyse(structure_of(model), work), plan_layer_devices(made)
    for use in made.devices:
        layers = [f"blk.{n}" for n, home in enumerate(homes[:-1]) if home == use.name]
        assert use.memory.kv == sum(kept.kv.get(n, 0) for n in layers)
        assert use.memory.state == sum(kept.state.get(n, 0) for n in layers)
        assert use.memory.total == use.used_bytes <= use.budget_bytes
        assert use.memory.cache % MIB == 0
        context = profile.device(use.name).context_bytes
        assert use.memory.reserve == context + way.get("settings", EngineSettings()).reserved_bytes(use.name)
    resting = sum(use.memory.weights for use in made.devices if use.kind == "cpu")
    on_host = sum(p.size_bytes for p in made.units if p.site.on_host or p.site.divided)
    assert 0.99 * on_host <= resting <= on_host
