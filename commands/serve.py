"""atsplan serve: an OpenAI-compatible server for a plan, by the llama-server of the engine."""

from __future__ import annotations

from pathlib import Path

import click

from commands.console import out, say
from commands.engines import engine_options, open_job, plan_options, review
from planner.errors import EngineProblem


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model", type=click.Path(path_type=Path))
@plan_options
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True)
@click.option("--no-check", is_flag=True, help="Skip the dry run.")
@click.option("--quiet", is_flag=True, help="Do not show the server's log.")
@engine_options
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def command(
    model: Path,
    plan_path: Path,
    device_maps: tuple[str, ...],
    threads: int,
    host: str,
    port: int,
    no_check: bool,
    quiet: bool,
    engine: str | None,
    llama_h: Path | None,
    extra: tuple[str, ...],
) -> None:
    """Serve MODEL by its plan until interrupted; EXTRA options go to llama-server as they are."""
    from planner.loading import plan_layer_devices
    from runtime.export import arguments
    from runtime.server import find_program, serving
    from runtime.stock import stock

    job = open_job(model, plan_path, device_maps, threads)
    program = find_program(engine)
    placed = stock(job.spec, len(plan_layer_devices(job.plan)) - 1)
    for note in placed.notes:
        say(f"not expressible: {note}")
    if not no_check:
        review(job, engine or str(program.parent), llama_h)
    listed = [*arguments(placed, str(job.path)), *extra]
    with serving(program, listed, host, port, (lambda line: None) if quiet else say) as server:
        out(f"{server.url} (OpenAI-compatible under /v1)")
        code = server.wait()
        raise EngineProblem("llama-server", f"ended with status {code}")
