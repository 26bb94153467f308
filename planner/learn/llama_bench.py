"""Tests of stock llama-bench, out of its JSON or its tables: what each row computes, and how deep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.constants import GIB
from planner.model.inventory import Inventory

_SAME_MODEL = 0.1  # of its bytes: a block for drafts is a few percent, the next quantisation a fifth


class NotACount(ValueError):
    """A field of a row that is no whole number an engine could count to; the message is its name."""


@dataclass(frozen=True, slots=True)
class BenchTest:
    """One row: tokens of its prompt, tokens it generates, tokens that lie in the cache before."""

    prompt: int
    gen: int
    depth: int

    @property
    def alone(self) -> bool:
        """Whether it is a prompt alone or tokens alone: of both nobody knows what took how long."""
        return (self.prompt > 0) != (self.gen > 0)

    @property
    def at(self) -> int:
        """The depth that its time is for: where a prompt begins, the middle of what is generated."""
        return self.depth + self.gen // 2


def another_model(model_bytes: int, inventory: Inventory) -> str:
    """Why rows of a model of that size are not of this one; "" where they may be, or do not say (0)."""
    size = sum(tensor.size_bytes for tensor in inventory.tensors)
    if not model_bytes or abs(model_bytes - size) <= _SAME_MODEL * size:
        return ""
    return f"its model has {model_bytes / GIB:.2f} GiB, MODEL has {size / GIB:.2f}"


def bench_test(values: Mapping[str, Any]) -> BenchTest:
    """What a row computes; NotACount for a field that says nothing possible, what is absent counts 0."""
    return BenchTest(*(count(values, name, 0) for name in ("n_prompt", "n_gen", "n_depth")))


def count(values: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of a row; NotACount for another value."""
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise NotACount(name)
    return value
