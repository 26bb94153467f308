"""Whole-model placements: how the planner prices them and how the engine is told to load them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from planner.block_names import layer_of
from planner.constants import CPU
from planner.cost.build_problem import Priced, analyse, build_problem
from planner.cost.placed import evaluate_placed
from planner.machine.host_memory import HostMemory
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.model.units import Kind, Unit, units_of
from planner.passes.predict import Breakdown, breakdown
from planner.passes.stock_rules import realise
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.load_spec import LoadSpec
from planner.plan.overrides import overrides_of
from planner.plan.request import Request
from planner.site import ON_CPU, Site
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Solution
from planner.workload import Workload

ROOMY = 2**50  # a budget that nothing exceeds: here time is asked, not memory
MOVABLE = (Kind.FFN, Kind.EXPERTS)


@dataclass(frozen=True, slots=True)
class Placement:
    """A layer device per layer and the head's last; `moved` names units that are on the CPU nevertheless."""

    name: str
    layer_devices: tuple[str, ...]
    moved: tuple[str, ...] = ()
    sensible: bool = True  # False: drawn at random

    @property
    def sites(self) -> Mapping[str, Site]:
        return dict.fromkeys(self.moved, ON_CPU)

    @property
    def streamed(self) -> bool:
        """Whether prompts of host weights reach a GPU: not where the CPU stands in the engine's device list,
        as it does when it owns a layer after one of another device. With -ngl 0 they do.
        """
        end = len(self.layer_devices)
        first = next((i for i, device in enumerate(self.layer_devices) if device != CPU), end)
        return CPU not in self.layer_devices[first:]

    @property
    def mixed(self) -> bool:
        """Whether CPU and another device both compute layers."""
        devices = set(self.layer_devices[:-1]) | ({CPU} if self.moved else set())
        return CPU in devices and len(devices) > 1


@dataclass
class Predictor:
    """Prices placements of one model; a profile may be swapped, the model is read once."""

    inventory: Inventory
    workload: Workload

    def __post_init__(self) -> None:
        self._model = analyse(structure_of(self.inventory), self.workload)

    def evaluate(self, profile: Profile, placement: Placement) -> Evaluation:
        """What the planner thinks of a placement. Raises ValueError when it knows no such option."""
        return self.evaluate_all(profile, [placement])[0]

    def evaluate_all(self, profile: Profile, placements: list[Placement]) -> list[Evaluation]:
        """The same for many placements: the model is priced once, or twice where some are not streamed."""
        return [found for _, _, found in self._priced(profile, placements, HostMemory.PINNED)]

    def explain_all(
        self, profile: Profile, placements: list[Placement], memory: HostMemory = HostMemory.PINNED
    ) -> list[Breakdown]:
        """What each placement's predicted times are made of and stand on."""
        return [breakdown(*each) for each in self._priced(profile, placements, memory)]

    def _priced(
        self, profile: Profile, placements: list[Placement], memory: HostMemory
    ) -> list[tuple[Priced, Solution, Evaluation]]:
        budgets = {device.name: ROOMY for device in profile.devices}
        request = Request(budgets, self.workload, stripes=False)
        found: dict[int, tuple[Priced, Solution, Evaluation]] = {}
        for streamed in (True, False):
            kept = [(i, p) for i, p in enumerate(placements) if p.streamed is streamed]
            if not kept:
                continue
            settings = EngineSettings(op_offload=streamed, host_memory=memory)
            priced = build_problem(self._model, profile, request, settings, Known())
            for index, placement in kept:
                solution = realise(priced, placement.layer_devices, placement.sites)
                if solution is None:
                    raise ValueError(f"{placement.name}: no such placement")
                found[index] = priced, solution, evaluate_placed(priced, solution)
        return [found[i] for i in range(len(placements))]


