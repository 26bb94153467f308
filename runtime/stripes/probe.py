"""Whether stripes are possible here, proven on a small tensor in a child process.

A tensor of experts is laid across VRAM and host memory, written, read back, and multiplied; the product
must be bit for bit that of the same tensor in ordinary VRAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import AtsplanError
from planner.site import Site, SiteKind
from runtime.child.ask import ask
from runtime.child.serve import serve
from runtime.engine.ggml import Ggml, Handle
from runtime.engine.libllama import Engine
from runtime.stripes.buffer_type import Stripes
from runtime.stripes.ggml_structs import StripesRefused

_WIDTH, _ROWS, _EXPERTS, _USED, _HOT = 1024, 1024, 16, 4, 7  # q8_0: 17 MiB, the boundary inside a granule


@dataclass(frozen=True, slots=True)
class Possible:
    """The answer for one GPU."""

    device: str
    why_not: str  # "" when stripes work
    host_access: bool  # whether loading may write host memory directly


def check(engine: Engine) -> tuple[Possible, ...]:
    """Try stripes on every GPU of an engine, in a child process; an abort there becomes a reason."""
    found = []
    for device in engine.ggml.devices():
        if device.kind in ("gpu", "igpu"):
            try:
                answer = ask(
                    "runtime.stripes.probe", {"engine": str(engine.path), "device": device.name}, engine.label
                )
            except AtsplanError as problem:
                answer = {"why_not": str(problem), "host_access": False}
            found.append(Possible(device.name, answer["why_not"], answer["host_access"]))
    return tuple(found)


def try_out(ggml: Ggml, device: str) -> bool:
    """Run the proof; whether the processor can write host granules. Raises StripesRefused."""
    name = str(Site(SiteKind.STRIPE, device, _HOT))
    with Stripes(ggml) as stripes:
        striped = stripes.buffer_type(name)
        plain = ggml.lib.ggml_backend_dev_buffer_type(ggml.device(device).handle)
        want, got = (_product(ggml, device, buft, stripes) for buft in (plain, striped))
        stripes.check()
        if want != got:
            raise StripesRefused(device, "a product over a stripe differs from the one over plain memory")
        return stripes.gpu(device).host_access


def _product(ggml: Ggml, device: str, buft: Handle, stripes: Stripes) -> bytes:
    """Multiply experts on both sides of the boundary; the weights' memory is of type `buft`."""
    import numpy as np

    lib, draw = ggml.lib, np.random.default_rng(1)
    weights = draw.integers(1, 60, (_EXPERTS * _ROWS * _WIDTH // 32, 34), np.uint8)  # q8_0 blocks
    inputs = draw.standard_normal((_WIDTH,)).astype(np.float32)
    chosen = np.asarray([0, _HOT - 1, _HOT, _EXPERTS - 1], np.int32)
    with ggml.context(1) as held, ggml.context(8, 4) as work, ggml.backend(ggml.device(device)) as backend:
        w = ggml.new_tensor(held, "q8_0", (_WIDTH, _ROWS, _EXPERTS))
        x = ggml.new_tensor(work, "f32", (_WIDTH, 1, 1))
        ids = ggml.new_tensor(work, "i32", (_USED, 1))
        y = lib.ggml_mul_mat_id(work, w, x, ids)
        graph = lib.ggml_new_graph_custom(work, 4, False)
        lib.ggml_build_forward_expand(graph, y)
        buffers = [_allocated(ggml, device, held, buft, stripes)]
        own = lib.ggml_backend_dev_buffer_type(ggml.device(device).handle)
        buffers.append(_allocated(ggml, device, work, own, stripes))
        try:
            for tensor, data in ((w, weights), (x, inputs), (ids, chosen)):
                lib.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
            stripes.check()
            back = np.empty_like(weights)
            lib.ggml_backend_tensor_get(w, back.ctypes.data, 0, back.nbytes)
            if not np.array_equal(back, weights):
                raise StripesRefused(device, "bytes written to a stripe did not come back")
            ggml.compute(backend, graph)
            result = np.empty((_USED, _ROWS), np.float32)
            lib.ggml_backend_tensor_get(y, result.ctypes.data, 0, result.nbytes)
            return result.tobytes()
        finally:
            for buffer in buffers:
                lib.ggml_backend_buffer_free(buffer)


def _allocated(ggml: Ggml, device: str, context: Handle, buft: Handle, stripes: Stripes) -> Handle:
    buffer = ggml.lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
    stripes.check()
    if not buffer:
        raise StripesRefused(device, "there is no memory for the trial")
    return int(buffer)


def _check_here(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        host_access = try_out(Engine.find(request["engine"]).ggml, request["device"])
    except StripesRefused as refused:
        return {"why_not": refused.why, "host_access": False}
    return {"why_not": "", "host_access": host_access}


if __name__ == "__main__":
    serve(_check_here)
