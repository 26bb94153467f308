"""Copies between memories: bandwidth of large ones, latency of small ones; child process only."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter_ns

from planner.errors import EngineProblem
from profiler.operators.arena import MiB
from runtime.engine.ggml import Ggml, Handle

LARGE = 64 * MiB
SMALL = 16 * 1024  # a few activation vectors
ROUNDS = 15
FEW = 5  # of copies that take long: noise is small beside them
LONG_S = 2.0  # for all rounds together


@dataclass(frozen=True, slots=True)
class Copies:
    """What one direction of a link achieves."""

    bandwidth_bytes_per_s: int
    latency_ns: int


def copies(ggml: Ggml, source: Handle, target: Handle, backend: Handle) -> Copies:
    """Time copies from one buffer type to another; `backend` belongs to the device on the far side.

    The latency is that of a small copy with the wait for it, as between two pieces of a graph.
    """
    small = _copy_ns(ggml, source, target, backend, SMALL)
    large = _copy_ns(ggml, source, target, backend, LARGE)
    return Copies(round(LARGE * 1e9 / max(large - small, 1)), max(small, 1))


def _copy_ns(ggml: Ggml, source: Handle, target: Handle, backend: Handle, size: int) -> int:
    lib = ggml.lib
    remote = ggml.buft_name(target).startswith("RPC")
    with ExitStack() as stack:
        ends = []
        for buft in (source, target):
            context = stack.enter_context(ggml.context(2))
            ends.append(ggml.new_tensor(context, "f32", (size // 4,)))
            buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
            if not buffer:
                raise EngineProblem(ggml.name, f"no memory in {ggml.buft_name(buft)}")
            stack.callback(lib.ggml_backend_buffer_free, buffer)
            lib.ggml_backend_buffer_clear(buffer, 0)
        times: list[int] = []
        end = perf_counter_ns() + int(LONG_S * 1e9)
        while len(times) < ROUNDS + 3 and (len(times) < FEW + 3 or perf_counter_ns() < end):
            start = perf_counter_ns()
            lib.ggml_backend_tensor_copy(*ends)
            lib.ggml_backend_synchronize(backend)
            if remote:
                ggml.await_result(ends[1])
            times.append(perf_counter_ns() - start)
        return round(statistics.median(times[3:]))
