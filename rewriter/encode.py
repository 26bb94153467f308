"""New metadata entries and tensor infos as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from planner.model.gguf.magic import MAGIC

U16, U32, STRING_TYPE, ARRAY_TYPE, U64, I32 = 2, 4, 8, 9, 10, 5


def head(version: int, n_tensors: int, n_kvs: int) -> bytes:
    """The first 24 bytes of a file."""
    return MAGIC + struct.pack("<IQQ", version, n_tensors, n_kvs)


def string(text: str) -> bytes:
    """A length and UTF-8."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def kv_string(key: str, value: str) -> bytes:
    """A text entry."""
    return string(key) + struct.pack("<I", STRING_TYPE) + string(value)


def kv_u16(key: str, value: int) -> bytes:
    """An unsigned 16-bit entry."""
    return string(key) + struct.pack("<IH", U16, value)


def kv_u32(key: str, value: int) -> bytes:
    """An unsigned 32-bit entry."""
    return string(key) + struct.pack("<II", U32, value)


def kv_i32(key: str, value: int) -> bytes:
    """A signed 32-bit entry."""
    return string(key) + struct.pack("<Ii", I32, value)


def kv_u64(key: str, value: int) -> bytes:
    """An unsigned 64-bit entry."""
    return string(key) + struct.pack("<IQ", U64, value)


def kv_u32_array(key: str, values: Sequence[int]) -> bytes:
    """An array of unsigned 32-bit numbers."""
    return string(key) + struct.pack(f"<IIQ{len(values)}I", ARRAY_TYPE, U32, len(values), *values)


def tensor_info(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """One entry of the tensor table; `dims` as stored, `offset` from the start of the data."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
