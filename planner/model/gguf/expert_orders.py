"""Where a rewrite has put a layer's experts: its record in the file, read in one place."""

from __future__ import annotations

from collections.abc import Mapping

from planner.constants import EXPERTS_KEY, MAX_LAYERS
from planner.errors import FileProblem
from planner.model.gguf.header import Header, KeyValue


def expert_orders(header: Header, path: str) -> Mapping[int, tuple[int, ...]]:
    """The original expert id at each position, by layer; {} of a file whose experts were never moved.

    FileProblem, with `path`, for a record that names no layer or is no permutation.
    """
    found: dict[int, tuple[int, ...]] = {}
    for kv in header.kvs:
        if kv.key.startswith(EXPERTS_KEY):
            layer = kv.key[len(EXPERTS_KEY) :]
            if not (layer.isascii() and layer.isdecimal() and len(layer) < 6 and int(layer) < MAX_LAYERS):
                raise damaged(path, f"{kv.key} names no layer")
            found[int(layer)] = permutation(kv, kv.key, path)
    return found


def permutation(kv: KeyValue | None, key: str, path: str) -> tuple[int, ...]:
    """The value of an entry as an order of 0, 1, …; FileProblem where it is none."""
    values = kv.value if kv else None
    if not isinstance(values, tuple) or set(map(type, values)) - {int}:
        raise damaged(path, f"{key} is not a permutation")
    numbers = tuple(int(value) for value in values)
    if sorted(numbers) != list(range(len(numbers))):
        raise damaged(path, f"{key} is not a permutation")
    return numbers


def damaged(path: str, what: str) -> FileProblem:
    """The record of an earlier rewrite in a file is not one."""
    return FileProblem(path, f"damaged record of an earlier rewrite: {what}")
