"""Plans written by hand for any model: what a test of the rewriter needs, without a solver."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.gguf_file import ModelFile
from planner.plan import (
    DeviceUse,
    ExpertOrder,
    LayerRange,
    MachineRef,
    ModelRef,
    Placement,
    Plan,
    Prediction,
)
from planner.units import Kind, Unit, units_of
from planner.workload import Workload


def experts_on_cpu(unit: Unit) -> str:
    """Routed experts and embeddings in host memory, the rest on the device."""
    return "cpu" if unit.kind in (Kind.EXPERTS, Kind.EMBEDDING, Kind.FFN) else "gpu:CUDA0"


def hand_plan(
    model: ModelFile,
    site: Callable[[Unit], str] = experts_on_cpu,
    experts: Mapping[int, tuple[int, ...]] | None = None,
) -> Plan:
    """A plan of the model with the sites and expert orders given; its costs are all zero."""
    inventory = model.inventory
    units = units_of(inventory).units
    return Plan(
        command="by hand",
        version="0",
        model=ModelRef(
            name=inventory.name,
            architecture=inventory.architecture,
            table_digest=inventory.table_digest(),
            header_digest=inventory.header_digest,
            tensors=len(inventory.tensors),
            size_bytes=inventory.size_bytes,
        ),
        machine=MachineRef(name="none", profile_digest="", measured=False, engine="none"),
        workload=Workload(),
        devices=tuple(_device(name) for name in ("CUDA0", "CUDA1", "CPU")),
        layers=(LayerRange(first=0, last=0, device="CUDA0"),),
        predicted=Prediction(
            tpot_ns=0,
            prefill_ns=0,
            error_ppm=0,
            splits=0,
            objective_ns=0,
            bound_ns=0,
            gap_ppm=0,
            status="optimal",
        ),
        baselines=(),
        units=tuple(
            Placement(unit=u.name, site=site(u), size_bytes=u.size_bytes, time_ns=0, why="test")
            for u in units
            if u.kind not in (Kind.NEXTN, Kind.FOREIGN)
        ),
        overrides=(),
        experts=tuple(ExpertOrder(layer=n, order=order) for n, order in sorted((experts or {}).items())),
    )


def _device(name: str) -> DeviceUse:
    return DeviceUse(
        name=name,
        kind="cpu" if name == "CPU" else "gpu",
        budget_bytes=0,
        weights_bytes=0,
        kv_bytes=0,
        state_bytes=0,
        compute_bytes=0,
    )
