"""What widths of planner.model.widths rest on: which architectures read which keys, mixers and indexers.

Asked of the engine, with one key changed at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.model.inventory import Inventory, Tensor

GATED = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})  # delta nets, a gate beside each query
_ROTATED = """
arctic baichuan bailingmoe chameleon codeshell cohere2moe dbrx deci deepseek dots1 ernie4_5
ernie4_5-moe falcon gpt-oss grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais2
llama llama4 maincoder mellum olmo olmo2 olmoe orion paddleocr plamo qwen2 qwen2moe qwen2vl qwen3
qwen3moe qwen3vl qwen3vlmoe seed_oss smallthinker smollm3 starcoder2 talkie xverse
"""
ALL_ROTATED = frozenset(_ROTATED.split())  # refused where a part of a head is not
_SECTIONS = """
bailingmoe3 deepseek32 ernie4_5 ernie4_5-moe glm-dsa glm4 glm4moe hunyuan-dense hunyuan_vl paddleocr
qwen2vl qwen35 qwen35moe qwen3vl qwen3vlmoe
"""
SECTIONED = frozenset(_SECTIONS.split())  # which read four sections of a rotated head
_OWN = """
afmoe bailingmoe bailingmoe2 bailingmoe3 deepseek deepseek2 deepseek32 deepseek4 dots1 dots3note
ernie4_5-moe exaone-moe glm-dsa glm5-next gpt-oss grovemoe hy_v3 hy_v4 kimi-k3 kimi-linear laguna
lfm2moe llama4 mellum mimo2 minimax-m3 mistral4 smallthinker
"""
OWN_EXPERTS = frozenset(_OWN.split())  # which read the width of one expert, and nothing in its place
_WIDTHS = """
gemma4 glm4moe grok minimax-m2 nemotron_h nemotron_h_moe
bailingmoe2 cohere2moe hunyuan-moe qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp
"""
READ_EXPERT_WIDTHS = OWN_EXPERTS - {"kimi-linear"} | frozenset(_WIDTHS.split())  # one, or one a layer
_DENSE = """
arctic dbrx granitemoe hunyuan-moe jamba minimax-01 minimax-m2 olmoe phimoe
"""
DENSE_EXPERTS = frozenset(_DENSE.split())  # experts as wide as dense parts, whatever the file says of them
DIVIDED_EXPERTS = frozenset({"qwen2moe", "qwen3moe", "qwen3vlmoe"}) | GATED  # unsaid, they share that width
_SHARED = """
bailingmoe2 bailingmoe3 cohere2moe ernie4_5-moe exaone-moe granitemoe hunyuan-moe hy_v3 laguna
nemotron_h_moe qwen2moe
"""
SHARED_WIDTHS = frozenset(_SHARED.split()) | GATED  # which read the width of shared experts, not their number
NO_EXPERTS = frozenset(  # granite and nemotron_h read them as granitemoe and nemotron_h_moe do
    {"cohere2", "ernie4_5", "exaone", "glm4", "lfm2", "qwen2", "qwen3", "qwen35", "qwen3vl"}
)
# Which read expert_gating_func: functions 1 to 4; some take 0 for their own.
_GATES = """
bailingmoe2 bailingmoe3 deepseek32 deepseek4 dots1 dots3note exaone-moe hy_v4 kimi-k3 kimi-linear lfm2moe
minimax-m2 minimax-m3 smallthinker
"""
_GATES_OR_0 = "afmoe cohere2moe deepseek2 glm-dsa glm4moe glm5-next hy_v3 laguna mistral4"
LEAST_GATE = {**dict.fromkeys(_GATES.split(), 1), **dict.fromkeys(_GATES_OR_0.split(), 0), "deepseek4": 4}
MOST_GATE = 4

_MAMBA_2 = frozenset({"mamba2", "nemotron_h", "nemotron_h_moe", "granitehybrid", "falcon-h1"})
_RWKV_7 = frozenset({"rwkv7", "arwkv7"})
_RANKS = {
    "w": "decay_lora_rank",
    "a": "iclr_lora_rank",
    "v": "value_residual_mix_lora_rank",
    "g": "gate_lora_rank",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One extent of a tensor: its axis, the values the engine may want there, and the keys behind them.

    None stands for a value that the file does not say.
    """

    stem: str
    axis: int
    wanted: tuple[int | None, ...]
    keys: str


def stated(inventory: Inventory, key: str, default: int | None = None) -> int | None:
    """A count that a file says, 0 included."""
    return inventory.number(key) if key in inventory.hparams else default


