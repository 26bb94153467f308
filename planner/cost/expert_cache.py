"""The engine's MoE cache in plans: sites `cache:DEVICE:PPM`, what is said of them, what cannot be loaded.

The engine takes one size. It caches every layer that has a GPU as its layer device and all its experts in
host memory, whether a plan wants that or not, and keeps the experts of all of them in one LRU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.block_names import block_of
from planner.constants import CPU
from planner.cost.ledger import Once, once
from planner.machine.profile import Device
from planner.memory.memory import NOTHING, Memory
from planner.model.structure import Structure
from planner.model.units import Kind, divisible
from planner.plan.load_spec import plan_layer_devices
from planner.plan.plan import CachePoint, Placement, Plan
from planner.site import ON_CPU, Site, SiteKind


def cached(sites: Iterable[Site]) -> set[Site]:
    """The sites behind the engine's cache, each once."""
    return {site for site in sites if site.kind is SiteKind.CACHE}


def cache_shares(
    structure: Structure, devices: Sequence[Device], curve: Sequence[CachePoint]
) -> tuple[Once, ...]:
    """What each size of the engine's MoE cache takes beside its part of every layer, by device.

    The engine adds one slot for each set of layers whose experts are alike, and is told whole MiB. The last
    share stands for experts on the host without a cache.
    """
    if not curve:
        return ()
    tensors = structure.tensors
    slots = {
        tuple((t.type, t.shape) for t in held): sum(t.size_bytes for t in held) // u.experts
        for u in structure.units
        if u.kind is Kind.EXPERTS
        for held in [[tensors[n] for n in divisible(u)]]
    }
    extra = sum(slots.values()) + 2**20
    found = [
        once(f"{d.name} has a cache of {point.share_ppm} ppm", i, Memory(cache=extra))
        for i, d in enumerate(devices)
        for point in curve
    ]
    return (*found, once("experts on the host without a cache", 0, NOTHING))


def cache_notes(placements: Sequence[Placement], curve: Sequence[CachePoint]) -> list[str]:
    """What a plan made with a hit curve says of the cache."""
    if not curve:
        return []
    found = cached(p.site for p in placements)
    if not found:
        return ["a MoE cache was considered: no size of it is predicted to be worth its memory"]
    (site,) = found
    hits = next((p.hit_ppm for p in curve if p.share_ppm == site.amount), 0)
    layers = sum(p.site == site for p in placements)
    return [
        f"MoE cache on {site.device}: {site.amount / 1e4:.1f} % of the experts of {layers} layers, for "
        f"{hits / 1e4:.1f} % of the trace's choices; needs llama.cpp b11480 or later (--moe-cache-mib)"
    ]


def faults(plan: Plan) -> Iterator[str]:
    """Where the sites of a plan are not what its cache size makes the engine do."""
    shares = cached(p.site for p in plan.units)
    size = sum(use.cache_bytes for use in plan.devices)
    if bool(shares) != bool(size):
        yield f"devices: a MoE cache of {size} bytes, and {len(shares)} cached sites in units"
    if len(shares) > 1:
        yield "units: the engine has one MoE cache, the sites name several"
    devices = plan_layer_devices(plan)
    for placed in plan.units if shares else ():
        if placed.site == ON_CPU and placed.unit.endswith(".experts") and _home(placed, devices) != CPU:
            yield f"units: {placed.unit} is on the CPU, yet the engine would cache it as well"


def _home(placed: Placement, devices: Sequence[str]) -> str:
    layer = block_of(placed.unit)
    return CPU if layer is None else devices[min(layer, len(devices) - 1)]
