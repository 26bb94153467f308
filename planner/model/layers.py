"""The layers of a model: how many, which attend, which are recurrent, which are speculative heads.

Structure is read from the tensors; hyperparameters only where tensors cannot tell.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.block_names import within_block
from planner.model.inventory import Inventory, Tensor
from planner.model.sliding_window import sliding_layers
from planner.remember import remembered

# Decoders whose tensors and memory this program knows; others are planned by whole layers.
_KNOWN = """
llama llama4 deci falcon grok gpt2 gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2
qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp phi2 phi3 phimoe
plamo plamo2 plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 starcoder2
mamba mamba2 jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe openelm arctic
deepseek deepseek2 deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet jais jais2 nemotron nemotron_h
nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2 rwkv7 arwkv7 granite granitemoe granitehybrid
granite_swa chameleon plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee afmoe laguna ernie4_5
ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 smollm3 gpt-oss lfm2 lfm2moe smallthinker seed_oss
grovemoe apertus minimax-01 minimax-m2 minimax-m3 cogvlm pangu-embedded mistral3 mistral4 paddleocr mimo2
step35 maincoder kimi-linear kimi-k3 glm5-next hy_v4 mellum maple talkie muse-glimmer spark2_5
"""
KNOWN = frozenset(_KNOWN.split())
# Encoders: every batch is read at once, without a cache, into vectors rather than logits.
_ENCODERS = """
bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding
wavtokenizer-dec
"""
ENCODERS = frozenset(_ENCODERS.split())
CACHELESS = ENCODERS | {"dream", "llada", "llada-moe", "rnd1", "clef"}  # diffusion: logits, but no cache

_STEM = re.compile(r"blk\.([0-9]+)\.(.+?)(?:\.weight|\.bias|(?:\.weight)?\.(?:input_)?scale)?")
_RECURRENT = re.compile(r"ssm_\w+|shortconv\.\w+|time_mix_\w+")
_ATTENTION = frozenset({"attn_q", "attn_k", "attn_qkv", "attn_kv", "attn_kv_a_mqa", "attn_q_b"})


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model; the tuples have one entry for each main layer."""

    n_main: int
    n_nextn: int  # speculative blocks after the main ones, counted inside block_count
    attention: tuple[bool, ...]
    recurrent: tuple[bool, ...]

    @property
    def n_all(self) -> int:
        """What the engine calls n_layer_all: speculative blocks included."""
        return self.n_main + self.n_nextn


@remembered
def layers_of(inventory: Inventory) -> Layers:
    """Count and classify layers.

    `block_count` includes the NextN blocks even when the file left their tensors out. A layer is
    recurrent by its own tensors (or by `attention.recurrent_layers` where a linear attention has
    ordinary names) and then attends as well only when it owns both kinds of projections.
    """
    stems = stems_by_layer(inventory)
    in_file = max(stems, default=-1) + 1
    total = inventory.number("block_count", in_file)
    heads = sum(any(s.startswith("nextn.") for s in names) for names in stems.values())
    n_nextn = min(inventory.number("nextn_predict_layers", heads), total)
    n_main = total - n_nextn
    listed = _listed_recurrent(inventory, n_main)
    recurrent = tuple(listed[n] or _is_recurrent(stems.get(n, frozenset())) for n in range(n_main))
    attention = tuple(_attends(stems.get(n, frozenset()), recurrent[n]) for n in range(n_main))
    return Layers(n_main, n_nextn, attention, recurrent)


@remembered
def stems_by_layer(inventory: Inventory) -> Mapping[int, frozenset[str]]:
    """Tensor names of each block without `blk.N.` and without suffix."""
    found: dict[int, set[str]] = defaultdict(set)
    for tensor in inventory.tensors:
        match = _STEM.fullmatch(tensor.name)
        if match:
            found[int(match[1])].add(match[2])
    return MappingProxyType({layer: frozenset(stems) for layer, stems in found.items()})


@remembered
def weights_by_layer(inventory: Inventory) -> Mapping[int, Mapping[str, Tensor]]:
    """The weights of each block by their names without `blk.N.` and `.weight`; biases and scales are none."""
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for tensor in inventory.tensors:
        block = within_block(tensor.name)
        if block and block[1].endswith(".weight"):
            found[block[0]][block[1].removesuffix(".weight")] = tensor
    return MappingProxyType(dict(found))


def _listed_recurrent(inventory: Inventory, n_main: int) -> tuple[bool, ...]:
    value = inventory.hparams.get("attention.recurrent_layers")
    if not isinstance(value, tuple):
        # Lightning attention has ordinary names: only the interval tells which layers have a state.
        interval = max(inventory.number("full_attention_interval", 8), 1)
        linear = inventory.architecture == "minimax-01"
        return tuple(linear and (n + 1) % interval != 0 for n in range(n_main))
    return tuple(bool(v) for v in (*value, *(False,) * n_main))[:n_main]


def _is_recurrent(stems: frozenset[str]) -> bool:
    return any(_RECURRENT.fullmatch(stem) for stem in stems)


def _attends(stems: frozenset[str], recurrent: bool) -> bool:
    if not recurrent:
        return bool(stems & _ATTENTION)
    # Delta-net layers name their projections attn_*; only a Mamba beside them makes these an attention.
    return "ssm_in" in stems and "attn_k" in stems


def shared_kv(inventory: Inventory, layers: Layers) -> Mapping[int, int]:
    """Layers that read another layer's KV cache, and whose: Gemma 3n and 4 share the last of each kind."""
    first = layers.n_main
    if inventory.architecture == "gemma3n":
        first = 20  # fixed in the engine
    elif inventory.architecture == "gemma4":
        first = layers.n_all - inventory.number("attention.shared_kv_layers")
    slides = sliding_layers(inventory, layers.n_main)
    return {n: first - (2 if slides[n] else 1) for n in range(max(first, 2), layers.n_main)}
