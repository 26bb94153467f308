"""The solver against two oracles that share nothing with it, on thousands of small random problems."""

from __future__ import annotations

import itertools
from dataclasses import replace

import chain_dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import brute_force, random_problem, with_budget

from planner.solver import counting, frontier
from planner.solver.capacities import binding
from planner.solver.counting import parts
from planner.solver.evaluate import evaluate
from planner.solver.problem import Capacity, Decision, Edge, Option, Problem, Share, Solution
from planner.solver.relaxation import LEAST, Relaxation
from planner.solver.solve import Solved, any_placement, better, price_of, solve, solve_cp
from planner.solver.stages import stages_of
from planner.solver.totals import Totals

SEEDS = st.integers(min_value=0, max_value=2**40)


def many(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def agree(problem: Problem, solved: Solved, best: int | None) -> None:
    """The solver found the optimum, and the evaluator finds its placement legal and as cheap as it said."""
    if best is None:
        assert solved.status == "infeasible" and solved.solution is None
        return
    assert solved.status == "optimal" and solved.solution is not None
    found = evaluate(problem, solved.solution)
    assert found.violations == ()
    assert found.objective_ns == solved.objective_ns == solved.bound_ns == best


@many(600)
@given(SEEDS)
def test_same_objective_as_trying_everything(seed: int) -> None:
    problem = random_problem(seed, length=3)
    agree(problem, solve(problem), brute_force(problem))


@many(120)
@given(SEEDS)
def test_there_is_room_where_trying_everything_finds_a_placement(seed: int) -> None:
    problem = random_problem(seed, length=4)
    found = any_placement(problem)
    if found.status != "unknown":  # the order that was tried is not the only one
        assert (found.solution is None) == (brute_force(problem) is None)
    if found.solution is not None:
        judged = evaluate(problem, found.solution)
        assert (judged.violations, judged.objective_ns) == ((), found.objective_ns)


@pytest.mark.parametrize("runs", [0, 3])
def test_room_for_many_layers_is_known_either_way(runs: int) -> None:
    """Kinds of layers that take turns, and memory for the whole of them to the byte."""
    options = [
        tuple(Option(d, d, ("x",), 1, 1, (size * (d == 0), size * (d == 1)), (d,)) for d in (0, 1))
        for size in (3, 5)
    ]
    decisions = tuple(Decision(f"blk.{n}", ("a",), options[n % 2]) for n in range(40))
    zero = ((0, 0), (0, 0))
    shares = (Share("GPU", 0, 2), Share("CPU", 1, 1))
    edges = tuple(Edge(n, n + 1, zero, zero) for n in range(39))
    for spare, leads in itertools.product((-1, 0), (False, True)):
        devices = (Capacity("GPU", "gpu", 82), Capacity("CPU", "cpu", 81 + spare))
        problem = Problem(devices, decisions, edges, shares=shares, max_runs=runs, host_leads=leads)
        found = any_placement(problem)
        assert found.status == ("infeasible" if spare else "feasible")
        assert found.solution is None or evaluate(problem, found.solution).feasible


@many(250)
@given(SEEDS)
def test_cp_sat_alone_agrees(seed: int) -> None:
    problem = random_problem(seed, length=3)
    agree(problem, solve_cp(problem), brute_force(problem))


@many(120)
@given(SEEDS)
def test_same_objective_as_the_dynamic_programme(seed: int) -> None:
    problem = random_problem(seed, length=9, gpus=1, limit_host=False, extras=False)
    agree(problem, solve(problem), chain_dp.optimum(problem, 0))


@many(200)
@given(SEEDS)
def test_dynamic_programme_against_trying_everything(seed: int) -> None:
    problem = random_problem(seed, length=3, gpus=1, limit_host=False, extras=False)
    assert chain_dp.optimum(problem, 0) == brute_force(problem)


@many(80)
@given(SEEDS)
def test_a_hint_changes_nothing_but_the_start(seed: int) -> None:
    problem = random_problem(seed, length=3)
    first = solve(problem)
    if first.solution is not None:
        agree(problem, solve(problem, first.solution), first.objective_ns)


@many(40)
@given(SEEDS)
def test_more_budget_is_never_slower(seed: int) -> None:
    problem = random_problem(seed, length=6, extras=False)
    before: int | None = None
    for capacity in range(0, 40, 8):
        found = solve(with_budget(problem, 0, capacity))
        assert before is None or (found.solution is not None and found.objective_ns <= before)
        before = found.objective_ns if found.solution is not None else before


@many(300)
@given(SEEDS)
def test_the_counting_relaxation_is_a_lower_bound(seed: int) -> None:
    from ortools.sat.python import cp_model

    problem = random_problem(seed, length=3)
    best = brute_force(problem)
    if best is None or not counting.applies(problem):
        return
    solver = cp_model.CpSolver()
    assert solver.solve(counting.CountModel(cp_model, problem).model) == cp_model.OPTIMAL
    assert round(solver.objective_value) <= best


@many(150)
@given(SEEDS)
def test_the_parts_are_the_whole(seed: int) -> None:
    problem = replace(random_problem(seed, length=3), host_leads=True)
    optima = [brute_force(part.problem) for part in parts(problem)]
    assert min((best for best in optima if best is not None), default=None) == brute_force(problem)
    for part in parts(problem):
        first = Solution((0,) * len(part.problem.decisions))
        there, here = evaluate(problem, part.whole(first)), evaluate(part.problem, first)
        assert (there.objective_ns, there.memory) == (here.objective_ns, here.memory)


@many(100)
@given(SEEDS)
def test_the_frontier_proves_what_it_says(seed: int) -> None:
    problem = random_problem(seed, length=3)
    if not frontier.applies(problem):
        return
    found, best = frontier.search(problem, None, 0), brute_force(problem)
    if found.proven:
        assert (found.objective_ns if found.solution else None) == best
    elif best is not None:
        assert found.bound_ns <= best


@many(200)
@given(SEEDS)
def test_no_multiplier_bounds_better_than_the_one_found(seed: int) -> None:
    problem = random_problem(seed, length=6, gpus=1, limit_host=False)
    memories = binding(problem)
    if len(memories) != 1:
        return
    ports = sorted({(o.entry, o.exit) for _, _, o in problem.all_options()})
    stages = stages_of(problem, memories, ports, limit_turns=False)
    allowed = [np.ones(len(d.options), dtype=bool) for d in problem.decisions]
    capacity = np.array([memories[0].capacity])
    relaxed = Relaxation(stages, allowed, ports, len(problem.devices), 0, capacity)
    grid = [0.0, *(10 ** (n / 8) for n in range(-72, 73))]
    near = grid[seed % len(grid)] or LEAST
    top = relaxed.top(near)
    if top.fits is None:  # the dual has no end
        assert relaxed.walk(relaxed.bound(np.array([1e9]))).memory[0] > capacity[0]
        return
    best = relaxed.bound(np.array([top.multiplier])).value
    assert all(relaxed.bound(np.array([each])).value <= best + 1e-6 * abs(best) for each in grid)
    assert top.fits.memory[0] <= capacity[0] and best <= top.fits.cost * (1 + 1e-9)


@many(300)
@given(SEEDS)
def test_totals_of_many_placements_are_what_the_evaluator_says_of_each(seed: int) -> None:
    problem = random_problem(seed, length=3)
    choices = itertools.product(*(range(len(d.options)) for d in problem.decisions))
    placements = [Solution(each) for each in choices]
    objective, fits = Totals(problem).of(placements)
    for n, found in enumerate(evaluate(problem, each) for each in placements):
        assert int(objective[n]) == found.objective_ns
        over = any("budget" in each or "together" in each for each in found.violations)
        assert bool(fits[n]) is not over


@many(300)
@given(SEEDS)
def test_two_ways_to_price_a_placement_agree(seed: int) -> None:
    problem = random_problem(seed, length=5)
    choices = tuple(seed // 7**i % len(d.options) for i, d in enumerate(problem.decisions))
    solution = Solution(choices)
    assert price_of(problem, solution) == evaluate(problem, solution).objective_ns


def test_the_same_problem_gives_the_same_placement() -> None:
    problem = random_problem(11, length=8, gpus=2)
    assert solve(problem) == solve(problem)


def test_contiguous_is_found_by_itself_when_splits_are_dear() -> None:
    problem = random_problem(5, length=6, gpus=1, limit_host=False, extras=False)
    dear = tuple(tuple(0 if p == q else 10_000 for q in range(2)) for p in range(2))
    edges = tuple(replace(e, decode_ns=dear, prefill_ns=dear) for e in problem.edges)
    problem = replace(problem, edges=edges)
    found = solve(problem)
    assert found.solution is not None
    chosen = found.solution.chosen(problem)
    assert sum(a.exit != b.entry for a, b in itertools.pairwise(chosen)) <= 1


@pytest.mark.parametrize("length", [24, 48])
def test_alike_layers_are_proven_in_one_pass(length: int) -> None:
    """Forty-eight equal layers under one budget: hopeless for plain branching."""
    problem = random_problem(3, length=length, gpus=1, limit_host=False, extras=False)
    assert frontier.search(problem, None, 0).proven
    agree(problem, solve(problem), chain_dp.optimum(problem, 0))


# Of problems that have a placement.
PLACED = (1, 5, 7, 8, 10, 12, 13, 18, 19, 24, 26, 27, 28, 30, 31, 36, 38, 39, 42, 44, 50, 51)


@pytest.mark.parametrize("seed", PLACED)
def test_neighbours_of_any_placement_lead_to_the_best(seed: int) -> None:
    """With work enough the parts are the whole; with little nothing gets worse or breaks a limit."""
    problem = random_problem(seed, length=5, gpus=2)
    start, best = any_placement(problem).solution, brute_force(problem)
    assert start is not None and best is not None
    asked = 0

    def search(narrowed: Problem, below_ns: int) -> tuple[Solution | None, bool]:
        nonlocal asked
        asked += 1
        found = solve_cp(narrowed).solution
        return (found if found and price_of(narrowed, found) < below_ns else None), asked < most

    for most in (1, 2, 100):
        asked = 0
        found = better(problem, start, search)
        judged = evaluate(problem, found)
        assert judged.feasible and best <= judged.objective_ns <= price_of(problem, start)
        assert asked <= most
    assert judged.objective_ns == best
