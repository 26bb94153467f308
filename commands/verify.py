"""atsplan verify: prove a rewritten file against its source and plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from commands.console import mib, out, out_json, read_text, say
from commands.rewrite import bar


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan OUTPUT was made by.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def command(source: Path, output: Path, plan_path: Path | None, as_json: bool) -> None:
    """Compare OUTPUT with SOURCE: every payload by digest, every metadata entry, order and alignment."""
    from planner.gguf_file import read_model
    from planner.plan import from_text
    from planner.stamp import check_plan
    from rewriter.verify import NotFaithful, verify

    original, rewritten = read_model(source), read_model(output)
    plan = None
    if plan_path is not None:
        plan = from_text(read_text(plan_path), str(plan_path))
        check_plan(original, plan, str(plan_path))
    total = 2 * original.inventory.size_bytes
    done = 0
    try:
        with bar() as told:

            def advance(count: int) -> None:
                nonlocal done
                done += count
                told("verifying", done, total)

            proof = verify(original, rewritten.paths, plan, advance)
    except NotFaithful as problem:
        for line in problem.problems:
            say(line)
        raise
    if as_json:
        tensors = [tensor.model_dump() for tensor in proof.tensors]
        out_json({**asdict(proof), "claims": proof.claims, "tensors": tensors})
        return
    rate = proof.size_bytes / max(proof.seconds, 1e-9) / 2**20
    out(f"{output}: {len(proof.tensors)} tensors, {mib(proof.size_bytes)}, the same ({rate:,.0f} MiB/s)")
    for claim in proof.claims:
        out(f"  {claim}")
    if plan is None:
        say("no plan given: order and experts were not compared with one")
