"""atsplan verify: prove a rewritten file against its source and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import counted, mib, next_step, out, out_json, read_text, say
from commands.shared.models import load_plan
from planner.errors import FileProblem

if TYPE_CHECKING:
    from rewriter.verify import Verification


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path), required=False)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan OUTPUT was made by.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def command(source: Path, output: Path | None, plan_path: Path | None, as_json: bool) -> None:
    """Compare OUTPUT with SOURCE: every payload by digest, every metadata entry, order and alignment.

    With one file only, compare it with the manifest that stands beside it.
    """
    from rewriter.verify import NotFaithful

    try:
        if output is not None:
            proof = _with_source(source, output, plan_path)
        elif plan_path is not None:
            raise click.UsageError("--plan needs SOURCE and OUTPUT.")
        else:
            proof = _with_manifest(source)
    except NotFaithful as problem:
        for line in problem.problems:
            say(line)
        raise
    if as_json:
        tensors = [tensor.model_dump() for tensor in proof.tensors]
        out_json({**asdict(proof), "claims": proof.claims, "tensors": tensors})
        _next(source, output, plan_path)
        return
    rate = proof.size_bytes / max(proof.seconds, 1e-9) / 2**20
    name = output or source
    out(f"{name}: {len(proof.tensors)} tensors, {mib(proof.size_bytes)}, the same ({rate:,.0f} MiB/s)")
    for claim in proof.claims:
        out(f"  {claim}")
    if output is not None and plan_path is None:
        say("no plan given: order and experts were not compared with one")
    _next(source, output, plan_path)


def _next(source: Path, output: Path | None, plan: Path | None) -> None:
    if plan is None:
        next_step("atsplan", "fit", output or source)
    else:
        next_step("atsplan", "run", output or source, "--plan", plan, "-p", "Once upon a time")


def _with_source(source: Path, output: Path, plan_path: Path | None) -> Verification:
    from planner.model.gguf.reader import read_model
    from rewriter.stamp import check_plan
    from rewriter.verify import verify

    original, rewritten = read_model(source), read_model(output)
    plan = None
    if plan_path is not None:
        plan = load_plan(plan_path)
        check_plan(original, plan, str(plan_path))
    with _counter(2 * original.inventory.size_bytes) as advance:
        return verify(original, rewritten.paths, plan, advance)


def _with_manifest(path: Path) -> Verification:
    from planner.model.gguf.reader import read_model
    from planner.model.gguf.shards import output_name
    from rewriter.manifest import from_text, manifest_path
    from rewriter.verify_by_manifest import recheck

    model = read_model(path)
    beside = manifest_path(model.paths[0].with_name(output_name(model.paths[0].name)))
    if not beside.exists():
        why = (
            "no such file: give the file to compare with too, or one beside which `rewrite` left its manifest"
        )
        raise FileProblem(str(beside), why)
    manifest = from_text(read_text(beside), str(beside))
    with _counter(model.inventory.size_bytes) as advance:
        return recheck(model, manifest, advance)


@contextmanager
def _counter(total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with counted() as told:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            told("verifying", done, total)

        yield advance
