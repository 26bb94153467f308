"""Hyperparameters that everybody later takes for plain counts: checked once, where the file is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.block_names import block_digits
from planner.constants import MAX_LAYERS
from planner.errors import FileProblem
from planner.model.gguf.header import ARRAY, STRING, Header, KeyValue
from planner.model.inventory import Hparam, is_count, too_many_used, wrong_counts
from planner.quoting import short

_U16, _U32, _I32, _F32, _BOOL, _F64 = 2, 4, 5, 6, 7, 12  # GGUF's numbers of value types
_SWITCHES = ("attention.causal", "expert_weights_norm", "use_parallel_residual", "rope.scaling.finetuned")
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 7, 10, 11})
_SPLIT = {"split.count": _U16, "split.no": _U16}
_GENERAL = {
    "general.name": STRING,
    "tokenizer.ggml.model": STRING,
    "tokenizer.ggml.pre": STRING,
    "tokenizer.ggml.tokens": ARRAY,
    "tokenizer.ggml.scores": ARRAY,
    "tokenizer.ggml.token_type": ARRAY,
    "tokenizer.ggml.merges": ARRAY,
    "tokenizer.ggml.add_bos_token": _BOOL,
    "tokenizer.ggml.add_eos_token": _BOOL,
    "tokenizer.ggml.add_space_prefix": _BOOL,
}
_TOKEN_ID = re.compile(r"tokenizer\.ggml\.(bos|eos|eot|unknown|padding)_token_id")
_FRACTION = re.compile(
    r".*_epsilon|rope\.freq_base(_swa)?|rope\.scaling\.(factor|attn_factor)|.*_softcapping|logit_scale"
    r"|(residual|embedding|expert_weights)_scale"
)
_SINGLE = re.compile(  # the same for every layer
    r"(block|expert|expert_shared)_count|(context|embedding|attention\.key|attention\.value)_length"
    r"|full_attention_interval|attention\.sliding_window|rope\.dimension_count|ssm\.\w+"
)


def check_counts(hparams: Mapping[str, Hparam], path: str) -> None:
    """FileProblem for a count that is no number, negative, or larger than anything could hold."""
    for key, value in wrong_counts(hparams):
        raise FileProblem(path, f"damaged: {key} is {short(str(value))}")
    if why := too_many_used(hparams):
        raise FileProblem(path, f"damaged: {why}")


def wrong_types(header: Header) -> tuple[str, ...]:
    """Keys of a type that stock llama.cpp refuses.

    It reads counts as u32 only, numbers of shards as u16, fractions as f32, switches as bool, and so on;
    a list only where a count may differ from layer to layer.
    """
    prefix = header.text("general.architecture") + "."
    wanted = {**_SPLIT, **_GENERAL}
    for kv in header.kvs:
        if kv.key.startswith(prefix):
            wanted[kv.key] = _of_model(kv, kv.key[len(prefix) :])
        elif _TOKEN_ID.fullmatch(kv.key):
            wanted[kv.key] = _U32
    return tuple(short(kv.key) for kv in header.kvs if wanted.get(kv.key, kv.type) != kv.type)


def _of_model(kv: KeyValue, name: str) -> int:
    """The type in which the engine reads a hyperparameter, or the one that it has."""
    if name == "vocab_size":
        return kv.type  # most architectures count their tokens instead
    if name in _SWITCHES:
        return _BOOL
    if name == "rope.dimension_sections":
        return _I32 if kv.type != ARRAY else ARRAY
    if _FRACTION.fullmatch(name):
        return _F32
    if kv.type == ARRAY:
        return _U32 if _SINGLE.fullmatch(name) else ARRAY
    if kv.type == _F64:
        return _F32
    return _U32 if is_count(name) and kv.type in _INTEGERS else kv.type


def check_layers(header: Header, path: str) -> None:
    """FileProblem for a tensor of a layer that cannot be."""
    for info in header.infos:
        block = block_digits(info.name)
        if block and (len(block) > 9 or int(block) >= MAX_LAYERS):
            raise FileProblem(path, f"damaged: tensor {short(info.name)} belongs to no possible layer")
