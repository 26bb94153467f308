"""Plans of the small test models for devices that are not here, and how to map them."""

from __future__ import annotations

from pathlib import Path

from hand_plans import hand_plan, with_uses

from planner.model.gguf.reader import read_model
from planner.model.units import Kind, units_of
from planner.plan.overrides import overrides_of
from planner.plan.plan import LayerRange, Placement, Plan, from_text, to_text
from planner.site import Site
from planner.workload import Workload

HERE = ("--device-map", "CUDA0=CPU")


SMALL = Workload(n_ctx=256, n_batch=64, n_ubatch=64)


def plan_for(model: Path, workload: Workload = SMALL) -> Plan:
    """Experts and embedding on the CPU, everything else on a CUDA0 that is not here."""
    file = read_model(model)
    units = [u for u in units_of(file.inventory).units if u.kind is not Kind.FOREIGN]
    blocks = max(u.layer or 0 for u in units) + 1
    plan = hand_plan(file)
    sites = [p.site for p in plan.units]
    changed = {
        "layers": (LayerRange(first=0, last=blocks, device="CUDA0"),),
        "overrides": overrides_of(file.inventory, units, sites, ["CUDA0"] * (blocks + 1)),
        "workload": workload,
        "devices": (),
    }
    return with_uses(plan.model_copy(update=changed), file.inventory)


def server_plan(model: Path, *runs: tuple[int, int, str], experts: str = "CPU") -> Plan:
    """The plan of test_run for the Vulkan device, with other layer devices or experts when given."""

    plan = from_text(to_text(plan_for(model)).replace("CUDA0", "Vulkan0"), "plan")
    layers = tuple(LayerRange(first=a, last=b, device=d) for a, b, d in runs)
    changed: dict[str, object] = {"layers": layers or plan.layers}
    if experts != "CPU":
        changed |= {"overrides": (), "units": with_experts(plan, f"gpu:{experts}")}
    return with_uses(plan.model_copy(update=changed), read_model(model).inventory)


def with_experts(plan: Plan, site: str, layers: tuple[int, ...] = ()) -> tuple[Placement, ...]:
    """The units of a plan with the experts of these layers (of all) at another site."""
    names = {f"blk.{n}.experts" for n in layers}
    return tuple(
        p.model_copy(update={"site": Site.parse(site)})
        if (p.unit in names or (not names and p.unit.endswith(".experts")))
        else p
        for p in plan.units
    )


def cpu_plan(model: Path, workload: Workload = SMALL, **machine_changes: object) -> Plan:
    """Everything on the CPU, no device to map."""
    file = read_model(model)
    made = hand_plan(file, lambda unit: "cpu")
    blocks = max(int(p.unit.split(".")[1]) + 1 for p in made.units if p.unit.startswith("blk."))
    changed = {
        "layers": (LayerRange(first=0, last=blocks, device="CPU"),),
        "workload": workload,
        "devices": (),
        "machine": made.machine.model_copy(update=machine_changes),
    }
    return with_uses(made.model_copy(update=changed), file.inventory)
