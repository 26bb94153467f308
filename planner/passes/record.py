"""A chosen placement written down as a plan: sites with reasons, what fills each device, predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from pydantic import ValidationError

from planner.cost.build_problem import OUTPUT, Model, Priced, decision_of
from planner.cost.expert_cache import cached, cached_bytes
from planner.cost.unit_time import Prices
from planner.errors import InputError
from planner.machine.engine_builds import EngineRange, computing_devices, range_of
from planner.machine.fingerprint import facts_of
from planner.machine.profile import Calibration, Profile, to_text
from planner.model.units import Unit
from planner.passes.notes import Subject, notes_of
from planner.passes.prompt_pipeline import Pipeline, pipeline_of, unpiped
from planner.passes.reasons import reason
from planner.passes.stock_rules import Candidate
from planner.plan.overrides import overrides_of
from planner.plan.plan import (
    Baseline,
    Constraints,
    DeviceUse,
    ExpertOrder,
    LayerRange,
    MachineRef,
    ModelRef,
    Placement,
    Plan,
    Prediction,
    Reserved,
    Search,
)
from planner.plan.request import SolveOptions
from planner.records import digest
from planner.site import HOST, ON_CPU, Site, SiteKind, sites
from planner.solver.deadline import Deadline
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Decision, Option, Solution
from planner.workload import Workload

_PPM = 10**6
_MIB = 2**20
_FEW_THREADS = 4
_ERROR_PPM = {True: 150_000, False: 300_000}  # without calibration: measured operators, assumed machine


@dataclass(frozen=True, slots=True)
class Chosen:
    """The placement that becomes the plan; `rule` names the stock rule it equals, if any."""

    priced: Priced
    solution: Solution
    evaluation: Evaluation
    bound_ns: int
    status: str
    rule: str


@dataclass(eq=False)
class BeyondPlans(InputError):
    """Figures of a machine that give a number no plan holds: months for a token."""

    field: str
    value: int
    profile: str

    def message(self) -> str:
        return f"profile {self.profile}: its figures give {self.field} {self.value}, more than any plan holds"


def record(
    chosen: Chosen,
    stock: Sequence[Candidate],
    profile: Profile,
    budgets: Mapping[str, int],
    workload: Workload,
    options: SolveOptions,
) -> Plan:
    """The plan of a chosen placement. Raises BeyondPlans."""
    try:
        return _recorded(chosen, stock, profile, budgets, workload, options)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        if first["type"] != "less_than_equal":
            raise
        raise BeyondPlans(str(first["loc"][-1]), int(first["input"]), profile.name) from None


def _recorded(
    chosen: Chosen,
    stock: Sequence[Candidate],
    profile: Profile,
    budgets: Mapping[str, int],
    workload: Workload,
    options: SolveOptions,
) -> Plan:
    priced = chosen.priced
    devices = layer_devices(chosen)
    placed = sites_of(chosen, devices)
    units = priced.model.units
    placements = tuple(_placement(chosen, unit, placed[unit.name]) for unit in units)
    pipeline = pipeline_of(priced, chosen.solution, chosen.evaluation)
    uses = _uses(chosen, budgets, options, pipeline)
    subject = Subject(priced, chosen.evaluation, chosen.rule, uses, placements, stock, pipeline)
    overrides = overrides_of(priced.model.inventory, units, [placed[u.name] for u in units], devices)
    kept = (unpiped(priced.model.inventory, devices),) if pipeline.refused else ()
    return Plan(
        command=options.command,
        version=version("atsplan"),
        model=_model_ref(priced),
        machine=machine_ref(profile, _cpu_computes(devices, placements), _used(chosen)),
        engines=_engines(priced.model, placed, workload),
        workload=workload,
        constraints=constraints_of(budgets, options),
        devices=uses,
        layers=ranges(devices),
        op_offload=priced.op_offload,
        repack=None if priced.repack else False,
        projector=options.projector,
        host_memory=priced.prices.host_memory,
        speculation=options.speculation,
        predicted=prediction(chosen),
        baselines=tuple(map(_baseline, stock)),
        fit=options.fit,
        search=search_of(options.deadline),
        notes=notes_of(subject, budgets, options),
        units=placements,
        overrides=(*overrides, *kept),
        experts=_orders(placed, units, options),
    )


def search_of(deadline: Deadline) -> Search | None:
    """What ended the search, where a clock might have; work alone is the same everywhere, and not told."""
    if not deadline.limited:
        return None
    return Search(ended_by=deadline.ended_by, time_limit_ms=math.ceil(deadline.seconds * 1000))


def constraints_of(budgets: Mapping[str, int], options: SolveOptions) -> Constraints:
    """What was asked, in the words of the plan file."""
    return Constraints(
        budgets=dict(sorted(budgets.items())),
        pins=tuple(f"{p.pattern}={p.site}" for p in options.pins),
        contiguous=options.contiguous,
        no_cpu=options.no_cpu,
        page=options.page,
        reserves=tuple(
            Reserved(name=r.name, device=r.device, size_bytes=r.size_bytes) for r in options.reserves
        ),
        heat_digest=options.heat_digest,
        stripes=options.stripes,
        hybrid=True if options.hybrid else None,
        cache=options.cache or None,
    )


def layer_devices(chosen: Chosen) -> tuple[str, ...]:
    """The layer device of each layer, speculative blocks included, and of the output head."""
    priced = chosen.priced
    names = [d.device for d in priced.problem.devices]
    by_name = {decision.name: names[option.entry] for decision, option in _pairs(chosen) if decision.layer}
    head = by_name.get(OUTPUT, "CPU")
    return (*(by_name.get(f"blk.{n}", head) for n in range(priced.model.layers.n_all)), head)


def sites_of(chosen: Chosen, devices: Sequence[str]) -> dict[str, Site]:
    """The site of every unit; those that are not loaded stay with their layer's device."""
    found: dict[str, Site] = {}
    for decision, option in _pairs(chosen):
        found.update(zip(decision.units, sites(option.sites), strict=True))
    for unit in chosen.priced.model.units:
        home = devices[-1] if unit.layer is None else devices[min(unit.layer, len(devices) - 1)]
        found.setdefault(unit.name, Site.on(home))
    return found


