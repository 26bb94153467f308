"""The stock rules that a plan records, as placements again: what the command of each does, to be priced.

A plan keeps of each rule its flags and its predicted cost. Flags are enough to say where every layer and
unit goes, so a rule can be written as a plan of its own and priced and checked like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.block_names import block_of
from planner.constants import CPU
from planner.cost.pins import Wanted, parse_pin, pinned
from planner.model.units import Unit
from planner.plan.engine_rules import layers_by_ngl
from planner.plan.load_spec import layer_ranges, plan_layer_devices
from planner.plan.plan import NOT_LOADED, Baseline, DeviceUse, Placement, Plan
from planner.plan.stock_rule import PINS, PLAIN
from planner.site import ON_CPU, Site

_FLAGS = re.compile(
    r"(?:--device (?P<device>\S+) )?-ngl (?P<ngl>\d{1,5})(?P<none> --device none)?"
    r"(?: --n-cpu-moe (?P<moe>\d{1,5})| --n-cpu-ffn (?P<ffn>\d{1,5})| (?P<every>--cpu-moe))?"
    rf"(?P<pins> {re.escape(PINS)})?(?P<plain> {PLAIN})?"
)


@dataclass(frozen=True, slots=True)
class Flags:
    """A stock rule's setting."""

    ngl: int
    device: str = ""  # the only one; "": all GPUs of the budgets
    alone: bool = False  # no GPU is opened, not even for prompts
    experts: int = 0  # of the first layers, on the CPU
    every: bool = False  # all experts on the CPU
    ffns: int = 0  # of the largest dense FFNs, on the CPU
    pins: bool = False  # pins move units that the rule alone has elsewhere
    plain: bool = False  # prompts are computed where the weights are


def flags(setting: str) -> Flags | None:
    """The flags of a recorded setting; None for one that names more than flags, as --fit does."""
    found = _FLAGS.fullmatch(setting)
    if found is None:
        return None
    return Flags(
        int(found["ngl"]),
        found["device"] or "",
        found["none"] is not None,
        int(found["moe"] or 0),
        found["every"] is not None,
        int(found["ffn"] or 0),
        found["pins"] is not None,
        found["plain"] is not None,
    )


def objective_ns(plan: Plan, of: Baseline) -> int:
    """What the solver minimises: the time of one request of the plan's workload."""
    return of.tpot_ns * plan.workload.gen + of.prefill_ns


def usable_rules(plan: Plan, units: Sequence[Unit] = ()) -> list[Baseline]:
    """The recorded rules that fit and can be written again, best first.

    Pins name units and tensors: of a plan with pins only the model's `units` tell which rules keep them.
    """
    found = [b for b in plan.baselines if b.feasible and flags(b.setting) is not None]
    if plan.constraints.pins:
        wanted = _pinned(plan, units) if units else {}
        found = [b for b in found if units and _keeps(rule_plan(plan, b, units), wanted)]
    return sorted(found, key=lambda b: objective_ns(plan, b))


def _keeps(plan: Plan, pins: Mapping[str, Wanted]) -> bool:
    return all(pins[p.unit].admits(p.site) for p in plan.units if p.unit in pins)


def rule_plan(plan: Plan, rule: Baseline, units: Sequence[Unit] = ()) -> Plan:
    """The plan with the rule's decisions in place of its own, and the rule's recorded cost.

    Layers and sites are exact; what follows from them (overrides, memory) is not there until it is priced
    (planner.check.reprice.edited). `units` of the model are for a rule that pins change. Raises ValueError
    for a rule whose setting is no flags.
    """
    told = flags(rule.setting)
    if told is None:
        raise ValueError(rule.setting)
    gpus = _gpus(plan, told)
    n_blocks = len(plan_layer_devices(plan)) - 1
    devices = layers_by_ngl(n_blocks, told.ngl, list(gpus.items()))
    free = plan.constraints.model_copy(update={"pins": (), "contiguous": False, "no_cpu": False})
    predicted = plan.predicted.model_copy(update={"tpot_ns": rule.tpot_ns, "prefill_ns": rule.prefill_ns})
    changed = {
        "layers": layer_ranges(devices),
        "units": _placed(plan, told, devices, _pinned(plan, units) if told.pins else {}),
        "overrides": (),
        "experts": (),
        "op_offload": not told.plain,
        "constraints": free,
        "devices": _uses(plan, gpus),
        "predicted": predicted,
        # Those of the plan were chosen for other work of the CPU: all cores, as the tools take unless told.
        "machine": plan.machine.model_copy(update={"threads": 0}),
        "notes": (),
    }
    return plan.model_copy(update=changed)


