"""The nearest plan that stock llama.cpp tools can load: no stripes, CPU layers first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.block_names import block_of
from planner.constants import CPU
from planner.plan.load_spec import layer_ranges, plan_layer_devices
from planner.plan.plan import Placement, Plan
from planner.site import ON_CPU, Site, SiteKind

_FREE = (".experts", ".ffn")  # units that need not be where their layer is

_BLOCK = re.compile(r"blk\.([0-9]{1,4})(?:\.|$)")


def nearest(plan: Plan) -> Plan:
    """The plan with its decisions changed to legal ones; price it again before use (planner.check.reprice).

    As many layers stay on the CPU as before, but they come first: that is how the tools count. The
    output head keeps its device.
    """
    before = plan_layer_devices(plan)
    after = (*sorted(before[:-1], key=lambda device: device != CPU), before[-1])
    cached = next((p.site for p in plan.units if p.site.kind is SiteKind.CACHE), ON_CPU)
    units = tuple(p.model_copy(update={"site": _site(p, before, after, cached)}) for p in plan.units)
    # Pins name units whose layers have moved.
    free = plan.constraints.model_copy(update={"pins": ()})
    return plan.model_copy(update={"layers": layer_ranges(after), "units": units, "constraints": free})


def _site(placement: Placement, before: Sequence[str], after: Sequence[str], cached: Site) -> Site:
    """The legal site; `cached` is that of host experts of device layers, the CPU without a MoE cache."""
    layer = block_of(placement.unit)
    if placement.site.kind in (SiteKind.STRIPE, SiteKind.HYBRID):
        return cached
    if layer is not None and placement.unit.endswith(".experts") and placement.site in (ON_CPU, cached):
        return ON_CPU if after[layer] == CPU else cached
    if layer is None or layer >= len(before) or before[layer] == after[layer]:
        return placement.site
    # Weights that were on the CPU stay there, or a layer new to the device would not fit.
    if after[layer] == CPU or (placement.unit.endswith(_FREE) and placement.site == ON_CPU):
        return ON_CPU
    return Site.on(after[layer])
