"""atsplan sweep: budget against predicted speed, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import PICTURE, mib, out_json, out_table, progress, say, table
from commands.shared.option_types import Target
from commands.shared.pictures import check_name, pyplot, save
from commands.shared.spellings import ask_unit
from commands.solve.options import SolveOptions, solve_options
from commands.solve.request import Inputs, inputs_of
from planner.constants import MIB, PPM
from planner.errors import AnswerIsNo, OptionProblem
from planner.quoting import mathtext

if TYPE_CHECKING:
    from planner.plan.plan import Baseline, Plan

_MOST = 500  # plans in one sweep


@dataclass(eq=False)
class NothingFits(AnswerIsNo):
    """No budget of a sweep is enough."""

    most_bytes: int

    def message(self) -> str:
        return f"nothing fits up to {mib(self.most_bytes)}: solve with that budget says what is missing"


@dataclass(frozen=True, slots=True)
class Point:
    """One budget and what it gives; `plan` is None where nothing fits."""

    budget_bytes: int
    plan: Plan | None

    @property
    def best_stock(self) -> Baseline | None:
        """The stock rule that answers a request first, as the plan is chosen by it; None when none fits."""
        from planner.check.recorded_rules import objective_ns

        plan = self.plan
        rules = [b for b in plan.baselines if b.feasible] if plan else []
        return min(rules, key=lambda b: objective_ns(plan, b), default=None) if plan else None

    @property
    def gain_ppm(self) -> int:
        """How many times as fast a request is as by that rule; 0 when none fits."""
        from planner.check.recorded_rules import objective_ns

        if self.plan is None or self.best_stock is None:
            return 0
        gain = PPM * objective_ns(self.plan, self.best_stock) // max(self.plan.predicted.objective_ns, 1)
        # A plan that is itself a stock rule, though a simpler one than the fastest, gains nothing.
        return max(gain, PPM) if self.plan.predicted.status == "baseline" else gain


@click.command()
@solve_options
@click.option(
    "--budgets", required=True, help="FIRST:LAST:STEP on the swept device: 4000:24000:1000 (MiB), 4G:24G:1G."
)
@click.option("--device", help="The device whose budget is swept [default: the first GPU].")
@click.option("--plot", type=Target(PICTURE), help="Write a picture: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def command(asked: SolveOptions, budgets: str, device: str | None, plot: Path | None, as_json: bool) -> None:
    """Plan MODEL for a range of budgets."""
    from planner.machine.budgets import parse_budget

    sizes = parse_range(budgets)
    check_name(plot, "--plot")
    inputs = inputs_of(asked)
    swept = _device(inputs, device)
    if asked.budget is not None and swept in parse_budget(asked.budget):
        raise OptionProblem("--budget", asked.budget, f"{swept} is what --budgets sweeps")
    points = _points(inputs, swept, sizes)
    if plot is not None:
        draw(points, f"{inputs.inventory.name} on {inputs.profile.name}, budget of {swept}", plot)
    if as_json:
        out_json([_data(point) for point in points])
    else:
        _show(points)
    if not inputs.profile.measured:
        say(f"assumed, not measured: {inputs.profile.name}")
    if all(point.plan is None for point in points):
        raise NothingFits(points[-1].budget_bytes)


def parse_range(text: str) -> tuple[int, ...]:
    """Budgets in MiB from FIRST:LAST:STEP, the last included; OptionProblem for what is no range."""
    parts = text.split(":")
    if len(parts) != 3:
        raise OptionProblem("--budgets", text, "expected FIRST:LAST:STEP, for example 4G:24G:1G")
    first, last, step = (_mib(part.strip(), text) for part in parts)
    ask_unit("--budgets", parts[1])
    if not 0 < first <= last or step == 0:
        raise OptionProblem("--budgets", text, "expected 0 < FIRST <= LAST and a step above zero")
    if (last - first) // step + 1 > _MOST:
        raise OptionProblem("--budgets", text, f"is more than {_MOST} plans")
    return tuple(range(first, last + 1, step))


def _mib(part: str, text: str) -> int:
    """One size of a range: a bare number counts MiB; OptionProblem for what is no whole number of them."""
    from planner.machine.budgets import EVERY, parse_reserve

    try:
        size = parse_reserve(part, "--budgets")[EVERY]
    except (OptionProblem, KeyError):
        size = 1
    if size % MIB:
        raise OptionProblem("--budgets", text, "expected FIRST:LAST:STEP, for example 4G:24G:1G")
    return size // MIB


def _device(inputs: Inputs, asked: str | None) -> str:
    gpus = [d.name for d in inputs.profile.devices if d.kind != "cpu"]
    known = [d.name for d in inputs.profile.devices]
    if asked is not None and asked not in known:
        raise OptionProblem("--device", asked, f"no such device; there are {', '.join(known)}")
    if asked is None and not gpus:
        raise OptionProblem("--device", "", "the machine has no GPU: name the device to sweep")
    return asked or gpus[0]


def _points(inputs: Inputs, device: str, sizes: Sequence[int]) -> list[Point]:
    from dataclasses import replace

    from planner.errors import AnswerIsNo
    from planner.passes.refusal import OutOfTime

    found = []
    with progress() as bar:
        task = bar.add_task("budgets", total=len(sizes), rate="")
        for n, size in enumerate(sizes):
            request = replace(inputs.request, budgets={**inputs.request.budgets, device: size * MIB})
            here = replace(inputs.within(1 / (len(sizes) - n)), request=request)
            try:
                plan = here.plan(advise=False)
            except OutOfTime:  # nothing is known of this budget
                raise
            except AnswerIsNo:
                plan = None
            found.append(Point(size * MIB, plan))
            bar.advance(task)
    return found


def _show(points: Sequence[Point]) -> None:
    shown = table("budget", "tokens/s", "ms/token", "prompt ms", "best stock rule", "request gain", "gap")
    for point in points:
        if point.plan is None:
            shown.add_row(mib(point.budget_bytes), "does not fit", "", "", "", "", "")
            continue
        p, stock = point.plan.predicted, point.best_stock
        shown.add_row(
            mib(point.budget_bytes),
            f"{1e9 / p.tpot_ns:.1f}",
            f"{p.tpot_ns / 1e6:.2f}",
            f"{p.prefill_ns / 1e6:.0f}",
            f"{1e9 / stock.tpot_ns:.1f}" if stock else "none fits",
            f"{point.gain_ppm / PPM:.2f}x" if stock else "",
            f"{p.gap_ppm / 1e4:.2f} %",
        )
    out_table(shown)


def _data(point: Point) -> dict[str, Any]:
    if point.plan is None:
        return {"budget_bytes": point.budget_bytes, "feasible": False}
    p = point.plan.predicted
    return {
        "budget_bytes": point.budget_bytes,
        "feasible": True,
        "tpot_ns": p.tpot_ns,
        "prefill_ns": p.prefill_ns,
        "status": p.status,
        "gap_ppm": p.gap_ppm,
        "objective_ns": p.objective_ns,
        "best_stock_tpot_ns": point.best_stock.tpot_ns if point.best_stock else None,
        "gain_ppm": point.gain_ppm or None,
    }


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Budget against tokens/s, the plan and each stock rule; the same points give the same bytes."""
    figure, axes = pyplot().subplots(figsize=(8, 4.8), layout="constrained")
    solved = [(p.budget_bytes / 2**30, 1e9 / p.plan.predicted.tpot_ns) for p in points if p.plan]
    for name, line in _stock_lines(points).items():
        axes.plot(*zip(*line, strict=True), label=mathtext(name), linewidth=1.2, linestyle="--")
    if solved:
        axes.plot(*zip(*solved, strict=True), label="atsplan", color="black", linewidth=2, marker=".")
    axes.set(xlabel="budget, GiB", ylabel="predicted tokens/s", title=mathtext(title))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def _stock_lines(points: Sequence[Point]) -> dict[str, list[tuple[float, float]]]:
    """By stock rule: budget in GiB and tokens/s, where it fits."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for baseline in point.plan.baselines if point.plan else ():
            if baseline.feasible:
                at = (point.budget_bytes / 2**30, 1e9 / baseline.tpot_ns)
                lines.setdefault(baseline.name, []).append(at)
    return lines
