"""The clock in planning: never looked at unless asked, kept when asked, and told in the plan."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from planning_models import machine, moe, plan, real
from random_problems import random_problem

from atsplan import main
from commands.solve import request as solve_request
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.findings import Severity, exit_code
from planner.cost.pins import parse_pin
from planner.machine.budgets import budgets_for, parse_budget
from planner.memory.reserves import Extras
from planner.model.structure import structure_of
from planner.passes import case as case_module
from planner.passes import largest_context as largest_context_module
from planner.passes import make_plan as make_plan_module
from planner.passes import placements, stock_rules
from planner.passes.case import Case
from planner.passes.largest_context import Keep, largest_context
from planner.passes.make_plan import make_plan
from planner.passes.refusal import OutOfTime
from planner.plan.engine_settings import EngineSettings
from planner.plan.plan import Plan, Search, from_text, to_text
from planner.plan.request import ExtraModels, Request
from planner.solver.clock import Clock
from planner.solver.deadline import Deadline
from planner.solver.evaluate import evaluate
from planner.solver.problem import Problem, Solution
from planner.solver.solve import Limits, Solved, price_of, solve

ROOT = Path(__file__).resolve().parent.parent
TWO_GPUS = "rtx3090-rtx3060-ddr4"
HARD = ROOT / "plans/inputs/Qwen3-Next-80B-A3B-Q4_K_M.inventory.yaml"


def never() -> float:
    raise AssertionError("nobody asked for a clock")


class FakeClock:
    """Seconds that pass with every look at it."""

    def __init__(self, step: float) -> None:
        self.step, self.time = step, 0.0

    def __call__(self) -> float:
        self.time += self.step
        return self.time


def within(seconds: float, now: Callable[[], float] = time.monotonic) -> Clock:
    return Clock(deadline=Deadline(seconds, now))


def test_without_a_limit_no_clock_is_looked_at() -> None:
    made = plan(moe(8), "3000", clock=within(math.inf, never))
    assert made.search is None and "search" not in to_text(made)


def test_a_part_ends_within_the_whole_and_tells_it() -> None:
    whole = Deadline(10, FakeClock(0.001))
    first = whole.part(0.5)
    assert 4.9 < first.left_s() < 5 < whole.left_s() and first.part(0.5).ends < first.ends < whole.ends
    assert not whole.over() and whole.ended_by == "proof"
    whole.ended.add("work")
    assert first.ended_by == "work"
    first.keep(first.look() - 1, 2)  # what comes after takes time of all parts
    assert 7.9 < whole.left_s() < 8 and 4.9 < first.left_s() < 5
    whole.keep(whole.look() - 100, 2)  # at most three quarters
    assert 2.4 < whole.left_s() < 2.5
    spent = Deadline(1, FakeClock(2)).part(0.5)
    assert spent.left_s() == 0 and spent.over() and spent.ended_by == "clock" and spent.seconds == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_search_cut_at_any_moment_claims_nothing_false(seed: int) -> None:
    """Cut after one look at the clock, after two, and so on: bounds hold, placements keep every limit."""
    problem = random_problem(seed, length=5)
    best = solve(problem)
    assert best.status in ("optimal", "infeasible")
    for looks in (1, 2, 3, 5, 9, 17):
        limits = Limits(deadline=Deadline(looks, FakeClock(1.0)))
        cut = solve(problem, None, limits)
        if cut.status == "infeasible":
            assert best.status == "infeasible"
        elif cut.solution is not None:
            found = evaluate(problem, cut.solution)
            assert found.feasible and found.objective_ns == cut.objective_ns
            assert cut.bound_ns <= best.objective_ns <= cut.objective_ns
            if cut.status == "optimal":
                assert cut.objective_ns == best.objective_ns
        if cut.status not in ("optimal", "infeasible"):
            assert limits.deadline.ended_by == "clock"


def test_a_plan_whose_search_the_clock_ended_says_so() -> None:
    profile = machine(TWO_GPUS)
    made = plan(moe(24), "CUDA0=3000,CUDA1=2000", on=profile, clock=within(20, FakeClock(7)))
    assert made.search == Search(ended_by="clock", time_limit_ms=20_000)
    assert made.predicted.bound_ns <= made.predicted.objective_ns
    stock = [made.workload.gen * b.tpot_ns + b.prefill_ns for b in made.baselines if b.feasible]
    assert made.predicted.objective_ns <= min(stock)
    assert from_text(to_text(made), "plan.yaml") == made
    proven = plan(moe(8), "3000", clock=within(3600))
    assert proven.search == Search(ended_by="proof", time_limit_ms=3_600_000)


def found_in(made: Plan, inputs: Inputs, options: CheckOptions) -> list[tuple[str, Severity, int]]:
    text = to_text(made)
    lines = text.splitlines()
    found = check_plan(made, text, "plan.yaml", inputs, options)
    assert exit_code(found) == 0, found
    return [(lines[f.line - 1].split(":")[0], f.severity, f.line) for f in found if f.rule == "search"]


def test_check_tells_of_a_clock_in_the_plan_and_in_the_check() -> None:
    model, profile = moe(8), machine()
    inputs = Inputs(model, profile)
    sure = plan(model, "3000")
    cut = sure.model_copy(update={"search": Search(ended_by="clock", time_limit_ms=20_000)})
    assert [each[:2] for each in found_in(cut, inputs, CheckOptions())] == [("search", Severity.NOTE)]
    assert found_in(sure, inputs, CheckOptions()) == []
    limited = sure.model_copy(update={"search": Search(ended_by="work", time_limit_ms=20_000)})
    assert found_in(limited, inputs, CheckOptions()) == []
    assert [e[:2] for e in found_in(sure, inputs, CheckOptions(time_limit_s=1e-9))] == [
        ("predicted", Severity.NOTE)
    ]


def test_no_refusal_where_only_the_time_was_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model, profile = moe(24), machine(TWO_GPUS)
    budgets = budgets_for(profile, parse_budget("CUDA0=9000,CUDA1=9000"))
    case = Case(structure_of(model), profile, Request(budgets, lowest_ctx=256), clock=within(1, FakeClock(2)))
    assert largest_context(case, EngineSettings()) == (256, Keep.ANY)
    made = make_plan(model, profile, case.request, clock=within(1, FakeClock(2)))
    assert made.workload.n_ctx == 256 and made.predicted.status == "baseline"
    assert made.search == Search(ended_by="clock", time_limit_ms=1000)
    Work(monkeypatch).search_to_the_end(placements)
    # Rules keep pins of experts; none keeps attention of single layers on the CPU.
    pinned = replace(case.request, pins=(parse_pin("blk.3.experts=cpu"),))
    by_rule = make_plan(model, profile, pinned, clock=within(1, FakeClock(2)))
    assert by_rule.predicted.status == "baseline"
    assert {p.unit: str(p.site) for p in by_rule.units}["blk.3.experts"] == "cpu"
    pins = ("blk.3.attention=cpu", "blk.4.attention=CUDA0", "blk.5.attention=cpu")
    pinned = replace(case.request, pins=tuple(map(parse_pin, pins)))
    with pytest.raises(OutOfTime, match="give a longer --time-limit, or none"):
        make_plan(model, profile, pinned, clock=within(1, FakeClock(2)))


def test_draft_lengths_share_the_time() -> None:
    """When it is up the lengths not yet tried are left out; to draft nothing is always tried."""
    profile = machine()
    model = real("Qwen3.6-35B-A3B-q4_K")
    budgets = budgets_for(profile, parse_budget("9000"))
    request = Request(budgets, extra_models=ExtraModels(Extras(), "CUDA0", 700_000))
    made = make_plan(model, profile, request, clock=within(1, FakeClock(2)))
    assert made.search is not None and made.search.ended_by == "clock"
    assert made.speculation is not None and made.speculation.tokens == 0
    assert " 1: " not in made.notes[-1]


class Work:
    """A clock that only work moves: each call of a function that is slowed takes so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self._patch = 0.0, monkeypatch

    def __call__(self) -> float:
        return self.time

    def slow(self, module: ModuleType, name: str, seconds: float) -> None:
        whole = getattr(module, name)

        def slowed(*given: Any, **named: Any) -> Any:
            self.time += seconds
            return whole(*given, **named)

        self._patch.setattr(module, name, slowed)

    def search_to_the_end(self, module: ModuleType) -> None:
        """Every search of this module takes all the time that it may."""

        def searched(problem: Problem, hint: Solution | None, limits: Limits) -> Solved:
            self.time += limits.deadline.left_s()
            assert limits.deadline.over()
            return Solved("feasible" if hint else "unknown", hint, price_of(problem, hint) if hint else 0, 0)

        self._patch.setattr(module, "solve", searched)


