"""A chosen placement written down as a plan: sites with reasons, what fills each device, predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from pydantic import ValidationError

from planner.constants import CPU, IDLE_THREADS, MIB, PPM
from planner.cost.build_problem import BeyondPlans, Model
from planner.cost.evidence import by_basis, of_prompt, of_token
from planner.cost.expert_cache import cached
from planner.cost.placed import sites_of
from planner.machine.engine_builds import EngineRange, computing_devices, range_of
from planner.machine.fingerprint import facts_of
from planner.machine.profile import Profile, profile_digest
from planner.memory.memory import NOTHING, Memory
from planner.model.inventory import Inventory
from planner.model.units import Unit
from planner.passes.chosen import Chosen
from planner.passes.margin import error_ppm, prompt_error_ppm
from planner.passes.notes import Subject, notes_of, reason
from planner.passes.prompt_pipeline import Pipeline, pipeline_of, unpiped
from planner.passes.stock_rules import Candidate
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.load_spec import layer_ranges
from planner.plan.overrides import overrides_of
from planner.plan.plan import (
    NOT_LOADED,
    Baseline,
    Constraints,
    DeviceUse,
    ExpertOrder,
    MachineRef,
    ModelRef,
    Placement,
    Plan,
    Prediction,
    Search,
)
from planner.plan.request import Request
from planner.site import HOST, ON_CPU, Site, SiteKind
from planner.solver.deadline import Deadline
from planner.solver.problem import Decision, Option


def record(
    chosen: Chosen,
    stock: Sequence[Candidate],
    profile: Profile,
    request: Request,
    known: Known,
) -> Plan:
    """The plan of a chosen placement. Raises BeyondPlans."""
    try:
        return _recorded(chosen, stock, profile, request, known)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        if first["type"] != "less_than_equal":
            raise
        raise BeyondPlans(str(first["loc"][-1]), int(first["input"]), profile.name) from None


def _recorded(
    chosen: Chosen,
    stock: Sequence[Candidate],
    profile: Profile,
    request: Request,
    known: Known,
) -> Plan:
    priced, settings = chosen.priced, chosen.priced.settings
    devices = chosen.layer_devices()
    placed = sites_of(chosen.priced, chosen.solution, devices)
    units = priced.model.units
    placements = _placements(chosen, placed)
    pipeline = pipeline_of(priced, chosen.solution)
    uses = _uses(chosen, request, pipeline)
    subject = Subject(priced, chosen.evaluation, chosen.rule, uses, placements, stock, pipeline)
    overrides = overrides_of(priced.model.inventory, units, [placed[u.name] for u in units], devices)
    kept = (unpiped(priced.model.inventory, devices),) if pipeline.refused else ()
    return Plan(
        command=request.command,
        version=version("atsplan"),
        model=model_ref(priced.model.inventory),
        machine=machine_ref(profile, _cpu_computes(devices, placements), _used(chosen)),
        engines=_engines(priced.model, placed),
        workload=priced.model.workload,
        constraints=constraints_of(request, known, settings),
        devices=uses,
        layers=layer_ranges(devices),
        op_offload=settings.op_offload,
        repack=None if settings.repack else False,
        projector=settings.projector,
        host_memory=settings.host_memory,
        following=settings.following if any(p.site.kind is SiteKind.HYBRID for p in placements) else None,
        speculation=settings.speculation,
        predicted=prediction(chosen),
        baselines=tuple(map(baseline_of, stock)),
        fit=known.fit,
        notes=notes_of(subject, request, known),
        units=placements,
        overrides=(*overrides, *kept),
        experts=_orders(placed, units, known),
    )


def search_of(deadline: Deadline) -> Search | None:
    """What ended the search, where a clock might have; work alone is the same everywhere, and not told."""
    if not deadline.limited:
        return None
    return Search(ended_by=deadline.ended_by, time_limit_ms=math.ceil(deadline.seconds * 1000))


def constraints_of(request: Request, known: Known, settings: EngineSettings) -> Constraints:
    """What was asked, in the words of the plan file."""
    return Constraints(
        budgets=dict(sorted(request.budgets.items())),
        pins=tuple(f"{p.pattern}={p.site}" for p in request.pins),
        contiguous=request.contiguous,
        no_cpu=request.no_cpu,
        page=request.page,
        reserves=settings.reserves,
        heat_digest=known.heat_digest,
        stripes=request.stripes,
        hybrid=True if request.hybrid else None,
        cache=known.cache or None,
    )


def machine_ref(profile: Profile, cpu_computes: bool, used: Sequence[str]) -> MachineRef:
    """The machine, by the digest of its profile's canonical text, the threads that suit the plan, and what
    the timings of the devices that it uses belong to.

    Threads of a CPU that computes nothing only wait: 16 of them cost a token on a GPU 8 %, 4 next to nothing.
    """
    best = next((d.threads for d in profile.devices if d.kind == "cpu"), 0)
    few = min(best or profile.fingerprint.cores or IDLE_THREADS, IDLE_THREADS)
    return MachineRef(
        name=profile.name,
        profile_digest=profile_digest(profile),
        measured=profile.measured,
        engine=profile.fingerprint.engine,
        threads=best if cpu_computes else few,
        measured_on=facts_of(profile, used) or None,
    )


def _engines(model: Model, placed: Mapping[str, Site]) -> EngineRange | None:
    """The builds that can load these sites, as far as is known."""
    # Cached experts may be computed by the CPU too.
    computed = {
        t: HOST if placed[unit.name].on_host else placed[unit.name].device
        for unit in model.units
        for t in unit.tensors
    }
    devices = computing_devices(model.units, computed)
    behind = bool(cached(placed.values()))
    return range_of(model.inventory.architecture, devices, cache=behind, nextn=model.workload.mtp)


def _used(chosen: Chosen) -> list[str]:
    """Devices that hold something."""
    devices = chosen.priced.problem.devices
    return [d.device for d, held in zip(devices, chosen.evaluation.memory, strict=True) if held]


def _cpu_computes(devices: Sequence[str], placements: Sequence[Placement]) -> bool:
    """Whether a token needs the CPU for more than looking up its row."""
    return CPU in devices or any(
        p.time_ns and (p.site == ON_CPU or p.site.kind is SiteKind.HYBRID) for p in placements
    )


def prediction(chosen: Chosen) -> Prediction:
    """Predicted times, their error bar, and how close to the optimum they are proven to be."""
    found = chosen.evaluation
    token = of_token(chosen.priced, chosen.solution, found)
    prompt = of_prompt(chosen.priced, chosen.solution, found)
    bound = min(chosen.bound_ns, found.objective_ns)
    gap = (found.objective_ns - bound) * PPM // max(found.objective_ns, 1)
    return Prediction(
        tpot_ns=found.decode_ns,
        prefill_ns=found.prefill_ns,
        error_ppm=error_ppm(chosen.priced, found, token),
        prefill_error_ppm=prompt_error_ppm(chosen.priced, found, prompt),
        basis_ppm=by_basis(token),
        splits=found.splits,
        objective_ns=found.objective_ns,
        bound_ns=bound,
        gap_ppm=gap,
        status=chosen.status,
    )


def model_ref(inventory: Inventory) -> ModelRef:
    """Which model a plan is of."""
    return ModelRef(
        name=inventory.name,
        architecture=inventory.architecture,
        table_digest=inventory.table_digest(),
        header_digest=inventory.header_digest,
        tensors=len(inventory.tensors),
        size_bytes=inventory.size_bytes,
    )


def host_weights_bytes(chosen: Chosen, request: Request) -> int:
    """Weights that a placement keeps in host memory."""
    pipeline = pipeline_of(chosen.priced, chosen.solution)
    return sum(use.weights_bytes for use in _uses(chosen, request, pipeline) if use.kind == "cpu")


def _uses(chosen: Chosen, request: Request, pipeline: Pipeline) -> tuple[DeviceUse, ...]:
    devices = range(len(chosen.priced.problem.devices))
    found = (_use(chosen, d, request, pipeline.on(d)) for d in devices)
    return tuple(use for use in found if use is not None)


def _use(chosen: Chosen, d: int, request: Request, copies: int) -> DeviceUse | None:
    """What fills one device, a pipeline's copies included; None when nothing does."""
    priced = chosen.priced
    device, held = priced.problem.devices[d], priced.ledger.held(priced.problem, chosen.solution)[d]
    opened = any(r.opens and r.device == device.device for r in priced.settings.reserves)
    if held == NOTHING and not opened and all(option.entry != d for _, option in chosen.pairs()):
        return None
    context = priced.prices.profile.device(device.device).context_bytes if opened and held == NOTHING else 0
    # In whole MiB, as the stock tools' option says it; what is left over lies with the compute buffer.
    left = held.cache % MIB
    beside = priced.settings.reserved_bytes(device.device)
    return DeviceUse.of(
        device.device,
        device.kind,
        request.budgets[device.device],
        held + Memory(compute=copies + left, cache=-left, reserve=context + beside),
    )


