"""The measuring child: `python -m profiler.operators.measure`, a request as JSON on stdin, JSON lines out.

Engine failures kill this process only; each line is complete when it appears, so the parent loses
nothing but the case that failed. Requests: {"ask": "figures"} and {"ask": "cases", "jobs": [...]}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from planner.constants import CPU
from planner.errors import AtsplanError, MachineError
from planner.machine.op_time import Case
from profiler import host
from profiler.operators import device_figures, links, thermal
from profiler.operators.arena import MiB
from profiler.operators.bench import Bench
from profiler.operators.cases import NOT_SUPPORTED, Place, job_of
from profiler.operators.time_share import Pace
from runtime.child.serve import Message as Line
from runtime.child.serve import serve_lines
from runtime.engine import gpu_usage, rpc
from runtime.engine.ggml import Device, Ggml
from runtime.engine.libllama import Engine

GPU_ARENA = 1024 * MiB
REMOTE_ARENA = 128 * MiB  # every byte goes over the network first


@dataclass(eq=False)
class NoDevice(MachineError):
    """A device was asked for that the engine does not see."""

    device: str
    here: tuple[str, ...]

    def message(self) -> str:
        return f"no device {self.device} on this machine (there is {', '.join(self.here)})"


def answer(request: Line) -> Iterator[Line]:
    """Lines for a request."""
    engine = Engine.find(request["engine"])
    if request["ask"] == "figures":
        rpc.register(engine, request["devices"])
        return _figures(engine, request)
    rpc.register(engine, [job["place"]["device"] for job in request["jobs"]])
    return _cases(engine.ggml, request)


def wanted(ggml: Ggml, names: Iterable[str]) -> list[Device]:
    """CPU and GPU devices; those named (and always the CPU), or all. NoDevice for one that is not there."""
    asked = {name.casefold(): name for name in names}
    devices = [d for d in ggml.devices() if d.kind in ("cpu", "gpu", "igpu")]
    here = {ggml.plan_name(d).casefold(): d for d in devices}
    absent = asked.keys() - here.keys()
    if absent:
        raise NoDevice(asked[min(absent)], tuple(ggml.plan_name(d) for d in devices))
    return [d for name, d in here.items() if not asked or d.kind == "cpu" or name in asked]


def places(ggml: Ggml, devices: Iterable[Device]) -> tuple[Place, ...]:
    """Where weights may lie for each device, own buffers first."""
    own, other = [], []
    for device in devices:
        for index, name in enumerate(ggml.buffer_types(device)):
            if index == 0:
                own.append(Place(ggml.plan_name(device), name, "own"))
            elif name.endswith("_Host"):
                other.append(Place(CPU, name, "host"))
                if device.name.startswith("CUDA"):  # kernels of other back ends cannot follow a host pointer
                    other.append(Place(device.name, name, "zero-copy"))
            elif "REPACK" in name:
                other.append(Place(device.name, name, "repack"))
    return (*own, *other)


def _figures(engine: Engine, request: Line) -> Iterator[Line]:
    ggml, caches, limit_s = engine.ggml, host.caches(), request["limit_s"]
    before = gpu_usage.used()
    devices = wanted(ggml, request["devices"])
    yield {"kind": "engine", "text": engine.build.text, "moe_cache": engine.has_moe_cache}
    all_places = places(ggml, devices)
    for device in devices:
        place = next(p for p in all_places if p.device == ggml.plan_name(device))
        size = arena_bytes(device, caches.last_bytes)
        with device_figures.bench(ggml, device, place, 0, size, caches.last_bytes) as at:
            threads, rates = _threads(at, request["threads"], limit_s)
            measured = device_figures.measure(at, limit_s)
            taken = _taken(device_id(ggml, device), before, at.arena.size_bytes)
        yield {
            "kind": "device",
            "name": ggml.plan_name(device),
            "device_kind": _kind(device),
            "description": device.description,
            "id": device_id(ggml, device),
            "memory_bytes": device.total_bytes,
            "free_bytes": host.memory_bytes()[1] if device.kind == "cpu" else device.free_bytes,
            "max_alloc_bytes": _max_alloc(ggml, place),
            "context_bytes": max(taken, 0) if device.kind == "gpu" else 0,
            "threads": threads,
            "thread_rates": rates,
            **asdict(measured),
        }
    for place in all_places:
        yield {"kind": "place", "place": asdict(place)}
        if place.kind == "zero-copy":
            yield _zero_copy(ggml, place, limit_s)
    yield from _links(ggml, devices)


def _taken(pci_id: str, before: Mapping[str, int], arena_bytes: int) -> int:
    """What a card holds beside the arena since `before`; the driver opens other cards too."""
    name, now = gpu_usage.name_at(pci_id), gpu_usage.used()
    return now[name] - before[name] - arena_bytes if name in now and name in before else 0


def _zero_copy(ggml: Ggml, place: Place, limit_s: float) -> Line:
    """How fast kernels of a device read pinned host memory."""
    device = ggml.device(place.device)
    with device_figures.bench(ggml, device, place, 0, 256 * MiB, 0) as at:
        rate = device_figures.rate(at, device_figures.PRODUCT, limit_s)
    return {"kind": "zero-copy", "device": place.device, "bytes_per_s": rate}


def _threads(at: Bench, asked: int, limit_s: float) -> tuple[int, dict[int, int]]:
    if at.device.kind != "cpu":
        return 0, {}
    if asked:
        at.ggml.set_threads(at.device, at.backend, asked)
        return asked, {}
    cores = host.cores()
    candidates = device_figures.thread_candidates(cores.physical, cores.usable)
    return device_figures.best_threads(at, candidates, limit_s)


def _links(ggml: Ggml, devices: list[Device]) -> Iterator[Line]:
    """Both directions between the CPU and every other device, and between any two others."""
    far = [d for d in devices if d.kind != "cpu"]
    for device in far:
        bufts = list(ggml.buffer_types(device).items())
        own = bufts[0][1]
        pinned = next((h for name, h in bufts if name.endswith("_Host")), None)
        memory = pinned or ggml.lib.ggml_backend_cpu_buffer_type()
        with ggml.backend(device) as backend:
            for source, target, ends in (
                (memory, own, (CPU, ggml.plan_name(device))),
                (own, memory, (ggml.plan_name(device), CPU)),
            ):
                made = links.copies(ggml, source, target, backend)
                line = {"kind": "link", "source": ends[0], "target": ends[1], **asdict(made)}
                if pinned and ends[0] == CPU:
                    pages = ggml.lib.ggml_backend_cpu_buffer_type()
                    rate = links.copies(ggml, pages, own, backend).bandwidth_bytes_per_s
                    line["mapped_bytes_per_s"] = min(rate, made.bandwidth_bytes_per_s)
                yield line
            for other in far:
                if other is not device:
                    theirs = next(iter(ggml.buffer_types(other).values()))
                    made = links.copies(ggml, theirs, own, backend)
                    pair = {"source": ggml.plan_name(other), "target": ggml.plan_name(device)}
                    yield {"kind": "link", **pair, **asdict(made)}


def _cases(ggml: Ggml, request: Line) -> Iterator[Line]:
    """One line a job: its key and its time, or why there is none."""
    jobs = [job_of(data) for data in request["jobs"]]
    pace = Pace(request["until_s"], len(jobs))
    slowed = thermal.cpu_events()
    cache = host.caches().last_bytes
    for place, group in groupby(jobs, key=lambda job: job.place):
        device = ggml.device(place.device)
        size = arena_bytes(device, cache)
        with device_figures.bench(ggml, device, place, request["threads"], size, cache) as at:
            for job in group:
                yield {"kind": "start", "key": job.key}
                with pace.case() as limit_s:
                    time = _time(at, job.case, limit_s)
                yield {"kind": "case", "key": job.key, **time}
            if place.kind == "own":  # the machine may have been busier when the stream was first measured
                why = list(thermal.gpu_reasons()) if device.kind != "cpu" else []
                rate = device_figures.stream_rate(at, limit_s)
                yield {"kind": "stream", "device": place.device, "bytes_per_s": rate, "slowed": why}
    if (events := thermal.cpu_events() - slowed) > 0:
        yield {"kind": "heat", "events": events}


def _time(at: Bench, case: Case, limit_s: float) -> Line:
    try:
        sample = at.measure(case, limit_s)
    except (AtsplanError, AttributeError, KeyError) as problem:
        return {"skipped": str(problem)}
    return asdict(sample) if sample else {"skipped": NOT_SUPPORTED}


def arena_bytes(device: Device, cache_bytes: int) -> int:
    """Several times the last cache, and no more than a third of what is free."""
    aim = GPU_ARENA if device.kind != "cpu" else max(4 * cache_bytes, 256 * MiB)
    aim = REMOTE_ARENA if device.name.startswith("RPC") else aim
    free = device.free_bytes or aim * 3
    return min(aim, 2048 * MiB, free // 3)


def _kind(device: Device) -> str:
    return "rpc" if device.name.startswith("RPC") else device.kind


def device_id(ggml: Ggml, device: Device) -> str:
    """PCI address of a device, "" when the engine does not say."""
    return host.device_id(ggml.lib, device.handle)


def _max_alloc(ggml: Ggml, place: Place) -> int:
    size = int(ggml.lib.ggml_backend_buft_get_max_size(ggml.all_buffer_types()[place.buffer]))
    return size if size < 2**62 else 0


if __name__ == "__main__":
    serve_lines(answer)
