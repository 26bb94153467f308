"""From inventory, profile, budgets and workload to the placement problem in integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.block_names import block_name, block_of
from planner.constants import MAX_ENGINE_DEVICES
from planner.cost.expert_cache import cache_shares
from planner.cost.layer_options import Choices, Chooser
from planner.cost.ledger import Ledger, Once, Placed, once
from planner.cost.pins import Wanted, pinned
from planner.cost.rounding import rounded
from planner.cost.shared_kv import Sharing
from planner.cost.unit_time import Prices, Timed, state_case
from planner.errors import InputError
from planner.machine import op_time
from planner.machine.host_memory import OFFLOAD_BATCH, HostMemory
from planner.machine.profile import Device, Profile
from planner.machine.unknown_types import host_bound
from planner.memory import kv_cache
from planner.memory.buffer_parts import BufferParts, buffer_parts, inputs_bytes
from planner.memory.memory import NOTHING, Memory
from planner.model.inventory import Inventory
from planner.model.layers import Layers
from planner.model.structure import Structure
from planner.model.units import Kind, Unit, divisible
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.load_spec import HYBRID_BANKS, HYBRID_RING_BYTES
from planner.plan.request import Request
from planner.site import ON_CPU, Site, sites
from planner.solver.problem import Capacity, Decision, Edge, Matrix, Mixed, Option, Pool, Problem
from planner.workload import Workload

INPUT = "input"
OUTPUT = "output"
UNFUSED = "unfused delta net"
_ON_HOST = frozenset({Kind.EMBEDDING, Kind.LOOKUP})
_NOT_LOADED = frozenset({Kind.FOREIGN})


_MOST_NS = 1 << 58  # nine years for a request: the search adds such numbers up in 64 bits


@dataclass(frozen=True, slots=True)
class Model:
    """A model analysed for one use: its units by decision, its caches."""

    structure: Structure
    workload: Workload
    groups: tuple[tuple[str, tuple[Unit, ...]], ...]  # decision name and its units, in graph order
    kv: Mapping[str, int]  # bytes by decision
    state: Mapping[str, int]
    owners: Mapping[str, str]  # decision of a layer that reads another's KV cache, and of that other

    @property
    def inventory(self) -> Inventory:
        return self.structure.inventory

    @property
    def layers(self) -> Layers:
        return self.structure.layers

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.structure.units

    @property
    def tables_bytes(self) -> int:
        """Per-layer and n-gram tables, of which single rows are read."""
        return sum(u.size_bytes for _, units in self.groups for u in units if u.kind is Kind.LOOKUP)


def analyse(structure: Structure, workload: Workload) -> Model:
    """Group the units of a model into decisions: the input tables, each layer, the output head."""
    layers = structure.layers
    groups: dict[str, list[Unit]] = {INPUT: []}
    for unit in structure.units:
        if unit.kind in _NOT_LOADED or (unit.kind is Kind.NEXTN and not workload.mtp):
            continue
        groups.setdefault(decision_of(unit), []).append(unit)
    groups[OUTPUT] = groups.pop(OUTPUT, [])
    caches = dict(zip(_names(layers.n_main), kv_cache.kv_bytes(structure, workload), strict=True))
    if workload.mtp:
        names = [block_name(n) for n in range(layers.n_main, layers.n_all)]
        caches |= dict(zip(names, kv_cache.nextn_kv_bytes(structure, workload), strict=True))
    state = dict(zip(_names(layers.n_main), kv_cache.state_bytes(structure, workload), strict=True))
    return Model(
        structure,
        workload,
        tuple((k, tuple(v)) for k, v in groups.items() if v),
        caches,
        state,
        {block_name(reader): block_name(owner) for reader, owner in structure.readers.items()},
    )


def decision_of(unit: Unit) -> str:
    """The name of the decision a unit belongs to."""
    if unit.kind in _ON_HOST:
        return INPUT
    return OUTPUT if unit.layer is None else block_name(unit.layer)


def _names(n_main: int) -> list[str]:
    return [block_name(n) for n in range(n_main)]


@dataclass(frozen=True, slots=True)
class Priced:
    """A problem and what it was made from."""

    model: Model
    problem: Problem
    prices: Prices
    ledger: Ledger  # the parts of the memory that the problem counts in totals
    settings: EngineSettings
    pins: Mapping[str, Wanted]  # by unit: where it was asked to be
    resident: Mapping[int, int]  # by host whose weights may be paged: bytes there are for all else
    shared: Mapping[int, int] = field(default_factory=dict)  # the same by pool of such a host, GPUs included

    def pool_bytes(self, pool: int) -> int:
        """What devices that share a memory may hold of it together, paged weights apart."""
        return self.shared.get(pool, self.problem.pools[pool].capacity_bytes)

    @property
    def copies(self) -> bool:
        """Whether a GPU has room for host weights that prompts need."""
        long = self.prices.workload.n_ubatch >= OFFLOAD_BATCH
        return self.settings.op_offload and long and any(d.kind == "gpu" for d in self.problem.devices)


@dataclass(eq=False)
class BeyondPlans(InputError):
    """Figures of a machine that give a number no plan holds: months for a token."""

    field: str
    value: int
    profile: str

    def message(self) -> str:
        return f"profile {self.profile}: its figures give {self.field} {self.value}, more than any plan holds"


def build_problem(
    model: Model,
    profile: Profile,
    request: Request,
    settings: EngineSettings,
    known: Known,
    timed: Timed | None = None,
) -> Priced:
    """The placement problem on the devices that have a budget and are opened, for the model's workload.

    `timed`: of another problem of the same model, profile and speculation. Raises BeyondPlans.
    """
    devices = devices_of(profile, request.budgets, settings)
    # A GPU's pinned memory comes before it in the engine's list of buffers for the CPU.
    repack = settings.repack and not any(d.kind in ("gpu", "igpu") for d in devices)
    workload, drafts, memory = model.workload, settings.speculation, settings.host_memory
    timed = timed or Timed()
    prices = Prices(model.structure, profile, workload, known.distinct, repack, drafts, memory, timed)
    buffers = {d.name: buffer_parts(model.structure, workload, d, settings.op_offload) for d in devices}
    fixed = [once for i, d in enumerate(devices) for once in _shares(i, d, buffers[d.name])]
    fixed += cache_shares(model.structure, devices, known.cache)
    fixed += _stages(model, devices) if settings.slots else ()
    fixed += _rings(devices) if settings.slots and memory is HostMemory.MAPPED else ()
    units = [u for _, g in model.groups for u in g]
    wanted = dict.fromkeys(host_bound(model.inventory, units, profile), Wanted(ON_CPU))
    loaded = {u.name for u in units}
    idle = [u for u in model.units if u.name not in loaded]
    asked = pinned(request.pins, units, [d.name for d in devices], idle)
    wanted |= asked
    named = [each.what for each in asked.values() if isinstance(each.what, Site)]
    named += request.sites
    chooser = Chooser(prices, devices, Choices.of(request, settings, known), buffers, named)
    sharing = Sharing(model.owners, model.kv, devices, prices, len(fixed))
    fixed += [(share, NOTHING) for share in sharing.shares()]
    every = {name: _every(chooser, model, name, units) for name, units in model.groups}
    placed = {
        name: sharing.with_shares(name, _left(chooser, every[name], name, units, request, wanted))
        for name, units in model.groups
    }
    fastest = sum(min((p.option.decode_ns for p in found), default=0) for found in every.values())
    alike = {id(found): tuple(p.option for p in found) for found in placed.values()}
    decisions = tuple(
        Decision(name, tuple(u.name for u in units), alike[id(placed[name])], name != INPUT)
        for name, units in model.groups
    )
    held = {id(found): {p.option.key: p.held for p in found} for found in placed.values()}
    ledger = Ledger(
        {name: held[id(found)] for name, found in placed.items()}, tuple(memory for _, memory in fixed)
    )
    reserved = {d.name: settings.reserved_bytes(d.name) for d in devices}
    pools = _pools(devices, profile, reserved)
    paging = {_pool_index(pools, d) for d in devices if d.kind == "cpu" and request.page} - {-1}
    shared = {p: pools[p].capacity_bytes for p in paging}
    pools = tuple(
        replace(pool, capacity_bytes=pool.capacity_bytes + model.inventory.size_bytes)
        if p in paging
        else pool
        for p, pool in enumerate(pools)
    )
    problem = Problem(
        devices=tuple(
            Capacity(
                d.name,
                d.kind,
                max(_budget(d, request, model.inventory.size_bytes) - reserved[d.name], 0),
                _pool_index(pools, d),
            )
            for d in devices
        ),
        decisions=decisions,
        edges=_edges(prices, devices, len(decisions)),
        pools=pools,
        shares=tuple(share for share, _ in fixed),
        exclusive=(*chooser.exclusive(), *sharing.exclusive()),
        mixed=_mixed(model, prices, devices, decisions),
        decode_weight=workload.gen,
        decode_ns=prices.token_ns,
        max_runs=MAX_ENGINE_DEVICES,
        host_leads=settings.op_offload and _streams(devices, workload),
        contiguous=request.contiguous,
    )
    if (longest := problem.longest()) > _MOST_NS:
        raise BeyondPlans("times up to", longest, profile.name)
    paged = [(i, d.name) for i, d in enumerate(devices) if d.kind == "cpu" and request.page]
    resident = {i: max(request.budgets[name] - reserved[name], 0) for i, name in paged}
    return Priced(model, rounded(problem, fastest), prices, ledger, settings, asked, resident, shared)


def devices_of(profile: Profile, budgets: Mapping[str, int], settings: EngineSettings) -> tuple[Device, ...]:
    """The devices that may be used, GPUs first."""
    offered = [d for d in profile.devices if d.name in budgets]
    gpus = [d for d in offered if d.kind != "cpu"] if settings.gpus else []
    return (*gpus, *(d for d in offered if d.kind == "cpu"))


def _streams(devices: tuple[Device, ...], workload: Workload) -> bool:
    """Whether prompts are computed on a GPU with weights streamed from host memory.

    llama.cpp streams only weights of its last CPU backend, and a CPU named in the device list (a CPU layer
    after a GPU layer) comes before that one: with such a layer nothing is streamed any more.
    """
    longest = min(workload.prompt, workload.n_ubatch)
    return longest >= OFFLOAD_BATCH and any(d.kind == "gpu" for d in devices)


def _budget(device: Device, request: Request, weights: int) -> int:
    """Bytes that a device may hold; a host whose weights are paged from the file also those."""
    return request.budgets[device.name] + (weights if device.kind == "cpu" and request.page else 0)


def _shares(index: int, device: Device, buffer: BufferParts) -> tuple[Once, ...]:
    """What the use of a device costs once, in the order of `layer_options.PER_DEVICE`."""
    shared = buffer.shared_bytes
    in_use = Memory(compute=buffer.base_bytes, reserve=device.context_bytes)
    return (
        once(f"{device.name} in use", index, in_use),
        once(f"{device.name} streams or has the head", index, Memory(compute=shared)),
        once(f"{device.name} streams", index, Memory(compute=buffer.staging_bytes - shared)),
        once(f"{device.name} has the head", index, Memory(compute=buffer.head_bytes - shared)),
    )


def _pools(devices: tuple[Device, ...], profile: Profile, reserved: Mapping[str, int]) -> tuple[Pool, ...]:
    """Memory that several devices share counts once: the least that any of them reports, less reserves."""
    names = dict.fromkeys(d.memory_pool for d in devices if d.memory_pool)
    found = []
    for name in names:
        known = [d.free_bytes or d.memory_bytes for d in profile.devices if d.memory_pool == name]
        size = min((k for k in known if k), default=0)
        others = sum(reserved[d.name] for d in devices if d.memory_pool == name)
        found.append(Pool(name, max(size - max(2**30, size * 4 // 100) - others, 0)))
    return tuple(found)


def _pool_index(pools: tuple[Pool, ...], device: Device) -> int:
    return next((i for i, pool in enumerate(pools) if pool.name == device.memory_pool), -1)


def _every(chooser: Chooser, model: Model, name: str, units: tuple[Unit, ...]) -> list[Placed]:
    """The options of a decision."""
    if name == INPUT:
        return chooser.on_host(units, Memory(compute=inputs_bytes(model.structure, model.workload)))
    kept = Memory(kv=model.kv.get(name, 0), state=model.state.get(name, 0))
    return chooser.layer(units, kept, reads=name in model.owners)


def _left(
    chooser: Chooser,
    found: list[Placed],
    name: str,
    units: tuple[Unit, ...],
    request: Request,
    wanted: Mapping[str, Wanted],
) -> list[Placed]:
    """The options of a decision that constraints leave."""
    left = [p for p in found if _allowed(chooser, p.option, name, units, request, wanted)]
    return left if len(left) < len(found) else found  # where all are left, layers that are alike share them


def _allowed(
    chooser: Chooser,
    option: Option,
    name: str,
    units: tuple[Unit, ...],
    request: Request,
    wanted: Mapping[str, Wanted],
) -> bool:
    if name != INPUT:
        if request.contiguous and not option.whole:
            return False
        if request.no_cpu and chooser.uses_host(option):
            return False
        if request.first_on_cpu is not None and not _counted(chooser, option, name, request.first_on_cpu):
            return False
    return not wanted or all(
        wanted[unit.name].admits(site)
        for unit, site in zip(units, sites(option.sites), strict=True)
        if unit.name in wanted
    )


def _counted(chooser: Chooser, option: Option, name: str, first: int) -> bool:
    """Whether a stock tool can be told the layer's device; the output head goes with the last layers."""
    layer = block_of(name)
    on_host = option.entry == chooser.cpu
    return on_host == (layer < first) if layer is not None else not on_host


