"""Plans written by hand for any model: what a test of the rewriter needs, without a solver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sample_plan import sample_plan

from planner.constants import CPU
from planner.memory.compute_buffer import compute_bytes
from planner.memory.kv_cache import kv_bytes, nextn_kv_bytes, state_bytes
from planner.model.gguf.reader import ModelFile
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.model.units import Kind, Unit, units_of
from planner.passes.record import model_ref
from planner.plan.engine_rules import tensor_devices
from planner.plan.load_spec import load_spec, plan_layer_devices
from planner.plan.overrides import UnplaceableUnit, overrides_of
from planner.plan.plan import DeviceUse, ExpertOrder, LayerRange, Placement, Plan
from planner.site import Site


def experts_on_cpu(unit: Unit) -> str:
    """Routed experts and embeddings in host memory, the rest on the device."""
    return "cpu" if unit.kind in (Kind.EXPERTS, Kind.EMBEDDING, Kind.FFN) else "gpu:CUDA0"


def hand_plan(
    model: ModelFile,
    site: Callable[[Unit], str] = experts_on_cpu,
    experts: Mapping[int, tuple[int, ...]] | None = None,
) -> Plan:
    """A plan of the model with the sites and expert orders given; its costs mean nothing.

    Layers follow their attention or mixer. It agrees with itself where the engine could place its units so.
    """
    sample, inventory = sample_plan(), model.inventory
    reference = model_ref(inventory)
    device = sample.devices[0]
    names = ("CUDA0", "CUDA1", "CPU")
    units = [u for u in units_of(inventory).units if u.kind not in (Kind.NEXTN, Kind.FOREIGN)]
    placements = tuple(
        Placement(unit=u.name, site=site(u), size_bytes=u.size_bytes, time_ns=0, why="test") for u in units
    )
    orders = tuple(ExpertOrder(layer=n, order=order) for n, order in sorted((experts or {}).items()))
    changed = {
        "model": reference,
        "devices": tuple(device.model_copy(update={"name": name}) for name in names),
        "units": placements,
        "experts": orders,
        "overrides": (),
    }
    made = sample.model_copy(update=changed)
    sites = [each.site for each in placements]
    layers = _layer_devices(units, sites, layers_of(inventory).n_main)
    try:
        overrides = overrides_of(inventory, units, sites, layers)
    except UnplaceableUnit:
        return made
    ranges = tuple(LayerRange(first=n, last=n, device=each) for n, each in enumerate(layers))
    placed = with_uses(made.model_copy(update={"layers": ranges, "overrides": overrides}), inventory)
    used = {use.name for use in placed.devices}
    empty = device.model_copy(update=dict.fromkeys(("weights_bytes", "kv_bytes", "compute_bytes"), 0))
    idle = tuple(empty.model_copy(update={"name": name}) for name in names if name not in used)
    return placed.model_copy(update={"devices": (*idle, *placed.devices)})


_CARRIED = frozenset({Kind.EXPERTS, Kind.FFN, Kind.EMBEDDING, Kind.LOOKUP})  # say nothing of their layer


def _layer_devices(units: Sequence[Unit], sites: Sequence[Site], n_main: int) -> list[str]:
    """The device of each layer and of the output head."""
    pairs = [(u.layer, s) for u, s in zip(units, sites, strict=True) if u.kind not in _CARRIED]
    own = {layer: CPU if site.on_host else site.device for layer, site in reversed(pairs)}
    return [own.get(n, CPU) for n in (*range(n_main), None)]


def with_uses(plan: Plan, inventory: Inventory) -> Plan:
    """The plan with the devices that its layers, overrides and workload give; budgets that always suffice."""
    layers, work = plan_layer_devices(plan), plan.workload
    kv = (
        *kv_bytes(structure_of(inventory), work),
        *(nextn_kv_bytes(structure_of(inventory), work) if work.mtp else ()),
    )
    state = state_bytes(structure_of(inventory), work)
    placed = tensor_devices(structure_of(inventory), load_spec(plan.model_copy(update={"devices": ()})))

    def use(name: str) -> DeviceUse:
        return DeviceUse(
            name=name,
            kind="cpu" if name == "CPU" else "gpu",
            budget_bytes=2**40,
            weights_bytes=sum(t.size_bytes for t in inventory.tensors if placed.get(t.name) == name),
            kv_bytes=sum(size for home, size in zip(layers, kv, strict=False) if home == name),
            state_bytes=sum(size for home, size in zip(layers, state, strict=False) if home == name),
            compute_bytes=compute_bytes(structure_of(inventory), work, staged_bytes=inventory.size_bytes),
        )

    names = sorted({*layers, *placed.values()} - {"CPU"})
    return plan.model_copy(update={"devices": tuple(map(use, (*names, "CPU")))})
