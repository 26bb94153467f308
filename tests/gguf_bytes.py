"""GGUF files written out by hand with struct.pack: the tests' own encoder, and damage of every kind."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"}
_CODES |= {U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class T:
    """A tensor; `gap` bytes of payload are followed by padding to the alignment."""

    name: str
    dims: tuple[int, ...]
    kind: int
    payload: bytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str | bytes, kind: int, value: object) -> bytes:
    """A key-value; arrays are given as (element type, values)."""
    head = text(key) + struct.pack("<I", kind)
    if kind == ARR:
        assert isinstance(value, tuple)
        element, values = value
        items = b"".join(_scalar(element, item) for item in values)
        return head + struct.pack("<IQ", element, len(values)) + items
    return head + _scalar(kind, value)


def _scalar(kind: int, value: object) -> bytes:
    return text(value) if kind == STR else struct.pack("<" + _CODES[kind], value)  # type: ignore[arg-type]


def arch(name: str = "llama") -> bytes:
    return kv("general.architecture", STR, name)


def info(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    kvs: Sequence[bytes] = (),
    tensors: Sequence[T] = (),
    alignment: int = 32,
    version: int = 3,
    tail: bool = True,
) -> bytes:
    """A whole file; `tail` pads the last tensor too, as llama.cpp and gguf-py do."""
    infos, data = b"", b""
    for tensor in tensors:
        infos += info(tensor.name, tensor.dims, tensor.kind, len(data))
        data += tensor.payload + bytes(-len(tensor.payload) % alignment)
    if tensors and not tail:
        data = data[: len(data) - -len(tensors[-1].payload) % alignment]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kvs)) + b"".join(kvs) + infos
    return head + bytes(-len(head) % alignment) + data


def save(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def f32(name: str, *values: float) -> T:
    return T(name, (len(values),), 0, struct.pack(f"<{len(values)}f", *values))


def shard(folder: Path, index: int, count: int, total: int, tensors: Sequence[T], **more: object) -> Path:
    """One shard of a split model, named as llama.cpp names it; the first one carries the model's metadata."""
    kvs = [kv("split.no", U16, index), kv("split.count", U16, count), kv("split.tensors.count", I32, total)]
    data = gguf([*([arch()] if index == 0 else []), *kvs], tensors, **more)  # type: ignore[arg-type]
    return save(folder, data, f"m-{index + 1:05d}-of-{count:05d}.gguf")
