"""What an engine is and can do on this machine, asked in a child process and told with what is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.errors import AtsplanError, EngineProblem
from runtime.child.ask import ask
from runtime.child.serve import serve
from runtime.engine import locate
from runtime.engine.libllama import Build, Engine
from runtime.hybrid import build
from runtime.load import dry_run, engine_fit
from runtime.stripes import probe
from runtime.tools.llama_server import find_program
from runtime.verify import loaded_placement


@dataclass(frozen=True, slots=True)
class Seen:
    """One device."""

    name: str
    kind: str
    description: str
    free_bytes: int
    total_bytes: int
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ability:
    """One thing this program can do with an engine, or why it cannot and what would help."""

    name: str
    works: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found of one engine."""

    build: Build
    devices: tuple[Seen, ...]
    abilities: tuple[Ability, ...]


def examine(engine: str | None, llama_h: Path | None, probe_model: Path | None = None) -> Findings:
    """Load an engine in a child process and see what it can do.

    `probe_model` is a small model to decode a token with. Raises EngineProblem when there is no engine.
    """
    place = locate.find(engine)
    request = {"engine": engine, "llama_h": str(llama_h) if llama_h else None}
    answer = ask("runtime.doctor", request, place.label)
    devices = tuple(Seen(**{**d, "buffers": tuple(d["buffers"])}) for d in answer["devices"])
    abilities = [Ability(**each) for each in answer["abilities"]]
    if probe_model is not None:
        abilities.insert(0, _computes(engine, llama_h, probe_model))
    abilities += [_server(engine), _gpu_figures()]
    return Findings(Build(**answer["build"]), devices, tuple(abilities))


def others(chosen: Path) -> list[tuple[str, str]]:
    """Other engines installed here: label and path."""
    return [(p.label, str(p.path)) for p in locate.installed() if p.path != chosen]


def _computes(engine: str | None, llama_h: Path | None, model: Path) -> Ability:
    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.worker import Ask, work

    spec = LoadSpec((), (), 0, (), Workload(n_ctx=64, n_batch=16, n_ubatch=16), threads=1)
    try:
        work(engine, llama_h, model, spec, [Ask((1, 2, 3), 2, ignore_end=True)], timeout_s=60)
    except AtsplanError as problem:
        return Ability("computes on this processor", False, str(problem))
    return Ability("computes on this processor", True)


def _server(engine: str | None) -> Ability:
    try:
        find_program(engine)
    except EngineProblem as problem:
        return Ability("serve (llama-server)", False, problem.why)
    return Ability("serve (llama-server)", True)


def _gpu_figures() -> Ability:
    from runtime.engine.gpu_usage import available

    if available():
        return Ability("GPU utilisation in bench", True)
    return Ability("GPU utilisation in bench", False, "needs an NVIDIA driver")


def _examine_here(request: Mapping[str, Any]) -> dict[str, Any]:
    engine = Engine.find(request["engine"], Path(request["llama_h"]) if request["llama_h"] else None)
    devices = [
        Seen(d.name, d.kind, d.description, d.free_bytes, d.total_bytes, tuple(engine.ggml.buffer_types(d)))
        for d in engine.ggml.devices()
    ]
    return {
        "build": asdict(engine.build),
        "devices": [asdict(d) for d in devices],
        "abilities": [asdict(a) for a in _abilities(engine, devices)],
    }


def _abilities(engine: Engine, devices: list[Seen]) -> list[Ability]:
    gpus = [d.name for d in devices if d.kind in ("gpu", "igpu")]
    no_gpu = "no device beside the CPU: a build with CUDA, Vulkan or RPC, given with --engine PATH"
    found = [
        _ability("exact memory by dry run", lambda: dry_run.supported(engine)),
        _ability("proof of every weight's device", lambda: loaded_placement.supported(engine)),
        _ability("comparison with --fit", lambda: engine_fit.supported(engine), "" if gpus else no_gpu),
        Ability("MoE cache", engine.has_moe_cache and bool(gpus), _no_cache(engine, bool(gpus), no_gpu)),
        _remote(engine),
        _slots(),
    ]
    stripes = probe.check(engine)
    if not stripes:
        found.append(Ability("striped experts", False, no_gpu))
    return found + [Ability(f"striped experts on {s.device}", not s.why_not, s.why_not) for s in stripes]


def _ability(name: str, supported: Callable[[], bool], why_not: str = "") -> Ability:
    if why_not:
        return Ability(name, False, why_not)
    works = supported()
    return Ability(name, works, "" if works else "this build does not export what it takes; use a newer one")


def _no_cache(engine: Engine, gpu: bool, no_gpu: str) -> str:
    if not engine.has_moe_cache:
        return "this build has none: it came with b11480"
    return "" if gpu else no_gpu


def _remote(engine: Engine) -> Ability:
    if engine.has("ggml_backend_rpc_add_server"):
        return Ability("remote devices (RPC)", True)
    return Ability("remote devices (RPC)", False, "this build has no RPC backend")


def _slots() -> Ability:
    """Hybrid experts need the native library; nothing is built to find out."""
    why_not = build.available() if sys.platform.startswith("linux") else "Linux only"
    return Ability("experts in slots", not why_not, why_not)


def cores() -> str:
    """Cores this process may use, of those the machine has."""
    from runtime.load.load_params import usable_cores

    return f"{usable_cores()} of {os.cpu_count() or 0}"


if __name__ == "__main__":
    serve(_examine_here)