def times(*factors: int | None) -> int | None:
    """A product, None where a factor is not said."""
    said = [factor for factor in factors if factor is not None]
    return math.prod(said) if len(said) == len(factors) else None


def mixer_rules(inventory: Inventory, own: Mapping[str, Tensor], n: int) -> Iterator[Rule]:
    """Widths of a recurrent layer's mixer; tensors that it does not have are no matter."""
    kernel = stated(inventory, "ssm.conv_kernel")
    yield Rule("ssm_conv1d", 0, (kernel,), "ssm.conv_kernel")
    yield Rule("shortconv.conv", 0, (stated(inventory, "shortconv.l_cache"),), "shortconv.l_cache")
    inner, state = stated(inventory, "ssm.inner_size"), stated(inventory, "ssm.state_size")
    rank, groups = stated(inventory, "ssm.time_step_rank"), stated(inventory, "ssm.group_count")
    if inventory.architecture in GATED and "ssm_out" in own:
        if state is not None and rank is not None and groups is not None:
            rows = state * (2 * groups + rank)
            yield Rule("attn_qkv", 1, (rows,), "ssm.state_size, group_count, time_step_rank")
        yield Rule("ssm_out", 0, (inner,), "ssm.inner_size")
    elif inventory.architecture in _MAMBA_2 and None not in (inner, groups, state, rank):
        rows = 2 * ((inner or 0) + (groups or 0) * (state or 0)) + (rank or 0)
        yield Rule("ssm_in", 1, (rows,), "ssm.inner_size, group_count, state_size, time_step_rank")
    elif inventory.architecture == "jamba":
        yield Rule("ssm_out", 0, (inner,), "ssm.inner_size")
        if state is not None and rank is not None:
            yield Rule("ssm_x", 1, (rank + 2 * state,), "ssm.time_step_rank, state_size")
    if "ssm_conv1d_q" in own:
        yield from _decayed(inventory, kernel, n)
    if inventory.architecture in _RWKV_7:
        yield from _rwkv(inventory)


def _decayed(inventory: Inventory, kernel: int | None, n: int) -> Iterator[Rule]:
    """Kimi's delta attention: a convolution for queries, keys and values."""
    heads = inventory.per_layer("attention.head_count", n + 1)
    width = times(max(heads), stated(inventory, "kda.head_dim"))
    for part in "qkv":
        yield Rule(f"ssm_conv1d_{part}", 0, (kernel,), "ssm.conv_kernel")
        yield Rule(f"ssm_conv1d_{part}", 2, (width,), "kda.head_dim")


def _rwkv(inventory: Inventory) -> Iterator[Rule]:
    unsaid = 0 if inventory.header_digest else None
    for letter, key in _RANKS.items():
        rank = stated(inventory, f"attention.{key}", unsaid)
        yield Rule(f"time_mix_{letter}1", 1, (rank,), f"attention.{key}")
    inner = stated(inventory, "feed_forward_length", unsaid)
    yield Rule("channel_mix_key", 1, (inner,), "feed_forward_length")


def indexer_rules(inventory: Inventory) -> Iterator[Rule]:
    """Queries and keys with which a sparse attention chooses its cells."""
    heads, key = (stated(inventory, f"attention.indexer.{what}") for what in ("head_count", "key_length"))
    yield Rule("indexer.attn_q_b", 1, (times(heads, key),), "attention.indexer.head_count, key_length")
    yield Rule("indexer.attn_k", 1, (key,), "attention.indexer.key_length")
    yield Rule("indexer.proj", 1, (heads,), "attention.indexer.head_count")
    if inventory.architecture == "glm5-next":
        pool = stated(inventory, "attention.indexer.kpool")
        yield Rule("indexer_compressor_ape", 1, (pool,), "attention.indexer.kpool")


def stream_rules(inventory: Inventory) -> Iterator[Rule]:
    """Hyper-connections: several streams of a row side by side, mixed by products of their own."""
    count, width = stated(inventory, "hyper_connection.count"), stated(inventory, "embedding_length")
    rank = stated(inventory, "hyper_connection.low_rank")
    for part in ("attn", "ffn"):
        yield Rule(f"hc_{part}_fn", 0, (times(count, width),), "hyper_connection.count")
        yield Rule(f"hc_{part}_norm", 1, (count,), "hyper_connection.count")
        yield Rule(f"hc_{part}_down", 1, (rank,), "hyper_connection.low_rank")
