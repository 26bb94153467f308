"""What a plan proves or disproves by itself, without model and profile: names, sums, overrides, times.

None of this needs an input, so none of it is ever skipped: a number changed in a text file rarely changes
alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from planner.block_names import block_of
from planner.check.recorded_rules import objective_ns
from planner.constants import CPU, PPM
from planner.machine.engine_builds import mixing_fault
from planner.machine.host_memory import HostMemory
from planner.model.units import is_table
from planner.plan.load_spec import LayerGap, plan_layer_devices
from planner.plan.patterns import listed
from planner.plan.plan import NOT_LOADED, DeviceUse, Placement, Plan
from planner.site import NoSite, Site, SiteKind

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NORM = 2**20  # no norm is larger


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong, the rule it breaks and its place in the plan."""

    rule: str
    message: str
    where: tuple[str | int, ...]


def faults(plan: Plan, schema: int = 0) -> list[Fault]:
    """Everything a plan says that cannot be true whatever its inputs are.

    `schema`: that of the text it was read from; 0: today's.
    """
    found = [*_digests(plan), *_names(plan), *_orders(plan), *_times(plan, schema or plan.schema_)]
    try:
        layers = plan_layer_devices(plan)
    except LayerGap as problem:
        return [*found, Fault("sites", problem.message().removeprefix("plan: "), ("layers",))]
    blocks = {n for p in plan.units if (n := block_of(p.unit)) is not None and not p.unit.endswith(".nextn")}
    if plan.layers and max(blocks, default=-1) >= max(entry.last for entry in plan.layers):
        what = f"layers end before layer {max(blocks)} and the output head"
        found.append(Fault("sites", what, ("layers",)))
    return [*found, *_weights(plan, layers), *_overrides(plan, layers)]


def _digests(plan: Plan) -> Iterator[Fault]:
    digests = [
        (plan.model.table_digest, ("model", "table_digest"), False),
        (plan.model.header_digest, ("model", "header_digest"), True),
        (plan.machine.profile_digest, ("machine", "profile_digest"), False),
        (plan.constraints.heat_digest, ("constraints", "heat_digest"), True),
    ]
    for text, where, empty in digests:
        if not (_DIGEST.fullmatch(text) or (empty and not text)):
            yield Fault("inputs", f"{'.'.join(where)}: expected sha256: and 64 hexadecimal digits", where)


def _names(plan: Plan) -> Iterator[Fault]:
    """Sites, layers and overrides name devices of the plan; no unit is placed twice."""
    known = {CPU, *(use.name for use in plan.devices)}
    seen: set[str] = set()
    for i, placed in enumerate(plan.units):
        if placed.site.device not in known and placed.why != NOT_LOADED:
            yield Fault("sites", f"{placed.unit}: {placed.site}: no such device in devices", ("units", i))
        if placed.unit in seen:
            yield Fault("units", f"{placed.unit} appears twice", ("units", i))
        seen.add(placed.unit)
    for i, entry in enumerate(plan.layers):
        if entry.device not in known:
            yield Fault("sites", f"layers: {entry.device}: no such device in devices", ("layers", i))
    for i, override in enumerate(plan.overrides):
        try:
            there = Site.of_buffer(override.buffer).device in known
        except NoSite as problem:
            yield Fault("overrides", str(problem), ("overrides", i))
            continue
        if not there:
            yield Fault("overrides", f"{override.buffer}: no such device in devices", ("overrides", i))


def _orders(plan: Plan) -> Iterator[Fault]:
    """Every layer has one order of its experts at most, in which each stands once."""
    seen: set[int] = set()
    for i, entry in enumerate(plan.experts):
        if sorted(entry.order) != list(range(len(entry.order))):
            what = (
                f"experts: layer {entry.layer}: the order is not one of {len(entry.order)} experts, each once"
            )
            yield Fault("sites", what, ("experts", i, "order"))
        if entry.layer in seen:
            yield Fault("sites", f"experts: layer {entry.layer} has two orders", ("experts", i))
        seen.add(entry.layer)
    for i, placed in enumerate(plan.units):
        layer = block_of(placed.unit)
        if placed.site.kind is SiteKind.HYBRID and layer is not None and layer not in seen:
            yield Fault(
                "sites", f"{placed.unit}: {placed.site}: no order of its experts", ("units", i, "site")
            )


