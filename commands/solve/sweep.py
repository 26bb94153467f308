"""atsplan sweep: budget against predicted speed, as a table and a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import (
    PICTURE,
    again,
    mib,
    next_step,
    out_json,
    out_table,
    progress,
    say,
    table,
    without,
)
from commands.shared.option_types import Target, html_option
from commands.shared.pictures import check_name, pyplot, save
from commands.shared.refusals import refusal_data
from commands.shared.spellings import ask_unit, tokens
from commands.shared.verdicts import rates
from commands.solve.options import SolveOptions, solve_options
from commands.solve.request import Inputs, workload_of
from commands.solve.ubatch import Way, best_of, sizes_of
from planner.constants import MIB, PPM
from planner.errors import AnswerIsNo, OptionProblem
from planner.quoting import mathtext

if TYPE_CHECKING:
    from planner.plan.plan import Baseline, Plan

_MOST = 500  # plans in one sweep
_EXPECTED = "expected FIRST:LAST:STEP, for example 4G:24G:1G"
_OWN = ("--budget", "--budgets", "--contexts", "-c", "--ctx", "--ctx-size", "--device", "--plot", "--html")
# Okabe-Ito colours, and what tells lines apart where colours do not.
_LOOKS = (
    ("#0072B2", "--", "o"),
    ("#D55E00", "-.", "s"),
    ("#009E73", ":", "^"),
    ("#CC79A7", (0, (5, 1)), "v"),
    ("#E69F00", (0, (1, 1)), "D"),
)
_TOKENS = re.compile(r"[0-9]{1,10}", re.ASCII)


@dataclass(eq=False)
class NothingFits(AnswerIsNo):
    """No budget of a sweep is enough; `refusal` is that of the largest, with ways out that were tried."""

    most_bytes: int
    refusal: AnswerIsNo

    def message(self) -> str:
        return f"nothing fits up to {mib(self.most_bytes)}: {self.refusal}"


@dataclass(frozen=True, slots=True)
class Point:
    """One budget and context, and what they give: a plan, or a refusal where nothing fits."""

    budget_bytes: int
    n_ctx: int
    plan: Plan | None
    refusal: AnswerIsNo | None = None

    @property
    def best_stock(self) -> Baseline | None:
        """The stock rule that answers a request first, as the plan is chosen by it; None when none fits."""
        from planner.check.gains import best_rule

        return best_rule(self.plan) if self.plan else None

    @property
    def gain_ppm(self) -> int:
        """How many times as fast a request is as by that rule; 0 when none fits."""
        from planner.check.recorded_rules import objective_ns

        if self.plan is None or self.best_stock is None:
            return 0
        return PPM * objective_ns(self.plan, self.best_stock) // max(self.plan.predicted.objective_ns, 1)


@dataclass(frozen=True, slots=True)
class Range:
    """What is swept: budgets of one device, in bytes, and contexts, in tokens."""

    device: str
    budgets: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Whether contexts differ, so that they are worth a column."""
        return len(self.contexts) > 1