def spec_of(inventory: Inventory, placement: Placement, workload: Workload, threads: int) -> LoadSpec:
    """How the engine is told a placement.

    Host weights are read, not mapped: pinned memory is what prompts are streamed from fastest.
    """
    units = [u for u in units_of(inventory).units if u.kind not in (Kind.FOREIGN, Kind.NEXTN)]
    sites = [_site(unit, placement) for unit in units]
    overrides = overrides_of(inventory, units, sites, placement.layer_devices)
    runs = [(device, len(list(group))) for device, group in groupby(placement.layer_devices)]
    skipped = runs[0][1] if runs[0][0] == CPU and len(runs) > 1 else 0
    listed = runs[1:] if skipped else runs
    return LoadSpec(
        devices=tuple(device for device, _ in listed if listed != [(CPU, len(placement.layer_devices))]),
        tensor_split=tuple(count for _, count in listed) if len(listed) > 1 or listed[0][0] != CPU else (),
        n_gpu_layers=len(placement.layer_devices) - skipped if listed[0][0] != CPU or len(listed) > 1 else 0,
        overrides=tuple((o.pattern, o.buffer) for o in overrides),
        workload=workload,
        use_mmap=False,
        threads=threads,
    )


def _site(unit: Unit, placement: Placement) -> Site:
    if unit.kind in (Kind.EMBEDDING, Kind.LOOKUP) or unit.name in placement.moved:
        return ON_CPU
    device = placement.layer_devices[-1 if unit.layer is None else unit.layer]
    return Site.on(device)


def movable(inventory: Inventory) -> tuple[str, ...]:
    """Names of the units that need not be on their layer's device, in layer order."""
    return tuple(u.name for u in units_of(inventory).units if u.kind in MOVABLE)


def sensible(inventory: Inventory, gpu: str) -> tuple[Placement, ...]:
    """What people do: all on the GPU, the movable weights of the first N layers on the CPU, `-ngl N`."""
    n, units = layers_of(inventory).n_main, movable(inventory)
    full = (gpu,) * (n + 1)
    found = [Placement("all on the GPU", full), Placement("all moved", full, units)]
    for eighths in (1, 2, 3, 6):
        count = len(units) * eighths // 8
        found.append(Placement(f"first {count} of {len(units)} moved", full, units[:count]))
    found.append(
        Placement(f"last {len(units) // 4} of {len(units)} moved", full, units[-(len(units) // 4) :])
    )
    for quarter in (1, 3):
        count = n * quarter // 4
        found.append(Placement(f"-ngl {n + 1 - count}", (CPU,) * count + (gpu,) * (n + 1 - count)))
    return tuple(found)


def shuffled(inventory: Inventory, gpu: str, count: int, seed: int) -> tuple[Placement, ...]:
    """Random placements: a stretch of layers whole on the CPU, and any of the other units moved."""
    n, units = layers_of(inventory).n_main, movable(inventory)
    draw = random.Random(seed)
    return tuple(_random(f"random {index}", n, units, gpu, draw) for index in range(count))


def _random(name: str, n: int, units: tuple[str, ...], gpu: str, draw: random.Random) -> Placement:
    whole = draw.choice((0, 0, draw.randint(1, n // 2)))
    start = draw.choice((0, draw.randint(0, n - whole)))
    devices = [CPU if start <= layer < start + whole else gpu for layer in range(n)]
    share = draw.random()
    free = [u for u in units if devices[layer_of(u)] == gpu]
    moved = tuple(u for u in free if draw.random() < share)
    return Placement(name, (*devices, gpu), moved, sensible=False)


def calibrating(inventory: Inventory, gpus: tuple[str, ...], brief: bool) -> Iterator[Placement]:
    """Placements whose times tell the parameters of the model apart; three of them when `brief`."""
    n, units = layers_of(inventory).n_main, movable(inventory)
    if not gpus:
        yield Placement("all on the CPU", (CPU,) * (n + 1))
        return
    full = (gpus[0],) * (n + 1)
    yield Placement("all on the GPU", full)
    yield Placement("all moved", full, units)
    yield Placement("every other moved", full, units[::2])
    if brief:
        return
    half = n // 2
    yield Placement("first half moved", full, units[:half])
    yield Placement("one moved", full, units[half : half + 1])
    yield Placement("first half on the CPU", (CPU,) * half + (gpus[0],) * (n + 1 - half))
    yield Placement("all on the CPU", (CPU,) * (n + 1))
    for other in gpus[1:]:
        yield Placement(f"half on {other}", (gpus[0],) * half + (other,) * (n + 1 - half))
