"""What a model file holds: architecture, hyperparameters and the tensor table. No weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from planner.block_names import block_digits
from planner.constants import MAX_LAYERS, MAX_U32
from planner.errors import FieldProblem
from planner.model.ggml_types import is_known, least_bytes, tensor_bytes
from planner.records import Bytes, Many, Record, Shape, digest, dump, load
from planner.remember import remembered
from planner.yaml_reader import Lines

Scalar = bool | int | float | str
Hparam = Scalar | tuple[Scalar, ...]
_Held = bool | Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | float | str  # what a file can hold

# Hyperparameters that are counts or sizes by their names, alone or one for each layer: everybody later takes
# them for whole numbers, so they are checked once, where a file is read.
_COUNT = re.compile(
    r".*(_count|_count_kv|_length|_length_mla|_length_swa|_length_per_layer_input|_size|_rank|_kernel|_interval"
    r"|head_dim|_layers|l_cache|_window|kpool|top_k|compress_ratios|hyper_connection\.count)"
)


class Shard(Record):
    """One file of the model."""

    file: str  # name without folder
    size_bytes: Bytes
    data_offset: Bytes  # where tensor data starts, from the start of the file
    alignment: int = Field(gt=0, le=1 << 30)


class Tensor(Record):
    """One named weight; `shape` in ggml order (ne0 first, the contiguous one)."""

    name: str
    type: str  # ggml's own spelling: f32, q4_K, mxfp4; type153 for a number without a known name
    shape: Shape
    size_bytes: Bytes  # from the offsets in the file, never from type arithmetic
    shard: int = Field(ge=0, lt=1 << 16)
    offset: Bytes  # of the payload, from the start of its shard


class Inventory(Record):
    """The tensor table of one model, in file order."""

    schema_: int = Field(1, alias="schema", ge=1, le=1)
    name: str
    architecture: str
    header_digest: str  # over the header bytes of all shards; "" when made from a bare table
    hparams: dict[str, _Held | Many[_Held]]  # keys without the architecture prefix: block_count …
    shards: Many[Shard] = Field(max_length=1 << 16)
    tensors: Many[Tensor] = Field(max_length=1 << 16)  # MAX_TENSORS of a file's header

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; KeyError when there is none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def number(self, key: str, default: int = 0) -> int:
        """An integer hyperparameter; the maximum when it is an array per layer."""
        value = self.hparams.get(key, default)
        if isinstance(value, tuple):
            return max((int(v) for v in value), default=default)
        return int(value)

    def per_layer(self, key: str, n_layers: int, default: int = 0) -> tuple[int, ...]:
        """An integer hyperparameter for each layer, scalar values repeated."""
        value = self.hparams.get(key, default)
        if isinstance(value, tuple):
            values = tuple(int(v) for v in value)
            return (values + (values[-1] if values else default,) * n_layers)[:n_layers]
        return (int(value),) * n_layers

    @property
    def size_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors)

    @remembered
    def table_digest(self) -> str:
        """Digest of architecture, hyperparameters and tensor table, whatever the order of the file."""
        lines = [f"{t.name} {t.type} {'x'.join(map(str, t.shape))} {t.size_bytes}" for t in self.tensors]
        hparams = [f"{k}={v!r}" for k, v in sorted(self.hparams.items())]
        return digest(self.architecture, "\n".join(hparams), "\n".join(sorted(lines)))


def to_text(inventory: Inventory) -> str:
    """Canonical YAML of an inventory."""
    return dump(inventory)


def from_text(text: str, path: str) -> Inventory:
    """Inventory from YAML text; FieldProblem names the line of what is wrong."""
    inventory = load(text, Inventory, path)
    seen: set[str] = set()
    for tensor in inventory.tensors:
        why = "appears twice" if tensor.name in seen else _impossible(tensor, len(inventory.shards))
        if why:
            line = text[: text.rfind(f"name: {tensor.name},") + 1].count("\n") + 1
            raise FieldProblem(path, line, f"tensor {tensor.name}", why)
        seen.add(tensor.name)
    for key, _ in wrong_counts(inventory.hparams):
        line = Lines(text).of("hparams", key)
        raise FieldProblem(path, line, f"hparams.{key}", "expected a count, or one for each layer")
    if why := too_many_used(inventory.hparams):
        line = Lines(text).of("hparams", "expert_used_count")
        raise FieldProblem(path, line, "hparams.expert_used_count", why)
    return inventory


def _least(tensor: Tensor) -> int:
    """The fewest bytes a tensor of this type and shape can have; 1 of a type that nobody here knows."""
    if is_known(tensor.type):
        try:
            return tensor_bytes(tensor.type, tensor.shape)
        except ValueError:
            return 1  # rows of no whole blocks: some tools pad them
    number = tensor.type.removeprefix("type")
    known = number.isascii() and number.isdecimal() and len(number) < 6
    return least_bytes(int(number), tensor.shape) if known else 1


def is_count(key: str) -> bool:
    """Whether a hyperparameter is a count or a size, by its name."""
    return _COUNT.fullmatch(key) is not None


def wrong_counts(hparams: Mapping[str, Hparam]) -> Iterator[tuple[str, Scalar]]:
    """Hyperparameters that are counts by their names but not by what they hold, with the wrong value."""
    for key, value in hparams.items():
        if is_count(key):
            limit = MAX_LAYERS if key == "block_count" else MAX_U32
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int) or not 0 <= number <= limit:
                    yield key, number


def too_many_used(hparams: Mapping[str, Hparam]) -> str:
    """Why a token cannot use that many experts; "" when it can. The engine aborts on such a file."""
    used, there = hparams.get("expert_used_count", 0), hparams.get("expert_count", 0)
    if isinstance(used, int) and isinstance(there, int) and used > there > 0:
        return f"a token uses {used} of {there} experts"
    return ""


def _impossible(tensor: Tensor, n_shards: int) -> str:
    """Why no model file can hold this tensor; "" when one may."""
    block = block_digits(tensor.name)
    if block and (len(block) > 9 or int(block) >= MAX_LAYERS):
        return "belongs to no possible layer"
    if len(tensor.shape) > 4 or not 0 < math.prod(tensor.shape) < 1 << 63:
        return "has a shape that cannot be"
    if tensor.offset + tensor.size_bytes >= 1 << 63:
        return "is larger than any file"
    if tensor.size_bytes < (needed := _least(tensor)):
        return f"holds {tensor.size_bytes} bytes, its type and shape need {needed}"
    return "" if tensor.shard < n_shards else f"lies in shard {tensor.shard} of {n_shards}"


@remembered
def by_name(inventory: Inventory) -> Mapping[str, Tensor]:
    """Tensors by name."""
    return MappingProxyType({t.name: t for t in inventory.tensors})