@click.command()
@solve_options
@click.option("--budgets", help="FIRST:LAST:STEP on the swept device: 4000:24000:1000 (MiB), 4G:24G:1G.")
@click.option("--contexts", metavar="TOKENS,…", help="Contexts, each with each budget: 4k,16k,64k.")
@click.option("--device", help="The device whose budget is swept [default: the first GPU].")
@click.option("--plot", type=Target(PICTURE), help="Write a picture: .png, .svg or .pdf.")
@html_option
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def command(
    asked: SolveOptions,
    budgets: str | None,
    contexts: str | None,
    device: str | None,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Plan MODEL for a range of budgets, of contexts, or of both.

    Interrupted, or out of time, it shows what it has.
    """
    from planner.passes.refusal import OutOfTime

    check_name(plot, "--plot")
    asked = replace(asked, ctx=str(parse_contexts(contexts)[0])) if contexts is not None else asked
    ways, swept = _asked(asked, budgets, contexts, device)
    inputs = ways[0][1]
    points: list[Point] = []
    ended: BaseException | None = None
    try:
        _solve(ways, swept, points)
    except (KeyboardInterrupt, OutOfTime) as early:
        if not points:
            raise
        ended = early
    if as_json:
        out_json([_data(point) for point in points])
    else:
        _show(points, swept.several)
    _write(inputs, swept, points, (plot, html), ended is None)  # rows are kept whatever becomes of a picture
    if not inputs.profile.measured:
        say(f"assumed, not measured: {inputs.profile.name}")
    if ended is not None:
        say(f"{len(points)} of {len(swept.budgets) * len(swept.contexts)} plans were solved")
        raise ended
    if (refusal := points[-1].refusal) and all(point.plan is None for point in points):
        raise NothingFits(points[-1].budget_bytes, refusal)
    next_step(*_to_solve(asked, swept, points))


def _to_solve(asked: SolveOptions, swept: Range, points: Sequence[Point]) -> list[str]:
    """The command for one of the plans: the least budget as fast as any, of the largest context that fits."""
    largest = max(point.n_ctx for point in points if point.plan)
    fits = {p.budget_bytes: p.plan.predicted.objective_ns for p in points if p.plan and p.n_ctx == largest}
    least = min(size for size, ns in fits.items() if 100 * ns <= 101 * min(fits.values()))
    budget = f"{swept.device}={least // MIB}"
    words = without(again(), _OWN, ("--json",))
    limits = ["--budget", f"{asked.budget},{budget}" if asked.budget else budget, "-c", str(largest)]
    return [words[0], "solve", *words[2:], *limits, "-o", "plan.yaml"]


def _asked(
    asked: SolveOptions, budgets: str | None, contexts: str | None, device: str | None
) -> tuple[list[Way], Range]:
    """What the command line asks for, by size of batch; OptionProblem for what makes no sense."""
    from planner.machine.budgets import parse_budget

    if budgets is None and contexts is None:
        raise OptionProblem("--budgets", "", "say what to sweep: --budgets 4G:24G:1G, --contexts 4k,16k,64k")
    sizes = parse_range(budgets) if budgets is not None else ()
    ways = sizes_of(asked)
    inputs = ways[0][1]
    swept = _device(inputs, device)
    if sizes and asked.budget is not None and swept in parse_budget(asked.budget):
        raise OptionProblem("--budget", asked.budget, f"{swept} is what --budgets sweeps")
    found = Range(
        swept,
        tuple(size * MIB for size in sizes) or (inputs.request.budgets[swept],),
        parse_contexts(contexts) if contexts is not None else (inputs.request.workload.n_ctx,),
    )
    if len(found.budgets) * len(found.contexts) > _MOST:
        raise OptionProblem("--contexts", contexts or "", f"with these budgets are more than {_MOST} plans")
    return ways, found


def parse_contexts(text: str) -> tuple[int, ...]:
    """Contexts in tokens, rising; OptionProblem for what is no list of them."""
    found = sorted({tokens(part) for part in text.split(",")}, key=lambda each: (len(each), each))
    if not all(_TOKENS.fullmatch(each) and 0 < int(each) < 2**31 for each in found):
        raise OptionProblem("--contexts", text, "expected numbers of tokens, for example 4k,16k,64k")
    return tuple(map(int, found))


def parse_range(text: str) -> tuple[int, ...]:
    """Budgets in MiB from FIRST:LAST:STEP, the last included; OptionProblem for what is no range."""
    parts = text.split(":")
    if len(parts) != 3:
        raise OptionProblem("--budgets", text, _EXPECTED)
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
        raise OptionProblem("--budgets", text, _EXPECTED) from None
    if size % MIB:
        raise OptionProblem("--budgets", text, f"{part} is not a whole number of MiB")
    return size // MIB


def _device(inputs: Inputs, asked: str | None) -> str:
    gpus = [d.name for d in inputs.profile.devices if d.kind != "cpu"]
    known = [d.name for d in inputs.profile.devices]
    if asked is not None and asked not in known:
        raise OptionProblem("--device", asked, f"no such device; there are {', '.join(known)}")
    if asked is None and not gpus:
        raise OptionProblem("--device", "", "the machine has no GPU: name the device to sweep")
    return asked or gpus[0]


def _solve(ways: Sequence[Way], swept: Range, points: list[Point]) -> None:
    """A plan for each budget and context, added to `points` as it is found."""
    pairs = [(size, n_ctx) for n_ctx in swept.contexts for size in swept.budgets]
    with progress() as bar:
        task = bar.add_task("plans", total=len(pairs), rate="")
        for n, (size, n_ctx) in enumerate(pairs):
            bar.update(task, rate=f"{mib(size)}, context {n_ctx}")

            def watch(done: float, before: int = n) -> None:
                bar.update(task, completed=before + done)

            # What would help is tried once, where nothing fitted: for the last of all, which has most memory.
            last = n + 1 == len(pairs) and all(point.plan is None for point in points)
            shared = [_with(way, swept.device, size, n_ctx, 1 / (len(pairs) - n)) for way in ways]
            points.append(_point(Point(size, n_ctx, None), shared, watch, advise=last))
            bar.update(task, completed=n + 1)


def _with(way: Way, device: str, size: int, n_ctx: int, share: float) -> Inputs:
    """What is asked with a budget and a context, and a share of the time that is left."""
    asked, inputs = way
    request = replace(inputs.request, budgets={**inputs.request.budgets, device: size})
    if n_ctx != request.workload.n_ctx:
        use = workload_of(replace(asked, ctx=str(n_ctx)), inputs.inventory, inputs.profile)
        request = replace(request, workload=use)
    return replace(inputs.within(share), request=request)


def _point(point: Point, ways: Sequence[Inputs], watch: Callable[[float], None], *, advise: bool) -> Point:
    """The best of some sizes of batches, as `solve` chooses among them; raises OutOfTime."""
    from planner.passes.refusal import OutOfTime

    found, refusal = [], None
    for n, inputs in enumerate(ways):

        def part(done: int, total: int, before: int = n) -> None:
            watch((before + done / max(total, 1)) / len(ways))

        try:
            here = inputs.within(1 / (len(ways) - n))
            found.append(here.plan(advise=advise and not n, watch=part))
        except OutOfTime:  # nothing is known of this budget
            raise
        except AnswerIsNo as no:
            refusal = refusal or no
    return replace(point, plan=best_of(found)) if found else replace(point, refusal=refusal)


def _write(
    inputs: Inputs,
    swept: Range,
    points: Sequence[Point],
    targets: tuple[Path | None, Path | None],
    complete: bool,
) -> None:
    """The picture and the page, where they are asked for."""
    plot, page = targets
    title = f"{inputs.inventory.name} on {inputs.profile.name}, budget of {swept.device}"
    if plot is not None:
        assumed = "" if inputs.profile.measured else " (assumed machine)"
        for_ctx = f", context {swept.contexts[0]}" if swept.several else ""
        shown = [point for point in points if point.n_ctx == swept.contexts[0]]
        where = f"{inputs.inventory.name} on {inputs.profile.name}{assumed}"
        draw(shown, f"{where}\nbudget of {swept.device}{for_ctx}", plot)
    if page is None:
        return
    from commands.page.page import view_of, write_page
    from commands.page.sweep_page import Sweep, sweep_page

    at = [(swept.budgets.index(p.budget_bytes), swept.contexts.index(p.n_ctx)) for p in points]
    views = [view_of(p.plan, inputs.inventory, inputs.model) if p.plan else None for p in points]
    sweep = Sweep(
        title,
        swept.device,
        swept.budgets[: max(b for b, _ in at) + 1],
        swept.contexts[: max(c for _, c in at) + 1],
        dict(zip(at, views, strict=True)),
        complete,
    )
    write_page(page, sweep_page(sweep))


def _show(points: Sequence[Point], several: bool) -> None:
    shown = table(
        "budget", "context", "tokens/s", "ms/token", "prompt ms", "best stock rule", "request gain", "gap"
    )
    for point in points:
        context = str(point.n_ctx) if several else ""
        if point.plan is None:
            shown.add_row(mib(point.budget_bytes), context, "does not fit")
            continue
        p, stock = point.plan.predicted, point.best_stock
        shown.add_row(
            mib(point.budget_bytes),
            context,
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
        why = refusal_data(point.refusal) if point.refusal else {"feasible": False}
        return {"budget_bytes": point.budget_bytes, "n_ctx": point.n_ctx, **why}
    p = point.plan.predicted
    return {
        "budget_bytes": point.budget_bytes,
        "n_ctx": point.n_ctx,
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
    fits = [(p.budget_bytes / 2**30, p.plan.predicted) for p in points if p.plan]
    solved = [(budget, 1e9 / predicted.tpot_ns) for budget, predicted in fits]
    for number, (name, line) in enumerate(_stock_lines(points).items()):
        colour, dashes, mark = _LOOKS[number % len(_LOOKS)]
        look = {"color": colour, "linestyle": dashes, "marker": mark, "markersize": 5, "linewidth": 1.2}
        axes.plot(*zip(*line, strict=True), label=mathtext(name), **look)
    if solved:
        axes.plot(*zip(*solved, strict=True), label="this plan", color="black", linewidth=2, marker=".")
        between = [rates(predicted.tpot_ns, predicted.error_ppm)[1:] for _, predicted in fits]
        look = {"color": "black", "alpha": 0.1, "linewidth": 0, "label": "its error"}
        axes.fill_between([at for at, _ in solved], *zip(*between, strict=True), **look)
    axes.set(
        xlabel="budget, GiB", ylabel="predicted tokens/s", title="\n".join(map(mathtext, title.split("\n")))
    )
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
