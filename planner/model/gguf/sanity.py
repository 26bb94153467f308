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
# Below the architecture's name, of what looks like a count: the keys that the engine has names for.
_READ = """
attention.compress_ratios attention.decay_lora_rank attention.gate_lora_rank attention.head_count
attention.head_count_kv attention.head_dim attention.iclr_lora_rank attention.indexer.block_size
attention.indexer.head_count attention.indexer.key_length attention.indexer.kpool attention.indexer.top_k
attention.key_length attention.key_length_mla attention.key_length_swa attention.kv_lora_rank
attention.output_group_count attention.output_lora_rank attention.q_lora_rank attention.relative_buckets_count
attention.shared_kv_layers attention.sliding_window attention.temperature_length attention.value_length
attention.value_length_mla attention.value_length_swa attention.value_residual_mix_lora_rank
attn_res.block_size block_count context_length convnext.block_count convnext.embedding_length
decoder_block_count embedding_length embedding_length_per_layer_input expert_chunk_feed_forward_length
expert_count expert_feed_forward_length expert_gating_func expert_group_count expert_group_used_count
expert_latent_length experts_per_group hyper_connection.sinkhorn_iterations interleave_moe_layer_step
expert_shared_count expert_shared_feed_forward_length expert_used_count features_length feed_forward_length
full_attention_interval hash_layer_count hyper_connection.count hyper_connection.low_rank kda.head_dim
leading_dense_block_count moe_every_n_layers moe_latent_size n_deepstack_layers nextn_predict_layers
ple.conv_kernel ple.ngram_size posnet.block_count posnet.embedding_length rescale_every_n_layers
rope.dimension_count rope.dimension_count_swa rope.scaling.original_context_length shortconv.l_cache
ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank token_shift_count
wkv.head_size
"""
_COUNTS = frozenset(_READ.split())
_FRACTION = re.compile(
    r"attention\.(layer|group)_norm(_rms)?_epsilon|rope\.freq_base(_swa)?|rope\.scaling\.(factor|attn_factor)"
    r"|(attn|final|router)_logit_softcapping|(logit|residual|embedding|expert_weights)_scale"
    r"|rope\.scaling\.yarn_\w+|attention\.(clamp_kqv|max_alibi_bias|scale|output_scale)"
)
_LISTS = frozenset(  # of these counts a file may have a list, one for each layer
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.sliding_window_pattern",
        "attention.compress_ratios",
        "attention.recurrent_layers",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_sections",
    }
)
_ELEMENTS = {
    "tokenizer.ggml.tokens": frozenset({STRING}),
    "tokenizer.ggml.scores": frozenset({_F32}),
    "tokenizer.ggml.token_type": frozenset({_I32}),
    "tokenizer.ggml.merges": frozenset({STRING}),
}
_VOCABULARY = "tokenizer.ggml."
_NO_VOCABULARY = frozenset({"none", "no_vocab"})
_MERGED = frozenset({"gpt2", "gemma4"})  # by pairs of tokens
_TYPED_TOKENS = frozenset({"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v3"})
_ELEMENTS_OF_COUNTS = frozenset({_U32, _I32, _BOOL})


def check_counts(hparams: Mapping[str, Hparam], path: str) -> None:
    """FileProblem for a count that is no number, negative, or larger than anything could hold."""
    for key, value in wrong_counts(hparams):
        raise FileProblem(path, f"damaged: {key} is {short(str(value))}")
    if why := too_many_used(hparams):
        raise FileProblem(path, f"damaged: {why}")


def wrong_types(header: Header) -> tuple[str, ...]:
    """Keys of a type that stock llama.cpp refuses.

    It reads counts as u32 only, numbers of shards as u16, fractions as f32, switches as bool, and so on;
    a list only where a count may differ from layer to layer. A key that it has no name for may have any type.
    """
    prefix = header.text("general.architecture") + "."
    wanted = {**_SPLIT, **_GENERAL}
    for kv in header.kvs:
        if kv.key.startswith(prefix):
            wanted[kv.key] = _of_model(kv, kv.key[len(prefix) :])
        elif _TOKEN_ID.fullmatch(kv.key):
            wanted[kv.key] = _U32
    elements = {**_ELEMENTS, **{prefix + name: _ELEMENTS_OF_COUNTS for name in _LISTS}}
    elements |= {prefix + name: frozenset({_F32}) for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp")}
    return tuple(
        short(kv.key)
        for kv in header.kvs
        if wanted.get(kv.key, kv.type) != kv.type
        or (kv.type == ARRAY and kv.element not in elements.get(kv.key, {kv.element}))
    )


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
    if kv.type == ARRAY and name in _LISTS:
        return ARRAY
    return _U32 if name in _COUNTS else kv.type


def vocabulary_faults(header: Header) -> tuple[str, ...]:
    """What the engine's tokenizer would miss in the header of a file with layers.

    A vocabulary may be none, but the file must say so. Tables of tensors say nothing of vocabularies.
    """
    own = {kv.key.removeprefix(_VOCABULARY): kv for kv in header.kvs if kv.key.startswith(_VOCABULARY)}
    layered = any(block_digits(info.name) for info in header.infos)
    if not own and not layered:
        return ()
    if "model" not in own:
        return (f"{_VOCABULARY}model is missing",)
    kind = str(own["model"].value)
    if kind in _NO_VOCABULARY:
        size = f"{header.text('general.architecture')}.vocab_size"
        told = header.get(size)
        if layered and (told is None or told.type != _U32 or not told.value):
            return (f"{size} is missing or no count, and tokenizer.ggml.model is {kind}",)
        return ()
    if "tokens" not in own:
        return (f"{_VOCABULARY}tokens is missing",)
    found: list[str] = []
    if kind in _MERGED and "merges" not in own:
        found.append(f"{_VOCABULARY}merges is missing, which a tokenizer {kind} needs")
    count = own["tokens"].length
    found += [
        f"{_VOCABULARY}{name} has {own[name].length} values for {count} tokens"
        for name in ("scores", "token_type")
        if name in own and own[name].length < count
    ]
    typed = header.text("general.architecture") in _TYPED_TOKENS
    if typed and "token_type_count" not in own:
        found.append(f"{_VOCABULARY}token_type_count is missing")
    return tuple(found)


def unread(header: Header) -> tuple[str, ...]:
    """Keys that look like counts of the model, of another type, that the engine does not read."""
    prefix = header.text("general.architecture") + "."
    own = [kv for kv in header.kvs if kv.key.startswith(prefix) and kv.type in _INTEGERS - {_U32}]
    names = [kv.key[len(prefix) :] for kv in own]
    return tuple(
        short(prefix + name) for name in names if is_count(name) and name not in _COUNTS | {"vocab_size"}
    )


def check_layers(header: Header, path: str) -> None:
    """FileProblem for a tensor of a layer that cannot be."""
    for info in header.infos:
        block = block_digits(info.name)
        if block and (len(block) > 9 or int(block) >= MAX_LAYERS):
            raise FileProblem(path, f"damaged: tensor {short(info.name)} belongs to no possible layer")
