"""Plans written by hand for any model: what a test of the rewriter needs, without a solver."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sample_plan import sample_plan

from planner.gguf_file import ModelFile
from planner.plan import ExpertOrder, ModelRef, Placement, Plan
from planner.units import Kind, Unit, units_of


def experts_on_cpu(unit: Unit) -> str:
    """Routed experts and embeddings in host memory, the rest on the device."""
    return "cpu" if unit.kind in (Kind.EXPERTS, Kind.EMBEDDING, Kind.FFN) else "gpu:CUDA0"


def hand_plan(
    model: ModelFile,
    site: Callable[[Unit], str] = experts_on_cpu,
    experts: Mapping[int, tuple[int, ...]] | None = None,
) -> Plan:
    """A plan of the model with the sites and expert orders given; its costs mean nothing."""
    sample, inventory = sample_plan(), model.inventory
    reference = ModelRef(
        name=inventory.name,
        architecture=inventory.architecture,
        table_digest=inventory.table_digest(),
        header_digest=inventory.header_digest,
        tensors=len(inventory.tensors),
        size_bytes=inventory.size_bytes,
    )
    device = sample.devices[0]
    names = ("CUDA0", "CUDA1", "CPU")
    placements = tuple(
        Placement(unit=u.name, site=site(u), size_bytes=u.size_bytes, time_ns=0, why="test")
        for u in units_of(inventory).units
        if u.kind not in (Kind.NEXTN, Kind.FOREIGN)
    )
    orders = tuple(ExpertOrder(layer=n, order=order) for n, order in sorted((experts or {}).items()))
    changed = {
        "model": reference,
        "devices": tuple(device.model_copy(update={"name": name}) for name in names),
        "units": placements,
        "experts": orders,
        "overrides": (),
    }
    return sample.model_copy(update=changed)
