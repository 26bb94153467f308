"""The order of tensors in the output: by where the plan puts them, then as the graph runs."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import FileProblem
from planner.model.inventory import Inventory
from planner.model.units import Unit
from planner.plan.plan import Plan
from planner.quoting import short

HOST = "host"
UNPLACED = "unplaced"


@dataclass(frozen=True, slots=True)
class Region:
    """A run of tensors that are loaded into one kind of memory."""

    name: str  # CUDA0, stripe:CUDA0, cache:CUDA0, host, unplaced
    tensors: tuple[str, ...]


def regions(inventory: Inventory, plan: Plan, units: tuple[Unit, ...], path: str) -> tuple[Region, ...]:
    """Every tensor of the model in output order.

    Device memory comes first in the order of the plan's devices, host memory last, so that what
    stays mapped is one range; what the plan does not place (speculative heads, vision) follows.
    Raises FileProblem for a site or unit that cannot be; `path` names the plan.
    """
    sites = {placement.unit: placement.site for placement in plan.units}
    unknown = sorted(sites.keys() - {unit.name for unit in units})
    if unknown:
        raise FileProblem(path, f"unit {short(unknown[0])} is not in the model")
    devices = tuple(device.name for device in plan.devices)
    grouped: dict[str, list[str]] = {name: [] for name in _names(devices)}
    for unit in units:
        grouped[_region(sites.get(unit.name), devices, unit.name, path)] += unit.tensors
    found = tuple(Region(name, tuple(tensors)) for name, tensors in grouped.items() if tensors)
    assert sum(len(r.tensors) for r in found) == len(inventory.tensors)
    return found


def _names(devices: tuple[str, ...]) -> list[str]:
    order = [*devices]
    order += [f"stripe:{device}" for device in devices]
    order += [f"cache:{device}" for device in devices]
    return [*(name for name in order if name != "CPU"), HOST, UNPLACED]


def _region(site: str | None, devices: tuple[str, ...], unit: str, path: str) -> str:
    """The region of a site: `gpu:CUDA0` -> CUDA0, `stripe:CUDA0:12` -> stripe:CUDA0, `cpu` -> host."""
    if site is None:
        return UNPLACED
    if site in ("cpu", "gpu:CPU"):
        return HOST
    kind, _, rest = site.partition(":")
    device = rest.rpartition(":")[0] if kind == "stripe" else rest
    if kind not in ("gpu", "stripe", "cache") or device not in devices:
        raise FileProblem(path, f"unit {short(unit)}: site {short(site)} is not of a device of the plan")
    return device if kind == "gpu" else f"{kind}:{device}"
