"""What a plan says beside its values: why a unit is where it is, assumptions, what is tight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.constants import CPU
from planner.cost.build_problem import UNFUSED, Model, Priced, unfused_ns
from planner.cost.expert_cache import cache_notes
from planner.machine.attention_kernels import kv_note
from planner.machine.budgets import tight
from planner.machine.host_memory import HostMemory
from planner.machine.profile import Device, Profile
from planner.machine.unknown_types import host_types, product_of
from planner.memory.buffer_parts import buffer_parts
from planner.memory.reserves import OTHER_USERS, estimates
from planner.model.heads import unstated_heads
from planner.model.layers import CACHELESS
from planner.model.tensor_roles import missing_partners
from planner.model.units import BOUND, Kind, Unit, foreign_note
from planner.passes.prompt_pipeline import Pipeline
from planner.passes.stock_rules import Candidate
from planner.plan.known import Known
from planner.plan.plan import DeviceUse, Placement
from planner.plan.request import Request
from planner.plan.stock_rule import FIT
from planner.quoting import short
from planner.site import ON_CPU, SiteKind, sites
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Decision, Option, Problem
from planner.workload import Workload

_SHOWN = 5  # names in a note


@dataclass(frozen=True, slots=True)
class Subject:
    """A chosen placement, as far as notes look at it."""

    priced: Priced
    evaluation: Evaluation
    rule: str  # the stock rule it equals, if any
    uses: Sequence[DeviceUse]
    placements: Sequence[Placement]
    stock: Sequence[Candidate]
    pipeline: Pipeline


def notes_of(subject: Subject, request: Request, known: Known) -> tuple[str, ...]:
    """All notes of a plan, in their order."""
    profile, settings = subject.priced.prices.profile, subject.priced.settings
    found = []
    if not profile.measured:
        found.append(f"assumed, not measured: {profile.name}")
    if subject.rule:
        found.append(f"same as the stock rule {subject.rule}")
    if not any(r.name.startswith("projector") for r in settings.reserves):
        found.append("no memory reserved for a vision projector (--mmproj)")
    if settings.projector is not None and settings.projector.device == CPU:
        found.append(
            f"the vision projector {settings.projector.name} computes on the CPU: images take longer"
        )
    found += _unrecognised(subject.priced.model, profile)
    found += estimates(request.extra_models.extras) if request.extra_models else []
    found += _untrained(subject.priced)
    if text := kv_note(_devices(subject.priced), subject.priced.prices.workload, profile.timings):
        found.append(text)
    found += filter(None, (tight(profile.device(use.name), use.used_bytes, profile) for use in subject.uses))
    found += _crowded_out(subject, request)
    found += _ceilings(subject.priced)
    found += _buffers(subject, request.budgets)
    found += _piped(subject)
    found += _routing(subject, request, known)
    found += _paged(subject, request)
    found += _tables(subject)
    found += _assumed(subject.priced)
    found += [f"profile: {warning}" for warning in profile.warnings]
    found += filter(None, map(_overfull, subject.stock))
    return (*found, *cache_notes(subject.placements, known.cache))


def _crowded_out(subject: Subject, request: Request) -> Iterator[str]:
    """GPUs that take no part because what is set aside on each is all of its budget."""
    profile, used = subject.priced.prices.profile, {use.name for use in subject.uses}
    reserves = subject.priced.settings.reserves
    for device in profile.devices:  # a budget may name one that is not there
        name, budget = device.name, request.budgets.get(device.name)
        if device.kind == "cpu" or name in used or budget is None:
            continue
        apart = sum(r.size_bytes for r in reserves if r.device == name and r.name == OTHER_USERS)
        if device.context_bytes + apart >= budget:
            parts = [f"{device.context_bytes >> 20} MiB by the driver"]
            parts += [f"{apart >> 20} by --reserve"] if apart else []
            mib = round(budget / 2**20)
            yield f"{name} takes no part: its budget of {mib} MiB is taken, {' and '.join(parts)}"


def _untrained(priced: Priced) -> Iterator[str]:
    """A sequence longer than those that the model learnt from; a server cuts its slots to them."""
    work, trained = priced.prices.workload, priced.model.inventory.number("context_length")
    if trained and work.n_ctx > trained * work.n_seq:
        slots = f" for each of {work.n_seq} sequences" if work.n_seq > 1 else ""
        yield (
            f"the context of {work.n_ctx} is beyond the {trained}{slots} that the model was trained with: "
            "llama-server cuts its slots to them"
        )


def _assumed(priced: Priced) -> list[str]:
    """Figures of the cost model that the profile does not hold, where they bear on this plan."""
    prices = priced.prices
    devices = [prices.profile.device(d.device) for d in priced.problem.devices if not d.host]
    if all(unfused_ns(prices, device)[1] for device in devices):
        return []
    return [
        "assumed, not measured: a delta-net layer on the CPU beside a GPU turns a fused kernel off in all of "
        f"them, for {mixed.decode_ns / 1e6:.2f} ms a token"
        for mixed in priced.problem.mixed
        if mixed.name == UNFUSED
    ]


def _overfull(candidate: Candidate) -> str:
    """--fit goes by the engine's own count of memory; the one here is a little above it, and decides."""
    found = candidate.evaluation
    if candidate.name != FIT or found is None or not found.violations:
        return ""
    return f"{FIT} ({candidate.setting}) does not fit as memory is counted here: {found.violations[0]}"


