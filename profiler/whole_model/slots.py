"""What experts in slots cost here: a generated model with the experts' own shape, decoded in seven ways.

All in slots; nearly all, so that the graph is cut and little is missing; half with the CPU alone for the
others, with the bus alone, with both; nearly all and half without guests, where the device begins before the
host knows the choices. The formula that prices a plan is solved for one unknown after the
other; how far it is off the token with both, whose CPU part it was fitted to, is its residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.constants import PPM
from planner.cost.hybrid_slots import AHEAD, Lanes, binomial, expected_ns, main_type
from planner.errors import AtsplanError
from planner.machine.profile import Device, SlotCosts
from planner.model.inventory import Inventory
from planner.model.units import Kind, Unit, divisible, units_of
from planner.plan.load_spec import LoadSpec
from planner.site import GUESTS
from planner.workload import Workload
from profiler import host
from profiler.session import Found, Request, Watcher
from profiler.synth import synth
from profiler.synth.bytes import TYPES, size_bytes
from runtime.child.ask import Limits, stream
from runtime.hybrid import build
from runtime.load import dry_run

Line = Mapping[str, Any]

LAYERS = 6
ALL_BYTES = 2**30  # of experts: more than caches hold, and loaded in a second
SHARE = 0.3  # of the time for the profile
LEAST_S = 5.0
FULL_SHARE = 0.8  # of free memory that the model may fill
LEFT_STAGES = 12  # layers' experts: a wrapper lives as long as its process, with two banks for prompts
PROMPT, PROMPTS, GEN = 512, 2, 48
ENOUGH_MORE = 0.5  # choices for the CPU in a layer, between the ways, that tell a choice from a start
NEVER = 1  # bytes a microsecond: a lane so slow that the other takes everything
NEEDED = ("all", "cut", "cpu", "bus", "both")
WAYS = (*NEEDED, "ahead", "joined")
LEAST_APART = 0.2  # that the last two ways differ in how often nothing is missed, or they tell nothing
_MODULE = "profiler.whole_model.slot_runs"


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts that a model has most of."""

    n_embd: int
    n_ff: int
    n_expert: int
    n_used: int
    type: str

    @property
    def spec(self) -> synth.SynthSpec:
        """A model of a few such layers, with as many experts as are needed to leave the caches."""
        return synth.SynthSpec(
            "qwen3moe", n_layers=LAYERS, n_embd=self.n_embd, n_head=8, n_head_kv=2, head_dim=64,
            n_expert=self.n_expert, n_used=self.n_used, n_ff_exp=self.n_ff, n_vocab=2048, type="q8_0",
            types={"experts": self.type}, seed=11, name="experts in slots",
        )  # fmt: skip


def shape_of(inventory: Inventory) -> Shape | None:
    """The experts of the model; None where it has none, or none with a gate of their own to copy."""
    units = [u for u in units_of(inventory).units if u.kind is Kind.EXPERTS and u.used < u.experts]
    return next((shape for unit in units if (shape := _shape(inventory, unit))), None)


def _shape(inventory: Inventory, unit: Unit) -> Shape | None:
    tensors = {t.name: t for t in inventory.tensors}
    down = next((tensors[n] for n in unit.tensors if n.endswith("ffn_down_exps.weight")), None)
    kind = main_type(unit, tensors)
    if down is None or kind not in TYPES:
        return None
    n_ff, n_embd = down.shape[0], down.shape[1]
    each = sum(tensors[n].size_bytes for n in divisible(unit)) // unit.experts
    fitting = ALL_BYTES // max(LAYERS * each, 1)
    n_expert = min(unit.experts, max(fitting, 2 * unit.used, 4))
    return Shape(n_embd, n_ff, n_expert, unit.used, kind)