def _stages(model: Model, devices: tuple[Device, ...]) -> tuple[Once, ...]:
    """Where prompts bring experts without a slot: room for two of the largest layer, a device."""
    tensors = model.structure.tensors
    experts = [divisible(u) for u in model.units if u.kind is Kind.EXPERTS]
    largest = max((sum(tensors[name].size_bytes for name in names) for names in experts), default=0)
    staged = Memory(compute=HYBRID_BANKS * largest)
    return tuple(once(f"{d.name} stages experts", i, staged) for i, d in enumerate(devices))


def _rings(devices: tuple[Device, ...]) -> tuple[Once, ...]:
    """Locked host memory through which mapped experts come to each device's stage."""
    host = next(i for i, d in enumerate(devices) if d.kind == "cpu")
    ring = Memory(compute=HYBRID_RING_BYTES)
    return tuple(once(f"{d.name} is brought mapped experts", host, ring) for d in devices)


def _edges(prices: Prices, devices: tuple[Device, ...], n: int) -> tuple[Edge, ...]:
    width = max(prices.inventory.number("embedding_length"), 1) * 4
    step = _matrix(prices, devices, [(prices.step_tokens, 1)], width)
    decode = tuple(tuple(map(prices.per_token, row)) for row in step)
    prefill = _matrix(prices, devices, prices.batches, width)
    return tuple(Edge(i, i + 1, decode, prefill) for i in range(n - 1))