def ranges(devices: Sequence[str]) -> tuple[LayerRange, ...]:
    """Consecutive layers with one device."""
    found: list[LayerRange] = []
    for n, device in enumerate(devices):
        if found and found[-1].device == device:
            found[-1] = LayerRange(first=found[-1].first, last=n, device=device)
        else:
            found.append(LayerRange(first=n, last=n, device=device))
    return tuple(found)


def machine_ref(profile: Profile, cpu_computes: bool, used: Sequence[str]) -> MachineRef:
    """The machine, by the digest of its profile's canonical text, the threads that suit the plan, and what
    the timings of the devices that it uses belong to.

    Threads of a CPU that computes nothing only wait: 16 of them cost a token on a GPU 8 %, 4 next to nothing.
    """
    best = next((d.threads for d in profile.devices if d.kind == "cpu"), 0)
    few = min(best or profile.fingerprint.cores or _FEW_THREADS, _FEW_THREADS)
    return MachineRef(
        name=profile.name,
        profile_digest=digest(to_text(profile)),
        measured=profile.measured,
        engine=profile.fingerprint.engine,
        threads=best if cpu_computes else few,
        measured_on=facts_of(profile, used) or None,
    )


def _engines(model: Model, placed: Mapping[str, Site], workload: Workload) -> EngineRange | None:
    """The builds that can load these sites, as far as is known."""
    # Cached experts may be computed by the CPU too.
    computed = {
        t: HOST if placed[unit.name].on_host else placed[unit.name].device
        for unit in model.units
        for t in unit.tensors
    }
    devices = computing_devices(model.inventory, computed)
    behind = bool(cached(placed.values()))
    return range_of(model.inventory.architecture, devices, cache=behind, nextn=workload.mtp)


def _used(chosen: Chosen) -> list[str]:
    """Devices that hold something."""
    devices = chosen.priced.problem.devices
    return [d.device for d, held in zip(devices, chosen.evaluation.memory, strict=True) if held]


def _cpu_computes(devices: Sequence[str], placements: Sequence[Placement]) -> bool:
    """Whether a token needs the CPU for more than looking up its row."""
    return "CPU" in devices or any(
        p.time_ns and (p.site == ON_CPU or p.site.kind is SiteKind.HYBRID) for p in placements
    )


def error_ppm(prices: Prices) -> int:
    """Relative half-width of the interval around a predicted time."""
    return prices.calibration.residual_ppm or _ERROR_PPM[prices.profile.measured]


