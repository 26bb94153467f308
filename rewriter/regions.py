"""The order of tensors in the output: by where the plan puts them, then as the graph runs."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import FileProblem
from planner.model.inventory import Inventory
from planner.model.units import Kind, Unit
from planner.plan.plan import Plan
from planner.quoting import short
from planner.site import HOST as CPU
from planner.site import ON_CPU, Site, SiteKind

UNPLACED = "unplaced"
TABLES = "tables"  # host memory of which single rows are read


@dataclass(frozen=True, slots=True)
class Region:
    """A run of tensors that are loaded into one kind of memory."""

    name: str  # the memory of its sites (gpu:CUDA0, stripe:CUDA0, cpu), tables, or unplaced
    tensors: tuple[str, ...]


def regions(inventory: Inventory, plan: Plan, units: tuple[Unit, ...], path: str) -> tuple[Region, ...]:
    """Every tensor of the model in output order.

    Device memory comes first in the order of the plan's devices, host memory last, so that what
    stays mapped is one range, in it the looked-up tables behind all that is read for every token, so that
    reading ahead never brings them; what the plan does not place (speculative heads, vision) follows.
    Raises FileProblem for a site or unit that cannot be; `path` names the plan.
    """
    sites = {placement.unit: placement.site for placement in plan.units}
    unknown = sorted(sites.keys() - {unit.name for unit in units})
    if unknown:
        raise FileProblem(path, f"unit {short(unknown[0])} is not in the model")
    devices = tuple(device.name for device in plan.devices)
    grouped: dict[str, list[str]] = {name: [] for name in _memories(devices)}
    for unit in units:
        memory = _memory(sites.get(unit.name), devices, unit.name, path)
        table = unit.kind is Kind.LOOKUP and memory == str(ON_CPU)
        grouped[TABLES if table else memory] += unit.tensors
    found = tuple(Region(name, tuple(tensors)) for name, tensors in grouped.items() if tensors)
    assert sum(len(r.tensors) for r in found) == len(inventory.tensors)
    return found


def _memories(devices: tuple[str, ...]) -> list[str]:
    """Every memory that a site may take, in the order of the file."""
    there = [name for name in devices if name != CPU]
    kinds = [kind for kind in SiteKind if kind is not SiteKind.CPU]
    return [*(str(Site(kind, name)) for kind in kinds for name in there), str(ON_CPU), TABLES, UNPLACED]


def _memory(site: Site | None, devices: tuple[str, ...], unit: str, path: str) -> str:
    """The memory of a site; FileProblem for a device that the plan does not have."""
    if site is None:
        return UNPLACED
    if site != ON_CPU and site.device not in devices:
        what = short(f"{unit}: site {site}")
        raise FileProblem(path, f"unit {what} is not of a device of the plan")
    return site.memory
