"""atsplan rewrite: compile a GGUF file to match a plan, or put a rewritten one back."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import again, counted, mib, next_step, out, out_json, say, without
from commands.shared.models import load_plan
from planner.errors import OptionProblem
from planner.quoting import utf8

if TYPE_CHECKING:
    from planner.model.gguf.reader import ModelFile
    from rewriter.rewrite import Report, RewriteOptions, Work

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan to compile the file to.")
@click.option("-o", "--output", "--out", "output", type=click.Path(path_type=Path), help="The file to write.")
@click.option("--alignment", default="", help="Of tensor data: 32, 4096, 2MiB. Default: as the source.")
@click.option("--shard-by-device", is_flag=True, help="One file for each kind of memory.")
@click.option("--shard-size", default="", help="Start another file before one exceeds this: 40GiB.")
@click.option("--undo", is_flag=True, help="Put a rewritten file back into the order of its source.")
@click.option("--in-place", is_flag=True, help="Replace the model itself, once the result is verified.")
@click.option("--no-verify", is_flag=True, help="Do not read the result back; no manifest is written.")
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@click.option(
    "--recover", is_flag=True, help="Complete or undo a rewrite to MODEL that was killed; nothing else."
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(
    model: Path,
    plan_path: Path | None,
    output: Path | None,
    alignment: str,
    shard_by_device: bool,
    shard_size: str,
    undo: bool,
    in_place: bool,
    no_verify: bool,
    force: bool,
    recover: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write MODEL again in the order of a plan: tensors by device, then as the graph runs, experts
    hot first where the plan says so. Everything else stays as it is, byte by byte."""
    from planner.model.gguf.reader import read_model
    from rewriter.rewrite import RewriteOptions, carry_out, decide
    from rewriter.undo import decide_undo

    if recover:
        _recover(model)
        next_step("atsplan", "inventory", model)
        return
    options = RewriteOptions(
        alignment=parse_size("--alignment", alignment),
        shard_by_device=shard_by_device,
        shard_bytes=parse_size("--shard-size", shard_size),
        verify=not no_verify,
        force=force,
        in_place=in_place,
    )
    file = read_model(model)
    for note in file.notes:
        say(note)
    target = _target(file, output, options)
    plan = None
    if undo:
        _refuse_with_undo(plan_path, options)
        work = decide_undo(file, target.name)
    elif plan_path is None:
        raise click.UsageError("Missing option '--plan' (or say --undo).")
    else:
        from planner.check.consistency import check_agreement
        from planner.model.validity import check_loadable
        from rewriter.stamp import read_stamp

        plan = load_plan(plan_path)
        read_stamp(file)  # a damaged record is the better reason
        check_loadable(file.inventory, str(model), file.refused)
        work = decide(file, plan, target.name, options, str(plan_path))
        check_agreement(plan, file.inventory, str(plan_path))
    if dry_run:
        _show_work(work, as_json)
        next_step(*without(again(), (), ("--dry-run", "--json")))
        return
    if in_place:
        say(f"{target} will be replaced once the new file is written and verified; --undo brings it back")
    with counted() as told:
        report = carry_out(file, plan, work, target, options, told)
    _show_report(report, as_json)
    if undo:
        _show_undone(file, report.files[0], as_json)
        next_step("atsplan", "verify", model, report.files[0])
    elif plan_path is not None:
        next_step("atsplan", "run", report.files[0], "--plan", plan_path, "-p", "Once upon a time")


def parse_size(option: str, text: str) -> int:
    """Bytes of `4096`, `2MiB`, `1.5GiB`; 0 for nothing; OptionProblem for anything else."""
    if not text:
        return 0
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]iB)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size <= 0:
        raise OptionProblem(option, text, "expected a size such as 4096, 2MiB or 40GiB")
    if option == "--alignment" and (size & (size - 1) or not 8 <= size <= 2**30):
        raise OptionProblem(option, text, "expected a power of two from 8 to 1GiB")
    return size


def _target(model: ModelFile, output: Path | None, options: RewriteOptions) -> Path:
    if not options.in_place:
        if output is None:
            raise click.UsageError("Missing option '-o' / '--output'.")
        if output.is_dir() or not output.name.endswith(".gguf"):
            raise OptionProblem("--output", str(output), "expected the name of a .gguf file")
        if utf8(output.name) != output.name:
            raise OptionProblem("--output", str(output), "expected a name in UTF-8")
        return output
    if output is not None:
        raise click.UsageError("--in-place writes to the model itself: leave -o away.")
    if len(model.paths) > 1 or options.shard_by_device or options.shard_bytes:
        raise click.UsageError("--in-place works on a model of one file.")
    if not options.verify:
        raise click.UsageError("--in-place replaces only what was verified: leave --no-verify away.")
    if model.headers[0].trailing_bytes:
        raise OptionProblem(
            "--in-place", str(model.paths[0]), "what lies behind the last tensor would be lost"
        )
    return model.paths[0]


def _refuse_with_undo(plan: Path | None, options: RewriteOptions) -> None:
    plain = replace(options, verify=True, force=False, in_place=False)
    if plan is not None or plain != type(plain)():
        raise click.UsageError("--undo restores one file in its old order: no plan, alignment or shards.")


def _recover(model: Path) -> None:
    from rewriter.publishing.publish import recover_all

    for line in recover_all(model) or [f"{model}: no interrupted rewrite was found"]:
        out(line)


def _show_undone(rewritten: ModelFile, target: Path, as_json: bool) -> None:
    """Whether the header is the original's, byte for byte, and what is not back."""
    from planner.model.gguf.reader import read_model
    from rewriter.undo import HEADER_IS_BACK, what_is_back

    header, *others = what_is_back(rewritten, read_model(target))
    say(header) if as_json or header != HEADER_IS_BACK else out(header)
    for line in others:
        say(line)


def _show_work(work: Work, as_json: bool) -> None:
    files = [{"file": file.name, "size_bytes": file.size_bytes} for file in work.layout.files]
    if as_json:
        out_json({"files": files, "regions": {r.name: list(r.tensors) for r in work.regions}})
        return
    for file in work.layout.files:
        out(f"{file.name}: {mib(file.size_bytes)}, {len(file.tensors)} tensors")
    for region in work.regions:
        out(f"  {region.name}: {len(region.tensors)} tensors, {region.tensors[0]} … {region.tensors[-1]}")


def _show_report(report: Report, as_json: bool) -> None:
    for note in report.notes:
        say(note)
    if as_json:
        paths = {"files": list(map(str, report.files)), "removed": list(map(str, report.removed))}
        out_json({**asdict(report), **paths})
        return
    for path in report.removed:
        say(f"{path}: removed with the earlier output")
    for path in report.files:
        out(f"{path}: {mib(path.stat().st_size)}")
    for name, tensors, size in report.regions:
        out(f"  {name}: {tensors} tensors, {mib(size)}")
    if report.moved_layers:
        out(f"  experts reordered in {len(report.moved_layers)} layers")
    say(f"written in {report.write_seconds:.1f} s, {mib(report.padding_bytes)} of padding")
    if report.verified:
        out(f"verified in {report.verify_seconds:.1f} s: {'; '.join(report.claims)}")
    else:
        out("not verified: run `atsplan verify` before you trust it")