def indistinct_ppm(calibration: Calibration) -> int:
    """How far two plans for one machine must differ to be told apart.

    The error of a difference is far smaller than that of either time, as both share the machine: a
    third of the calibration's residual, between 0.5 % and 2 %; 1 % without calibration.
    """
    residual = calibration.residual_ppm
    return min(max(residual // 3, 5_000), 20_000) if residual else 10_000


def prediction(chosen: Chosen) -> Prediction:
    """Predicted times, their error bar, and how close to the optimum they are proven to be."""
    found = chosen.evaluation
    bound = min(chosen.bound_ns, found.objective_ns)
    gap = (found.objective_ns - bound) * _PPM // max(found.objective_ns, 1)
    return Prediction(
        tpot_ns=found.decode_ns,
        prefill_ns=found.prefill_ns,
        error_ppm=error_ppm(chosen.priced.prices),
        splits=found.splits,
        objective_ns=found.objective_ns,
        bound_ns=bound,
        gap_ppm=gap,
        status=chosen.status,
    )


def _pairs(chosen: Chosen) -> list[tuple[Decision, Option]]:
    problem = chosen.priced.problem
    return list(zip(problem.decisions, chosen.solution.chosen(problem), strict=True))


def _model_ref(priced: Priced) -> ModelRef:
    inventory = priced.model.inventory
    return ModelRef(
        name=inventory.name,
        architecture=inventory.architecture,
        table_digest=inventory.table_digest(),
        header_digest=inventory.header_digest,
        tensors=len(inventory.tensors),
        size_bytes=inventory.size_bytes,
    )


def _uses(
    chosen: Chosen, budgets: Mapping[str, int], options: SolveOptions, pipeline: Pipeline
) -> tuple[DeviceUse, ...]:
    devices = range(len(chosen.priced.problem.devices))
    found = (_use(chosen, d, budgets, options, pipeline.on(d)) for d in devices)
    return tuple(use for use in found if use is not None)


def _use(
    chosen: Chosen, d: int, budgets: Mapping[str, int], options: SolveOptions, copies: int
) -> DeviceUse | None:
    """What fills one device, a pipeline's copies included; None when nothing does."""
    problem, model = chosen.priced.problem, chosen.priced.model
    device, total = problem.devices[d], chosen.evaluation.memory[d]
    kept = [decision.name for decision, option in _pairs(chosen) if option.entry == d]
    opened = any(r.opens and r.device == device.device for r in options.reserves)
    if not total and not kept and not opened:
        return None
    kv, state = sum(model.kv.get(n, 0) for n in kept), sum(model.state.get(n, 0) for n in kept)
    asked = {s for _, option in _pairs(chosen) for s in option.shares}
    mine = [s for i, s in enumerate(problem.shares) if i in asked and s.device == d]
    away = [d.name for d, option in _pairs(chosen) if option.away and d.name in kept]
    once = sum(s.size_bytes for s in mine) + sum(model.kv[model.owners[name]] for name in away)
    context = chosen.priced.prices.profile.device(device.device).context_bytes if once or opened else 0
    placed = {u: site for d, o in _pairs(chosen) for u, site in zip(d.units, sites(o.sites), strict=True)}
    sizes = {u.name: chosen.priced.prices.moved_bytes(u) for u in model.units if u.name in placed}
    slots = cached_bytes(placed, sizes, device.device)
    # In whole MiB, as the stock tools' option says it; what is left over lies with the compute buffer.
    cache = (slots + sum(s.size_bytes for s in mine if " cache of " in s.name)) // _MIB * _MIB
    reserved = options.reserved_bytes(device.device)
    return DeviceUse(
        name=device.device,
        kind=device.kind,
        budget_bytes=budgets[device.device],
        weights_bytes=total - kv - state - once - slots,
        kv_bytes=kv,
        state_bytes=state,
        compute_bytes=max(once + slots - cache - context, 0) + copies,
        cache_bytes=cache,
        reserve_bytes=context + reserved,
    )


def _baseline(candidate: Candidate) -> Baseline:
    found = candidate.evaluation
    return Baseline(
        name=candidate.name,
        setting=candidate.setting,
        feasible=candidate.feasible,
        tpot_ns=found.decode_ns if found and candidate.feasible else 0,
        prefill_ns=found.prefill_ns if found and candidate.feasible else 0,
        vram_bytes=candidate.vram_bytes,
    )


def _placement(chosen: Chosen, unit: Unit, site: Site) -> Placement:
    problem = chosen.priced.problem
    name = decision_of(unit)
    for decision, option in _pairs(chosen):
        if decision.name == name and unit.name in decision.units:
            index = decision.units.index(unit.name)
            return Placement(
                unit=unit.name,
                site=site,
                size_bytes=unit.size_bytes,
                time_ns=option.parts[index] if option.parts else 0,
                why=reason(problem, decision, option, index, unit),
            )
    return Placement(unit=unit.name, site=site, size_bytes=unit.size_bytes, time_ns=0, why="not loaded")


def _orders(
    placed: Mapping[str, Site], units: Sequence[Unit], options: SolveOptions
) -> tuple[ExpertOrder, ...]:
    striped = {u.layer for u in units if placed[u.name].kind in (SiteKind.STRIPE, SiteKind.HYBRID)}
    known = {order.layer: order for order in options.orders}
    slotted = {u.layer: u.experts for u in units if placed[u.name].kind is SiteKind.HYBRID}
    found = []
    for layer in sorted(layer for layer in striped if layer is not None):
        if layer in known:
            found.append(known[layer])
        elif layer in slotted:  # of routing that nobody looked at, any experts are as good as others
            found.append(ExpertOrder(layer=layer, order=tuple(range(slotted[layer]))))
    return tuple(found)
