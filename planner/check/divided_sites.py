"""Sites that divide a unit, against what the unit is: one answer for every command.

Only routed experts are divided (stripes, slots, the engine's cache), and never into more experts than there
are. Without the model the unit's name and the plan's own orders say as much as they can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.block_names import block_of
from planner.errors import InputError
from planner.model.inventory import Inventory
from planner.model.units import Kind, units_of
from planner.plan.plan import Placement, Plan
from planner.site import SiteKind

_COUNTED = {SiteKind.STRIPE: "a stripe", SiteKind.HYBRID: "slots"}


@dataclass(eq=False)
class ImpossibleSite(InputError):
    """A plan in which a unit lives where it cannot."""

    path: str
    why: str

    def message(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, slots=True)
class SiteFault:
    """A site that its unit cannot have; `index` into the plan's units."""

    index: int
    why: str


def check_sites(plan: Plan, inventory: Inventory | None, path: str) -> None:
    """ImpossibleSite for the first unit that cannot be divided as its site says."""
    for fault in site_faults(plan, inventory):
        raise ImpossibleSite(path, fault.why)


def site_faults(plan: Plan, inventory: Inventory | None) -> list[SiteFault]:
    """Every site that divides what cannot be, or into more experts than there are."""
    if all(not placed.site.divided for placed in plan.units):
        return []
    known = _experts(plan) if inventory is None else _experts_of(inventory)
    slotted = any(placed.site.kind is SiteKind.HYBRID for placed in plan.units)
    return [
        SiteFault(i, f"units[{i}].site: {placed.unit}: {placed.site}: {why}")
        for i, placed in enumerate(plan.units)
        if (why := _why(placed, known) or _beside_slots(placed, slotted))
    ]


def _beside_slots(placed: Placement, slotted: bool) -> str:
    if not slotted or placed.site.kind not in (SiteKind.STRIPE, SiteKind.CACHE):
        return ""
    return "no load has this beside layers with slots (hybrid), whose device lies before the GPU"


def _why(placed: Placement, known: Mapping[str, int]) -> str:
    site = placed.site
    if not site.divided:
        return ""
    if placed.unit not in known:
        return "only routed experts can be divided, and this unit has none"
    experts = known[placed.unit]
    if site.kind in _COUNTED and 0 < experts < site.amount:
        return f"{_COUNTED[site.kind]} of {site.amount} experts, the layer has {experts}"
    return ""


def _experts_of(inventory: Inventory) -> dict[str, int]:
    return {u.name: u.experts for u in units_of(inventory).units if u.kind is Kind.EXPERTS}


def _experts(plan: Plan) -> dict[str, int]:
    """Units that are experts by their names, with as many as the plan orders; 0: not known."""
    orders = {each.layer: len(each.order) for each in plan.experts}
    layers = {p.unit: block_of(p.unit) for p in plan.units if p.unit.endswith(".experts")}
    return {unit: orders.get(layer, 0) if layer is not None else 0 for unit, layer in layers.items()}