def measured(
    found: Found, inventory: Inventory, request: Request, watch: Watcher, folder: Path
) -> tuple[tuple[SlotCosts, ...], tuple[str, ...]]:
    """The costs for every GPU that experts in slots can be had on, and why not for the others."""
    shape = shape_of(inventory)
    gpus = [d for d in found.devices if d.kind == "gpu" and not d.memory_pool]
    if shape is None or not gpus:
        return (), ()
    if why := build.available():
        return (), (f"experts in slots are not measured: {why}",)
    costs, notes = [], []
    for device in gpus:
        lines = _lines(found, device, len(gpus), shape, request, watch, folder)
        made = costs_of(lines, device.name, shape)
        costs += [made] if made else []
        notes += [] if made else [f"experts in slots are not measured on {device.name}: {_why(lines)}"]
    return tuple(costs), tuple(notes)


def _lines(
    found: Found, device: Device, count: int, shape: Shape, request: Request, watch: Watcher, folder: Path
) -> dict[str, Line]:
    """What the runs said, by way, with those of an interrupted profile; `count` devices share the time."""
    shaped = [device.name, *map(str, asdict(shape).values())]
    known: dict[str, Line] = {
        x["key"]: x for x in found.journal.lines if x["kind"] == "slots" and x["of"] == shaped
    }
    left = [way for way in WAYS if way not in known]
    if not left:
        return known
    limit_s = request.seconds * SHARE / count
    if limit_s < LEAST_S:
        enough = math.ceil(LEAST_S * count / SHARE)
        return {"": {"skipped": f"that takes {LEAST_S:.0f} s or more; give --seconds {enough}"}}
    size = LAYERS * shape.n_expert * expert_bytes(shape)
    free = min(device.free_bytes, host.memory_bytes()[1])
    size += LEFT_STAGES * size // LAYERS
    if size > FULL_SHARE * free:
        return {"": {"skipped": f"{size >> 20} MiB of experts do not fit into {free >> 20} MiB"}}
    watch.stage("the native library")
    try:
        build.library()  # a compiler may need a minute, which is no time of the runs
    except AtsplanError as problem:
        return {"": {"skipped": str(problem)}}
    watch.stage(f"experts in slots of {device.name}")
    path = folder / "slots.gguf"
    if not path.exists():
        synth.write(path, shape.spec)
    for line in run(path, left, device.name, shape, found.threads, request.engine, limit_s):
        known[line["key"]] = line
        found.journal.add({**line, "kind": "slots", "of": shaped})
        watch.run(f"{line['key']}{': ' + line['skipped'] if 'skipped' in line else ''}")
    return known


def run(
    path: Path, ways: list[str], device: str, shape: Shape, threads: int, engine: str | None, limit_s: float
) -> Iterator[dict[str, Any]]:
    """A line a way; one that ends the child costs itself and what comes after it."""
    load = Workload(n_ctx=PROMPT + GEN + 64, n_batch=PROMPT, n_ubatch=PROMPT)
    spec = LoadSpec((device,), (1,), 999, (), load, use_mmap=False, threads=threads)
    request = {
        "engine": engine,
        "model": str(path),
        "device": device,
        "spec": dry_run.to_json(spec),
        "seed": 5,
        "prompt": PROMPT,
        "prompts": PROMPTS,
        "gen": GEN,
        "runs": [{"key": way, "config": config(way, shape)} for way in ways],
    }
    left = list(ways)
    try:
        with closing(stream(_MODULE, request, engine or "libllama", Limits(limit_s))) as lines:
            for line in lines:
                left.remove(line["key"])
                yield line
    except AtsplanError as problem:
        yield {"key": left[0] if left else "", "skipped": str(problem)}


def config(way: str, shape: Shape) -> dict[str, Any]:
    """Settings of the device for a way: how many slots, and which lane takes what has none."""
    n, half = shape.n_expert, shape.n_expert // 2
    ways: dict[str, dict[str, Any]] = {
        "all": {"slots": n, "guests": 0},
        "cut": {"slots": n - 1, "guests": GUESTS, "bus_bytes_us": NEVER},
        "cpu": {"slots": half, "guests": GUESTS, "bus_bytes_us": NEVER},
        "bus": {"slots": half, "guests": min(shape.n_used, n - half), "cpu_bytes_us": NEVER},
        "both": {"slots": half, "guests": GUESTS},
        "ahead": {"slots": n - 1, "guests": 0},
        "joined": {"slots": half, "guests": 0},
    }
    return {"name": f"SLOTS{WAYS.index(way)}", **ways[way]}


