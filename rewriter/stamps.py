"""The metadata entries that tie an output file to its source and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.model.gguf.reader import ModelFile, ShardHeader, mapped
from planner.model.inventory import Inventory, by_name
from planner.plan.plan import Plan
from planner.records import digest
from rewriter import encode
from rewriter.layout import Copy
from rewriter.stamp import (
    EXPERTS,
    PLAN_DIGEST,
    SOURCE_ALIGNMENT,
    SOURCE_HEADER,
    SOURCE_LOST,
    SOURCE_ORDER,
    SOURCE_SIZE,
    SOURCE_TABLE,
    SOURCE_TRAILING,
    Stamp,
    plan_digest,
    read_stamp,
)

_STEP = 1 << 20


def source_of(model: ModelFile, stamp: Stamp | None) -> Stamp:
    """The record of the original source: the stamp of a rewritten file, else the model itself."""
    if stamp is not None:
        return stamp
    inventory = model.inventory
    single = len(model.headers) == 1
    return Stamp(
        plan_digest="",
        source_header=inventory.header_digest,
        source_table=inventory.table_digest(),
        source_order=tuple(range(len(inventory.tensors))),
        source_alignment=model.headers[0].header.number("general.alignment") or 0,
        source_size=model.headers[0].size_bytes - model.headers[0].trailing_bytes if single else 0,
        source_trailing=model.headers[0].trailing_bytes if single else 0,
        source_lost=lost_bytes(model),
        experts={},
    )


def stamp_entries(
    model: ModelFile,
    source: Stamp,
    plan: Plan,
    order: tuple[str, ...],
    experts: Mapping[int, tuple[int, ...]],
) -> tuple[bytes, ...]:
    """Encoded entries for an output that holds tensors in this order, its experts in these orders."""
    place = {t.name: source.source_order[n] for n, t in enumerate(model.inventory.tensors)}
    entries = [
        encode.kv_string(PLAN_DIGEST, plan_digest(plan)),
        encode.kv_string(SOURCE_HEADER, source.source_header),
        encode.kv_string(SOURCE_TABLE, source.source_table),
        encode.kv_u32_array(SOURCE_ORDER, [place[name] for name in order]),
        encode.kv_u32(SOURCE_ALIGNMENT, source.source_alignment),
        encode.kv_u64(SOURCE_SIZE, source.source_size),
        *([] if source.source_trailing is None else [encode.kv_u64(SOURCE_TRAILING, source.source_trailing)]),
        *([encode.kv_u64(SOURCE_LOST, source.source_lost)] if source.source_lost else []),
    ]
    entries += [encode.kv_u32_array(f"{EXPERTS}{layer}", experts[layer]) for layer in sorted(experts)]
    return tuple(entries)


def set_digest(stamp: tuple[bytes, ...], files: tuple[tuple[str, ...], ...]) -> str:
    """What the shards of one output have in common, and those of another rewrite do not."""
    names = ("\n".join(file) for file in files)
    return digest(b"".join(stamp).hex(), *names)


def trailing_of(model: ModelFile, source: Stamp) -> Copy | None:
    """What lay behind the last tensor of the original source, as far as it lies behind this one's."""
    last = model.headers[-1]
    length = min(source.source_trailing or 0, last.trailing_bytes)
    start = last.size_bytes - last.trailing_bytes
    return Copy(len(model.headers) - 1, start, length) if length else None


def lost_bytes(model: ModelFile) -> int:
    """Bytes of a source that no rewrite keeps: padding that is not zero, and what lies behind shards."""
    lost = sum(h.trailing_bytes for h in model.headers) if len(model.headers) > 1 else 0
    for shard in model.headers:
        with mapped(shard.path) as data:
            for start, end in _padding(shard):
                lost += sum(_nonzero(data[n : min(n + _STEP, end)]) for n in range(start, end, _STEP))
    return lost


def _padding(shard: ShardHeader) -> Iterator[tuple[int, int]]:
    """Ranges of a file that are neither header nor tensor nor behind the last one."""
    at = shard.header.end
    base = shard.header.data_offset
    pairs = zip(shard.header.infos, shard.sizes, strict=True)
    for offset, size in sorted((info.offset, size) for info, size in pairs):
        yield at, base + offset
        at = base + offset + size
    yield at, shard.size_bytes - shard.trailing_bytes


def _nonzero(data: bytes) -> int:
    return len(data) - data.count(0)


def original_order(model: ModelFile, source: Stamp) -> tuple[str, ...]:
    """Tensor names in the order of the original source."""
    pairs = zip(source.source_order, model.inventory.tensors, strict=True)
    return tuple(tensor.name for _, tensor in sorted(pairs, key=lambda pair: pair[0]))


def original_inventory(model: ModelFile) -> Inventory | None:
    """The table of the file that a rewritten one was made from, in its order; None for a file as published.

    Offsets and shards stay those of the rewritten file. FileProblem when its stamp is damaged.
    """
    stamp = read_stamp(model)
    if stamp is None:
        return None
    tensors = by_name(model.inventory)
    order = tuple(tensors[name] for name in original_order(model, stamp))
    return model.inventory.model_copy(update={"header_digest": stamp.source_header, "tensors": order})
