"""Does a plan agree with itself and with its model? Units, layers and overrides state one placement thrice.

The engine is told layers and overrides; a site that says something else would be ignored without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.block_names import block_of
from planner.check.divided_sites import check_sites
from planner.check.plan_alone import faults as faults_alone
from planner.cost.expert_cache import faults as cache_faults
from planner.errors import InputError
from planner.memory.kv_cache import kv_bytes, nextn_kv_bytes, state_bytes
from planner.model.inventory import Inventory
from planner.model.layers import Layers
from planner.model.nextn import nextn_fault
from planner.model.structure import Structure, structure_of
from planner.model.units import Kind, Unit
from planner.model.validity import check_loadable
from planner.passes.prompt_pipeline import restated
from planner.plan.load_spec import LoadSpec, plan_layer_devices
from planner.plan.override_match import disagreements
from planner.plan.overrides import UnplaceableUnit, wanted_buffers
from planner.plan.plan import Plan
from planner.site import Site, SiteKind
from planner.workload import Workload

_PLACEMENT = frozenset({"sites", "units", "overrides", "memory"})  # what plan_alone's rules say of the load
_OPTIONAL = (Kind.NEXTN, Kind.FOREIGN)  # not loaded unless asked for, so a plan need not name them


@dataclass(eq=False)
class Contradiction(InputError):
    """A plan whose parts, or whose file, do not say the same."""

    path: str
    faults: tuple[str, ...]

    def message(self) -> str:
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"{self.path}: {self.faults[0]}{more}; atsplan check lists what is wrong with a plan"


def check_agreement(plan: Plan, inventory: Inventory | None, path: str) -> None:
    """Contradiction unless layers, units, overrides, weights and caches of the plan say the same.

    Without an inventory, as far as the plan alone tells. NotLoadable for a model that llama.cpp refuses,
    ImpossibleSite for a unit divided as it cannot be. Predicted times are `atsplan check`'s to judge.
    """
    if inventory is not None:
        check_loadable(inventory, inventory.name)
    check_sites(plan, inventory, path)
    found = agreement_faults(plan, structure_of(inventory)) if inventory is not None else []
    found = found or [fault.message for fault in faults_alone(plan) if fault.rule in _PLACEMENT]
    if found:
        raise Contradiction(path, tuple(found))


def agreement_faults(plan: Plan, structure: Structure) -> list[str]:
    """What a plan says of a model that is not so, of the first kind in which there is any."""
    return (
        workload_faults(plan.workload, structure.inventory)
        or _layer_faults(plan, structure.layers)
        or _unit_faults(plan, structure.units)
        or _order_faults(plan, structure.units)
        or _tensor_faults(plan, structure)
        or _cache_faults(plan, structure)
        or list(cache_faults(plan))
    )


def check_order(plan: Plan, spec: LoadSpec, found: Mapping[int, tuple[int, ...]], path: str) -> None:
    """Contradiction when `spec` has stripes and the file does not hold the experts as planned.

    `found` maps layers to the original expert id at each position; {} of a file never rewritten.
    """
    if not any(Site.of_buffer(buffer).kind is SiteKind.STRIPE for _, buffer in spec.overrides):
        return
    wrong = [e.layer for e in plan.experts if found.get(e.layer, tuple(range(len(e.order)))) != e.order]
    if wrong:
        what = f"the file does not hold the experts of layer {wrong[0]} in the plan's order"
        fault = f"{what}, so the hot ones would not be in VRAM: atsplan rewrite it first"
        raise Contradiction(path, (fault, *map(str, wrong[1:])))


def workload_faults(workload: Workload, inventory: Inventory) -> list[str]:
    """What a workload asks of a model that does not have it."""
    if workload.mtp and (fault := nextn_fault(inventory)):
        return [f"workload: mtp is true, but the model {fault}"]
    return []


def _layer_faults(plan: Plan, layers: Layers) -> list[str]:
    stated = sum(each.last - each.first + 1 for each in plan.layers)
    if stated in (layers.n_main + 1, layers.n_all + 1):
        return []
    return [f"layers: {stated} layers with the output head, the model has {layers.n_main + 1}"]


def _unit_faults(plan: Plan, units: Sequence[Unit]) -> list[str]:
    stated = [placement.unit for placement in plan.units]
    optional = {unit.name for unit in units if unit.kind in _OPTIONAL}
    known = {unit.name for unit in units}
    return [
        *(f"units: {name} is no unit of the model" for name in stated if name not in known),
        *(f"units: {name} appears twice" for name, times in sorted(Counter(stated).items()) if times > 1),
        *(f"units: {name} has no site" for name in sorted(known - optional - set(stated))),
    ]


def _order_faults(plan: Plan, units: Sequence[Unit]) -> list[str]:
    experts = {block_of(unit.name): unit.experts for unit in units if unit.kind is Kind.EXPERTS}
    return [
        f"experts: layer {e.layer}: an order of {len(e.order)} experts, it has {experts.get(e.layer, 0)}"
        for e in plan.experts
        if len(e.order) != experts.get(e.layer, 0)
    ]


def _tensor_faults(plan: Plan, structure: Structure) -> list[str]:
    inventory = structure.inventory
    sites = {placement.unit: placement.site for placement in plan.units}
    units = [unit for unit in structure.units if unit.name in sites]
    try:
        devices = plan_layer_devices(plan)
        wanted = wanted_buffers(inventory, units, [sites[u.name] for u in units], devices)
        wanted |= restated(inventory, units, devices, plan.overrides)
    except UnplaceableUnit as problem:
        return [str(problem)]
    return list(disagreements(inventory, plan.overrides, wanted))


def _cache_faults(plan: Plan, structure: Structure) -> list[str]:
    """KV cache and recurrent state follow the layer devices and the workload, to the byte."""
    work, layers = plan.workload, plan_layer_devices(plan)
    kv = [*kv_bytes(structure, work), *(nextn_kv_bytes(structure, work) if work.mtp else ())]
    state = state_bytes(structure, work)
    uses = {use.name: use for use in plan.devices}
    faults = []
    for device in sorted({*layers, *uses}):
        use = uses.get(device)
        stated = (use.kv_bytes, use.state_bytes) if use else (0, 0)
        needed = (_on(device, layers, kv), _on(device, layers, state))
        for what, have, want in zip(("KV cache", "recurrent state"), stated, needed, strict=True):
            if have != want:
                faults.append(f"devices: {device}: {what} of {have} bytes, workload and layers give {want}")
    return faults


def _on(device: str, layers: Sequence[str], sizes: Sequence[int]) -> int:
    return sum(size for home, size in zip(layers, sizes, strict=False) if home == device)