def _weights(plan: Plan, layers: tuple[str, ...]) -> Iterator[Fault]:
    """The weights of each device are the units there; of divided ones at most the whole."""
    if plan.units and (short := plan.model.size_bytes - sum(p.size_bytes for p in plan.units)) < 0:
        yield Fault("units", f"units hold {-short} bytes more than the model", ("model", "size_bytes"))
    # The head's norm stays with its layer where the matrix leaves; its size is the model's to tell.
    head = next((p for p in plan.units if p.unit == "output"), None)
    slack = _NORM if head is not None and head.site.buffer != layers[-1] else 0
    mapped = plan.host_memory is HostMemory.MAPPED
    tables = sum(p.size_bytes for p in plan.units if is_table(p.unit)) if mapped else 0
    for i, use in enumerate(plan.devices):
        if (have := use.tables_bytes or 0) != (wanted := tables if use.name == CPU else 0):
            what = f"{use.name}: mapped tables of {have} bytes, its units hold {wanted}"
            yield Fault("memory", what, ("devices", i))
        loaded = [p for p in plan.units if p.why != NOT_LOADED]
        whole = sum(p.size_bytes for p in loaded if _on(p, use))
        parts = sum(_divided_at_most(p) for p in loaded if p.site.divided and not p.site.on_host)
        # A head without a tensor of its own is a copy of the embedding.
        tied = next((p.size_bytes for p in loaded if p.unit == "token_embd"), 0)
        most = whole + parts + (tied if use.name == layers[-1] else 0)
        have = use.weights_bytes + (use.tables_bytes or 0)
        near = any(abs(have - exact) <= slack for exact in (whole, most))
        if have < whole - slack or have > most + slack or (not parts and not near):
            span = f"{whole}" if whole == most else f"{whole} to {most}"
            where = ("devices", i, "weights_bytes")
            yield Fault("memory", f"{use.name}: weights of {have} bytes, its units hold {span}", where)


def _divided_at_most(placed: Placement) -> int:
    """Bytes that a divided unit has on its device at most: the whole, and beside slots those of guests."""
    if placed.site.kind is not SiteKind.HYBRID:
        return placed.size_bytes
    # No expert is larger than the slots' share of the unit: the number of experts is at least theirs.
    return placed.size_bytes + placed.site.guests * placed.size_bytes // max(placed.site.amount, 1)


def _on(placed: Placement, use: DeviceUse) -> bool:
    if placed.site.on_host:
        return use.name == CPU
    return not placed.site.divided and placed.site.device == use.name


def _times(plan: Plan, schema: int) -> Iterator[Fault]:
    """Units, token, prompt and objective belong together; a stock rule beside them is no faster."""
    told = plan.predicted
    units = sum(p.time_ns for p in plan.units)
    if told.tpot_ns < units:
        what = f"tpot_ns is {told.tpot_ns}, the units alone take {units}"
        yield Fault("cost", what, ("predicted", "tpot_ns"))
    request = told.tpot_ns * plan.workload.gen + told.prefill_ns
    if told.objective_ns != request:
        what = f"objective_ns is {told.objective_ns}, a request of the workload takes {request}"
        yield Fault("cost", what, ("predicted", "objective_ns"))
    if told.bound_ns > told.objective_ns:
        yield Fault("optimal", "bound_ns is above the plan's own objective", ("predicted", "bound_ns"))
    elif told.gap_ppm != (gap := (told.objective_ns - told.bound_ns) * PPM // max(told.objective_ns, 1)):
        what = f"gap_ppm is {told.gap_ppm}, bound and objective give {gap}"
        yield Fault("optimal", what, ("predicted", "gap_ppm"))
    for i, rule in enumerate(plan.baselines):
        if rule.feasible and not (rule.tpot_ns and (rule.prefill_ns or not plan.workload.prompt)):
            yield Fault("cost", f"{rule.name} fits and has no time", ("baselines", i))
    free = plan.constraints
    # A fault of the engine keeps a plan from what its stock rules do all the same.
    fault = mixing_fault(plan.model.architecture, plan.machine.engine, free.budgets)
    # Schema 1 priced the rules of a plan with pins without them: what beats the plan there, it may not do.
    asked = told.status == "edited" or fault or (schema < 2 and bool(free.pins))
    best = min((r for r in plan.baselines if r.feasible), key=lambda r: objective_ns(plan, r), default=None)
    if best is not None and not asked and request > objective_ns(plan, best):
        what = f"slower than the stock rule {best.name} ({best.setting}) that it records"
        yield Fault("optimal", what, ("predicted", "objective_ns"))


def _overrides(plan: Plan, layers: tuple[str, ...]) -> Iterator[Fault]:
    """Overrides and sites say the same, as far as patterns of this program's own form tell their tensors."""
    reached: dict[tuple[int, str], int] = {}
    for i, override in enumerate(plan.overrides):
        names = listed(override.pattern)
        if names is None:
            return  # a pattern of another form: only the model's tensors tell what it takes
        if len(names) != override.tensors:
            what = f"{override.pattern}: names {len(names)} tensors, not {override.tensors}"
            yield Fault("overrides", what, ("overrides", i))
        buffer = Site.of_buffer(override.buffer).buffer
        for layer in sorted({layer for name in names if (layer := block_of(name)) is not None}):
            reached.setdefault((layer, buffer), i)
    wanted = {
        (layer, p.site.buffer)
        for p in plan.units
        if (layer := block_of(p.unit)) is not None and p.why != NOT_LOADED
    }
    for i, placed in enumerate(plan.units):
        layer = block_of(placed.unit)
        if layer is None or placed.why == NOT_LOADED:
            continue
        buffer = placed.site.buffer
        if buffer != layers[min(layer, len(layers) - 1)] and (layer, buffer) not in reached:
            what = f"{placed.unit}: no override puts it on {buffer}"
            yield Fault("overrides", what, ("units", i, "site"))
    for (layer, buffer), i in reached.items():
        if (layer, buffer) not in wanted:
            what = f"an override puts tensors of layer {layer} on {buffer}, no unit is there"
            yield Fault("overrides", what, ("overrides", i))