def baseline_of(candidate: Candidate) -> Baseline:
    """A stock rule as a plan records it."""
    found = candidate.evaluation
    return Baseline(
        name=candidate.name,
        setting=candidate.setting,
        feasible=candidate.feasible,
        tpot_ns=found.decode_ns if found and candidate.feasible else 0,
        prefill_ns=found.prefill_ns if found and candidate.feasible else 0,
        vram_bytes=candidate.vram_bytes,
    )


def _placements(chosen: Chosen, placed: Mapping[str, Site]) -> tuple[Placement, ...]:
    """Every unit of the model with its site, its time and why it is there."""
    holders = {unit: pair for pair in chosen.pairs() for unit in pair[0].units}
    return tuple(
        _placement(chosen, unit, placed[unit.name], holders.get(unit.name))
        for unit in chosen.priced.model.units
    )


def _placement(chosen: Chosen, unit: Unit, site: Site, holder: tuple[Decision, Option] | None) -> Placement:
    if holder is None:
        return Placement(unit=unit.name, site=site, size_bytes=unit.size_bytes, time_ns=0, why=NOT_LOADED)
    decision, option = holder
    index = decision.units.index(unit.name)
    return Placement(
        unit=unit.name,
        site=site,
        size_bytes=unit.size_bytes,
        time_ns=option.parts[index] if option.parts else 0,
        why=reason(chosen.priced.problem, decision, option, index, unit),
    )


def _orders(placed: Mapping[str, Site], units: Sequence[Unit], known: Known) -> tuple[ExpertOrder, ...]:
    striped = {u.layer for u in units if placed[u.name].kind in (SiteKind.STRIPE, SiteKind.HYBRID)}
    orders = {order.layer: order for order in known.orders}
    slotted = {u.layer: u.experts for u in units if placed[u.name].kind is SiteKind.HYBRID}
    found = []
    for layer in sorted(layer for layer in striped if layer is not None):
        if layer in orders:
            found.append(orders[layer])
        elif layer in slotted:  # of routing that nobody looked at, any experts are as good as others
            found.append(ExpertOrder(layer=layer, order=tuple(range(slotted[layer]))))
    return tuple(found)