def _matrix(
    prices: Prices,
    devices: tuple[Device, ...],
    batches: list[tuple[int, int]] | tuple[tuple[int, int], ...],
    width: int,
) -> Matrix:
    return tuple(
        tuple(
            sum(count * prices.hand_over(source.name, target.name, batch * width) for batch, count in batches)
            for target in devices
        )
        for source in devices
    )


def _mixed(
    model: Model, prices: Prices, devices: tuple[Device, ...], decisions: tuple[Decision, ...]
) -> tuple[Mixed, ...]:
    """The fixed cost of a graph with CPU and other parts, and the fused kernels that such a graph loses."""
    if all(d.kind == "cpu" for d in devices):
        return ()
    steps = sum(count for _, count in prices.batches)
    ns = prices.calibration.mixed_ns
    every = tuple(i for i, d in enumerate(decisions) if d.layer)
    graph = Mixed("mixed graph", every, prices.per_token(ns), ns * steps)
    recurrent = {block_name(n) for n, is_recurrent in enumerate(model.layers.recurrent) if is_recurrent}
    if not any(_delta_net(t.name) for t in model.inventory.tensors) or not recurrent:
        return (graph,)
    # A delta-net layer away from the GPU switches the fused operator off everywhere.
    extra = max(unfused_ns(prices, d)[0] for d in devices if d.kind != "cpu") * len(recurrent)
    which = tuple(i for i, d in enumerate(decisions) if d.name in recurrent)
    unfused = Mixed(UNFUSED, which, prices.per_token(extra), extra * steps, layers_only=True)
    return (graph, unfused)


def unfused_ns(prices: Prices, device: Device) -> tuple[int, bool]:
    """What a delta-net layer takes more without its fused operator, and whether that was measured.

    Not measured: the state is read and written by some ten small operators instead of one.
    """
    case = state_case(prices.structure, 1)
    fused, unfused = (
        op_time.lookup(prices.profile, op, case.type, case.shape, 1, device.name)
        for op in (case.op, op_time.UNFUSED_DELTA_NET)
    )
    if unfused.basis == "measured" and fused.basis == "measured":
        return max(unfused.ns - fused.ns, 0), True
    return 10 * device.op_overhead_ns, False


def _delta_net(name: str) -> bool:
    return ".ssm_ba." in name or ".ssm_beta." in name
