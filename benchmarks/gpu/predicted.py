"""Predicted against measured cells of a GPU benchmark: python -m benchmarks.gpu.predicted RESULTS PROFILE

PROFILE is a profile of a machine of the same kind, of whatever model; nothing of the benchmark's own runs
goes into a prediction. Beside RESULTS lies its `.routing.csv`: choices of each expert over all layers.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu import generated_models, report, solver_plans
from planner.machine.profile import from_text
from planner.plan.plan import Plan
from planner.site import SiteKind
from planner.workload import Workload


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.argument("profile_path", metavar="PROFILE", type=click.Path(exists=True, path_type=Path))
def main(results: Path, profile_path: Path) -> None:
    """Print a Markdown table: milliseconds predicted, measured, and the error."""
    profile = from_text(profile_path.read_text(), str(profile_path))
    routing = read_routing(results.with_suffix(".routing.csv"))
    print("| model | routing | in VRAM | contender | decode | | | prefill 512 | | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = json.loads(results.read_text())["runs"]
    for (model, level, percent), runs in report.cells(rows).items():
        inventory = generated_models.inventory(model)
        layers, traced = range(inventory.number("block_count")), routing[model, level]
        choices = dict.fromkeys(map(str, layers), traced) if traced else {}
        work = Workload(n_ctx=1280, prompt=512, depth=0)
        budget = next(r["budget_bytes"] for r in runs if report.decode_ns(r, 0))
        whole = next(r["vram_bytes"] for r in rows if (r["model"], r["residency"]) == (model, 100))
        _, plan = solver_plans.solve(inventory, profile, budget, whole, work, choices, stripes=True)
        for name, predicted in predictions(plan).items():
            measured = [r for r in runs if r["contender"] == name and report.decode_ns(r, 0)]
            if measured:
                row = (report.decode_ns(measured[0], 0), report.prefill_ns(measured[0], 512))
                parts = [
                    pair for ours, theirs in zip(predicted, row, strict=True) for pair in shown(ours, theirs)
                ]
                print("| " + " | ".join([model, level, f"{percent} %", name, *parts]) + " |")


def predictions(plan: Plan) -> dict[str, tuple[int, int]]:
    """Decode and prefill of the solver's striped plan and of the stock rules, nanoseconds."""
    found = {b.name: (b.tpot_ns, b.prefill_ns) for b in plan.baselines if b.feasible}
    sites = {u.site.kind for u in plan.units if u.unit.endswith("experts")}
    if sites == {SiteKind.STRIPE}:
        found["stripes"] = (plan.predicted.tpot_ns, plan.predicted.prefill_ns)
    return found


def shown(predicted_ns: int, measured_ns: int) -> tuple[str, str, str]:
    """Milliseconds and the relative error."""
    error = predicted_ns / measured_ns - 1
    return f"{predicted_ns / 1e6:.1f}", f"{measured_ns / 1e6:.1f}", f"{error:+.0%}"


def read_routing(path: Path) -> dict[tuple[str, str], list[int]]:
    """Choices by expert, for each model and routing."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            found[row["model"], row["routing"]].append(int(row["count"]))
    return found


def write_routing(path: Path, traced: dict[str, dict[str, list[int]]]) -> None:
    """Sum traced choices over the layers; `traced` maps "model routing" to choices by layer."""
    with path.open("w", newline="") as file:
        writer: Any = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "routing", "expert", "count"))
        for key, layers in traced.items():
            width = max(len(row) for row in layers.values())
            for expert in range(width):
                count = sum(row[expert] for row in layers.values() if expert < len(row))
                writer.writerow((*key.split(), expert, count))


if __name__ == "__main__":
    main()
