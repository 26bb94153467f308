"""atsplan heat trace: watch a model route while it reads prompts and writes answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import ms, progress, read_text, say
from commands.shared.heat_files import describe, judge_next, write_result
from commands.shared.option_types import Number, Target
from commands.shared.plan_job import device_map_option, open_job
from planner.errors import FieldProblem, FileProblem, OptionProblem

if TYPE_CHECKING:
    from planner.model.gguf.reader import ModelFile
    from planner.model.routed_layers import MoeShape
    from planner.plan.load_spec import LoadSpec
    from planner.routing.expert_counts import Heat
    from planner.routing.trace import Trace
    from profiler.routing_trace import Options, Prompt


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--text", "texts", multiple=True, help="A prompt; repeatable, each is a source of its own.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='Prompts: a .jsonl file ({"text": …} a line), or a text file with lines of --- between them.',
)
@click.option(
    "-n", "--gen", type=click.IntRange(1), default=64, show_default=True, help="Tokens written to each."
)
@click.option("--domain", help="What the prompts are about (code, prose …): a name for `run --heat`.")
@click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option("--temp", type=Number(0), default=0.8, show_default=True, help="0: greedy.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Load as a plan says.")
@device_map_option
@click.option("--device", help="Load everything onto this device [default: CPU only].")
@click.option("-t", "--threads", type=click.IntRange(0, 512), default=0, help="CPU threads [all].")
@click.option(
    "--engine", metavar="PATH", help="llama.cpp library or build folder [default: the installed one]."
)
@click.option("--no-cost", is_flag=True, help="Do not load once more to measure what watching costs.")
@click.option("--trace", "trace_out", type=Target("routing trace"), help="Also write every choice, in order.")
@click.option(
    "-o",
    "--out",
    "--output",
    "out",
    type=Target("heat file"),
    help="Where to write heat.csv [default: stdout].",
)
def trace(
    model: Path,
    texts: tuple[str, ...],
    prompts: Path | None,
    gen: int,
    domain: str | None,
    chat: bool,
    temp: float,
    seed: int,
    plan_path: Path | None,
    device_maps: tuple[str, ...],
    device: str | None,
    threads: int,
    engine: str | None,
    no_cost: bool,
    trace_out: Path | None,
    out: Path | None,
) -> None:
    """Run prompts through MODEL and count which experts its router chooses, by layer and phase.

    Ids are those of the original model, also when MODEL was rewritten with its experts permuted.
    """
    from planner.model.gguf.reader import read_model
    from planner.model.routed_layers import moe_shape
    from planner.routing import expert_counts as heats
    from planner.routing import trace as traces
    from profiler.routing_trace import Options

    listed = _prompts(texts, prompts)
    file = read_model(model)
    shape = moe_shape(file.inventory)
    if plan_path is None:
        spec = _spec(file, listed, gen, device, threads)
    elif device is None:
        spec = open_job(file.paths[0], plan_path, device_maps, threads).spec
    else:
        raise OptionProblem("--device", device, "the plan says which devices to use")
    options = Options(gen, temp, seed, chat, cost=not no_cost)
    found = _original(file, _watch(engine, file, spec, listed, shape, options))
    heat = replace(traces.heat_of(found, shape.n_used), model=shape.digest)
    heat = heats.merge([heats.about(_deep(heat), domain or "", 0)])
    if trace_out is not None:
        write_result(trace_out, traces.to_text(replace(found, model=shape.digest)), "routing trace")
    write_result(out, heats.to_text(heat), describe(heat))
    judge_next(out, model)


def _deep(heat: Heat) -> Heat:
    """With the length of each prompt and its answer as the depth of its counts."""
    depth = {name: sum(p.tokens for p in heat.parts if p.source == name) for name in heat.sources}
    return replace(heat, parts=tuple(replace(p, depth=depth[p.source]) for p in heat.parts))


def _watch(
    engine: str | None,
    file: ModelFile,
    spec: LoadSpec,
    prompts: list[Prompt],
    shape: MoeShape,
    options: Options,
) -> Trace:
    from profiler.routing_trace import Progress
    from profiler.routing_trace import trace as watch

    with progress() as bar:
        task = bar.add_task("tracing", total=len(prompts) * options.gen, rate="")

        def on_progress(at: Progress) -> None:
            done = at.prompt * options.gen + at.tokens
            bar.update(task, completed=done, description=prompts[at.prompt].name, rate=f"token {at.tokens}")

        found, cost = watch(engine, file.paths[0], spec, prompts, shape.n_expert, options, on_progress)
    if cost.plain_ns:
        say(
            f"watching: {ms(cost.watched_ns)} a token against {ms(cost.plain_ns)} without "
            f"({cost.share:+.0%}); do not take times from a traced run"
        )
    return found


def _original(file: ModelFile, found: Trace) -> Trace:
    """Ids of the original model, where this file has its experts permuted."""
    from commands.shared.heat_files import mapped
    from planner.routing.formats.detect import original_ids
    from planner.routing.formats.orders import model_orders

    with mapped(file.paths[0]) as data:
        orders = model_orders(data, str(file.paths[0]))
    if not orders:
        return found
    say(f"{file.paths[0]}: experts are permuted here, positions mapped back to original ids")
    return original_ids(found, orders)


def _spec(file: ModelFile, prompts: list[Prompt], gen: int, device: str | None, threads: int) -> LoadSpec:
    """Everything on one device, with a context for the longest prompt."""
    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload

    # A byte is at most a token, and a chat template adds few.
    longest = max(len(prompt.text.encode(errors="replace")) for prompt in prompts) + gen + 256
    limit = file.inventory.number("context_length", longest) or longest
    work = Workload(n_ctx=max(min(longest, limit), gen + 1), n_batch=512, n_ubatch=512)
    devices = (device,) if device else ()
    return LoadSpec(devices, (1,) if device else (), 999 if device else 0, (), work, threads=threads)


def _prompts(texts: tuple[str, ...], path: Path | None) -> list[Prompt]:
    from profiler.routing_trace import Prompt

    listed = [Prompt(f"text-{index + 1}", text) for index, text in enumerate(texts)]
    if path is not None:
        listed += _from_file(path)
    if not listed:
        raise OptionProblem("--prompts/--text", "", "give at least one prompt")
    return listed


def _from_file(path: Path) -> list[Prompt]:
    from profiler.routing_trace import Prompt

    text = read_text(path)
    if path.suffix == ".jsonl":
        return [
            p for number, line in enumerate(text.splitlines(), 1) if (p := _json_prompt(path, number, line))
        ]
    blocks = "\n".join(text.splitlines()).split("\n---\n")
    listed = [
        Prompt(f"{path.stem}-{index + 1}", block) for index, block in enumerate(blocks) if block.strip()
    ]
    if not listed:
        raise FileProblem(str(path), "holds no prompt")
    return listed


def _json_prompt(path: Path, number: int, line: str) -> Prompt | None:
    from profiler.routing_trace import Prompt

    if not line.strip():
        return None
    try:
        entry = json.loads(line)
        text = entry.get("text") or entry["prompt"]
        return Prompt(str(entry.get("name") or f"{path.stem}-{number}"), str(text))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise FieldProblem(str(path), number, "text", 'expected {"text": "…"} or {"prompt": "…"}') from None
