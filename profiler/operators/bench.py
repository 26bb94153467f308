"""One device at work: builds the graph of a case, runs it until the numbers settle; child process only."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter_ns

from planner.errors import EngineProblem
from planner.machine.op_time import Case
from profiler.operators import graphs
from profiler.operators.arena import Arena, MiB, sane_bytes
from profiler.operators.timings import MIN_PASSES, WARM_PASSES, Sample, reduce, repeat
from runtime.engine.ggml import Device, Ggml, Handle

MAX_NODES = 1024
REMOTE_NODES = 64  # of a device behind a network: every node of a graph is sent, and asked about
PASS_S = 0.08  # longest aim of one pass: long against the clock and the launch, short enough for several
SLOW_PASSES = 3  # a case that takes this many times its time limit is measured once: a software GPU
CONVERTED_BYTES = 64 * MiB  # repacked weights are made for every case, so there are few of them


@dataclass(slots=True)
class Bench:
    """A backend and the memory its weights lie in.

    `convert` names a buffer type that changes the layout of its weights (CPU_REPACK); otherwise
    weights are placed in the arena. `cache_bytes` is the last cache that passes have to defeat.
    """

    ggml: Ggml
    device: Device
    backend: Handle
    arena: Arena
    cache_bytes: int
    convert: Handle = 0
    launch_ns: int = 0

    def measure(self, case: Case, limit_s: float) -> Sample | None:
        """Time of one operator at that case; None when the device does not support it.

        Raises EngineProblem when there is no memory for it. Engine failures end the process.
        """
        fitted, factor = self._fit(case)
        if fitted is None:
            raise EngineProblem(self.ggml.name, f"weights of {case.op} {case.shape} do not fit into memory")
        with self._graph(fitted, 1) as first:
            if first is None:
                return None
            self._run(first)
            start = perf_counter_ns()
            self._run(first)
            once_ns = perf_counter_ns() - start
        if once_ns > SLOW_PASSES * limit_s * 1e9:
            return _times(reduce([once_ns], 1, self.launch_ns), factor)
        return _times(self.measure_nodes(fitted, self._nodes(fitted, once_ns, limit_s), limit_s), factor)

    def measure_nodes(self, case: Case, nodes: int, limit_s: float) -> Sample:
        """Time of one of `nodes` operators in one graph; the device must support it."""
        with ExitStack() as stack:
            # What a small pass leaves in the cache, the next would find there.
            sweep = stack.enter_context(self._sweep()) if nodes < self._leaving_cache(case) else None
            graph = stack.enter_context(self._graph(case, nodes))
            assert graph is not None
            before = (lambda: self._run(sweep)) if sweep is not None else None
            times = repeat(lambda: self._run(graph), limit_s, before)
        return reduce(times, nodes, self.launch_ns)

    @property
    def most_nodes(self) -> int:
        """Of one graph."""
        return REMOTE_NODES if self.device.name.startswith("RPC") else MAX_NODES

    def _run(self, graph: Handle) -> None:
        self.ggml.compute(self.backend, graph)
        if self.device.name.startswith("RPC"):
            self.ggml.await_result(self.ggml.lib.ggml_graph_node(graph, -1))

    def _fit(self, case: Case) -> tuple[Case | None, float]:
        """The case itself, or one of fewer experts and as many fewer tokens when the stack is too large."""
        room = CONVERTED_BYTES * 4 if self.convert else self.arena.size_bytes
        factor = 1.0
        while _weight_bytes(self.ggml, case) * graphs.weights_per_node(case) > room:
            if case.op != "MUL_MAT_ID" or case.shape[2] // 2 < case.used:
                return None, factor
            halved = (*case.shape[:2], case.shape[2] // 2)
            if case.batch > 1:
                factor *= case.batch / max(case.batch // 2, 1)
            case = replace(case, shape=halved, batch=max(case.batch // 2, 1))
        return case, factor

    def _nodes(self, case: Case, once_ns: int, limit_s: float) -> int:
        """Operators of one pass: as many as there is time for, or as leave the cache if that takes few."""
        aim_s = min(PASS_S, limit_s / (WARM_PASSES + MIN_PASSES))
        leaving = self._leaving_cache(case)
        nodes = int(aim_s * 1e9 / once_ns)
        nodes = leaving if nodes < leaving <= PASS_S * 1e9 / once_ns else nodes
        return max(min(self._most_nodes(case), nodes), 1)

    def _leaving_cache(self, case: Case) -> int:
        """The operators that read twice as much as the cache holds; 0 where none have to."""
        if self.device.kind != "cpu" or case.op == "RMS_NORM":
            return 0
        each = _weight_bytes(self.ggml, case) * graphs.weights_per_node(case) / graphs.windows(case)
        return int(2 * self.cache_bytes / max(each, 1)) + 1

    def _most_nodes(self, case: Case) -> int:
        size = _weight_bytes(self.ggml, case) * graphs.weights_per_node(case)
        room = CONVERTED_BYTES if self.convert else self.arena.size_bytes * 15 // 16
        return min(max(room // max(size, 1), 1) * graphs.windows(case), self.most_nodes)

    @contextmanager
    def _sweep(self) -> Iterator[Handle]:
        """A graph of copies all over the arena, twice what the cache holds: what was in it is out."""
        case = Case("CONT", "f32", (MiB, 2), 1)
        copied = min(2 * self.cache_bytes, self.arena.size_bytes)
        with self._graph(case, max(copied // (16 * MiB), 1), plain=True) as graph:
            assert graph is not None
            yield graph

    @contextmanager
    def _graph(self, case: Case, nodes: int, plain: bool = False) -> Iterator[Handle | None]:
        """A graph with its tensors in memory; None when the device cannot compute it."""
        lib = self.ggml.lib
        with ExitStack() as stack:
            weights = stack.enter_context(self.ggml.context(2 * nodes + 8))
            size = _graph_size(nodes * graphs.operators_per_node(case))
            work = stack.enter_context(self.ggml.context(size, size))
            parts = graphs.build(self.ggml, weights, work, case, nodes)
            if parts.weights and self.convert and not plain:
                stack.callback(lib.ggml_backend_buffer_free, self._allocate(weights, self.convert))
            elif parts.weights:
                self.arena.place(parts.weights)
            results = self._results([n for n in parts.nodes if n not in set(parts.weights)])
            if results:
                stack.callback(lib.ggml_backend_buffer_free, results)
            if parts.inputs:
                own = lib.ggml_backend_dev_buffer_type(self.device.handle)
                stack.callback(lib.ggml_backend_buffer_free, self._allocate(work, own))
            if not all(lib.ggml_backend_dev_supports_op(self.device.handle, n) for n in parts.nodes[:1]):
                yield None
                return
            if self.convert and parts.weights and not plain:
                self._set_converted(parts.weights)
            graphs.set_inputs(self.ggml, parts)
            graph = lib.ggml_new_graph_custom(work, size, False)
            for node in parts.nodes:
                lib.ggml_build_forward_expand(graph, node)
            yield graph

    def _allocate(self, context: Handle, buft: Handle) -> Handle:
        buffer = self.ggml.lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
        if not buffer:
            raise EngineProblem(self.ggml.name, f"no memory in {self.ggml.buft_name(buft)}")
        return int(buffer)

    def _results(self, nodes: list[Handle]) -> Handle:
        """Two places that all results share in turn."""
        if not nodes:
            return 0
        lib = self.ggml.lib
        own = lib.ggml_backend_dev_buffer_type(self.device.handle)
        # Nodes of one graph are alike, and a device behind a network is asked for each size.
        alike = {int(lib.ggml_nbytes(node)): node for node in nodes}
        largest = max(int(lib.ggml_backend_buft_get_alloc_size(own, node)) for node in alike.values())
        stride = -(-largest // 4096) * 4096
        buffer = lib.ggml_backend_buft_alloc_buffer(own, 2 * stride)
        if not buffer:
            raise EngineProblem(self.ggml.name, f"no memory for results on {self.device.name}")
        base = int(lib.ggml_backend_buffer_get_base(buffer))
        for index, node in enumerate(nodes):
            lib.ggml_backend_tensor_alloc(buffer, node, base + index % 2 * stride)
        return int(buffer)

    def _set_converted(self, tensors: list[Handle]) -> None:
        size = int(self.ggml.lib.ggml_nbytes(tensors[0]))
        pattern = (sane_bytes(min(size, MiB)) * (size // MiB + 1))[:size]
        for tensor in tensors:
            self.ggml.lib.ggml_backend_tensor_set(tensor, c.cast(c.c_char_p(pattern), c.c_void_p), 0, size)


def _times(sample: Sample, factor: float) -> Sample:
    ns = (round(n * factor) for n in (sample.time_ns, sample.spread_ns, sample.best_ns))
    time_ns, spread_ns, best_ns = ns
    return Sample(time_ns, spread_ns, sample.samples, best_ns)


def _graph_size(nodes: int) -> int:
    """Room for nodes, and for as many leaves: weights, indices and shared inputs."""
    return 3 * nodes + 16


def _weight_bytes(ggml: Ggml, case: Case) -> int:
    """Bytes of one weight tensor of a case."""
    if case.op == "RMS_NORM":
        return 0
    kind, shape = graphs.weight_shape(case)
    with ggml.context(1) as context:
        return int(ggml.lib.ggml_nbytes(ggml.new_tensor(context, kind, shape)))
