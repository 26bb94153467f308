"""atsplan heat: trace, import, merge, report and export expert routing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.heat.heat_report import report
from commands.heat.heat_trace import trace
from commands.shared.console import say
from commands.shared.heat_files import (
    describe,
    judge_next,
    read_heat,
    read_orders,
    read_profile,
    shape_of,
    write_result,
)
from commands.shared.option_types import Number, Target
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from planner.routing.expert_counts import Heat
    from planner.routing.export import Choice
    from planner.routing.trace import Trace

FILE = click.Path(path_type=Path)
PHASES = ("prefill", "decode", "mixed")
model_option = click.option(
    "--model", type=FILE, help="GGUF or inventory.yaml to check ids and layers against."
)
out_option = click.option(
    "-o", "--out", "--output", "out", type=Target("heat file"), help="Where to write [default: stdout]."
)


@click.group(short_help="Expert routing: trace, import, merge, report, export.")
def command() -> None:
    """How often a model's router chooses each expert: measured here, or read from other tools."""


@command.command("import")
@click.argument("files", nargs=-1, required=True, type=FILE)
@model_option
@out_option
@click.option(
    "--experts", type=click.IntRange(1, 4096), help="Experts of a layer, where a file does not say."
)
@click.option("--source", help="Name of the prompt or workload [default: what the file says, or its name].")
@click.option("--phase", type=click.Choice(PHASES), help="Phase, where the file does not say.")
@click.option("--tokens", type=click.IntRange(1, 1 << 53), help="Tokens seen, where the file does not say.")
@click.option("--domain", help="What the text was about (code, prose …), where the file does not say.")
@click.option(
    "--depth",
    type=click.IntRange(1, 1 << 53),
    help="Tokens of the longest context, where the file does not say.",
)
@click.option(
    "--permutation", type=FILE, help="Ids are positions in a permuted file: its plan, GGUF or perms.json."
)
@click.option(
    "--layout",
    type=click.Choice(("heat", "chain", "clique")),
    default="heat",
    help="Which one of a perms.json.",
)
@click.option(
    "--trace",
    "trace_out",
    type=Target("routing trace"),
    help="Also write the routing trace, when the file has one.",
)
def import_(
    files: tuple[Path, ...],
    model: Path | None,
    out: Path | None,
    experts: int | None,
    source: str | None,
    phase: str | None,
    tokens: int | None,
    domain: str | None,
    depth: int | None,
    permutation: Path | None,
    layout: str,
    trace_out: Path | None,
) -> None:
    """Turn routing profiles of other tools into heat.csv; several files become several sources.

    The format is told by the content: llama.cpp importance matrices (GGUF), moe_layer_perf and
    moe-trace of patched engines, mbolt, EPLB counts, route traces, demand traces, plain counts.
    """
    from planner.routing import expert_counts as heats
    from planner.routing import trace as traces

    found = [read_profile(path, model, experts or 0) for path in files]
    made: list[Heat] = []
    for path, profile in zip(files, found, strict=True):
        heat = profile.heat
        if permutation is not None:
            heat = heats.original(heat, read_orders(permutation, layout))
        own = profile.format == "heat.csv" and not source  # its names were given once already
        named = heat if own else _named(heat, source or path.stem, phase, tokens)
        made.append(heats.about(named, domain or "", depth or 0))
        say(f"{path}: {profile.format}")
    if trace_out is not None:
        ordered = [_by_original(p.trace, permutation, layout) for p in found if p.trace is not None]
        if not ordered:
            raise OptionProblem("--trace", str(trace_out), "the files hold counts only, no order of choices")
        write_result(trace_out, traces.to_text(traces.join(ordered)), "routing trace")
    merged = heats.merge(made)
    write_result(out, heats.to_text(merged), describe(merged))
    judge_next(out, model)


def _by_original(trace: Trace, permutation: Path | None, layout: str) -> Trace:
    from planner.routing.formats.detect import original_ids

    return original_ids(trace, read_orders(permutation, layout)) if permutation else trace


def _named(heat: Heat, source: str, phase: str | None, tokens: int | None) -> Heat:
    """What the user knows and the file does not: name, phase, tokens."""
    from planner.routing import expert_counts as heats

    parts = [
        replace(
            part,
            source=source if part.source == "import" else f"{source}.{part.source}",
            phase=heats.Phase(phase) if phase and part.phase is heats.Phase.MIXED else part.phase,
            tokens=part.tokens or tokens or 0,
        )
        for part in heat.parts
    ]
    return heats.make(heat.model, heat.n_expert, heat.n_used, parts)


@command.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option(
    "-w", "--weight", "weights", multiple=True, type=Number(0, 1e6), help="One for each file, in order."
)
@model_option
@out_option
def merge(files: tuple[Path, ...], weights: tuple[float, ...], model: Path | None, out: Path | None) -> None:
    """Add heats of one model; a weight scales the counts of a whole file."""
    from planner.routing import expert_counts as heats

    if weights and len(weights) != len(files):
        raise OptionProblem(
            "--weight", str(len(weights)), f"give one for each of the {len(files)} files, or none"
        )
    merged = heats.merge([read_heat(path, model) for path in files], weights or None)
    write_result(out, heats.to_text(merged), describe(merged))
    judge_next(out, model)


@command.command()
@click.argument("file", type=FILE)
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(("moe-trace", "moe-layer-perf", "perms", "heat")),
    help="moe-trace: pos,layer,ids CSV; moe-layer-perf: JSON; perms: mbolt's JSON; heat: heat.csv.",
)
@click.option("--model", type=FILE, help="GGUF or inventory.yaml: what an expert weighs, for --budget.")
@click.option("--budget", type=Number(0, min_open=True), help="MiB for hot experts [default: all of them].")
@click.option("--per-layer", type=click.IntRange(1), help="At most so many experts in a layer.")
@out_option
def export(
    file: Path, target: str, model: Path | None, budget: float | None, per_layer: int | None, out: Path | None
) -> None:
    """Write the choice of hot experts in a file that a patched engine reads.

    moe-trace engines give every layer equally many slots; moe-layer-perf engines fill the budget with
    the best experts of all layers, skipping what does not fit.
    """
    from planner.routing import expert_counts as heats
    from planner.routing import export

    heat = read_heat(file, model)
    if target in ("perms", "heat"):
        if budget or per_layer:
            raise OptionProblem("--to", target, "holds every expert: --budget and --per-layer do not apply")
        text = heats.to_text(heat) if target == "heat" else export.perms_json(heat)
        write_result(out, text, describe(heat))
        return judge_next(file, model)
    choice = _choice(heat, target, model, budget, per_layer)
    writer = export.positions_csv if target == "moe-trace" else export.perf_json
    chosen = sum(len(experts) for experts in choice.values())
    write_result(out, writer(heat, choice), f"{chosen} hot experts in {len(choice)} layers")
    return judge_next(file, model)


def _choice(
    heat: Heat, target: str, model: Path | None, budget: float | None, per_layer: int | None
) -> Choice:
    from planner.routing import export

    cap = per_layer or 0
    if budget is None:
        return {la: list(o)[: cap or heat.n_expert] for la, o in export.all_experts(heat).items()}
    shape = shape_of(model)
    if shape is None:
        raise OptionProblem("--budget", str(budget), "needs --model, which says what an expert weighs")
    size = round(budget * 2**20)
    if target == "moe-trace":
        return export.choose_uniform(heat, shape, size, cap)
    return export.choose(heat, shape.expert_bytes, size, cap)


command.add_command(trace)
command.add_command(report)
