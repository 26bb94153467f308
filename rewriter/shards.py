"""Which tensors share an output file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.model.gguf.header import pad
from planner.model.gguf.reader import ModelFile
from planner.plan.plan import ExpertOrder
from rewriter.regions import Region

_INFO_BYTES = 96  # of one entry of the tensor table and of an opaque size, their names aside
_FILE_BYTES = 256  # the counts and split keys of any file
_STAMP_BYTES = 1024  # digests and keys of the record of a rewrite, its arrays aside

Files = tuple[tuple[str, ...], ...]


def split(found: tuple[Region, ...], by_device: bool) -> Files:
    """One file, or one per kind of memory."""
    if by_device:
        return tuple(region.tensors for region in found)
    return (tuple(name for region in found for name in region.tensors),)


def limit(
    model: ModelFile, files: Files, orders: Iterable[ExpertOrder], alignment: int, limit_bytes: int
) -> Files:
    """The same files cut so that none exceeds the limit, header and padding included.

    A tensor that is larger than the limit has a file of its own.
    """
    costs = _costs(model, alignment)
    overhead = _FILE_BYTES + alignment
    room = limit_bytes - _metadata_bytes(model, orders) - overhead
    made: list[tuple[str, ...]] = []
    for file in files:
        current: list[str] = []
        for name in file:
            if current and costs[name] > room:
                made.append(tuple(current))
                current, room = [], limit_bytes - overhead
            current.append(name)
            room -= costs[name]
        made.append(tuple(current))
        room = limit_bytes - overhead
    return tuple(made)


def _costs(model: ModelFile, alignment: int) -> Mapping[str, int]:
    """Bytes that a tensor adds to its file."""
    return {
        tensor.name: pad(tensor.size_bytes, alignment) + _INFO_BYTES + 2 * len(tensor.name.encode())
        for tensor in model.inventory.tensors
    }


def _metadata_bytes(model: ModelFile, orders: Iterable[ExpertOrder]) -> int:
    """What the first file carries besides its tensors, at most."""
    copied = sum(shard.header.kvs_end for shard in model.headers)
    places = 4 * len(model.inventory.tensors)
    return copied + _STAMP_BYTES + places + sum(4 * len(o.order) + 64 for o in orders)
