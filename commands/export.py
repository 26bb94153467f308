"""atsplan export: the command line of a stock tool that realises a plan, or the nearest it can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import next_step, out_text, say, write_text
from commands.shared.extra_models import draft_fields, projector_fields, uncounted_draft
from commands.shared.models import load_plan
from commands.shared.option_types import Target
from commands.shared.plan_job import parse_map
from planner.errors import OptionProblem
from planner.quoting import file_name

if TYPE_CHECKING:
    from planner.check.check import Inputs
    from planner.plan.load_spec import LoadSpec
    from planner.plan.plan import Plan
    from runtime.tools.export import Published
    from runtime.tools.options import Stock

FORMATS = (
    *("llama-server", "llama-cli", "llama-bench", "preset", "env", "json"),
    *("llama-cpp-python", "docker-compose", "llama-swap"),
)


@click.command()
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="llama-server", show_default=True)
@click.option("--model", help="Path of the model file there [default: the plan's model name].")
@click.option("--device-map", "device_maps", multiple=True, metavar="CUDA0=CUDA1", help="Rename a device.")
@click.option("-t", "--threads", type=click.IntRange(0, 512), default=0, help="CPU threads [the plan's].")
@click.option(
    "--inventory",
    "models",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Model or inventory, to price the nearest plan [default: inputs/ beside the plan].",
)
@click.option("--profile", "profiles", multiple=True, type=click.Path(path_type=Path), help="Its profile.")
@click.option("--mmproj", default="", help="Vision projector [the plan's].")
@click.option("--draft", default="", help="Draft model [the plan's].")
@click.option("--publish", metavar="ADDRESS", help="docker-compose: for other machines [default: 127.0.0.1].")
@click.option("--no-key", is_flag=True, help="Let everyone who reaches --publish use it, without a key.")
@click.option("--exact", is_flag=True, help="Refuse when the tool cannot express the whole plan.")
@click.option("--stock", "stock_only", is_flag=True, help="Without the device for experts in slots.")
@click.option("-o", "--output", "--out", "output", type=Target(), help="Write here [default: stdout].")
def command(
    plan_path: Path,
    form: str,
    model: str | None,
    device_maps: tuple[str, ...],
    threads: int,
    models: tuple[Path, ...],
    profiles: tuple[Path, ...],
    mmproj: str,
    draft: str,
    publish: str | None,
    no_key: bool,
    exact: bool,
    stock_only: bool,
    output: Path | None,
) -> None:
    """Print how a stock llama.cpp tool loads a model by PLAN.

    What the tool cannot express is named, with the nearest placement it can do and what that costs.
    """
    from dataclasses import replace

    from commands.shared.inputs import InputLibrary
    from commands.shared.stock_choice import choose
    from planner.check.consistency import check_agreement
    from planner.errors import AnswerIsNo
    from planner.memory.kv_cache import checkpoint_bytes
    from planner.model.structure import structure_of
    from planner.plan.load_spec import plan_layer_devices
    from runtime.tools.expert_rule import expert_rule
    from runtime.tools.export import export

    published = _published(form, publish, no_key)
    plan = load_plan(plan_path)
    inputs = InputLibrary(models, profiles).of(plan, plan_path)
    check_agreement(plan, inputs.inventory, str(plan_path))
    plan = _without_commas(plan, inputs)
    path = model or file_name(plan.model.name, ".gguf")
    if not stock_only and (slots := _with_slots(plan, form, device_maps, threads, path)):
        _write(slots, output)
        next_step("atsplan", "refine", plan_path, "--measured", "server.log")
        return
    if exact and not (mine := _stock(plan, device_maps, threads)).exact:
        raise AnswerIsNo(f"{plan_path}: no stock tool can load this plan: {'; '.join(mine.notes)}")
    plan, placed = choose(plan, str(plan_path), inputs, lambda each: _stock(each, device_maps, threads))
    if placed.rule is None:
        rule = expert_rule(placed.spec, len(plan_layer_devices(plan)) - 1, inputs.inventory, plan)
        placed = replace(placed, rule=rule)
    placed = replace(placed, **_beside(plan, placed.spec, device_maps, mmproj, draft))
    if inputs.inventory is not None:
        held = checkpoint_bytes(structure_of(inputs.inventory), plan.workload)
        placed = replace(placed, checkpoint_bytes=held)
    _write(export(plan, placed, path, form, published), output)
    next_step("atsplan", "refine", plan_path, "--measured", "server.log")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        out_text(text)
    else:
        write_text(output, text)
        say(f"wrote {output}")


def _with_slots(plan: Plan, form: str, device_maps: tuple[str, ...], threads: int, model: str) -> str:
    """The script of a plan with experts in slots; "" where the format has none, or the plan no slots."""
    from dataclasses import replace

    from planner.plan.load_spec import load_spec, map_devices, plan_layer_devices
    from runtime.session.hybrid import positions
    from runtime.tools import hybrid_script
    from runtime.tools.export import export
    from runtime.tools.options import stock

    spec = map_devices(load_spec(plan), parse_map(device_maps, plan))
    if form not in hybrid_script.FORMS or not hybrid_script.has_slots(spec):
        return ""
    spec = replace(spec, threads=threads or spec.threads)
    placed = stock(hybrid_script.named(spec), len(plan_layer_devices(plan)) - 1)
    placed = replace(placed, least=plan.engines.least if plan.engines else 0)
    placed = replace(placed, **_beside(plan, placed.spec, device_maps, "", ""))
    # Slots are named by position: those of the file itself, where it is here.
    here = positions(Path(model), spec.residents) if Path(model).is_file() else spec.residents
    if not Path(model).is_file():
        say(f"{model} is not here: its experts are taken to lie in the order of the source")
    return hybrid_script.script(spec, here, export(plan, placed, model, form), plan.model.name)


def _published(form: str, publish: str | None, no_key: bool) -> Published:
    """Who may reach the server; OptionProblem where the format publishes nothing, and for no address."""
    from ipaddress import ip_address

    from runtime.tools.export import COMPOSE, Published

    if publish is None and not no_key:
        return Published()
    if form != COMPOSE or publish is None:
        option = "--no-key" if publish is None else "--publish"
        raise OptionProblem(option, publish or "", f"is for --format {COMPOSE} with --publish ADDRESS")
    try:
        return Published(str(ip_address(publish)), no_key)
    except ValueError:
        raise OptionProblem("--publish", publish, "expected an IP address, such as 0.0.0.0") from None


def _without_commas(plan: Plan, inputs: Inputs) -> Plan:
    """The plan with overrides that option parsers do not cut: the same tensors, spelt anew where needed."""
    from planner.plan.override_match import placed
    from planner.plan.overrides import collate
    from runtime.tools.options import cut_by_parsers

    found = tuple((o.pattern, o.buffer) for o in plan.overrides)
    if inputs.inventory is None or not any(cut_by_parsers(pattern) for pattern, _ in found):
        return plan
    say("override patterns with commas or equals signs are spelt anew, for the same tensors")
    return plan.model_copy(update={"overrides": collate(placed(inputs.inventory, found))})


def _stock(plan: Plan, device_maps: tuple[str, ...], threads: int) -> Stock:
    from dataclasses import replace

    from planner.plan.load_spec import load_spec, map_devices, plan_layer_devices
    from runtime.tools.options import stock

    spec = map_devices(load_spec(plan), parse_map(device_maps, plan))
    placed = stock(replace(spec, threads=threads or spec.threads), len(plan_layer_devices(plan)) - 1)
    return replace(placed, least=plan.engines.least if plan.engines else 0)


def _beside(
    plan: Plan, spec: LoadSpec, device_maps: tuple[str, ...], mmproj: str, draft: str
) -> dict[str, Any]:
    """The fields of a Stock for projector and draft, by the plan's names where no files are given."""
    planned, mapped = plan.speculation, parse_map(device_maps, plan)
    if plan.projector is not None:
        mmproj = mmproj or file_name(plan.projector.name, ".gguf")
    if planned and planned.tokens and planned.draft:
        draft = draft or file_name(planned.draft, ".gguf")
    if draft and (sentence := uncounted_draft(plan)):
        say(f"note: {sentence}")
    return {
        **projector_fields(plan, mapped, spec, mmproj),
        **draft_fields(plan, mapped, spec, draft),
    }
