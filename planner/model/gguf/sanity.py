"""Hyperparameters that everybody later takes for plain counts: checked once, where the file is read."""

from __future__ import annotations

from collections.abc import Mapping

from planner.block_names import block_digits
from planner.constants import MAX_LAYERS
from planner.errors import FileProblem
from planner.model.gguf.header import Header
from planner.model.inventory import Hparam, is_count, too_many_used, wrong_counts
from planner.quoting import short

_U16, _U32, _BOOL, _F64 = 2, 4, 7, 12  # GGUF's numbers of value types
_SWITCHES = ("attention.causal", "expert_weights_norm", "use_parallel_residual", "rope.scaling.finetuned")
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 7, 10, 11})
_SPLIT = {"split.count": _U16, "split.no": _U16}


def check_counts(hparams: Mapping[str, Hparam], path: str) -> None:
    """FileProblem for a count that is no number, negative, or larger than anything could hold."""
    for key, value in wrong_counts(hparams):
        raise FileProblem(path, f"damaged: {key} is {short(str(value))}")
    if why := too_many_used(hparams):
        raise FileProblem(path, f"damaged: {why}")


def wrong_types(header: Header) -> tuple[str, ...]:
    """Keys of a type that stock llama.cpp refuses: it reads counts as u32 only, numbers of shards as u16,
    fractions as f32, and switches as bool.
    """
    prefix = header.text("general.architecture") + "."
    keys = [kv for kv in header.kvs if kv.key.startswith(prefix) and kv.type in _INTEGERS]
    wrong = [kv for kv in keys if is_count(kv.key[len(prefix) :]) and kv.type != _U32]
    wrong += [kv for kv in header.kvs if kv.key.startswith(prefix) and kv.type == _F64]
    wrong += [kv for key in _SWITCHES if (kv := header.get(prefix + key)) and kv.type != _BOOL]
    wrong += [kv for key, kind in _SPLIT.items() if (kv := header.get(key)) and kv.type != kind]
    return tuple(short(kv.key) for kv in wrong)


def check_layers(header: Header, path: str) -> None:
    """FileProblem for a tensor of a layer that cannot be."""
    for info in header.infos:
        block = block_digits(info.name)
        if block and (len(block) > 9 or int(block) >= MAX_LAYERS):
            raise FileProblem(path, f"damaged: tensor {short(info.name)} belongs to no possible layer")
