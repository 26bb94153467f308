"""The page of a sweep: curves over budgets and contexts, and sliders over the plans that were solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commands.page.curve_figure import Spot, curve
from commands.page.elements import Node, document, element
from commands.page.page import View, badge, sections
from commands.page.patterns import patterns
from commands.shared.console import mib
from commands.shared.verdicts import gain, rates, verdict

if TYPE_CHECKING:
    from planner.plan.plan import Plan

Key = tuple[int, int]  # of budget and context


@dataclass(frozen=True, slots=True)
class Sweep:
    """Solved points: for each budget and context the plan, and None where nothing fits."""

    title: str
    device: str
    budgets: Sequence[int]  # bytes
    contexts: Sequence[int]  # tokens
    views: Mapping[Key, View | None]
    complete: bool = True


def sweep_page(sweep: Sweep) -> str:
    """All points in one file; the last budget and the first context are shown at first."""
    found = [view for view in sweep.views.values() if view is not None]
    plan = found[-1].plan if found else None
    most = max((spot.high for spot in _spots(sweep, list(sweep.views))), default=1) or 1
    cut = "" if sweep.complete else "The sweep was ended early: what had been solved is here."
    header = element(
        "header",
        element("p", "atsplan", class_="brand"),
        element("h1", plan.model.name if plan else sweep.title),
        element(
            "p",
            element("strong", plan.machine.name if plan else sweep.title),
            f", budget of {sweep.device} ",
            badge(plan) if plan else None,
            class_="machine",
        ),
        element("p", cut) if cut else None,
    )
    panels = [
        _panel(sweep, key, view, shown=number == len(sweep.views) - 1)
        for number, (key, view) in enumerate(sweep.views.items())
    ]
    return document(sweep.title, [patterns(), header, element("main", _chooser(sweep, most), *panels)])


def _key(key: Key) -> str:
    return f"{key[0]}-{key[1]}"


def _chooser(sweep: Sweep, most: float) -> Node:
    """Curves and sliders: for each context one curve over budgets, and for each budget one over contexts."""
    figures = []
    if len(sweep.budgets) > 1:
        for c, context in enumerate(sweep.contexts):
            along = [key for key in sweep.views if key[1] == c]
            title = f"Tokens/s against the budget of {sweep.device}, context {context}"
            figures.append(_figure(sweep, along, most, title, "budget, GiB"))
    if len(sweep.contexts) > 1:
        for b, budget in enumerate(sweep.budgets):
            along = [key for key in sweep.views if key[0] == b]
            title = f"Tokens/s against the context, budget {mib(budget)}"
            figures.append(_figure(sweep, along, most, title, "context, tokens"))
    at = next(reversed(list(sweep.views)), (0, 0))
    axes = [
        ("budget", "Budget", [mib(size) for size in sweep.budgets], at[0]),
        ("context", "Context", [f"{n} tokens" for n in sweep.contexts], at[1]),
    ]
    controls = element("div", *(_slider(*axis) for axis in axes), class_="controls")
    return element(
        "section", element("h2", "What more memory brings"), *figures, controls, class_="card wide"
    )


def _figure(sweep: Sweep, along: Sequence[Key], most: float, title: str, axis: str) -> Node:
    made = curve(_spots(sweep, along, by_context="context" in axis), most, title, axis)
    made.set("data-along", axis.partition(",")[0])
    made.set("data-keys", " ".join(map(_key, along)))
    return made


def _slider(name: str, label: str, labels: Sequence[str], at: int) -> Node:
    told = element("output", labels[at], for_=name)
    slider = element(
        "input",
        type="range",
        id=name,
        min=0,
        max=max(len(labels) - 1, 0),
        step=1,
        value=at,
        data_axis=name,
        data_labels="|".join(labels),
        aria_label=label,
    )
    if len(labels) < 2:  # it stays for the script, which reads the point from both
        slider.set("hidden", "")
    return element("label", f"{label}: ", slider, told)


def _spots(sweep: Sweep, keys: Sequence[Key], by_context: bool = False) -> list[Spot]:
    found = []
    for key in keys:
        budget, context = sweep.budgets[key[0]], sweep.contexts[key[1]]
        x, label = (context, _short(context)) if by_context else (budget / 2**30, f"{budget / 2**30:.3g}")
        view = sweep.views[key]
        rate, low, high, stock = _rates(view.plan) if view else (0.0, 0.0, 0.0, 0.0)
        found.append(Spot(x, label, _key(key), rate, low, high, stock))
    return found


def _rates(plan: Plan) -> tuple[float, float, float, float]:
    times = [b.tpot_ns for b in plan.baselines if b.feasible]
    p = plan.predicted
    return (*rates(p.tpot_ns, p.error_ppm), 1e9 / min(times) if times else 0.0)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _panel(sweep: Sweep, key: Key, view: View | None, shown: bool) -> Node:
    """What one point holds; the others wait for the sliders."""
    name = f"{mib(sweep.budgets[key[0]])}, context {sweep.contexts[key[1]]}"
    if view is None:
        why = element("p", f"Nothing fits {name}.")
        made = element("div", element("section", why, class_="card wide"), class_="panel")
    else:
        said = f"The plan for {name}: {verdict(view.plan)}; {gain(view.plan)}"
        made = element(
            "div", element("h2", said, class_="wide"), *sections(view, f"paste-{_key(key)}"), class_="panel"
        )
    made.set("data-panel", _key(key))
    if not shown:
        made.set("hidden", "")
    return made