def _gpus(plan: Plan, told: Flags) -> dict[str, int]:
    """The devices that the rule opens, with the memory by which it deals layers to them."""
    if told.alone:
        return {}
    taken: dict[str, int] = {}
    for each in plan.constraints.reserves:
        taken[each.device] = taken.get(each.device, 0) + each.size_bytes
    names = [told.device] if told.device else [d for d in _order(plan) if d != CPU]
    return {name: plan.constraints.budgets.get(name, 0) - taken.get(name, 0) for name in names}


def _order(plan: Plan) -> list[str]:
    """Devices as the plan lists them, then those that it leaves unused."""
    return list(dict.fromkeys([*(use.name for use in plan.devices), *plan.constraints.budgets]))


def _pinned(plan: Plan, units: Sequence[Unit]) -> Mapping[str, Wanted]:
    placed = {p.unit for p in plan.units if p.why != NOT_LOADED}
    pins = [parse_pin(text) for text in plan.constraints.pins]
    return pinned(pins, [u for u in units if u.name in placed], list(plan.constraints.budgets))


def _placed(
    plan: Plan, told: Flags, devices: tuple[str, ...], pins: Mapping[str, Wanted]
) -> tuple[Placement, ...]:
    on_host = _on_host(plan, told)
    found = []
    for placed in plan.units:
        layer = block_of(placed.unit)
        home = devices[-1 if layer is None else min(layer, len(devices) - 1)]
        # Input tables stay in host memory under every rule.
        inputs = layer is None and placed.site == ON_CPU and placed.unit != "output"
        away = inputs or placed.unit in on_host
        site, wanted = ON_CPU if away else Site.on(home), pins.get(placed.unit)
        if wanted is not None and not inputs and not wanted.admits(site):
            site = wanted.what if isinstance(wanted.what, Site) else Site.on(home)
        found.append(placed.model_copy(update={"site": site}))
    return tuple(found)


def _on_host(plan: Plan, told: Flags) -> set[str]:
    """Units that the rule keeps on the CPU whatever their layer."""
    numbered = [(p, n) for p in plan.units if (n := block_of(p.unit)) is not None]
    experts = {p.unit: n for p, n in numbered if p.unit.endswith(".experts")}
    dense = [(p.unit, p.size_bytes, n) for p, n in numbered if p.unit.endswith(".ffn")]
    largest = sorted(dense, key=lambda each: (-each[1], each[2]))[: told.ffns]
    first = {name for name, layer in experts.items() if told.every or layer < told.experts}
    return first | {name for name, _, _ in largest}


def _uses(plan: Plan, gpus: Mapping[str, int]) -> tuple[DeviceUse, ...]:
    """Uses for the devices the rule names; weights in host memory are counted as the whole model's."""
    known = {use.name: use for use in plan.devices}
    found = []
    for name in (n for n in _order(plan) if n == CPU or n in gpus):
        use = known.get(name) or DeviceUse(
            name=name,
            kind="cpu" if name == CPU else "gpu",
            budget_bytes=plan.constraints.budgets.get(name, 0),
            weights_bytes=0,
            kv_bytes=0,
            state_bytes=0,
            compute_bytes=0,
        )
        empty = {"kv_bytes": 0, "state_bytes": 0, "compute_bytes": 0, "cache_bytes": 0, "reserve_bytes": 0}
        weights = plan.model.size_bytes if name == CPU else 1
        found.append(use.model_copy(update={**empty, "weights_bytes": weights}))
    return tuple(found)
