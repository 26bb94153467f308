"""`atsplan diff A B`: what moved between two plans, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import mib, ms, next_step, out, out_json
from commands.shared.models import load_plan

if TYPE_CHECKING:
    from planner.model.inventory import Inventory
    from planner.plan.difference import Difference
    from planner.plan.plan import Plan

DERIVED = ("units.", "overrides", "command")  # follow from the moves, or from when the plan was made


@click.command("diff", epilog="Exit code 0 and no output when the plans are equal, 1 when they differ.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="GGUF or inventory: show tensors too.")
@click.option("--json", "as_json", is_flag=True, help="Print the difference as JSON.")
def command(before: Path, after: Path, model: Path | None, as_json: bool) -> None:
    """What moved from plan BEFORE to plan AFTER, and what it costs."""
    from planner.plan.difference import difference

    old, new = load_plan(before), load_plan(after)
    tensors = _tensors(model, {before: old, after: new})
    found = difference(old, new)
    if as_json:
        out_json(_as_json(found, old, new))
    elif found:
        _print(found, old, new, tensors)
    if found:
        next_step("atsplan", "explain", after)
        raise SystemExit(1)


def _tensors(model: Path | None, plans: dict[Path, Plan]) -> dict[str, tuple[str, ...]]:
    """The tensors of each unit, where the model is given; each plan that is of it must agree with it."""
    from commands.shared.models import load_inventory
    from planner.check.consistency import check_agreement
    from planner.check.divided_sites import check_sites
    from planner.model.units import units_of

    for path, plan in plans.items():
        check_sites(plan, None, str(path))
    if model is None:
        return {}
    inventory: Inventory = load_inventory(model, planned=True)
    for path, plan in plans.items():
        if plan.model.table_digest == inventory.table_digest():
            check_agreement(plan, inventory, str(path))
    return {unit.name: unit.tensors for unit in units_of(inventory).units}


def _as_json(found: Difference, old: Plan, new: Plan) -> dict[str, object]:
    return {
        "equal": not found,
        "moves": [
            {"unit": m.unit, "size_bytes": m.size_bytes, "before": m.before, "after": m.after}
            for m in found.moves
        ],
        "changes": [{"field": c.field, "before": c.before, "after": c.after} for c in found.changes],
        "tpot_ns": {"before": old.predicted.tpot_ns, "after": new.predicted.tpot_ns},
        "prefill_ns": {"before": old.predicted.prefill_ns, "after": new.predicted.prefill_ns},
    }


def show_moves(found: Difference, tensors: dict[str, tuple[str, ...]] | None = None) -> None:
    """What moved, one group of units for each pair of sites."""
    groups: dict[tuple[str, str], list[str]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for move in found.moves:
        key = (move.before or "absent", move.after or "absent")
        groups.setdefault(key, []).append(move.unit)
        sizes[key] = sizes.get(key, 0) + move.size_bytes
    for (was, now), units in groups.items():
        out(f"{len(units)} {'unit' if len(units) == 1 else 'units'}, {mib(sizes[was, now])}: {was} -> {now}")
        for unit in units:
            out(f"  {unit}")
            for tensor in (tensors or {}).get(unit, ()):
                out(f"    {tensor}")


def _print(found: Difference, old: Plan, new: Plan, tensors: dict[str, tuple[str, ...]]) -> None:
    show_moves(found, tensors)
    for change in found.changes:
        if not change.field.startswith(DERIVED):
            out(f"{change.field}: {change.before} -> {change.after}")
    rest = sum(change.field.startswith(DERIVED) for change in found.changes)
    if rest:
        out(f"{rest} derived {'value' if rest == 1 else 'values'} (times per unit, overrides, command)")
    out(_cost("decode", old.predicted.tpot_ns, new.predicted.tpot_ns))
    out(_cost("prefill", old.predicted.prefill_ns, new.predicted.prefill_ns))


def _cost(what: str, before: int, after: int) -> str:
    if before == after:
        return f"predicted {what}: {ms(after)}, the same"
    share = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return f"predicted {what}: {ms(before)} -> {ms(after)}{share}"
