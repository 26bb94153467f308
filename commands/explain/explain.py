"""atsplan explain: a plan in sentences."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import PICTURE, next_step, out, out_json, planning, say
from commands.shared.inputs import InputLibrary, input_options
from commands.shared.models import load_plan
from commands.shared.option_types import Number, Target, began, html_option
from commands.shared.pictures import check_name
from planner.solver.deadline import Deadline

if TYPE_CHECKING:
    from planner.passes.predict import Breakdown
    from planner.plan.plan import Plan


@click.command()
@click.argument("path", metavar="PLAN", type=click.Path(path_type=Path))
@input_options
@click.option("--time-limit", type=Number(0.1, 3600), help="Seconds to solve again [work is limited].")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.option("--plot", type=Target(PICTURE), help="Draw the plan: .png, .svg or .pdf.")
@html_option
def command(
    path: Path,
    library: InputLibrary,
    time_limit: float | None,
    as_json: bool,
    plot: Path | None,
    html: Path | None,
) -> None:
    """Where the time of PLAN goes, what limits it, what 1 GiB more would buy, why it beats stock rules.

    Model and profile are looked for in `inputs/` beside the plan; without them the question of more
    memory stays open.
    """
    from planner.check.consistency import check_agreement
    from planner.check.explain import as_data, kept_of, sentences

    check_name(plot, "--plot")
    plan = load_plan(path)
    inventory = library.of(plan, path).inventory
    check_agreement(plan, inventory, str(path))
    parts = _parts(plan, path, library)
    larger = _larger(plan, path, library, time_limit)
    server = kept_of(plan, inventory) if inventory is not None else None
    if as_json:
        out_json(as_data(plan, larger, parts, server))
    else:
        for sentence in sentences(plan, larger, parts, server):
            out(sentence)
        for note in plan.notes:
            say(f"note: {note}")
    if html is not None:
        from commands.page.page import plan_page, view_of, write_page

        view = view_of(plan, inventory, None, path)
        write_page(html, plan_page(replace(view, larger=larger, parts=parts)))
    if plot is not None:
        from commands.explain.plan_picture import draw_plan

        draw_plan(plan, plot)
        say(f"wrote {plot}")
    next_step("atsplan", "export", path)


def _parts(plan: Plan, path: Path, library: InputLibrary) -> Breakdown | None:
    """What the predicted time is made of; None without the inputs, or when they give another time."""
    from planner.check.reprice import NotPlaceable, reprice

    inputs = library.of(plan, path)
    if inputs.inventory is None or inputs.profile is None:
        return None
    try:
        parts = reprice(plan, inputs.inventory, inputs.profile, inputs.known).breakdown()
    except NotPlaceable:
        return None
    return parts if parts.tpot_ns == plan.predicted.tpot_ns else None


def _larger(plan: Plan, path: Path, library: InputLibrary, time_limit: float | None) -> Plan | None:
    """The plan with 1 GiB more on the device that limits it."""
    from planner.check.explain import binding, with_more
    from planner.constants import GIB
    from planner.solver.clock import Clock

    tight = binding(plan)
    inputs = library.of(plan, path)
    if tight is None:
        return None
    if inputs.inventory is None or inputs.profile is None:
        say("model or profile not found: pass --model and --profile to learn what more memory would buy")
        return None
    found = inputs.inventory, inputs.profile, inputs.known
    deadline = Deadline(time_limit or math.inf, began=began())
    with planning("with 1 GiB more", deadline.left_s) as watch:
        return with_more(plan, *found, tight.name, GIB, Clock(deadline=deadline, watch=watch))
