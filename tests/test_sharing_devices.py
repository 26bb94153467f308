"""Caches that several layers read, on several devices: every pass of a solve against trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_models import MIB, machine, priced
from random_problems import brute_force, sharing_problem

from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.cost.build_problem import Priced
from planner.cost.placed import evaluate_placed
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.profile import Profile
from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Hparam, Inventory
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.largest_context import Keep, fits, free_of_charge, largest_context, with_context
from planner.passes.make_plan import make_plan
from planner.passes.refusal import Infeasible
from planner.plan.engine_settings import EngineSettings
from planner.plan.load_spec import plan_layer_devices
from planner.plan.plan import to_text
from planner.plan.request import Request
from planner.solver.clock import Clock
from planner.solver.evaluate import evaluate
from planner.solver.problem import Problem, Solution
from planner.solver.solve import solve, solve_cp
from planner.solver.stretches import break_ties
from planner.workload import Workload

SEEDS = st.integers(min_value=0, max_value=2**40)
WORK = Workload(n_ctx=8192, depth=2048)


def many(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def agrees(problem: Problem, best: int | None) -> None:
    """Every way to solve ends in a legal placement at the least price, reordered or not; or in none."""
    for found in (solve(problem), solve_cp(problem)):
        assert (found.solution is None) == (best is None), found
        if found.solution is None:
            continue
        for chosen in (found.solution, break_ties(problem, found.solution)):
            judged = evaluate(problem, chosen)
            assert (judged.violations, judged.objective_ns) == ((), best)


@many(40)
@given(SEEDS, st.sampled_from([(1, 2, 4), (2, 2, 3), (2, 1, 4), (3, 2, 2)]))
def test_caches_that_lie_on_one_device_only(seed: int, shape: tuple[int, int, int]) -> None:
    gpus, caches, readers = shape
    problem = sharing_problem(seed, gpus=gpus, caches=caches, readers=readers)
    agrees(problem, brute_force(problem))
    free = free_of_charge(problem)
    assert (solve(free).solution is None) == (brute_force(problem) is None)


def row(name: str, *shape: int, kind: str = "f16") -> Row:
    return Row(name, kind, shape, tensor_bytes(kind, shape))


@cache
def gemma(layers: int = 42, shared: int = 18, *, period: int = 6, width: int = 2560) -> Inventory:
    """The shape of Gemma 4 E4B: every sixth layer sees everything, the last `shared` own no cache."""
    full = [n % period == period - 1 for n in range(layers)]
    rows = [
        row("token_embd.weight", width, 262144, kind="q6_K"),
        row("per_layer_token_embd.weight", 256 * layers, 262144, kind="q5_1"),
        row("output_norm.weight", width, kind="f32"),
        row("per_layer_model_proj.weight", width, 256 * layers),
    ]
    for n, head in enumerate(512 if all_ else 256 for all_ in full):
        rows += [
            row(f"blk.{n}.attn_q.weight", width, 8 * head, kind="q4_K"),
            row(f"blk.{n}.attn_k.weight", width, 2 * head, kind="q4_K"),
            row(f"blk.{n}.attn_v.weight", width, 2 * head, kind="q6_K"),
            row(f"blk.{n}.attn_output.weight", 8 * head, width, kind="q4_K"),
            *(row(f"blk.{n}.ffn_{x}.weight", width, 4 * width, kind="q4_K") for x in ("gate", "up")),
            row(f"blk.{n}.ffn_down.weight", 4 * width, width, kind="q6_K"),
        ]
    hparams: dict[str, Hparam] = {
        "block_count": layers,
        "context_length": 131072,
        "embedding_length": width,
        "feed_forward_length": 4 * width,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": tuple(not all_ for all_ in full),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": 256,
        "vocab_size": 262144,
    }
    return inventory_of("gemma4-e4b", "gemma4", hparams, rows)


def ways(model: Inventory, profile: Profile, budgets: Mapping[str, int]) -> Iterator[Priced]:
    request = Request(budgets, WORK)
    yield priced(model, profile, request)
    yield priced(model, profile, request, settings=EngineSettings(op_offload=False))
    paged = priced(model, profile, replace(request, page=True))
    yield replace(paged, problem=replace(paged.problem, max_runs=2))


def least_paid(priced: Priced) -> int | None:
    """The least that any placement costs, with every piece of its graph."""
    best: int | None = None
    for choices in itertools.product(*(range(len(d.options)) for d in priced.problem.decisions)):
        found = evaluate(priced.problem, Solution(choices))
        if found.feasible and (best is None or found.objective_ns < best):
            paid = evaluate_placed(priced, Solution(choices)).objective_ns
            best = paid if best is None else min(best, paid)
    return best


@pytest.mark.parametrize("budget", [300, 420, 560, 900])
@pytest.mark.parametrize("name", ["2x-rtx4060ti-16gb", "rtx3090-rtx3060-ddr4"])
def test_a_small_model_is_placed_as_well_as_trying_everything_does(name: str, budget: int) -> None:
    """Four layers, of which the last two read the caches of the first two."""
    model, profile = gemma(4, 2, period=2, width=1024), machine(name)
    best = None
    budgets = budgets_for(profile, parse_budget(str(budget)))
    for way in ways(model, profile, budgets):
        slender = replace(way, problem=slim(way.problem))
        agrees(slender.problem, brute_force(slender.problem))
        best = min((x for x in (best, least_paid(slender)) if x is not None), default=None)
    made = make_plan(model, profile, Request(budgets, WORK), clock=Clock(5))
    found = check_plan(made, to_text(made), "p", Inputs(model, profile), CheckOptions(time_limit_s=5))
    assert found == []
    assert best is None or made.predicted.objective_ns <= best * 1.01  # a stock rule may come as close


def slim(problem: Problem) -> Problem:
    """Without what needs no trying: more than four options that differ in the device of the head."""
    head = problem.decisions[-1]
    return replace(problem, decisions=(*problem.decisions[:-1], replace(head, options=head.options[:3])))


@pytest.mark.parametrize(
    ("name", "budget", "page"),
    [
        ("2x-rtx4060ti-16gb", 1500, False),
        ("2x-rtx4060ti-16gb", 1500, True),
        ("rtx3090-rtx3060-ddr4", 1500, True),
    ],
)
def test_a_real_shape_on_two_gpus(name: str, budget: int, page: bool) -> None:
    model, profile = gemma(), machine(name)
    budgets = budgets_for(profile, parse_budget(str(budget)))
    work = Workload(n_ctx=32768)
    try:
        made = make_plan(model, profile, Request(budgets, work, page=page), clock=Clock(0.4))
    except Infeasible as refused:
        assert all(need.total_bytes > need.budget_bytes for need in refused.needs)
        return
    homes = plan_layer_devices(made)
    for use in made.devices:
        held = [n for n, home in enumerate(homes[:24]) if home == use.name]
        assert use.used_bytes <= use.budget_bytes and (use.kv_bytes > 0) == bool(held)


def test_the_largest_context_of_caches_that_are_shared() -> None:
    model, profile = gemma(8, 4, period=2, width=1024), machine("2x-rtx4060ti-16gb")
    budgets = budgets_for(profile, parse_budget("700"))
    work = Workload(n_ctx=131072, n_ubatch=256)
    case = Case(structure_of(model), profile, Request(budgets, work, lowest_ctx=4096))
    found, keep = largest_context(case, EngineSettings())
    assert fits(case, EngineSettings(), with_context(work, found), keep)
    assert found == work.n_ctx or not fits(case, EngineSettings(), with_context(work, found + 256), keep)
    assert keep in Keep and MIB
