"""Random tensor bytes in ggml's block formats: valid, zero-mean, of a chosen standard deviation, and fast.

The blocks are drawn directly (random quants, fixed scales), not quantised from floats: any such file is
as valid as a converted one, and gigabytes take seconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

POOL_BYTES = 16 * 2**20  # longer tensors repeat this much random data, rotated


@dataclass(frozen=True, slots=True)
class Block:
    """One ggml block format and how to fill it."""

    number: int  # ggml's type number
    elements: int
    size_bytes: int
    spread: float  # standard deviation of one element when the scale is 1
    stamp: Callable[[Bytes, float], None]  # writes the scale fields into blocks [n, size_bytes]
    peak: Callable[[Bytes], None]  # sets element 0 of each block to its largest value


def _put(blocks: Bytes, at: int, *values: float) -> None:
    import numpy as np

    raw = np.asarray(values, np.float16).view(np.uint8)
    blocks[:, at : at + raw.size] = raw


def _stamp_q4_0(blocks: Bytes, scale: float) -> None:
    _put(blocks, 0, scale)


def _stamp_q4_k(blocks: Bytes, scale: float) -> None:
    _put(blocks, 0, scale / 32, 7.5 * scale / 32)
    blocks[:, 4:12] = 160  # eight 6-bit scales and eight 6-bit minima, all 32
    blocks[:, 12:16] = 0


def _stamp_q5_k(blocks: Bytes, scale: float) -> None:
    _put(blocks, 0, scale / 32, 15.5 * scale / 32)
    blocks[:, 4:12] = 160
    blocks[:, 12:16] = 0


def _stamp_q6_k(blocks: Bytes, scale: float) -> None:
    blocks[:, 192:208] = 32  # int8 scales
    _put(blocks, 208, scale / 32)


def _stamp_mxfp4(blocks: Bytes, scale: float) -> None:
    import numpy as np

    blocks[:, 0] = int(np.clip(np.round(np.log2(scale)) + 127, 0, 254))  # E8M0


def _peak_q4_0(blocks: Bytes) -> None:
    blocks[:, 2] |= 0x0F


def _peak_q8_0(blocks: Bytes) -> None:
    blocks[:, 2] = 127


def _peak_q4_k(blocks: Bytes) -> None:
    blocks[:, 16] |= 0x0F


def _peak_q5_k(blocks: Bytes) -> None:
    blocks[:, 16] |= 0x01
    blocks[:, 48] |= 0x0F


def _peak_q6_k(blocks: Bytes) -> None:
    blocks[:, 0] |= 0x0F
    blocks[:, 128] |= 0x03


def _peak_mxfp4(blocks: Bytes) -> None:
    blocks[:, 1] = (blocks[:, 1] & 0xF0) | 0x07


# Deviation of a uniform draw: sqrt((n^2 - 1) / 12) for n levels; mxfp4 has the levels 0 0.5 1 1.5 2 3 4 6.
BLOCKS = {
    "q4_0": Block(2, 32, 18, 4.61, _stamp_q4_0, _peak_q4_0),
    "q8_0": Block(8, 32, 34, 73.9, _stamp_q4_0, _peak_q8_0),
    "q4_K": Block(12, 256, 144, 4.61, _stamp_q4_k, _peak_q4_k),
    "q5_K": Block(13, 256, 176, 9.23, _stamp_q5_k, _peak_q5_k),
    "q6_K": Block(14, 256, 210, 18.5, _stamp_q6_k, _peak_q6_k),
    "mxfp4": Block(39, 32, 17, 2.93, _stamp_mxfp4, _peak_mxfp4),
}
PLAIN = {"f32": (0, 4), "f16": (1, 2), "bf16": (30, 2)}  # type number, bytes of an element
TYPES = (*PLAIN, *BLOCKS)
PEAK = 1.65  # the largest value of a block, in standard deviations, about the same in every format


def fitting_type(name: str, ne0: int) -> str:
    """`name`, or the nearest type whose blocks divide a row of `ne0` elements."""
    if name in PLAIN or ne0 % BLOCKS[name].elements == 0:
        return name
    return "q8_0" if ne0 % 32 == 0 else "f16"


def type_number(name: str) -> int:
    """ggml's number of a type."""
    return PLAIN[name][0] if name in PLAIN else BLOCKS[name].number


def size_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; ne0 must be a multiple of the block."""
    elements = 1
    for size in shape:
        elements *= size
    if name in PLAIN:
        return elements * PLAIN[name][1]
    return elements // BLOCKS[name].elements * BLOCKS[name].size_bytes


@dataclass(slots=True)
class Source:
    """Random blocks of one seed; the bytes of a tensor depend on seed, name, shape and type alone."""

    seed: int
    pools: dict[tuple[str, float], Bytes] = field(default_factory=dict)

    def generator(self, label: str) -> np.random.Generator:
        """A generator of its own for every label."""
        import numpy as np

        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(label.encode())]))

    def chunks(self, label: str, type_: str, shape: tuple[int, ...], deviation: float) -> Iterator[Bytes]:
        """The bytes of a tensor of random weights, in pieces of at most POOL_BYTES."""
        total = size_bytes(type_, shape)
        if total <= POOL_BYTES // 4:
            yield self._blocks(label, type_, total, deviation)
            return
        unit = PLAIN[type_][1] if type_ in PLAIN else BLOCKS[type_].size_bytes
        pool = self._pool(type_, deviation)
        start = int(self.generator(label).integers(len(pool) // unit)) * unit
        while total > 0:
            piece = pool[start : start + total]
            yield piece
            total -= piece.size
            start = 0

    def matrix(self, label: str, type_: str, shape: tuple[int, ...], deviation: float) -> Bytes:
        """The same bytes at once, a row of the tensor a row."""
        import numpy as np

        data = np.concatenate(list(self.chunks(label, type_, shape, deviation)))
        return data.reshape(-1, size_bytes(type_, shape[:1]))

    def _pool(self, type_: str, deviation: float) -> Bytes:
        key = (type_, deviation)
        if key not in self.pools:
            unit = PLAIN[type_][1] if type_ in PLAIN else BLOCKS[type_].size_bytes
            self.pools[key] = self._blocks(f"pool {key}", type_, POOL_BYTES // unit * unit, deviation)
        return self.pools[key]

    def _blocks(self, label: str, type_: str, total: int, deviation: float) -> Bytes:
        import numpy as np

        draw = self.generator(label)
        if type_ in PLAIN:
            values = draw.standard_normal(total // PLAIN[type_][1], np.float32) * np.float32(deviation)
            return plain_bytes(values, type_)
        block = BLOCKS[type_]
        data = np.frombuffer(bytearray(draw.bytes(total)), np.uint8)
        block.stamp(data.reshape(-1, block.size_bytes), deviation / block.spread)
        return data


def plain_bytes(values: NDArray[np.float32], type_: str) -> Bytes:
    """Floats as the bytes of f32, f16 or bf16."""
    import numpy as np

    if type_ == "f16":
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return data if type_ == "f32" else np.ascontiguousarray(data.reshape(-1, 4)[:, 2:]).reshape(-1)


def raise_first(rows: Bytes, type_: str, deviation: float) -> None:
    """Set element 0 of every row to PEAK deviations, in place: a constant direction in an embedding."""
    import numpy as np

    if type_ in PLAIN:
        raw = plain_bytes(np.asarray([PEAK * deviation], np.float32), type_)
        rows[:, : raw.size] = raw
        return
    block = BLOCKS[type_]
    block.peak(rows[:, : block.size_bytes])
