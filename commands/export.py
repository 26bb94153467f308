"""atsplan export: the command line of a stock tool that realises a plan, or the nearest it can do."""

from __future__ import annotations

from pathlib import Path

import click

from commands.console import out, say, write_text
from commands.engines import parse_map
from commands.models import load_plan

FORMATS = ("llama-server", "llama-cli", "preset", "env", "json", "llama-cpp-python", "docker-compose")


@click.command()
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="llama-server", show_default=True)
@click.option("--model", help="Path of the model file there [default: the plan's model name].")
@click.option("--device-map", "device_maps", multiple=True, metavar="CUDA0=CUDA1", help="Rename a device.")
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads [the tool's default].")
@click.option("--exact", is_flag=True, help="Refuse when the tool cannot express the whole plan.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write here [default: stdout].")
def command(
    plan_path: Path,
    form: str,
    model: str | None,
    device_maps: tuple[str, ...],
    threads: int,
    exact: bool,
    output: Path | None,
) -> None:
    """Print how a stock llama.cpp tool loads a model by PLAN.

    What the tool cannot express is named, with the nearest placement it can do.
    """
    from dataclasses import replace

    from planner.errors import AnswerIsNo
    from planner.loading import load_spec, map_devices, plan_layer_devices
    from runtime.export import export
    from runtime.stock import stock

    plan = load_plan(plan_path)
    spec = map_devices(load_spec(plan), parse_map(device_maps, plan))
    placed = stock(replace(spec, threads=threads), len(plan_layer_devices(plan)) - 1)
    if exact and not placed.exact:
        raise AnswerIsNo(f"{plan_path}: no stock tool can load this plan: {'; '.join(placed.notes)}")
    for note in placed.notes:
        say(f"not expressible: {note}")
    text = export(plan, placed, model or f"{plan.model.name}.gguf", form)
    if output is None:
        out(text.rstrip("\n"))
    else:
        write_text(output, text)
        say(f"wrote {output}")
