"""What llama.cpp must be told to realise a plan: a plain record between plan and runtime.

The engine counts the output head as one more layer after the last, and NextN blocks as layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.block_names import block_of
from planner.constants import CPU, MAX_ENGINE_DEVICES, MAX_LAYERS
from planner.errors import InputError
from planner.machine.attention_kernels import kv_problem
from planner.machine.host_memory import HostMemory
from planner.model.units import looked_up
from planner.plan.adaptation import STAYS, Adaptation
from planner.plan.plan import LayerRange, Plan
from planner.site import GUESTS, NoSite, Site, SiteKind
from planner.workload import Workload

HYBRID_BANKS = 2  # of memory for the experts of a layer that a prompt brings: one is read, the other filled
# Locked host memory, at most, through which a device's prompts bring mapped experts: chunks of native/ring.h.
HYBRID_RING_BYTES = 16 * 2**20


# Layer, its number of experts, and those that have slots, hot first.
Residents = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The load parameters of one model, in the engine's own terms."""

    devices: tuple[str, ...]  # explicit device list, repeats and CPU allowed, at most 16; (): CPU only
    tensor_split: tuple[int, ...]  # layers per entry of `devices`; the output head is one layer
    n_gpu_layers: int
    overrides: tuple[tuple[str, str], ...]  # (pattern, buffer type name), first match wins
    workload: Workload
    main_gpu: int = 0
    use_mmap: bool = True
    use_extra_bufts: bool = True  # CPU_REPACK
    cache_bytes: int = 0
    threads: int = 0  # 0: all cores this process may use
    op_offload: bool = True  # prompts of host weights are computed on a GPU
    swa_full: bool = False  # sliding-window layers keep the whole context
    rollback: int = 0  # tokens that speculation may take back: as many more copies of a recurrent state
    notes: tuple[str, ...] = ()  # where the engine cannot be told the plan exactly
    residents: Residents = ()  # experts in slots, by original id
    guests: tuple[tuple[int, int], ...] = ()  # layer, slots for experts of one step where not site.GUESTS
    banks: int = HYBRID_BANKS  # layers whose experts a prompt may have on a device at a time
    adaptation: Adaptation = STAYS  # of the experts in slots to the text
    mapped: tuple[tuple[str, str], ...] = ()  # (the plan's device, the one here in its place)


@dataclass(eq=False)
class LayerGap(InputError):
    """A plan that gives some layer no device, or two."""

    layer: int
    why: str

    def message(self) -> str:
        return f"plan: layers: layer {self.layer} {self.why}"


@dataclass(eq=False)
class Unloadable(InputError):
    """A plan that asks the engine for something it cannot do."""

    what: str
    why: str

    def message(self) -> str:
        return f"plan: {self.what}: {self.why}"


def load_spec(plan: Plan) -> LoadSpec:
    """The parameters that realise a plan.

    Raises LayerGap when its layer ranges are not complete, Unloadable for what no engine can be told.

    Layers of the CPU that come first need no entry in the device list (the engine counts from the
    end); any other order is spelt as an explicit list, in which a device may stand several times.
    """
    if problem := kv_problem(plan.workload):
        raise Unloadable("workload", problem)
    devices = plan_layer_devices(plan)
    runs, notes = _at_most(MAX_ENGINE_DEVICES, _runs(devices))
    overrides = tuple((o.pattern, _legal(o.buffer)) for o in plan.overrides)
    cache_bytes = sum(use.cache_bytes for use in plan.devices)
    used = [use.name for use in plan.devices if use.compute_bytes or use.weights_bytes]
    return _listed(
        LoadSpec(
            devices=(),
            tensor_split=(),
            n_gpu_layers=0,
            overrides=overrides,
            workload=plan.workload,
            cache_bytes=cache_bytes,
            # The engine caches no weights in layouts of the CPU's own.
            use_extra_bufts=not cache_bytes and plan.repack is not False,
            threads=plan.machine.threads,
            op_offload=plan.op_offload,
            use_mmap=not pins_host_weights(plan),
            notes=notes,
            residents=_residents(plan),
            guests=_guests(plan),
            adaptation=plan.following.adaptation if plan.following else STAYS,
        ),
        runs,
        [*used, *(_device(buffer) for _, buffer in overrides)],
    )


