"""atsplan heat report: coverage on sources not seen, transfer, verdict, pictures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import PICTURE, next_step, out, out_json, out_table, say, table
from commands.shared.heat_files import describe, read_heat, shape_of
from commands.shared.option_types import Number, Target
from commands.shared.pictures import check_name
from planner.errors import AnswerIsNo

if TYPE_CHECKING:
    from planner.routing.report import Report

FEW_SOURCES = 3  # below it, the interval says nothing


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="GGUF or inventory.yaml to check against.")
@click.option("--phase", type=click.Choice(("prefill", "decode")), help="Only this phase, where it is known.")
@click.option(
    "--resident",
    type=Number(0, 1, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    help="Share of the experts held, for the table, the transfer and the verdict.",
)
@click.option("--map", "map_path", type=Target(PICTURE), help="Picture layers x experts: .png, .svg or .pdf.")
@click.option("--curves", "curve_path", type=Target(PICTURE), help="Picture of coverage: .png, .svg or .pdf.")
@click.option("--check", is_flag=True, help="Exit 1 when there is no exploitable skew.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def report(
    files: tuple[Path, ...],
    model: Path | None,
    phase: str | None,
    resident: float,
    map_path: Path | None,
    curve_path: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """Judge heat: what a hot set serves on prompts it was not chosen on, and whether that pays."""
    from planner.routing import expert_counts as heats
    from planner.routing.report import report as judge

    check_name(map_path, "--map")
    check_name(curve_path, "--curves")
    shape = shape_of(model)
    heat = heats.merge([read_heat(path, model) for path in files])
    if phase:
        heat = heats.only(heat, heats.Phase(phase))
    judged = judge(heat, resident, shape.n_group if shape else 1)
    if as_json:
        out_json(asdict(judged))
    else:
        out(describe(heat))
        _print(judged)
    if map_path or curve_path:
        from commands.heat import heat_pictures

        if map_path:
            heat_pictures.heat_map(heat, map_path)
            say(f"{map_path}: layers x experts")
        if curve_path:
            heat_pictures.coverage_curves(heat, judged, curve_path)
            say(f"{curve_path}: coverage by resident share")
    slots = ("--heat", str(files[0]), "--hybrid") if judged.exploitable else ()
    machine = ("--profile", "profile.yaml")
    next_step("atsplan", "solve", model or "MODEL", *machine, *slots, "-o", "plan.yaml")
    if check and not judged.exploitable:
        raise AnswerIsNo(judged.verdict)


def _print(judged: Report) -> None:
    layers = table("layer", "choices", "touched", "entropy", "Gini", "own", "expected", "lift")
    for row in judged.layers:
        layers.add_row(
            str(row.layer),
            str(row.choices),
            str(row.touched),
            f"{row.entropy_bits:.2f}",
            f"{row.gini:.2f}",
            f"{row.in_sample:.3f}",
            f"{row.expected:.3f}",
            f"{row.expected / judged.resident:.2f}",
        )
    out_table(layers)
    means = table("resident", "own", "expected", "low", "high", "lift", "cold bytes saved")
    for entry in judged.intervals:
        means.add_row(
            f"{entry.resident:.1%}",
            f"{entry.in_sample:.3f}",
            f"{entry.value:.3f}",
            f"{entry.low:.3f}",
            f"{entry.high:.3f}",
            f"{entry.lift:.2f}",
            f"{entry.saving:.0%}",
        )
    out_table(means)
    _print_transfer(judged)
    for chosen, tested, value, own in judged.phases:
        out(f"chosen while {chosen}, judged while {tested}: {value:.3f} (own choice {own:.3f})")
    out(judged.verdict)
    if len(judged.sources) < FEW_SOURCES:
        few = "1 source is" if len(judged.sources) == 1 else f"{len(judged.sources)} sources are"
        say(f"{few} few: each prompt as a source of its own gives a firmer answer")


def _print_transfer(judged: Report) -> None:
    """Chosen on the row's source, judged on the column's."""
    if len(judged.transfer) < 2:
        return
    made = table("chosen on \\ judged on", *(str(index + 1) for index in range(len(judged.sources))))
    for index, (name, row) in enumerate(zip(judged.sources, judged.transfer, strict=True)):
        made.add_row(f"{index + 1} {name}", *(f"{value:.3f}" for value in row))
    out_table(made)
