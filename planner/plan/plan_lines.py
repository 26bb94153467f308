"""A plan as a list for a person: how full each device is, and which tensors each override takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from planner.constants import MIB
from planner.model.inventory import Inventory
from planner.plan.override_match import Match, matches
from planner.plan.plan import DeviceUse, Plan


def device_lines(plan: Plan) -> Iterator[str]:
    """One line a device: used, budget, share, and what uses it."""
    for use in plan.devices:
        share = 100 * use.used_bytes // use.budget_bytes if use.budget_bytes else 0
        parts = ", ".join(f"{name} {_mib(size)}" for name, size in _parts(use) if size)
        yield f"{use.name}: {_mib(use.used_bytes)} of {_mib(use.budget_bytes)} MiB ({share} %): {parts}"


def override_lines(plan: Plan, inventory: Inventory) -> Iterator[str]:
    """One line an override: what it takes, its bytes and layers, and what is wrong with it."""
    for match in matches(inventory, [(o.pattern, o.buffer) for o in plan.overrides]):
        yield (
            f"{match.pattern} → {match.buffer}: {len(match.tensors)} tensors, {_mib(match.size_bytes)} MiB"
            f"{_layers(match)}{''.join(f'; {fault}' for fault in match.faults)}"
        )


def _parts(use: DeviceUse) -> Iterable[tuple[str, int]]:
    return (
        ("weights", use.weights_bytes),
        ("KV", use.kv_bytes),
        ("state", use.state_bytes),
        ("compute", use.compute_bytes),
        ("MoE cache", use.cache_bytes),
        ("reserved", use.reserve_bytes),
        ("mapped tables, not counted,", use.tables_bytes or 0),
    )


def _layers(match: Match) -> str:
    runs = groupby(enumerate(match.layers), key=lambda pair: pair[1] - pair[0])
    spans = [[layer for _, layer in run] for _, run in runs]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    return f", layers {', '.join(texts)}" if texts else ""


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f}" if size_bytes >= 10 * MIB else f"{size_bytes / MIB:.1f}"