def newcomers(before: Residents, after: Residents) -> tuple[int, int]:
    """Experts that have slots in `after` alone, and in how many layers; both have the same layers."""
    new = [len(set(then) - set(now)) for (_, _, now), (_, _, then) in zip(before, after, strict=True)]
    return sum(new), sum(map(bool, new))


def _residents(plan: Plan) -> Residents:
    """The experts that the plan puts into slots: the first of each layer's order."""
    orders = {each.layer: each.order for each in plan.experts}
    found = []
    for placed in plan.units:
        if placed.site.kind is SiteKind.HYBRID:
            layer = block_of(placed.unit)
            if layer is None:
                raise Unloadable("units", f"{placed.unit} has slots for experts and is of no layer")
            if len(orders.get(layer, ())) < placed.site.amount:
                raise Unloadable("experts", f"layer {layer} has slots and no order that fills them")
            found.append((layer, len(orders[layer]), orders[layer][: placed.site.amount]))
    return tuple(found)


def _guests(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Layers that have more or fewer slots for experts of one step than a site without a number says."""
    slotted = [(block_of(p.unit), p.site.guests) for p in plan.units if p.site.kind is SiteKind.HYBRID]
    return tuple((layer, n) for layer, n in slotted if layer is not None and n != GUESTS)


def pins_host_weights(plan: Plan) -> bool:
    """Whether host weights are read into pinned memory; a plan without work for them maps the file."""
    return plan.host_memory is HostMemory.PINNED and works_from_host(plan)


def works_from_host(plan: Plan) -> bool:
    """Whether weights in host memory are computed with, beside a GPU; to look rows up is no work."""
    computed = any(
        p.time_ns and not looked_up(p.unit) and (p.site.on_host or p.site.kind is SiteKind.HYBRID)
        for p in plan.units
    )
    return computed and any(use.kind == "gpu" for use in plan.devices)


def _listed(spec: LoadSpec, runs: Sequence[tuple[str, int]], others: Iterable[str]) -> LoadSpec:
    """A spec with its device list; `others` hold no layer but tensors, or compute prompts of host weights."""
    listed = _entries_of(runs, others)
    return replace(
        spec,
        devices=tuple(device for device, _ in listed),
        tensor_split=tuple(count for _, count in listed),
        n_gpu_layers=sum(count for _, count in listed),
    )


def device_list(layers: Sequence[str], others: Iterable[str]) -> list[tuple[str, int]]:
    """The engine's device list, and layers by entry, for the devices of all layers, the output head last."""
    runs, _ = _at_most(MAX_ENGINE_DEVICES, _runs(layers))
    return _entries_of(runs, others)


def _entries_of(runs: Sequence[tuple[str, int]], others: Iterable[str]) -> list[tuple[str, int]]:
    skipped = runs[0][1] if runs[0][0] == CPU else 0
    listed = list(runs[1:] if skipped else runs)
    there = {CPU, *(device for device, _ in listed)}
    return listed + [(device, 0) for device in dict.fromkeys(others) if device not in there]


def plan_layer_devices(plan: Plan) -> tuple[str, ...]:
    """The device of every layer the engine counts, NextN blocks included, the output head last."""
    blocks = [n + 1 for p in plan.units if (n := block_of(p.unit)) is not None]
    return layer_devices(plan.layers, max(blocks, default=0))


def layer_devices(ranges: Iterable[LayerRange], n_blocks: int = 0) -> tuple[str, ...]:
    """The device of each layer and, last, of the output head.

    Where the ranges count fewer than `n_blocks` layers the missing ones are NextN blocks, which stand
    between the last layer and the output head: they go where the output head is.
    """
    if n_blocks > MAX_LAYERS:
        raise LayerGap(n_blocks - 1, f"is beyond the {MAX_LAYERS} that a model may have")
    found: list[str] = []
    for each in sorted(ranges, key=lambda r: r.first):
        if each.first != len(found) or each.last < each.first:
            raise LayerGap(min(each.first, len(found)), "has no device, or more than one")
        found += [each.device] * (each.last - each.first + 1)
    if not found:
        raise LayerGap(0, "has no device")
    return (*found, *[found[-1]] * (n_blocks + 1 - len(found)))


def layer_ranges(devices: Sequence[str]) -> tuple[LayerRange, ...]:
    """Consecutive layers with one device."""
    found: list[LayerRange] = []
    for n, device in enumerate(devices):
        if found and found[-1].device == device:
            found[-1] = LayerRange(first=found[-1].first, last=n, device=device)
        else:
            found.append(LayerRange(first=n, last=n, device=device))
    return tuple(found)


def map_devices(spec: LoadSpec, names: Mapping[str, str]) -> LoadSpec:
    """The same placement on other devices, `names` from the plan's to those here; CPU stays CPU.

    A device mapped to CPU turns its layers into CPU layers and its overrides into CPU overrides; the
    CPU then has other work than the plan chose its threads for, and gets all cores.
    """
    layers = [names.get(d, d) for d, count in _entries(spec) for _ in range(count)]
    mapped = replace(
        spec,
        overrides=tuple((pattern, _renamed(buffer, names)) for pattern, buffer in spec.overrides),
        threads=0 if CPU in names.values() else spec.threads,
        mapped=(*spec.mapped, *names.items()),
    )
    here = _listed(mapped, _runs(layers), [names.get(d, d) for d in spec.devices])
    if any(d != CPU for d in here.devices):
        return here
    return replace(here, cache_bytes=0, use_mmap=True)  # nothing to pin memory for


def devices_of(spec: LoadSpec) -> tuple[str, ...]:
    """Every device a spec names, each once, in order of appearance; stripes by their device."""
    named = [*spec.devices, *(_device(buffer) for _, buffer in spec.overrides)]
    return tuple(dict.fromkeys(name for name in named if name != CPU))


def _entries(spec: LoadSpec) -> list[tuple[str, int]]:
    listed = list(zip(spec.devices, spec.tensor_split, strict=True))
    return listed if any(spec.tensor_split) else [(CPU, 1)]


def _legal(buffer: str) -> str:
    """The buffer name itself; Unloadable when it is a stripe that says no device or width."""
    try:
        return Site.of_buffer(buffer).buffer
    except NoSite as problem:
        raise Unloadable("overrides", f"buffer {problem}") from None


def _device(buffer: str) -> str:
    return Site.of_buffer(buffer).device


def _renamed(buffer: str, names: Mapping[str, str]) -> str:
    site = Site.of_buffer(buffer)
    return site.moved(names.get(site.device, site.device)).buffer


def _runs(devices: Sequence[str]) -> list[tuple[str, int]]:
    return [(device, len(list(group))) for device, group in groupby(devices)]


def _at_most(limit: int, runs: list[tuple[str, int]]) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Runs joined until a device list can hold them: the shortest run takes its longer neighbour's device."""
    joined, moved = list(runs), 0
    while len(joined) - (joined[0][0] == CPU) > limit:
        index = min(range(len(joined)), key=lambda i: (joined[i][1], i))
        near = [i for i in (index - 1, index + 1) if 0 <= i < len(joined)]
        target = max(near, key=lambda i: joined[i][1])
        moved += joined[index][1]
        joined[index] = (joined[target][0], joined[index][1])
        joined = _merged(joined)
    if not moved:
        return joined, ()
    return joined, (
        f"the engine takes {limit} entries in a device list, the plan needs {len(runs)}: "
        f"{moved} layers follow their neighbours",
    )


def _merged(runs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(device, sum(n for _, n in group)) for device, group in groupby(runs, key=lambda r: r[0])]
