"""GGUF files with the header of an inventory and no data: as large as the model, empty on disk.

A load that does not allocate weights (no_alloc) never reads the holes, so the engine's arithmetic
can be asked about models of hundreds of gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from planner.model.ggml_types import TYPES
from planner.model.inventory import Hparam, Inventory

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def write_sparse(path: Path, inventory: Inventory, **more: Hparam) -> Path:
    """Write the file; returns `path`. The vocabulary has no tokens, only a size.

    `more`: keys below `tokenizer.ggml`.
    """
    metadata: dict[str, Hparam] = {
        "general.architecture": inventory.architecture,
        "tokenizer.ggml.model": "none",
        **{f"tokenizer.ggml.{key}": one for key, one in more.items()},
        **{f"{inventory.architecture}.{key}": one for key, one in inventory.hparams.items()},
    }
    infos = b"".join(_tensor_infos(inventory))
    pairs = b"".join(string(key) + value(one) for key, one in metadata.items())
    header = b"GGUF" + struct.pack("<IQQ", 3, len(inventory.tensors), len(metadata)) + pairs + infos
    start = -(-len(header) // 32) * 32
    with path.open("wb") as file:
        file.write(header)
        file.truncate(start + sum(-(-t.size_bytes // 32) * 32 for t in inventory.tensors))
    return path


def _tensor_infos(inventory: Inventory) -> Iterator[bytes]:
    offset = 0
    for tensor in inventory.tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        yield string(tensor.name) + sizes + struct.pack("<IQ", _NUMBERS[tensor.type], offset)
        offset += -(-tensor.size_bytes // 32) * 32


def string(text: str) -> bytes:
    """A GGUF string."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(one: Hparam) -> bytes:
    """A GGUF metadata value with its type."""
    if isinstance(one, tuple):
        kind, _ = _scalar(one[0])
        return struct.pack("<IIQ", _ARRAY, kind, len(one)) + b"".join(_scalar(v)[1] for v in one)
    kind, data = _scalar(one)
    return struct.pack("<I", kind) + data


def _scalar(value: bool | int | float | str) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, str):
        return _STRING, string(value)
    if isinstance(value, float):
        return _F32, struct.pack("<f", value)
    return (_I32, struct.pack("<i", value)) if value < 0 else (_U32, struct.pack("<I", value))