def expert_bytes(shape: Shape) -> int:
    """Bytes of one expert of a layer: gate, up and down."""
    return 3 * size_bytes(shape.type, (shape.n_embd, shape.n_ff))


def _why(lines: Mapping[str, Line]) -> str:
    return next((line["skipped"] for line in lines.values() if "skipped" in line), "the runs ended too early")


def costs_of(lines: Mapping[str, Line], device: str, shape: Shape) -> SlotCosts | None:
    """The costs that explain the runs, nanoseconds; None where one is missing or a lane had nothing to do.

    The unknowns of `planner.cost.hybrid_slots.step_ns`, one from each way; those of slots without guests are
    left out where their ways were not run.
    """
    if any("decode_ns" not in lines.get(way, {}) for way in NEEDED):
        return None
    if not (lines["cpu"]["cpu"] and lines["bus"]["uploaded"] and lines["both"]["expert_bytes"]):
        return None  # the engine has no kernel for the type, or no slot was made
    seen = {way: _Seen(line, shape) for way, line in lines.items() if way in WAYS and "decode_ns" in line}
    gpu_ns, whole_ns = int(lines["both"]["device_ns"]), seen["all"].layer_ns
    lane = _lane(seen["cut"], seen["cpu"], gpu_ns, whole_ns)
    upload_start_ns = int(lines["both"]["bus_start_ns"])
    bus_ns = seen["bus"].layer_ns - whole_ns - lane.sync_ns - upload_start_ns * seen["bus"].any_missing
    upload_ns = max(round(bus_ns / max(seen["bus"].missing, 1e-9)), 1)
    begun_ns = lane.begin_ns * seen["both"].any_missing
    beside_ns = (seen["both"].step_cpu_ns - begun_ns) / max(seen["both"].by_cpu, 1e-9)
    lanes = Lanes(
        gpu_ns,
        lane.pair_ns,
        upload_ns,
        GUESTS,
        lane.sync_ns,
        beside_ns=max(round(beside_ns), lane.pair_ns),
        pair_start_ns=lane.start_ns,
        upload_start_ns=upload_start_ns,
    )
    told = whole_ns - gpu_ns + expected_ns(lanes, shape.n_used, seen["both"].missing)
    return SlotCosts(
        device=device,
        type=shape.type,
        expert_bytes=int(lines["both"]["expert_bytes"]),
        sync_ns=lanes.sync_ns,
        pair_ns=lanes.pair_ns,
        beside_ns=lanes.beside_ns,
        pair_start_ns=lanes.pair_start_ns,
        upload_ns=lanes.upload_ns,
        upload_start_ns=lanes.upload_start_ns,
        **_begun_ahead(seen, lane.sync_ns),
        staged_bytes_per_s=_staged(lines, shape),
        residual_ppm=round(abs(told / seen["both"].layer_ns - 1) * PPM),
    )


@dataclass(frozen=True, slots=True)
class _Lane:
    """The CPU's part of a layer, nanoseconds."""

    sync_ns: int  # of every layer that is cut
    start_ns: int  # of one in which the CPU has a part: its begin, and its rows on their way
    begin_ns: float  # of that what passes before the CPU has computed
    pair_ns: int


