"""Whole-model runs that calibrate a profile: a generated model for the machine, then the model itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.constants import CPU
from planner.machine.op_time import Case
from planner.machine.profile import Device, Profile
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.units import Kind, Unit, units_of
from planner.workload import Workload
from profiler import host, runner
from profiler.operators.cases import cases_of
from profiler.runner import Length, Stop
from profiler.session import Found, Request, Watcher
from profiler.synth import synth
from profiler.whole_model import calibrate
from profiler.whole_model.calibrate import ENOUGH, Run
from profiler.whole_model.placements import Placement, calibrating, movable, spec_of
from runtime.engine.page_reads import PAGING_BYTES

GiB = 2**30
FULL_SHARE = 0.85  # of free device memory that a calibrating run may fill with weights
LENGTH = Length(prompt=64, gen=16, repeats=2)
RUNS = 3  # of a real model
LEAST_RUNS = 2  # of them, however long they take
CASES_SHARE = 0.4  # of the time, left for the operators
PATIENCE = 4  # times all the time, after which runs of a real model are cut off: it may come from a slow disk
DOUBTFUL_PPM = 100_000

# As many layers as real models have, since the fixed costs go by layers; experts so small that loading
# takes a second, and so many that a token's share of them does not stay in the caches.
GENERATED = synth.SynthSpec(
    "qwen3moe", n_layers=24, n_embd=1024, n_head=16, n_head_kv=4, head_dim=64, n_expert=32, n_used=8,
    n_ff_exp=512, n_vocab=8192, type="q4_K", types={"output": "q6_K"}, seed=7, name="calibration",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A model file to be run in several placements."""

    path: Path
    inventory: Inventory
    placements: tuple[Placement, ...]
    least: int  # runs, whatever time they take
    own: bool  # a real model: its calibration holds for it alone


def generated(folder: Path) -> Path:
    """The generated model that calibrates machines with a GPU, written into a folder; 0.7 GB."""
    return synth.write(folder / "calibration.gguf", GENERATED)


def generated_cases(inventory: Inventory) -> tuple[Case, ...]:
    """The operators of the generated model that its runs need: one token at shallow depth."""
    return tuple(c for c in cases_of(inventory, max_depth=4096) if c.batch == 1)


def gpus_of(found: Found) -> tuple[str, ...]:
    """What a model can be divided between beside the CPU."""
    return tuple(d.name for d in found.devices if d.kind in ("gpu", "igpu"))


def of_machine(found: Found, path: Path, inventory: Inventory) -> Model:
    """The generated model and the placements that tell the machine's own parameters apart."""
    placements = tuple(filter(_touches_gpu, calibrating(inventory, gpus_of(found), brief=False)))
    return Model(path, inventory, placements, ENOUGH, own=False)


def of_model(found: Found, path: Path, inventory: Inventory) -> Model:
    """A real model and up to three placements of it that fit into memory."""
    gpus = gpus_of(found)
    placements = _filling(found.devices, inventory, gpus[0]) if gpus else calibrating(inventory, (), False)
    units = units_of(inventory).units
    fitting = [p for p in placements if _fits(found.devices, units, p)]
    return Model(path, inventory, tuple(fitting[:RUNS]), LEAST_RUNS, own=True)