@pytest.mark.parametrize("pace", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("context", ["max", "4096"])
def test_the_limit_is_the_seconds_that_a_person_waits(
    pace: float, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, pricing, stock rules and recording are in it, on a machine however busy.

    A search may take all its time; the plan is ready in time wherever it would be without any search.
    """
    work = Work(monkeypatch)
    work.slow(case_module, "build_problem", 1.0 * pace)
    work.slow(largest_context_module, "build_problem", 1.0 * pace)
    work.slow(stock_rules, "candidates", 2.0 * pace)
    work.slow(make_plan_module, "record", 3.0 * pace)
    for module in (placements, largest_context_module):
        work.search_to_the_end(module)
    profile = machine(TWO_GPUS)
    budgets = budgets_for(profile, parse_budget("CUDA0=3000,CUDA1=2000"))
    request = Request(budgets, lowest_ctx=256 if context == "max" else 0)
    model = moe(24)
    make_plan(model, profile, request, clock=Clock(deadline=Deadline(60, work, began=-60.0)))
    least, work.time = work.time, 0.0
    clock = Clock(deadline=Deadline(60, work, began=-5.0))  # it took five seconds to read the files
    made = make_plan(model, profile, request, clock=clock)
    assert made.search == Search(ended_by="clock", time_limit_ms=60_000)
    assert 20 < work.time <= 55
    assert least < 55


def test_a_plan_that_the_clock_cut_says_so_on_the_way_and_in_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem of minutes, with contexts: as a command, with a clock of its own."""
    out = tmp_path / "p.yaml"
    words = ["solve", HARD, "--machine", TWO_GPUS, "--page", "--ctx", "max", "--time-limit", 4, "-o", out]
    began = []

    def deadline(seconds: float, began_at: float | None = None, **named: float | None) -> Deadline:
        began.append(named["began"])
        return Deadline(seconds, FakeClock(0.05))

    monkeypatch.setattr(solve_request, "Deadline", deadline)
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    assert began[0] is not None and began[0] <= time.monotonic()  # since the command began, not since here
    made = from_text(out.read_text(), "plan.yaml")
    assert made.search == Search(ended_by="clock", time_limit_ms=4000)
    assert "ended by the clock after 4 s" in done.stderr
    checked = CliRunner().invoke(main, ["check", "--no-resolve", str(out), "--json"])
    rules = [f["rule"] for file in json.loads(checked.stdout)["files"] for f in file["findings"]]
    assert "search" in rules


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_suspended_search_gives_the_same_bytes(tmp_path: Path) -> None:
    """Stopped again and again while it works, for longer than it works."""
    table = ROOT / "plans/inputs/GLM-4.7-Flash-q4_K.inventory.yaml"
    words = [sys.executable, str(ROOT / "atsplan.py"), "solve", str(table), "--machine", "2x-rtx4060ti-16gb"]
    words += ["--budget", "5000", "--page", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    quiet = subprocess.run(words, capture_output=True, env=environment, cwd=tmp_path, check=True).stdout
    child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, cwd=tmp_path)
    stops = 0
    try:
        while child.poll() is None and stops < 12:
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            child.send_signal(signal.SIGCONT)
            stops += 1
            time.sleep(0.3)
        found, _ = child.communicate(timeout=500)
    finally:
        child.kill()
    assert stops > 2 and found == quiet and json.loads(found)["search"] is None


def test_plans_without_the_field_are_as_they_were() -> None:
    path = next((ROOT / "plans").glob("*--*.yaml"))
    made = from_text(path.read_text(), str(path))
    assert made.search is None and to_text(made) == path.read_text()
