"""`atsplan fmt`: plan files in canonical form, so that diffs show decisions and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import next_step, progress, read_text, say, write_text
from commands.shared.inputs import InputLibrary, input_options
from planner.errors import FileProblem

if TYPE_CHECKING:
    from planner.plan.plan import Plan


@click.command("fmt", epilog="Exit code 1 with --check when a file is not canonical.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--check", "only_check", is_flag=True, help="Change nothing, say which files would change.")
@click.option(
    "--reprice", is_flag=True, help="After an edit by hand: recompute all that follows from the sites."
)
@input_options
def command(
    paths: tuple[Path, ...],
    only_check: bool,
    reprice: bool,
    library: InputLibrary,
) -> None:
    """Rewrite plan files (or all plans of a folder) in canonical form; comments are not kept."""
    from planner.plan.plan import from_text, to_text

    changed, files = 0, plan_files(paths)
    with progress() as bar:
        task = bar.add_task("plans", total=len(files), rate="")
        for path in files:
            text = read_text(path, "plan")
            plan = from_text(text, str(path))
            canonical = to_text(_repriced(plan, path, library) if reprice else plan)
            bar.advance(task)
            if canonical == text:
                continue
            changed += 1
            say(f"{path}: {'not canonical' if only_check else 'rewritten'}")
            if not only_check:
                write_text(path, canonical)
    if changed and only_check:
        next_step("atsplan", "fmt", *paths)
        raise SystemExit(1)
    if changed:  # else silence, as hooks like it
        next_step("atsplan", "check", *paths)


def _repriced(plan: Plan, path: Path, library: InputLibrary) -> Plan:
    from planner.check.reprice import edited

    inputs = library.of(plan, path)
    if inputs.inventory is None or inputs.profile is None:
        what = "inventory" if inputs.inventory is None else "profile"
        raise FileProblem(str(path), f"its {what} was not found; give --model or --profile")
    return edited(plan, inputs.inventory, inputs.profile, inputs.known)


def plan_files(paths: tuple[Path, ...]) -> list[Path]:
    """The files named, and every *.yaml directly inside the folders named, in sorted order.

    FileProblem when there is none, or not one that was named.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.glob("*.yaml") if not p.is_dir())
        elif os.path.lexists(path):
            found.append(path)
        else:
            raise FileProblem(str(path), "no such file")
    if not found:
        raise FileProblem(", ".join(map(str, paths)), "no plan files (*.yaml) here")
    return found