def _lane(cut: _Seen, cpu: _Seen, gpu_ns: int, whole_ns: float) -> _Lane:
    """From few choices without a slot to many: their slope is a pair, the rest its start and the layer's."""
    begin_ns = float(cpu.line["cpu_start_ns"])
    few, many = cut.by_cpu / max(cut.any_missing, 1e-9), cpu.by_cpu / cpu.any_missing
    alone_ns = cpu.step_cpu_ns / cpu.by_cpu
    if many - few > ENOUGH_MORE:
        few_ns, many_ns = cut.step_cpu_ns / max(cut.any_missing, 1e-9), cpu.step_cpu_ns / cpu.any_missing
        slope_ns = (many_ns - few_ns) / (many - few)
    else:  # of one choice a token there is one or none: the lane's own start has to tell
        slope_ns = alone_ns - begin_ns / many
    pair_ns = min(max(slope_ns, alone_ns / 2), alone_ns)
    begin_ns = max(cpu.step_cpu_ns / cpu.any_missing - pair_ns * many, 0.0)
    # The layer's own time and a part of the start, where little is missing; both, where much is.
    little = cut.layer_ns - whole_ns + gpu_ns * cut.any_missing - pair_ns * cut.by_cpu
    much = cpu.layer_ns - whole_ns + gpu_ns * cpu.any_missing - pair_ns * cpu.by_cpu
    often = max(cpu.any_missing - cut.any_missing, 1e-9)
    start_ns = min(max((much - little) / often, 0.0), max(much, 0.0))
    sync_ns = max(little - start_ns * cut.any_missing, 0.0)
    return _Lane(round(sync_ns), round(start_ns), begin_ns, round(pair_ns))


def _begun_ahead(seen: Mapping[str, _Seen], sync_ns: int) -> dict[str, int]:
    """What no guests bring where nothing is missed, and cost where something is, from both kinds of layers.

    Each way without guests has the slots of one with guests that the bus was kept from: of the layers that
    miss nothing and those that do they have different shares.
    """
    if not {"ahead", "joined"} <= seen.keys():
        return {}
    few, many = (1.0 - seen[way].any_missing for way in ("ahead", "joined"))  # how often nothing is missed
    if few - many < LEAST_APART:
        return {}
    sooner_ns = seen["cut"].layer_ns - seen["ahead"].layer_ns
    later_ns = seen["joined"].layer_ns - seen["cpu"].layer_ns
    ahead_ns = (sooner_ns * (1.0 - many) + later_ns * (1.0 - few)) / (few - many)
    joined_ns = (later_ns * few + sooner_ns * many) / (few - many)
    return {
        "ahead_ns": round(min(max(ahead_ns, 0.0), sync_ns)),
        "joined_ns": round(max(joined_ns, 0.0)),
    }


@dataclass(frozen=True, slots=True)
class _Seen:
    """A way's line, by layer and token."""

    line: Line
    shape: Shape

    @property
    def layer_ns(self) -> float:
        return int(self.line["decode_ns"]) / LAYERS

    @property
    def by_cpu(self) -> float:
        """Choices that the CPU computed, on average."""
        return int(self.line["cpu"]) / (GEN * LAYERS)

    @property
    def step_cpu_ns(self) -> float:
        """What it took for them."""
        return int(self.line["cpu_ns"]) / (GEN * LAYERS)

    @property
    def missing(self) -> float:
        """Choices without a slot, on average."""
        return self.by_cpu + int(self.line["uploaded"]) / (GEN * LAYERS)

    @property
    def any_missing(self) -> float:
        """How often one has none."""
        return 1.0 - binomial(self.shape.n_used, self.missing / self.shape.n_used)[0]


def _staged(lines: Mapping[str, Line], shape: Shape) -> int:
    """Bytes a second that reach the device ahead of a prompt's layers, where the bus is what it waits for."""
    whole, staged = int(lines["all"]["prompt_ns"]), int(lines["both"]["prompt_ns"])
    ahead = PROMPT * shape.n_used >= AHEAD * shape.n_expert  # else experts come when their layer has chosen
    if not ahead or staged < math.ceil(1.3 * whole):
        return 0
    cold = LAYERS * (shape.n_expert - shape.n_expert // 2) * int(lines["both"]["expert_bytes"])
    return round(cold * 1e9 / staged)