def _devices(priced: Priced) -> list[Device]:
    return [priced.prices.profile.device(d.device) for d in priced.problem.devices]


def _unrecognised(model: Model, profile: Profile) -> Iterator[str]:
    """What this program does not know of the model, and what it did about it."""
    cached = model.inventory.architecture not in CACHELESS
    if model.structure.table.unknown:
        names = [short(name) for name in model.structure.table.unknown]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"not recognised, stays with its layer: {', '.join(names[:_SHOWN])}{more}"
    if partners := missing_partners(model.inventory):
        more = f", and {len(partners) - 1} more" if len(partners) > 1 else ""
        yield f"{short(partners[0], 300)}{more}"
    if any(model.layers.attention) and not any(model.kv.values()) and cached:
        yield "the file does not say how wide its attention is: the KV cache is not counted"
    if heads := unstated_heads(model.inventory):
        yield heads
    if foreign := foreign_note(model.units):
        yield foreign
    yield from _not_computed(model, profile)
    for kind in host_types(model.inventory, profile):
        yield f"tensor type {kind} is not known: kept on the CPU unless pinned elsewhere"


def _not_computed(model: Model, profile: Profile) -> Iterator[str]:
    """Products that the model needs and a device has no kernel for."""
    if profile.unsupported:
        products = {(product_of(tensor), tensor.type) for tensor in model.inventory.tensors}
        for one in profile.unsupported:
            if (one.op, one.type) in products:
                yield f"{one.device} cannot compute {one.op} of {one.type}: such weights are kept off it"


def _ceilings(priced: Priced) -> list[str]:
    """What devices that share one memory may hold together."""
    return [
        f"{pool.name}: one memory, counted once; at most {priced.pool_bytes(p) >> 20} MiB together"
        for p, pool in enumerate(priced.problem.pools)
    ]


def _piped(subject: Subject) -> Iterator[str]:
    """What several GPUs keep to work on one prompt at the same time."""
    pipeline = subject.pipeline
    size = max(pipeline.copies, default=0) >> 20
    if pipeline.refused:
        yield (
            f"prompts are not pipelined over the devices: the engine's copies would take up to {size} MiB on "
            "each; an override that moves nothing turns it off"
        )
    elif pipeline.engaged:
        yield f"prompts are pipelined over the GPUs: up to {size} MiB on each are counted for copies"


def _buffers(subject: Subject, budgets: Mapping[str, int]) -> Iterator[str]:
    """GPUs that no layer can live on, as one buffer of theirs cannot hold what a batch computes."""
    structure, prices = subject.priced.model.structure, subject.priced.prices
    for device in prices.profile.devices:
        limit, work = device.max_alloc_bytes, prices.workload
        needed = buffer_parts(structure, work, device).largest_bytes if limit else 0
        if device.name not in budgets or needed <= limit:
            continue
        smaller = work.n_ubatch
        while smaller > 1 and buffer_parts(structure, _batch(work, smaller), device).largest_bytes > limit:
            smaller //= 2
        fits = buffer_parts(structure, _batch(work, smaller), device).largest_bytes <= limit
        yield (
            f"{device.name}: takes no layer: its largest buffer has {limit >> 20} MiB, a batch of "
            f"{work.n_ubatch} tokens computes in {needed >> 20}"
            + (f"; --ubatch {smaller} fits" if fits else "")
        )


def _routing(subject: Subject, request: Request, known: Known) -> Iterator[str]:
    """What became of the routing that was given: single experts on a GPU need more than stock llama.cpp."""
    striped = sum(p.site.kind is SiteKind.STRIPE for p in subject.placements)
    if slotted := sum(p.site.kind is SiteKind.HYBRID for p in subject.placements):
        layers = "1 layer" if slotted == 1 else f"{slotted} layers"
        yield (
            f"experts in slots in {layers}, the others computed by CPU and bus at the same time: needs this "
            "program's device, in atsplan run, bench and serve or in stock tools (atsplan export)"
        )
    if known.verdict:
        yield f"routing (--heat): {known.verdict}"
    if striped:
        layers = "1 layer" if striped == 1 else f"{striped} layers"
        yield (
            f"experts striped in {layers}: loaded by atsplan run, bench and serve; stock llama.cpp cannot "
            "place single experts"
        )
    elif known.curves and request.stripes and not slotted:
        yield "under this budget hot experts on a GPU gain nothing over whole layers"


