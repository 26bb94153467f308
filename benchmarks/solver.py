"""How long proofs of optimality take: model x machine, processor seconds of one core and the gap left.

    python -m benchmarks.solver one       # one GPU, budgets of 8, 16 and 22 GB, with and without stripes
    python -m benchmarks.solver two       # 24 + 12 GB, 2 x 16 GB, a GPU and one over the network
    python -m benchmarks.solver stripes   # two GPUs, and stripe widths that differ in every layer

The time is that of a whole `solve`: prices, stock rules, search. Host memory is not limited (--page), so
that models of every size have a plan. The coverage of hot experts is a made curve, another for each layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.cost.build_problem import analyse, build_problem
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.presets import load
from planner.model.inventory import Inventory, from_text
from planner.model.routed_layers import moe_shape
from planner.model.structure import structure_of
from planner.passes import stock_rules
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.request import Request
from planner.solver.solve import Limits, Solved, solve
from planner.workload import Workload

INPUTS = Path(__file__).resolve().parent.parent / "plans" / "inputs"
MODELS = (
    "Qwen3.6-35B-A3B-q4_K",
    "Kimi-K2-Thinking-q4_K",
    "DeepSeek-V3.1-Terminus-q4_K",
    "Qwen3-30B-A3B-Q4_K_M",
    "Qwen3-235B-A22B-UD-Q4_K_S",
    "Qwen3-Next-80B-A3B-Q4_K_M",
    "Qwen3.6-27B-q4_K",
    "Llama-3.1-70B-Q4_K_M",
    "Nemotron-3-Nano-30B-A3B-Q4_K_M",
    "GLM-4.7-Flash-q4_K",
    "gemma-4-26B-A4B-Q4_K_M",
    "gpt-oss-20b-MXFP4",
    "gpt-oss-120b-MXFP4",
)
LARGE = MODELS[:3]
TWO = ("rtx3090-rtx3060-ddr4", "2x-rtx4060ti-16gb", "rtx4090-rpc")


@dataclass(frozen=True, slots=True)
class Case:
    """One problem."""

    model: str
    machine: str
    budget: str = ""  # "": what is free
    striped: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What the solver said of it, and after how much work."""

    seconds: float
    solved: Solved

    @property
    def gap(self) -> float:
        """Relative; zero when proven."""
        found = self.solved
        return (found.objective_ns - found.bound_ns) / max(found.objective_ns, 1)


def cases(which: str, models: tuple[str, ...]) -> Iterator[Case]:
    """The problems of one table."""
    if which == "one":
        for striped in (False, True):
            for model in models:
                for gigabytes in (8, 16, 22):
                    yield Case(model, "rtx4090-epyc", f"{gigabytes * 1000}MB", striped)
        return
    for model in models:
        for machine in TWO:
            yield Case(model, machine, "", which == "stripes")


def read(model: str) -> Inventory:
    """An inventory that ships with the plans."""
    path = INPUTS / f"{model}.inventory.yaml"
    return from_text(path.read_text(encoding="utf-8"), str(path))


def coverage(inventory: Inventory) -> Mapping[int, tuple[float, ...]]:
    """Share of routed choices that the k hottest experts of each layer serve: k/E to a power of its own."""
    shape = moe_shape(inventory)
    return {
        layer: tuple((k / shape.n_expert) ** _power(layer) for k in range(shape.n_expert + 1))
        for layer in shape.layers
    }


def _power(layer: int) -> float:
    return 0.35 + 0.3 * (layer * 7919 % 97) / 97


def measure(case: Case, inventory: Inventory, limit_s: float) -> Result:
    """Price and solve one problem."""
    profile = load(case.machine)
    budgets = budgets_for(profile, parse_budget(case.budget) if case.budget else {})
    known = Known(curves=coverage(inventory) if case.striped else {})
    started = time.process_time()
    workload = Workload()
    request = Request(budgets, workload, page=True)
    priced = build_problem(
        analyse(structure_of(inventory), workload), profile, request, EngineSettings(), known
    )
    stock = [c for c in stock_rules.candidates(priced) if c.feasible and c.evaluation]
    hint = min(stock, key=lambda c: c.evaluation.objective_ns if c.evaluation else 0, default=None)
    solved = solve(priced.problem, hint.solution if hint else None, Limits(limit_s))
    return Result(time.process_time() - started, solved)


def row(case: Case, result: Result) -> str:
    """One line of the table."""
    budget = f" {case.budget}" if case.budget else ""
    where = f"{case.machine}{budget}{' stripes' if case.striped else ''}"
    gap = "proven" if result.solved.status == "optimal" else f"{100 * result.gap:.3f} %"
    return f"{case.model:32} {where:36} {result.seconds:6.1f} s  {result.solved.status:10} {gap}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", choices=("one", "two", "stripes"))
    parser.add_argument("--models", nargs="*", help="Only these [one: the three largest claims; else all].")
    parser.add_argument("--time-limit", type=float, default=20.0)
    asked = parser.parse_args()
    models = tuple(asked.models or (LARGE if asked.which == "one" else MODELS))
    inventories = {name: read(name) for name in models}
    results = []
    for case in cases(asked.which, models):
        if case.striped and not inventories[case.model].number("expert_used_count"):
            continue
        results.append(measure(case, inventories[case.model], asked.time_limit))
        print(row(case, results[-1]), flush=True)
    proven = sum(r.solved.status == "optimal" for r in results)
    worst, longest = max(r.gap for r in results), max(r.seconds for r in results)
    print(f"{proven} of {len(results)} proven, worst gap {100 * worst:.3f} %, longest {longest:.1f} s")


if __name__ == "__main__":
    main()
