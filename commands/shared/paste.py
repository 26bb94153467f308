"""The command that starts a plan: what a person pastes into a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.quoting import file_name, shell

if TYPE_CHECKING:
    from planner.model.inventory import Inventory
    from planner.plan.plan import Plan

TABLES = (".yaml", ".yml")


def model_name(plan: Plan, model: Path | None) -> str:
    """The model in a command: the file itself, or the plan's name for it where only a table is here."""
    table_only = model is None or model.suffix in TABLES
    return file_name(plan.model.name, ".gguf") if table_only else str(model)


def pasted(
    plan: Plan,
    inventory: Inventory | None,
    model: Path | None,
    words: tuple[str, ...] = (),
    plan_path: Path | None = None,
) -> tuple[str, tuple[str, ...]]:
    """llama-server's command line for a plan, and what it cannot say.

    `atsplan run` where experts are divided: no option of a stock tool says that. `words` stand in the place
    of --model where llama-server itself fetches it.
    """
    from planner.plan.load_spec import load_spec, plan_layer_devices
    from planner.plan.override_match import placed as matched
    from planner.plan.overrides import collate
    from runtime.tools.export import export
    from runtime.tools.options import cut_by_parsers, stock

    name = model_name(plan, model)
    if any(line.site.divided for line in plan.units):
        return shell(["atsplan", "run", name, "--plan", str(plan_path or "plan.yaml")]), ()
    if inventory is not None and any(cut_by_parsers(each.pattern) for each in plan.overrides):
        found = tuple((each.pattern, each.buffer) for each in plan.overrides)
        plan = plan.model_copy(update={"overrides": collate(matched(inventory, found))})
    placed = stock(load_spec(plan), len(plan_layer_devices(plan)) - 1)
    text = export(plan, placed, name, "llama-server")
    text = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    if words:
        text = text.replace(f" {shell(['--model', name])} ", f" {shell(words)} ", 1)
    return text, placed.notes


def known_by(plan: Plan) -> str:
    """Which builds of llama.cpp know the options of a pasted line; "" where all do, or none is needed."""
    from planner.plan.load_spec import load_spec, plan_layer_devices
    from runtime.tools.export import builds
    from runtime.tools.options import stock

    if any(line.site.divided for line in plan.units):
        return ""
    return "; ".join(builds(plan, stock(load_spec(plan), len(plan_layer_devices(plan)) - 1)))
