"""`atsplan check`: are the plans in git still right? Needs neither model nor GPU."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.fmt import plan_files
from commands.shared.console import next_step, out, out_text, progress, read_text, say, write_text
from commands.shared.inputs import InputLibrary, input_options
from commands.shared.option_types import Number, Target
from commands.shared.plan_job import device_map_option, engine_options
from planner.errors import FileProblem, InputError

if TYPE_CHECKING:
    from planner.check.check import CheckOptions
    from planner.check.findings import Finding
    from planner.passes.case import Built

_FEW = 8  # plans that are not worth a second process


@click.command(
    "check", epilog="Exit codes: 0 all plans hold, 1 drift, 2 a file cannot be judged, 3 the engine failed."
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@input_options
@click.option(
    "--allow-missing", is_flag=True, help="Pass plans whose inputs are not here, by what they prove alone."
)
@click.option("--no-resolve", is_flag=True, help="Do not solve again to look for a better placement.")
@click.option("--time-limit", type=Number(0.1, 3600), help="Seconds to solve a plan again [work is limited].")
@click.option(
    "--max-age",
    type=click.IntRange(1),
    default=180,
    show_default=True,
    help="Days before a profile is called old.",
)
@click.option("--list", "listed", is_flag=True, help="Also show how full devices are, what overrides take.")
@click.option("--smoke", is_flag=True, help="Also load each plan with its --model and decode a few tokens.")
@device_map_option
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--junit", type=Target(), help="Write a JUnit XML report here.")
@click.option("--sarif", type=Target(), help="Write a SARIF report here.")
def command(
    paths: tuple[Path, ...],
    library: InputLibrary,
    allow_missing: bool,
    no_resolve: bool,
    time_limit: float | None,
    max_age: int,
    listed: bool,
    smoke: bool,
    device_maps: tuple[str, ...],
    engine: str | None,
    llama_h: Path | None,
    as_json: bool,
    junit: Path | None,
    sarif: Path | None,
) -> None:
    """Check plan files, or all plans of a folder, against the inputs they were made from.

    With --smoke the engine then loads each in a child process, short and long prompts are decoded, and a
    failure is the engine's: exit code 3, the build named, the plan kept.
    """
    from planner.check import findings
    from planner.check.check import CheckOptions

    files = plan_files(paths)
    options = CheckOptions(not no_resolve, time_limit or math.inf, datetime.now(UTC).date(), max_age)
    found = _check_all(files, library, options, allow_missing)
    for path in files if listed and not as_json else ():
        _list(path, library)
    names = [str(path) for path in files]
    if junit is not None:
        write_text(junit, findings.to_junit(names, found))
    if sarif is not None:
        from importlib.metadata import version

        write_text(sarif, findings.to_sarif(found, version("atsplan")))
    out_text(findings.to_json(names, found)) if as_json else _print(names, found)
    code = findings.exit_code(found)
    if code:
        _next_after_findings(found, code)
        raise SystemExit(code)
    for path in files if smoke else ():
        _smoke(path, library, device_maps, engine, llama_h)
    if len(files) == 1:
        next_step("atsplan", "export", files[0])


def _next_after_findings(found: list[Finding], code: int) -> None:
    """For the first plan that does not hold: its inputs, or its values derived again.

    Nothing for a file that is no plan: no command makes one of it.
    """
    from planner.check.findings import exit_code

    bad = next(each for each in found if exit_code([each]) == code)
    if bad.rule == "schema":
        return
    more = ("--reprice",) if code == 1 else ("--model", "MODEL", "--profile", "PROFILE")
    next_step("atsplan", "fmt" if code == 1 else "check", bad.path, *more)


def _list(path: Path, library: InputLibrary) -> None:
    from planner.check.check import read_plan
    from planner.plan.plan_lines import device_lines, override_lines

    try:
        plan, _ = read_plan(read_text(path, "plan"), str(path))
        inventory = library.of(plan, path).inventory if plan else None
    except InputError:
        return  # its finding says why
    if plan is None:
        return
    for line in (*device_lines(plan), *(override_lines(plan, inventory) if inventory else ())):
        out(f"{path}: {line}")


def _smoke(
    path: Path,
    library: InputLibrary,
    device_maps: tuple[str, ...],
    engine: str | None,
    llama_h: Path | None,
) -> None:
    from commands.check.smoke_test import smoke
    from commands.shared.models import load_plan
    from commands.shared.plan_job import open_job

    model = library.model_file(load_plan(path))
    say(f"{path}: smoke test")
    smoke(open_job(model, path, device_maps, 0, other_machine=True), path, engine, llama_h)


def _check_all(
    files: list[Path], library: InputLibrary, options: CheckOptions, allow_missing: bool
) -> list[Finding]:
    """Findings in the order of the files; models are shared out over the processors."""
    groups: dict[str, list[Path]] = {}
    for path in files:
        groups.setdefault(path.name.partition("--")[0], []).append(path)
    workers = min(len(groups), os.cpu_count() or 1)
    found: dict[Path, list[Finding]] = {}
    with contextlib.ExitStack() as stack:
        done: Iterable[dict[Path, list[Finding]]]
        if len(files) < _FEW or workers < 2:
            done = (_check_group([path], library, options, allow_missing) for path in files)
        else:
            from planner.model.units import import_late
            from runtime.child.pool import share_out

            import_late()  # once, not in every process
            work = partial(_check_group, library=library, options=options, allow_missing=allow_missing)
            done = stack.enter_context(share_out(work, list(groups.values()), workers))
        # The bar has a thread: it comes after the processes, or they would have to begin anew.
        bar = stack.enter_context(progress())
        task = bar.add_task("plans", total=len(files), rate="")
        for group in done:
            found |= group
            bar.advance(task, len(group))
    return [finding for path in files for finding in found[path]]


def _check_group(
    paths: list[Path], library: InputLibrary, options: CheckOptions, allow_missing: bool
) -> dict[Path, list[Finding]]:
    from planner.passes.case import Built

    built = Built()
    return {path: _check_one(path, library, options, allow_missing, built) for path in paths}


def _check_one(
    path: Path, library: InputLibrary, options: CheckOptions, allow_missing: bool, built: Built
) -> list[Finding]:
    """What is wrong with one file is a finding, so that the others are judged and every report is written."""
    from planner.check.check import check_plan, missing_inputs, read_plan

    try:
        text = read_text(path, "plan")
    except InputError as problem:
        return [_unread(path, "schema", problem)]
    plan, found = read_plan(text, str(path))
    if plan is None:
        return found
    try:
        inputs = library.of(plan, path)
    except InputError as problem:
        return [_unread(path, "inputs", problem)]
    return [
        *check_plan(plan, text, str(path), inputs, options, built),
        *missing_inputs(plan, str(path), text, inputs, allowed=allow_missing),
    ]


def _unread(path: Path, rule: str, problem: InputError) -> Finding:
    """A plan that cannot be judged because a file cannot be read: it, or one that it names."""
    from planner.check.findings import Finding, Severity

    if isinstance(problem, FileProblem) and problem.path == str(path):
        return Finding(str(path), 1, rule, Severity.INPUT, problem.why)
    return Finding(str(path), 1, rule, Severity.INPUT, str(problem))


def _print(names: list[str], found: list[Finding]) -> None:
    from planner.check.findings import Severity

    for finding in found:
        out(finding.text())
    bad = {f.path for f in found if f.severity is not Severity.NOTE}
    noted = {f.path for f in found} - bad
    plans = "plan" if len(names) == 1 else "plans"
    told = [f"{len(bad)} with findings"] if bad else []
    told += [f"{len(noted)} with notes only"] if noted else []
    say(f"{len(names)} {plans} checked, {', '.join(told) or 'none with findings'}")
