"""The figures of one device: best thread count, stream bandwidth, product rates, small operators.

Runs in the measuring child process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from planner.machine.op_time import Case, bytes_read, operations
from profiler.operators.arena import MiB, arena
from profiler.operators.bench import Bench
from profiler.operators.cases import Place
from runtime.engine.ggml import Device, Ggml, Handle
from runtime.stripes.buffer_type import Stripes
from runtime.stripes.ggml_structs import StripesRefused

# Large enough to be far from any fixed cost; q4_K is the commonest type of the files people run.
PRODUCT = Case("MUL_MAT", "q4_K", (4096, 4096), 1)
BATCHED = Case("MUL_MAT", "q4_K", (4096, 4096), 512)
STREAMS = (
    Case("CONT", "f32", (MiB, 4), 1),
    Case("MUL_MAT", "f32", (4096, 2048), 1),
    Case("MUL_MAT", "f16", (4096, 4096), 1),
    Case("MUL_MAT", "q8_0", (4096, 4096), 1),
    PRODUCT,
)
SMALL = Case("RMS_NORM", "f32", (2048,), 1)
SAME = 1.03  # fewer threads win when they are within this of the best


@dataclass(frozen=True, slots=True)
class Figures:
    """What Device records of a profile hold, as measured."""

    stream_bytes_per_s: int
    bandwidth_bytes_per_s: int
    flops_per_s: int
    op_overhead_ns: int
    launch_ns: int


@contextmanager
def bench(
    ggml: Ggml, device: Device, place: Place, threads: int, size_bytes: int, cache_bytes: int
) -> Iterator[Bench]:
    """A device ready to measure with weights of one kind of buffer."""
    with (
        ggml.backend(device, threads) as backend,
        Stripes(ggml) as stripes,
        arena(ggml, _memory(ggml, place, stripes), size_bytes) as made,
    ):
        ready = Bench(ggml, device, backend, made, cache_bytes)
        ready.convert = ggml.all_buffer_types()[place.buffer] if place.kind == "repack" else 0
        ready.launch_ns = _launch_ns(ready)
        yield ready


def _memory(ggml: Ggml, place: Place, stripes: Stripes) -> Handle:
    """The buffer type of an arena; zero-copy reads are timed on the granules that stripes use.

    Kernels read memory pinned in small pages up to a third slower.
    """
    if place.kind == "repack":
        return int(ggml.lib.ggml_backend_cpu_buffer_type())
    if place.kind == "zero-copy":
        with suppress(StripesRefused):
            return stripes.host_type(place.device)
    return ggml.all_buffer_types()[place.buffer]


def measure(at: Bench, limit_s: float) -> Figures:
    """All figures of a device at the thread count it has now; `limit_s` a figure."""
    stream = stream_rate(at, limit_s)
    batched = at.measure(BATCHED, limit_s)
    small = at.measure(SMALL, limit_s)
    return Figures(
        stream_bytes_per_s=stream,
        bandwidth_bytes_per_s=rate(at, PRODUCT, limit_s) or stream,
        flops_per_s=round(operations(BATCHED) * 1e9 / batched.time_ns) if batched else 1,
        op_overhead_ns=small.time_ns if small else 0,
        launch_ns=at.launch_ns,
    )


def best_threads(at: Bench, candidates: tuple[int, ...], limit_s: float) -> tuple[int, dict[int, int]]:
    """The least thread count that decodes within 3 % of the best, and bytes per second of every candidate."""
    rates: dict[int, int] = {}
    for count in candidates:
        at.ggml.set_threads(at.device, at.backend, count)
        rates[count] = rate(at, PRODUCT, limit_s)
    best = max(rates.values())
    chosen = min(count for count, rate in rates.items() if rate * SAME >= best)
    at.ggml.set_threads(at.device, at.backend, chosen)
    return chosen, rates


def thread_candidates(cores: int, logical: int) -> tuple[int, ...]:
    """Powers of two and those between them, all but one core, all cores, and all hardware threads."""
    counts = {n for power in range(10) for n in (2**power, 3 * 2**power) if n <= cores}
    return tuple(sorted(counts | {max(cores - 1, 1), cores, logical}))


def stream_rate(at: Bench, limit_s: float) -> int:
    """Bytes per second of the fastest pass of the fastest way to go through memory."""
    # Vulkan builds crash on a copy of this kind on a software driver; matrix-vector products stream as well.
    cases = STREAMS[1:] if at.device.name.startswith("Vulkan") else STREAMS
    return max(rate(at, case, limit_s, best=True) for case in cases)


def rate(at: Bench, case: Case, limit_s: float, best: bool = False) -> int:
    """Bytes per second of a case, in the median or the best pass; 0 when the device does not support it."""
    sample = at.measure(case, limit_s)
    if sample is None:
        return 0
    moved = bytes_read(case) * (2 if case.op == "CONT" else 1)  # a copy reads and writes
    return round(moved * 1e9 / (sample.best_ns if best else sample.time_ns))


def _launch_ns(at: Bench) -> int:
    """What every graph costs beside its operators: one small operator, less the slope of many."""
    one = at.measure_nodes(SMALL, 1, 0.05)
    many = at.measure_nodes(SMALL, min(256, at.most_nodes), 0.05)
    # Of the fastest passes: on a busy machine the others wait for a processor, which no launch does.
    return max(one.best_ns - many.best_ns, 0)