def _filling(devices: Sequence[Device], inventory: Inventory, gpu: str) -> Iterator[Placement]:
    """As much as fits on the GPU, as little as can be, and half way between: what a plan will lie among.

    The weights of first layers move; where that frees too little, whole layers go to the CPU.
    """
    n, weights = layers_of(inventory).n_main, movable(inventory)
    units = units_of(inventory).units

    def moved(count: int) -> Placement:
        return Placement(f"first {count} of {len(weights)} moved", (gpu,) * (n + 1), weights[:count])

    least = next((c for c in range(len(weights) + 1) if _on_gpu_fits(devices, units, moved(c))), None)
    if least is not None:
        yield from (moved(c) for c in dict.fromkeys((least, len(weights), (least + len(weights)) // 2)))
        return
    for count in range(1, n + 1):
        placement = Placement(f"-ngl {n + 1 - count}", (CPU,) * count + (gpu,) * (n + 1 - count))
        if _on_gpu_fits(devices, units, placement):
            yield placement
            return


def measured(found: Found, model: Model, request: Request, watch: Watcher) -> list[Run]:
    """Run a model in its placements, as many as the time for whole models allows; known runs are kept."""
    load = workload()
    specs = {p.name: spec_of(model.inventory, p, load, found.threads) for p in model.placements}
    if not gpus_of(found):  # nothing is copied to a device: map the file, as a later run will
        specs = {name: replace(spec, use_mmap=True) for name, spec in specs.items()}
    digest = model.inventory.table_digest()
    known = {x["key"]: x for x in found.journal.lines if x["kind"] == "run" and x["model"] == digest}

    def keep(line: runner.Line) -> None:
        found.journal.add({**line, "model": digest})
        watch.run(f"{line['key']}{': ' + line['skipped'] if 'skipped' in line else ''}")

    left = {name: spec for name, spec in specs.items() if name not in known}
    stop = _stop(found, model, request.seconds, len(known))
    lines = known | (runner.whole_model(model.path, left, request.engine, LENGTH, keep, stop) if left else {})
    ended = [(p, lines[p.name]) for p in model.placements if "decode_ns" in lines.get(p.name, {})]
    return [Run(p, round(statistics.median(x["decode_ns"])), x.get("paged_bytes", 0)) for p, x in ended]


def _stop(found: Found, model: Model, seconds: float, known: int) -> Stop:
    """Enough time is left for the operators; a software GPU, which would take hours, is given up."""
    now = time.monotonic()
    last_s = now + PATIENCE * seconds if model.own else max(found.until_s, now + seconds / 2)
    return Stop(until_s=found.until_s - CASES_SHARE * seconds, least=model.least - known, last_s=last_s)


def calibrated(profile: Profile, measured: Sequence[tuple[Model, Sequence[Run]]]) -> Profile:
    """The profile with what the runs of each model tell, and warnings where that is nothing or doubtful."""
    missing = []
    for model, runs in measured:
        used = [run for run in runs if run.paged_bytes < PAGING_BYTES]
        missing += [_paged(model, run) for run in runs if run not in used]
        if not used:
            missing.append(f"no whole-model run of {model.path.name} tells its speed: it is not calibrated")
            continue
        fit = calibrate.model if model.own else calibrate.machine
        profile = fit(model.inventory, workload(), profile, used)
    doubts = tuple(
        f"calibration of {c.model[:19] or 'the generated model'}: one of {c.runs} runs is off by "
        f"{c.residual_ppm / 1e4:.0f} %: the machine was not steady, or something else costs time"
        for c in profile.calibrations
        if c.residual_ppm > DOUBTFUL_PPM
    )
    return profile.model_copy(update={"warnings": (*profile.warnings, *missing, *doubts)})


def _paged(model: Model, run: Run) -> str:
    return (
        f"paging: {model.path.name} ({run.placement.name}) read {run.paged_bytes >> 20} MiB from disk while "
        "it was timed: it does not stay in memory, the run says nothing about the processors"
    )


def workload() -> Workload:
    """What the calibrating runs do; the depth is that of the middle token."""
    depth = LENGTH.prompt + LENGTH.gen // 2
    return Workload(n_ctx=512, depth=depth, prompt=LENGTH.prompt, gen=LENGTH.gen, n_ubatch=LENGTH.prompt)


def _touches_gpu(placement: Placement) -> bool:
    # Without any layer on a GPU the engine repacks host weights: other kernels, which would mislead the fit.
    return set(placement.layer_devices) != {CPU}


def _fits(devices: Sequence[Device], units: Sequence[Unit], placement: Placement) -> bool:
    """Whether weights and some room for caches fit: into the device, and the rest into main memory."""
    on_host = _bytes(units, placement)[1]
    return _on_gpu_fits(devices, units, placement) and on_host < FULL_SHARE * host.memory_bytes()[1]


def _on_gpu_fits(devices: Sequence[Device], units: Sequence[Unit], placement: Placement) -> bool:
    free = [d.free_bytes for d in devices if d.kind in ("gpu", "igpu")]
    return not free or _bytes(units, placement)[0] <= FULL_SHARE * free[0] - GiB // 2


def _bytes(units: Sequence[Unit], placement: Placement) -> tuple[int, int]:
    """Weights on the first GPU and on the host."""
    on_device = on_host = 0
    for unit in units:
        last = len(placement.layer_devices) - 1
        device = placement.layer_devices[last if unit.layer is None else min(unit.layer, last)]
        away = unit.kind in (Kind.EMBEDDING, Kind.LOOKUP) or unit.name in placement.moved or device == CPU
        on_host += unit.size_bytes if away else 0
        on_device += 0 if away else unit.size_bytes + unit.tied_bytes
    return on_device, on_host
