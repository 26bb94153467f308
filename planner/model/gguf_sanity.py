"""Hyperparameters that everybody later takes for plain counts: checked once, where the file is read."""

from __future__ import annotations

from collections.abc import Mapping

from planner.block_names import block_digits
from planner.constants import MAX_COUNT, MAX_LAYERS
from planner.errors import FileProblem
from planner.model.gguf_header import Header
from planner.model.inventory import Hparam, too_many_used
from planner.quoting import short

# What the planner's arithmetic reads as whole numbers, alone or one per layer.
COUNTS = frozenset(
    {
        "attention.compress_ratios",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.indexer.head_count",
        "attention.indexer.key_length",
        "attention.indexer.kpool",
        "attention.indexer.top_k",
        "attention.key_length",
        "attention.key_length_mla",
        "attention.key_length_swa",
        "attention.shared_kv_layers",
        "attention.sliding_window",
        "attention.value_length",
        "attention.value_length_mla",
        "attention.value_length_swa",
        "block_count",
        "context_length",
        "embedding_length",
        "embedding_length_per_layer_input",
        "expert_count",
        "expert_feed_forward_length",
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "expert_used_count",
        "feed_forward_length",
        "full_attention_interval",
        "hash_layer_count",
        "hyper_connection.count",
        "kda.head_dim",
        "leading_dense_block_count",
        "nextn_predict_layers",
        "ple.conv_kernel",
        "ple.ngram_size",
        "rope.dimension_count",
        "shortconv.l_cache",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
        "token_shift_count",
        "vocab_size",
        "wkv.head_size",
    }
)


def check_counts(hparams: Mapping[str, Hparam], path: str) -> None:
    """FileProblem for a count that is no number, negative, or larger than anything could hold."""
    for key in sorted(COUNTS & hparams.keys()):
        value = hparams[key]
        limit = MAX_LAYERS if key == "block_count" else MAX_COUNT
        for each in value if isinstance(value, tuple) else (value,):
            if not isinstance(each, int) or not 0 <= each <= limit:
                raise FileProblem(path, f"damaged: {key} is {short(str(each))}")
    if why := too_many_used(hparams):
        raise FileProblem(path, f"damaged: {why}")


def check_layers(header: Header, path: str) -> None:
    """FileProblem for a tensor of a layer that cannot be."""
    for info in header.infos:
        block = block_digits(info.name)
        if block and (len(block) > 9 or int(block) >= MAX_LAYERS):
            raise FileProblem(path, f"damaged: tensor {short(info.name)} belongs to no possible layer")
