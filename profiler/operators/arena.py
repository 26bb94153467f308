"""A large buffer full of sane numbers, in which weights of any type and shape are placed; child process only.

One arena a device and buffer kind replaces an allocation for every case. It is several times larger than
the last cache, so that weights spread over it come from memory. Every byte is 0x30 to 0x3f: read as f16,
bf16, f32, or as the scale of any quantised block this is a positive number of ordinary size, so that no
kernel meets NaN or denormal arithmetic, and no bytes have to be made for each type.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from planner.errors import EngineProblem
from runtime.engine.ggml import Ggml, Handle

MiB = 2**20
_CHUNK = 16 * MiB
_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS


@dataclass(slots=True)
class Arena:
    """An allocated buffer; `place` gives tensors their memory in it."""

    ggml: Ggml
    buft: Handle
    buffer: Handle
    size_bytes: int

    def stride(self, tensor: Handle) -> int:
        """Bytes one such tensor takes, alignment and padding included."""
        alignment = max(int(self.ggml.lib.ggml_backend_buft_get_alignment(self.buft)), 256)
        size = int(self.ggml.lib.ggml_backend_buft_get_alloc_size(self.buft, tensor))
        return -(-size // alignment) * alignment

    def room(self, tensor: Handle) -> int:
        """How many such tensors fit side by side."""
        return self.size_bytes // self.stride(tensor)

    def place(self, tensors: Sequence[Handle]) -> None:
        """Lay equal tensors evenly over the whole arena."""
        base = int(self.ggml.lib.ggml_backend_buffer_get_base(self.buffer))
        stride = self.stride(tensors[0])
        step = self.size_bytes // len(tensors) // stride * stride
        for index, tensor in enumerate(tensors):
            self.ggml.lib.ggml_backend_tensor_alloc(self.buffer, tensor, base + index * step)


@contextmanager
def arena(ggml: Ggml, buft: Handle, size_bytes: int) -> Iterator[Arena]:
    """An arena of at most `size_bytes`, halved until it can be allocated; freed at the end."""
    limit = int(ggml.lib.ggml_backend_buft_get_max_size(buft))
    size_bytes = min(size_bytes, limit) // _CHUNK * _CHUNK
    buffer = 0
    while size_bytes >= _CHUNK and not buffer:
        buffer = ggml.lib.ggml_backend_buft_alloc_buffer(buft, size_bytes) or 0
        size_bytes = size_bytes if buffer else size_bytes // 2 // _CHUNK * _CHUNK
    if not buffer:
        raise EngineProblem(ggml.name, f"no memory for weights in {ggml.buft_name(buft)}")
    try:
        ggml.lib.ggml_backend_buffer_set_usage(buffer, _WEIGHTS)
        _fill(ggml, buffer, size_bytes)
        yield Arena(ggml, buft, buffer, size_bytes)
    finally:
        ggml.lib.ggml_backend_buffer_free(buffer)


def sane_bytes(size_bytes: int) -> bytes:
    """Bytes that every type reads as ordinary positive numbers."""
    import numpy as np

    draw = np.random.Generator(np.random.SFC64(20260101))
    return (draw.integers(0, 16, size_bytes, np.uint8) | 0x30).tobytes()


def _fill(ggml: Ggml, buffer: Handle, size_bytes: int) -> None:
    pattern = sane_bytes(_CHUNK)
    source = c.cast(c.c_char_p(pattern), c.c_void_p)
    base = int(ggml.lib.ggml_backend_buffer_get_base(buffer))
    with ggml.context(size_bytes // _CHUNK + 1) as context:
        for offset in range(0, size_bytes, _CHUNK):
            chunk = ggml.new_tensor(context, "i8", (_CHUNK,))
            ggml.lib.ggml_backend_tensor_alloc(buffer, chunk, base + offset)
            ggml.lib.ggml_backend_tensor_set(chunk, source, 0, _CHUNK)
