"""Whole-model runs that calibrate a profile: a generated model for the machine, then the model itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.inventory import Inventory
from planner.profile import Profile
from planner.timing import Case
from planner.units import Kind, units_of
from planner.workload import Workload
from profiler import calibrate, host, runner, synth
from profiler.calibrate import Run
from profiler.cases import Place, cases_of
from profiler.placements import Placement, calibrating, spec_of
from profiler.runner import Length

GiB = 2**30
FULL_SHARE = 0.85  # of free device memory that a calibrating run may fill with weights
LENGTH = Length(prompt=64, gen=16, repeats=2)
RUNS = 3  # of a real model
DOUBTFUL_PPM = 100_000

# As many layers as real models have, since the fixed costs go by layers; experts so small that loading
# takes a second, and so many that a token's share of them does not stay in the caches.
GENERATED = synth.SynthSpec(
    "qwen3moe", n_layers=24, n_embd=1024, n_head=16, n_head_kv=4, head_dim=64, n_expert=32, n_used=8,
    n_ff_exp=512, n_vocab=8192, type="q4_K", types={"output": "q6_K"}, seed=7, name="calibration",
)  # fmt: skip

Say = Callable[[str], None]


def generated(folder: Path) -> Path:
    """The generated model that calibrates machines with a GPU, written into a folder; 0.7 GB."""
    return synth.write(path_in(folder), GENERATED)


def path_in(folder: Path) -> Path:
    """Where `generated` writes."""
    return folder / "calibration.gguf"


def has_gpu(places: Sequence[Place]) -> bool:
    """Whether there is anything to divide a model between."""
    return any(place.device != "CPU" for place in places)


def generated_cases(inventory: Inventory) -> tuple[Case, ...]:
    """The operators of the generated model that its runs need: one token at shallow depth."""
    return tuple(c for c in cases_of(inventory, max_depth=4096) if c.batch == 1)


def machine(profile: Profile, path: Path, inventory: Inventory, engine: str | None, say: Say) -> Profile:
    """The profile with the machine's own calibration. Raises EngineProblem when no run succeeds."""
    gpus = tuple(d.name for d in profile.devices if d.kind in ("gpu", "igpu"))
    placements = [p for p in calibrating(inventory, gpus, brief=False) if not gpus or _touches_gpu(p)]
    runs = _measure(profile, path, inventory, engine, placements, say)
    return calibrate.machine(inventory, workload(), profile, runs) if runs else profile


def model(profile: Profile, path: Path, inventory: Inventory, engine: str | None, say: Say) -> Profile:
    """The profile with a calibration of one model, from up to three runs that fit into memory."""
    gpus = tuple(d.name for d in profile.devices if d.kind in ("gpu", "igpu"))
    placements = [p for p in calibrating(inventory, gpus[:1], brief=False) if not gpus or _touches_gpu(p)]
    fitting = [p for p in placements if _fits(profile, inventory, p)][:RUNS]
    runs = _measure(profile, path, inventory, engine, fitting, say)
    return calibrate.model(inventory, workload(), profile, runs) if runs else profile


def with_doubts(profile: Profile) -> Profile:
    """The profile with a warning for every calibration that does not explain its own runs."""
    doubts = tuple(
        f"calibration of {c.model[:19] or 'the generated model'}: one of {c.runs} runs is off by "
        f"{c.residual_ppm / 1e4:.0f} %: the machine was not steady, or something else costs time"
        for c in profile.calibrations
        if c.residual_ppm > DOUBTFUL_PPM
    )
    return profile.model_copy(update={"warnings": (*profile.warnings, *doubts)})


def workload() -> Workload:
    """What the calibrating runs do; the depth is that of the middle token."""
    depth = LENGTH.prompt + LENGTH.gen // 2
    return Workload(n_ctx=512, depth=depth, prompt=LENGTH.prompt, gen=LENGTH.gen, n_ubatch=LENGTH.prompt)


def _touches_gpu(placement: Placement) -> bool:
    # Without any layer on a GPU the engine repacks host weights: other kernels, which would mislead the fit.
    return set(placement.layer_devices) != {"CPU"}


def _measure(
    profile: Profile,
    path: Path,
    inventory: Inventory,
    engine: str | None,
    placements: Sequence[Placement],
    say: Say,
) -> list[Run]:
    threads = profile.device("CPU").threads
    load = workload()
    specs = {p.name: spec_of(inventory, p, load, threads) for p in placements}
    if len(profile.devices) == 1:  # nothing is copied to a device: map the file, as a later run will
        specs = {name: replace(spec, use_mmap=True) for name, spec in specs.items()}

    def tell(line: runner.Line) -> None:
        say(f"{line['key']}{': ' + line['skipped'] if 'skipped' in line else ''}")

    lines = runner.whole_model(path, specs, engine, LENGTH, tell)
    return [
        Run(p, round(statistics.median(lines[p.name]["decode_ns"])))
        for p in placements
        if "decode_ns" in lines[p.name]
    ]


def _fits(profile: Profile, inventory: Inventory, placement: Placement) -> bool:
    """Whether weights and some room for caches fit: into the device, and the rest into main memory."""
    on_device, on_host = 0, 0
    for unit in units_of(inventory).units:
        device = placement.layer_devices[
            -1 if unit.layer is None else min(unit.layer, len(placement.layer_devices) - 1)
        ]
        away = unit.kind in (Kind.EMBEDDING, Kind.LOOKUP) or unit.name in placement.moved or device == "CPU"
        on_host += unit.size_bytes if away else 0
        on_device += 0 if away else unit.size_bytes + unit.tied_bytes
    free = [d.free_bytes for d in profile.devices if d.kind in ("gpu", "igpu")]
    if free and on_device > FULL_SHARE * free[0] - GiB // 2:
        return False
    return on_host < FULL_SHARE * host.memory_bytes()[1]
