"""The metadata entries that tie an output file to its source and plan."""

from __future__ import annotations

from collections.abc import Mapping

from planner.model.gguf_file import ModelFile
from planner.plan.plan import Plan
from rewriter import encode
from rewriter.stamp import (
    EXPERTS,
    PLAN_DIGEST,
    SOURCE_ALIGNMENT,
    SOURCE_HEADER,
    SOURCE_ORDER,
    SOURCE_SIZE,
    SOURCE_TABLE,
    Stamp,
    plan_digest,
)


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
    ]
    entries += [encode.kv_u32_array(f"{EXPERTS}{layer}", experts[layer]) for layer in sorted(experts)]
    return tuple(entries)


def original_order(model: ModelFile, source: Stamp) -> tuple[str, ...]:
    """Tensor names in the order of the original source."""
    pairs = zip(source.source_order, model.inventory.tensors, strict=True)
    return tuple(tensor.name for _, tensor in sorted(pairs, key=lambda pair: pair[0]))
