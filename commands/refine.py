"""atsplan refine: measured times into the calibration, and to a faster plan if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import again, ms, next_step, out, out_json, planning, read_text, say, write_text
from commands.shared.inputs import InputLibrary, input_options
from commands.shared.models import load_plan
from commands.shared.option_types import Number, Target
from planner.errors import FileProblem, OptionProblem

if TYPE_CHECKING:
    from planner.check.check import Inputs
    from planner.learn.refine import Refined
    from planner.plan.plan import Plan


@click.command()
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--measured",
    "measured",
    multiple=True,
    type=click.Path(path_type=Path),
    help="JSON of run, bench or llama-bench, a log of llama-server or its /metrics; repeatable.",
)
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    help="Expert counts since: others for the slots that the plan has, which a running serve takes over.",
)
@input_options
@click.option("--time-limit", type=Number(0.1, 3600), help="Seconds to solve again [work is limited].")
@click.option("-o", "--output", "--out", "output", type=Target("plan"), help="Write a faster plan here.")
@click.option("--calibrated", type=Target("profile"), help="Write the profile with its new calibration here.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def command(
    plan_path: Path,
    measured: tuple[Path, ...],
    routing: Path | None,
    library: InputLibrary,
    time_limit: float | None,
    output: Path | None,
    calibrated: Path | None,
    as_json: bool,
) -> None:
    """Compare what PLAN was measured to take with what it predicts.

    From 15 % apart the calibration takes the measurement in and the request is solved again; a plan that is
    faster by 3 % or more is shown, and written with -o. With --routing sites stay, and the experts that are
    chosen most get the slots, by the same 3 %.
    """
    import math

    from planner.check.consistency import check_agreement
    from planner.learn.readers import samples_in
    from planner.learn.refine import refine
    from planner.machine.profile import to_text as profile_text
    from planner.plan.plan import to_text
    from planner.solver.clock import Clock
    from planner.solver.deadline import Deadline

    plan = load_plan(plan_path)
    inputs = library.of(plan, plan_path)
    if inputs.inventory is None or inputs.profile is None:
        lacks = "--model" if inputs.inventory is None else "--profile"
        raise FileProblem(str(plan_path), f"what it was made from is not here: give {lacks}")
    check_agreement(plan, inputs.inventory, str(plan_path))
    if routing is not None or not measured:
        if routing is None or measured:
            raise OptionProblem("--routing", str(routing or ""), "give --measured or --routing, and not both")
        _reseat(plan, inputs, routing, output, as_json)
        return
    samples = [
        sample for path in measured for sample in samples_in(read_text(path), str(path), inputs.inventory)
    ]
    deadline = Deadline(time_limit or math.inf)
    with planning("solving again", deadline.left_s) as watch:
        clock = Clock(deadline=deadline, watch=watch)
        found = refine(plan, inputs.inventory, inputs.profile, inputs.known, samples, clock)
    profile = found.calibrated.profile if found.calibrated else None
    if calibrated is not None and profile is not None:
        write_text(calibrated, profile_text(profile))
        say(f"wrote {calibrated}")
    if output is not None and found.proposed is not None:
        write_text(output, to_text(found.proposed))
        say(f"wrote {output}")
    if as_json:
        out_json(_data(plan, found))
    else:
        _show(plan, found)
    if found.proposed is None:
        next_step("atsplan", "explain", plan_path)
    elif output is None:
        next_step(*again("-o", "faster.yaml"))
    else:
        next_step("atsplan", "diff", plan_path, output)


def _reseat(plan: Plan, inputs: Inputs, path: Path, output: Path | None, as_json: bool) -> None:
    """Other experts for the slots of a plan, by counts of the use at hand."""
    from commands.shared.inputs import known_of_heat
    from planner.learn.residents import reseated
    from planner.model.routed_layers import moe_shape
    from planner.plan.plan import to_text
    from planner.routing.coverage import judge
    from planner.routing.expert_counts import from_text, heat_of_model

    assert inputs.inventory is not None and inputs.profile is not None
    known = known_of_heat(path, inputs.inventory, plan.workload)
    heat = heat_of_model(from_text(read_text(path), str(path)), moe_shape(inputs.inventory), str(path))
    found = reseated(plan, inputs.inventory, inputs.profile, known, judge(heat, plan.experts))
    before, after = found.before.predicted, found.after.predicted
    if as_json:
        proposed = found.after.model_dump(mode="json", by_alias=True) if found.worth_it else None
        times = {"tpot_ns": [before.tpot_ns, after.tpot_ns], "gain_ppm": found.gain_ppm}
        out_json({**times, "experts": found.moved, "layers": found.layers, "proposed": proposed})
    elif not found.moved:
        out("the experts in the slots are those that this routing uses most")
    else:
        out(
            f"{found.moved} other experts in the slots of {found.layers} layers: a token "
            f"{ms(before.tpot_ns)} -> {ms(after.tpot_ns)}, {found.gain_ppm / 1e4:.1f} % less for the request"
        )
        if not found.worth_it:
            out("less than 3 %: the plan is kept")
    if output is not None and found.worth_it:
        write_text(output, to_text(found.after))
        say(f"wrote {output}")


def _show(plan: Plan, found: Refined) -> None:
    from commands.diff import show_moves
    from planner.learn.refine import Verdict
    from planner.learn.samples import LEAST

    seen, fitted = found.seen, found.calibrated
    for why, number in seen.dropped.items():
        say(f"left out: {number} {'sample' if number == 1 else 'samples'} {why.value}")
    for kind in seen.noisy:
        say(f"left out: times of a {kind.value}, which are too far from each other")
    if seen.token is not None:
        told = f"{ms(seen.token.ns)} a token at depth {seen.token.depth}, {seen.token.samples} samples"
        out(f"measured {told}; the plan says {ms(plan.predicted.tpot_ns)} at depth {plan.workload.depth}")
    if seen.prompt is not None:
        told = f"{ms(seen.prompt.ns)} for a prompt of {seen.prompt.tokens} tokens"
        out(f"measured {told}, {seen.prompt.samples} samples")
    if found.verdict is Verdict.UNKNOWN:
        out(f"{found.verdict.value}: {LEAST} of tokens or of prompts are needed, in one file or several")
    else:
        out(f"{found.verdict.value} ({found.deviation_ppm / 1e4:.1f} % from the prediction)")
    if fitted is not None:
        factors = ", ".join(f"{name} {ppm / 1e6:.2f}" for name, ppm in fitted.factors.items())
        out(f"times of the devices, of those that the profile gave: {factors}")
    if found.plan is not None and found.proposed is not None:
        show_moves(found.changes)
        before, after = found.plan.predicted, found.proposed.predicted
        out(
            f"{found.gain_ppm / 1e4:.1f} % less for the whole request: a token {ms(before.tpot_ns)} -> "
            f"{ms(after.tpot_ns)}, the prompt {ms(before.prefill_ns)} -> {ms(after.prefill_ns)}"
        )


def _data(plan: Plan, found: Refined) -> dict[str, Any]:
    from dataclasses import asdict

    seen, fitted = found.seen, found.calibrated
    return {
        "verdict": found.verdict.name.lower(),
        "reason": found.verdict.value,
        "deviation_ppm": found.deviation_ppm,
        "gain_ppm": found.gain_ppm,
        "measured": {
            "token": asdict(seen.token) if seen.token else None,
            "prompt": asdict(seen.prompt) if seen.prompt else None,
            "left_out": {why.name.lower(): number for why, number in seen.dropped.items()},
        },
        "predicted_tpot_ns": plan.predicted.tpot_ns,
        "calibrated": None
        if fitted is None
        else {
            "before": asdict(fitted.before),
            "after": asdict(fitted.after),
            "factors_ppm": dict(fitted.factors),
        },
        "moves": [asdict(move) for move in found.changes.moves],
        "proposed": found.proposed.model_dump(mode="json", by_alias=True) if found.proposed else None,
    }
