"""How fast CUDA kernels multiply experts that lie in pinned host memory, by type; a line of JSON a case.

    python -m benchmarks.gpu.zero_copy --engine BUILD_FOLDER [--types q4_K,mxfp4] [--tokens 1,512]

Each case is MUL_MAT_ID over a tensor of 128 experts, 8 used, all of it in host memory (K = 0) or all of it
in VRAM (K = 128) of one striped buffer type; the graph holds several with different experts.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import click
import numpy as np

from planner.site import Site, SiteKind
from profiler.synth.bytes import Source
from runtime.engine.ggml import Ggml, Handle
from runtime.engine.libllama import Engine
from runtime.stripes.buffer_type import Stripes

WIDTH, ROWS, EXPERTS, USED, NODES = 2048, 768, 128, 8, 12


@click.command()
@click.option("--engine", required=True)
@click.option("--types", default="q4_0,q4_K,q5_K,q6_K,q8_0,mxfp4,f16", show_default=True)
@click.option("--tokens", default="1,8,512", show_default=True)
@click.option("--repeats", default=8, show_default=True)
def main(engine: str, types: str, tokens: str, repeats: int) -> None:
    """Measure and print."""
    ggml = Engine.find(engine).ggml
    for type_name in types.split(","):
        for k in (0, EXPERTS):
            for n in map(int, tokens.split(",")):
                print(json.dumps(measure(ggml, type_name, k, n, repeats)), flush=True)


def measure(ggml: Ggml, type_name: str, k: int, n_tokens: int, repeats: int) -> dict[str, object]:
    """Median time of one product, and the weight bytes it touches per second."""
    lib, device = ggml.lib, ggml.device("CUDA0")
    draw = np.random.default_rng(5)
    with ExitStack() as stack:
        stripes = stack.enter_context(Stripes(ggml))
        backend = stack.enter_context(ggml.backend(device))
        held, work = stack.enter_context(ggml.context(1)), stack.enter_context(ggml.context(64, 64))
        weights = ggml.new_tensor(held, type_name, (WIDTH, ROWS, EXPERTS))
        inputs = ggml.new_tensor(work, "f32", (WIDTH, 1, n_tokens))
        choices, graph = [], lib.ggml_new_graph_custom(work, 64, False)
        for _ in range(NODES):
            choices.append(ggml.new_tensor(work, "i32", (USED, n_tokens)))
            lib.ggml_build_forward_expand(graph, lib.ggml_mul_mat_id(work, weights, inputs, choices[-1]))
        for context, buft in (
            (held, stripes.buffer_type(str(Site(SiteKind.STRIPE, "CUDA0", k)))),
            (work, lib.ggml_backend_dev_buffer_type(device.handle)),
        ):
            buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
            stripes.check()
            stack.callback(lib.ggml_backend_buffer_free, buffer)
        fill(ggml, type_name, weights, inputs, draw)
        touched = 0
        for one in choices:
            ids = np.argsort(draw.random((n_tokens, EXPERTS)), axis=1)[:, :USED].astype(np.int32).copy()
            lib.ggml_backend_tensor_set(one, ids.ctypes.data, 0, ids.nbytes)
            touched += len(np.unique(ids))
        times = []
        for _ in range(repeats + 3):
            start = time.perf_counter_ns()
            ggml.compute(backend, graph)
            times.append(time.perf_counter_ns() - start)
        slab = lib.ggml_nbytes(weights) // EXPERTS
    ns = float(np.median(times[3:]))
    return {
        "type": type_name,
        "in_vram": k,
        "tokens": n_tokens,
        "us_per_op": round(ns / NODES / 1e3, 1),
        "bytes_per_op": touched * slab // NODES,
        "gb_per_s": round(touched * slab / ns, 1),
    }


def fill(ggml: Ggml, type_name: str, weights: Handle, inputs: Handle, draw: np.random.Generator) -> None:
    """Random weights and inputs."""
    at = 0
    for piece in Source(1).chunks("w", type_name, (WIDTH, ROWS, EXPERTS), 0.02):
        data = np.ascontiguousarray(piece)
        ggml.lib.ggml_backend_tensor_set(weights, data.ctypes.data, at, data.nbytes)
        at += data.nbytes
    values = draw.standard_normal(ggml.lib.ggml_nbytes(inputs) // 4).astype(np.float32)
    ggml.lib.ggml_backend_tensor_set(inputs, values.ctypes.data, 0, values.nbytes)


if __name__ == "__main__":
    main()
