"""Inventories from bare tensor tables: CSV with a line per tensor, for models that are not at hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.errors import FieldProblem
from planner.model.ggml_types import BY_NAME, tensor_bytes
from planner.model.inventory import Hparam, Inventory, Shard, Tensor

ALIGNMENT = 32
_SPELLINGS = {name.lower(): name for name in BY_NAME}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; `shape` in ggml order."""

    name: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int


def read_table(text: str, path: str) -> tuple[Row, ...]:
    """Rows of a CSV table with the columns name, ne (2048x768x128) and type, and optionally bytes.

    Types may be spelled in lower case. Without `bytes` the size follows from type and shape. Raises
    FieldProblem with the line for a missing column, a wrong number, an unknown type without bytes.
    """
    reader = csv.DictReader(io.StringIO(text))
    missing = {"name", "ne", "type"} - set(reader.fieldnames or ())
    if missing:
        raise FieldProblem(path, 1, ", ".join(sorted(missing)), "column missing in the tensor table")
    return tuple(_row(record, path, line) for line, record in enumerate(reader, start=2))


def inventory_of(
    name: str, architecture: str, hparams: Mapping[str, Hparam], rows: Iterable[Row]
) -> Inventory:
    """An inventory as if the tensors lay in one file in the order of the table; header_digest is ""."""
    tensors: list[Tensor] = []
    offset = 0
    for row in rows:
        tensors.append(
            Tensor(
                name=row.name,
                type=row.type,
                shape=row.shape,
                size_bytes=row.size_bytes,
                shard=0,
                offset=offset,
            )
        )
        offset += -(-row.size_bytes // ALIGNMENT) * ALIGNMENT
    shard = Shard(file=f"{name}.gguf", size_bytes=offset, data_offset=0, alignment=ALIGNMENT)
    return Inventory(
        schema_=1,
        name=name,
        architecture=architecture,
        header_digest="",
        hparams=dict(sorted(hparams.items())),
        shards=(shard,),
        tensors=tuple(tensors),
    )


def _row(record: Mapping[str, str | None], path: str, line: int) -> Row:
    name, type_name = record["name"] or "", record["type"] or ""
    type_name = _SPELLINGS.get(type_name.lower(), type_name)
    try:
        shape = tuple(int(size) for size in (record["ne"] or "").split("x"))
        stated = record.get("bytes")
        size = int(stated) if stated else tensor_bytes(type_name, shape)
    except KeyError:
        raise FieldProblem(path, line, "type", f"{name}: unknown type {type_name} and no bytes") from None
    except ValueError as problem:
        raise FieldProblem(path, line, name, str(problem)) from None
    return Row(name, type_name, shape, size)