def _batch(workload: Workload, n_ubatch: int) -> Workload:
    return workload.model_copy(update={"n_ubatch": n_ubatch})


def _paged(subject: Subject, request: Request) -> Iterator[str]:
    """A warning in numbers where host weights exceed memory on request."""
    memory, devices = subject.evaluation.memory, subject.priced.problem.devices
    for device, used in zip(devices, memory, strict=True):
        over = used - request.budgets[device.device]
        if device.pool >= 0:
            shared = sum(m for m, each in zip(memory, devices, strict=True) if each.pool == device.pool)
            over = max(over, shared - subject.priced.pool_bytes(device.pool))
        if request.page and device.host and over > 0:
            yield f"will page from disk: {over >> 20} MiB more than host memory; slower than predicted"


def _tables(subject: Subject) -> Iterator[str]:
    """Where per-layer and n-gram tables are, of which a token reads one row each."""
    tables = [u for u in subject.priced.model.units if u.kind is Kind.LOOKUP]
    size, row = sum(u.size_bytes for u in tables), sum(u.active_bytes for u in tables)
    if size and subject.priced.settings.host_memory is HostMemory.MAPPED:
        yield (
            f"lookup tables of {size >> 20} MiB stay mapped from the file, in no memory of their own: "
            f"a token reads {row} bytes of them; rows that the page cache does not hold come from disk"
        )
    elif size:
        yield (
            f"lookup tables of {size >> 20} MiB are read into host memory whole, though a token reads {row} "
            "bytes of them: --host-memory mapped leaves them in the file"
        )


def reason(problem: Problem, decision: Decision, option: Option, index: int, unit: Unit) -> str:
    """A short reason for the site of `unit`, the `index`-th of its decision."""
    if not decision.layer:
        return "looked up on the host, one row a token"
    home = problem.devices[option.entry].device
    site = sites(option.sites)[index]
    apart = site == ON_CPU and not problem.devices[option.entry].host
    if unit.kind in BOUND or unit.kind is Kind.NEXTN or (unit.kind is Kind.OUTPUT and not apart):
        return _home_reason(problem, decision, option, unit, home)
    if site.kind is SiteKind.STRIPE:
        return f"{site.amount} hottest of {unit.experts} experts on {home}, the others across the bus"
    if site.kind is SiteKind.HYBRID:
        slots = f"{site.amount} of {unit.experts} experts in slots of {home}"
        return f"{slots}, the others by {site.others} beside it"
    if site.kind is SiteKind.CACHE:
        return f"read through the engine's expert cache on {home}"
    if site == ON_CPU and problem.devices[option.entry].host:
        return "its layer is on the CPU"
    other = _elsewhere(decision, option, index)
    if other is None:
        return "no other place"
    delta = (other.decode_ns - option.decode_ns) / 1000
    if site == ON_CPU:
        return f"frees {unit.size_bytes >> 20} MiB of {home} for {-delta:.0f} us a token"
    return f"saves {delta:.0f} us a token against the CPU" if delta >= 0 else "keeps the graph whole"


def _home_reason(problem: Problem, decision: Decision, option: Option, unit: Unit, home: str) -> str:
    kept = {Kind.ATTENTION: "owns the layer's KV cache", Kind.RECURRENT: "owns the layer's state"}
    if problem.devices[option.entry].host:
        others = [o.decode_ns for o in decision.options if not problem.devices[o.entry].host]
        if not others:
            return "no other place"
        saved = (option.decode_ns - min(others)) / 1000
        if saved <= 0:
            return "as fast here as on a GPU"
        return f"a GPU would save {saved:.0f} us a token here"
    return kept.get(unit.kind, f"layer device {home}")


def _elsewhere(decision: Decision, option: Option, index: int) -> Option | None:
    """The option that differs only in the site of one unit."""
    for other in decision.options:
        rest = [i for i in range(len(option.sites)) if i != index]
        there = sites(other.sites)[index]
        alike = (other.entry, other.away) == (option.entry, option.away)
        same = alike and all(other.sites[i] == option.sites[i] for i in rest)
        if same and there != option.sites[index] and not there.divided:
            return other
    return None
