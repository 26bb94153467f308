"""Shapes that a file's metadata gives its tensors: the engine refuses a file whose tensors have others.

Only what every architecture computes alike, and only from keys that are stated; where architectures differ
(`_GATED`, `_APART`) they were asked: tests hold each rule to models that the engine itself makes, and the
refusals to what it says of real tables with one key changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.model.heads import even_width, is_latent, kv_heads
from planner.model.inventory import Inventory, Tensor
from planner.model.layers import Layers, layers_of, stems_by_layer, weights_by_layer
from planner.model.required_tensors import KEYS, required_of
from planner.model.sliding_window import sliding_layers

_GATED = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})  # a gate beside each query
_OTHER_INNER = frozenset({"arctic", "qwen"})  # dense parts as wide as the model; half of what is stated
# Refused where a part of a head is not rotated.
_ROTATED = """
arctic baichuan bailingmoe chameleon codeshell cohere2moe dbrx deci deepseek dots1 ernie4_5 ernie4_5-moe
falcon gpt-oss grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais2 llama llama4
maincoder mellum olmo olmo2 olmoe orion paddleocr plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl
qwen3vlmoe seed_oss smallthinker smollm3 starcoder2 talkie xverse
"""
_ALL_ROTATED = frozenset(_ROTATED.split())
# The tensor whose width a key says: where it is there, 0 is no width.
_WIDTH_OF: Mapping[str, str] = {
    "feed_forward_length": "ffn_down",
    "attention.kv_lora_rank": "attn_kv_a_mqa",
    "attention.q_lora_rank": "attn_q_a",
    "ssm.conv_kernel": "ssm_conv1d",
    "ssm.inner_size": "ssm_out",
    "ssm.state_size": "ssm_conv1d",
    "shortconv.l_cache": "shortconv.conv",
    "wkv.head_size": "time_mix_output",
}
# Experts as wide as this key says, never as wide as dense layers.
_EXPERT_WIDTH = """
afmoe bailingmoe bailingmoe2 bailingmoe3 deepseek deepseek2 deepseek32 deepseek4 dots1 dots3note ernie4_5-moe
exaone-moe gemma4 glm-dsa glm5-next gpt-oss hy_v3 hy_v4 kimi-k3 laguna mistral4
"""
_OWN_EXPERT_WIDTH = frozenset(_EXPERT_WIDTH.split())
_MAMBA_2 = frozenset({"mamba2", "nemotron_h", "nemotron_h_moe", "granitehybrid", "falcon-h1"})
_SECTIONS = 4  # of a head that is rotated by several positions
_BY_SECTIONS = frozenset(
    {
        *("bailingmoe3", "deepseek32", "ernie4_5", "ernie4_5-moe", "glm-dsa", "glm4", "glm4moe"),
        *("hunyuan-dense", "hunyuan_vl", "paddleocr", "qwen2vl", "qwen35", "qwen35moe", "qwen3vl"),
        "qwen3vlmoe",
    }
)
_NO_EXPERTS = frozenset(  # granite and nemotron_h read them as granitemoe and nemotron_h_moe do
    {"cohere2", "ernie4_5", "exaone", "glm4", "lfm2", "qwen2", "qwen3", "qwen35", "qwen3vl"}
)
# Which read expert_gating_func: functions 1 to 4; some take 0 for their own.
_GATES = """
bailingmoe2 bailingmoe3 deepseek32 deepseek4 dots1 dots3note exaone-moe hy_v4 kimi-k3 kimi-linear lfm2moe
minimax-m2 minimax-m3 smallthinker
"""
_GATES_OR_0 = "afmoe cohere2moe deepseek2 glm-dsa glm4moe glm5-next hy_v3 laguna mistral4"
_LEAST_GATE = {**dict.fromkeys(_GATES.split(), 1), **dict.fromkeys(_GATES_OR_0.split(), 0)}
_MOST_GATE = 4
_INTERLEAVED = frozenset({"ernie4_5-moe", "llama4"})  # dense layers among the routed ones
_LISTS_ONLY: Mapping[str, frozenset[str]] = {
    "attention.sliding_window_pattern": frozenset(
        {"dots3note", "gemma4", "granite_swa", "mimo2", "spark2_5"}
    ),
    "attention.compress_ratios": frozenset({"deepseek4"}),
    "attention.indexer.types": frozenset({"dots3note"}),
}
# Which tell their recurrent layers by key-value heads.
_HEADED = """
plamo2 jamba nemotron_h nemotron_h_moe granitehybrid lfm2 lfm2moe bailingmoe3 kimi-k3 glm5-next
"""
_BY_HEADS = frozenset(_HEADED.split())


@dataclass(frozen=True, slots=True)
class _Rule:
    """One extent of a tensor: its axis, the values the engine may want there, and the keys behind them."""

    stem: str
    axis: int
    wanted: tuple[int, ...]
    keys: str


def shape_faults(inventory: Inventory) -> Iterator[str]:
    """Tensors of main layers whose shapes contradict the hyperparameters, a sentence each."""
    layers, weights = layers_of(inventory), weights_by_layer(inventory)
    slides = sliding_layers(inventory, layers.n_main)
    yield from _kinds(inventory, layers)
    for n in range(layers.n_main):
        own = weights.get(n, {})
        attends = layers.attention[n] and not layers.recurrent[n]
        yield from _nothing(inventory, own, n, attends)
        for rule in _rules(inventory, own, n, slides[n], attends):
            tensor = own.get(rule.stem)
            if tensor is not None and rule.axis < len(tensor.shape):
                yield from _fault(tensor, rule)


def _fault(tensor: Tensor, rule: _Rule) -> Iterator[str]:
    wanted, there = [size for size in rule.wanted if size > 0], tensor.shape[rule.axis]
    if wanted and there not in wanted:
        shape, say = "x".join(map(str, tensor.shape)), "say" if "," in rule.keys else "says"
        yield f"tensor {tensor.name} is {shape}, {rule.keys} {say} {wanted[0]} in place of {there}"


def _nothing(inventory: Inventory, own: Mapping[str, Tensor], n: int, attends: bool) -> Iterator[str]:
    """Widths that are stated as 0, of tensors that are there."""
    widths = dict(_WIDTH_OF)
    if attends:
        widths["attention.head_count_kv"] = "attn_k"
    if inventory.architecture in _OWN_EXPERT_WIDTH:
        widths["expert_feed_forward_length"] = "ffn_down_exps"
    for key, stem in widths.items():
        if key in inventory.hparams and stem in own and not inventory.per_layer(key, n + 1)[n]:
            yield f"tensor {own[stem].name} is there, {inventory.architecture}.{key} is 0"
    # Where one of two keys is read, the other one stands in for it.
    for first, stem in (("", "ffn_down_exps"), ("_shared", "ffn_down_shexp")):
        pair = (f"expert{first}_feed_forward_length", "feed_forward_length")
        keys = [key for key in pair if key in inventory.hparams]
        asked = not first or inventory.architecture in _GATED
        if stem in own and keys and asked and not any(inventory.per_layer(key, n + 1)[n] for key in keys):
            yield f"tensor {own[stem].name} is there, {inventory.architecture}.{keys[0]} is 0"


def _rules(
    inventory: Inventory, own: Mapping[str, Tensor], n: int, slides: bool, attends: bool
) -> Iterator[_Rule]:
    yield from _feed_forward(inventory, own, n)
    yield from _experts(inventory, n)
    if not attends:
        yield from _mixers(inventory)
    else:
        yield from _latent(inventory, n) if is_latent(inventory) else _heads(inventory, n, slides)


def _heads(inventory: Inventory, n: int, slides: bool) -> Iterator[_Rule]:
    stated = inventory.hparams
    if "attention.key_length" not in stated or "attention.value_length" not in stated:
        return
    key, value = inventory.number("attention.key_length"), inventory.number("attention.value_length")
    if slides:
        key = inventory.number("attention.key_length_swa", key)
        value = inventory.number("attention.value_length_swa", value)
    heads = inventory.per_layer("attention.head_count", n + 1)[n]
    cached = kv_heads(inventory, n + 1)[n]
    queries = heads * key * (2 if inventory.architecture in _GATED else 1)
    yield _Rule("attn_q", 1, (queries,), "attention.head_count")
    yield _Rule("attn_output", 0, (heads * value,), "attention.head_count")
    if cached:
        yield _Rule("attn_k", 1, (cached * key,), "attention.head_count_kv")
        yield _Rule("attn_v", 1, (cached * value,), "attention.head_count_kv")
        fused = heads * key + cached * (key + value)
        yield _Rule("attn_qkv", 1, (fused,), "attention.head_count, head_count_kv")


def _latent(inventory: Inventory, n: int) -> Iterator[_Rule]:
    number = inventory.number
    heads = inventory.per_layer("attention.head_count", n + 1)[n]
    key, value = number("attention.key_length_mla"), number("attention.value_length_mla")
    kept, rope = number("attention.kv_lora_rank"), number("rope.dimension_count")
    queries = number("attention.q_lora_rank")
    yield _Rule("attn_q_a", 1, (queries,), "attention.q_lora_rank")
    yield _Rule("attn_q_b", 0, (queries,), "attention.q_lora_rank")
    yield _Rule("attn_q_b", 1, (heads * key,), "attention.head_count, key_length_mla")
    yield _Rule("attn_v_b", 0, (kept,), "attention.kv_lora_rank")
    yield _Rule("attn_v_b", 1, (value,), "attention.value_length_mla")
    yield _Rule("attn_v_b", 2, (heads,), "attention.head_count")
    yield _Rule("attn_k_b", 1, (kept,), "attention.kv_lora_rank")
    yield _Rule("attn_k_b", 2, (heads,), "attention.head_count")
    yield _Rule("attn_kv_a_norm", 0, (kept,), "attention.kv_lora_rank")
    if kept and "rope.dimension_count" in inventory.hparams:
        yield _Rule("attn_kv_a_mqa", 1, (kept + rope,), "attention.kv_lora_rank, rope.dimension_count")
    yield _Rule("attn_output", 0, (heads * value,), "attention.head_count, value_length_mla")


def _feed_forward(inventory: Inventory, own: Mapping[str, Tensor], n: int) -> Iterator[_Rule]:
    inner = inventory.per_layer("feed_forward_length", n + 1)[n]
    if "ffn_down" in own and inner and inventory.architecture not in _OTHER_INNER:
        yield _Rule("ffn_down", 0, (inner,), "feed_forward_length")
        yield _Rule("ffn_gate", 1, (inner,), "feed_forward_length")
        halves = (inner,) if "ffn_gate" in own else (inner, 2 * inner)  # gate and up in one
        yield _Rule("ffn_up", 1, halves, "feed_forward_length")


def _experts(inventory: Inventory, n: int) -> Iterator[_Rule]:
    number = inventory.number
    dense = inventory.per_layer("feed_forward_length", n + 1)[n]
    stated = inventory.per_layer("expert_feed_forward_length", n + 1)[n]
    # Unstated it is the width of dense layers, in some architectures divided.
    divided = () if inventory.architecture == "llama" else (2, max(number("expert_used_count"), 1))
    inner = (stated,) if stated else (dense, *(dense // parts for parts in divided))
    key = "expert_feed_forward_length" if stated else "feed_forward_length"
    yield _Rule("ffn_down_exps", 0, inner, key)
    yield _Rule("ffn_up_exps", 1, inner, key)
    yield _Rule("ffn_gate_exps", 1, inner, key)
    yield _Rule("ffn_gate_up_exps", 1, tuple(2 * size for size in inner), key)
    # Architectures read one of two keys, and know the width of one shared expert without either.
    several = tuple(size * number("expert_shared_count", 1) for size in inner)
    width = number("expert_shared_feed_forward_length")
    gated = inventory.architecture in _GATED
    shared = (width or dense,) if gated else (*several, width or dense)
    key = "expert_shared_feed_forward_length" if width else "expert_shared_count"
    yield _Rule("ffn_down_shexp", 0, shared, key)
    yield _Rule("ffn_up_shexp", 1, shared, key)
    yield _Rule("ffn_gate_shexp", 1, shared, key)


def _mixers(inventory: Inventory) -> Iterator[_Rule]:
    number = inventory.number
    yield _Rule("ssm_conv1d", 0, (number("ssm.conv_kernel"),), "ssm.conv_kernel")
    if inventory.architecture in _GATED:
        state, values = number("ssm.state_size"), number("ssm.time_step_rank")
        rows = state * (2 * number("ssm.group_count") + values)
        yield _Rule("attn_qkv", 1, (rows,), "ssm.state_size, group_count, time_step_rank")
        yield _Rule("ssm_out", 0, (number("ssm.inner_size"),), "ssm.inner_size")
    if inventory.architecture in _MAMBA_2:
        inner, shared = number("ssm.inner_size"), number("ssm.group_count") * number("ssm.state_size")
        rows = 2 * (inner + shared) + number("ssm.time_step_rank")
        yield _Rule("ssm_in", 1, (rows,), "ssm.inner_size, group_count, state_size, time_step_rank")


def _kinds(inventory: Inventory, layers: Layers) -> Iterator[str]:
    """Layers that are of another kind than the keys say that tell kinds apart."""
    stems = stems_by_layer(inventory)
    yield from _without_experts(inventory, stems)
    yield from _dense(inventory, layers, stems)
    yield from _full_attention(inventory, layers, stems)
    yield from _listed(inventory, layers)
    yield from _compressed(inventory, layers, stems)
    yield from _groups(inventory)
    yield from _rotated(inventory)


def _without_experts(inventory: Inventory, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """Experts in an architecture whose mixtures have another name."""
    arch, routed = inventory.architecture, [n for n, names in stems.items() if "ffn_down_exps" in names]
    if arch in _NO_EXPERTS and routed:
        yield f"layer {min(routed)} holds experts, and llama.cpp reads none of {arch}"


def _dense(inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """Which of the first layers hold no experts."""
    arch, dense = inventory.architecture, inventory.hparams.get("leading_dense_block_count")
    if not isinstance(dense, int) or "leading_dense_block_count" not in required_of(arch).get(KEYS, {}):
        return
    for n in range(layers.n_main):
        routed, plain = ("ffn_down_exps" in stems.get(n, ()), "ffn_down" in stems.get(n, ()))
        if n < dense and routed and not plain:
            yield f"layer {n} holds experts, leading_dense_block_count says {dense} dense layers"
        if n >= dense and plain and not routed and arch not in _INTERLEAVED:
            yield f"layer {n} holds no experts, leading_dense_block_count says {dense} dense layers"


def _full_attention(
    inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]
) -> Iterator[str]:
    """Which layers of a recurrent model attend; a list of recurrent layers goes before the interval."""
    interval = inventory.hparams.get("full_attention_interval")
    listed = "attention.recurrent_layers" in inventory.hparams
    if inventory.architecture not in _GATED or listed or not isinstance(interval, int):
        return
    if not interval:
        yield f"{inventory.architecture}.full_attention_interval is 0"
        return
    for n, attends in enumerate(layers.attention):
        if n in stems and attends != ((n + 1) % interval == 0):
            kind = "attends" if attends else "does not attend"
            yield f"layer {n} {kind}, full_attention_interval {interval} says otherwise"


def _groups(inventory: Inventory) -> Iterator[str]:
    groups, used = inventory.number("expert_group_count"), inventory.number("expert_group_used_count")
    if groups > 1 and not 0 < used < groups:
        yield f"{inventory.architecture}.expert_group_used_count is {used}, of {groups} groups"
    gate, least = inventory.hparams.get("expert_gating_func"), _LEAST_GATE.get(inventory.architecture)
    if isinstance(gate, int) and least is not None and not least <= gate <= _MOST_GATE:
        yield f"{inventory.architecture}.expert_gating_func is {gate}, of {least} to {_MOST_GATE}"
    experts = inventory.number("expert_count")
    if groups > 1 and experts and (experts % groups or groups >= experts):
        yield f"{inventory.architecture}.expert_group_count is {groups}, of {experts} experts"


def _rotated(inventory: Inventory) -> Iterator[str]:
    arch, rotated = inventory.architecture, inventory.hparams.get("rope.dimension_count")
    key = inventory.number("attention.key_length", even_width(inventory))
    if arch in _ALL_ROTATED and rotated is not None and key and rotated != key:
        yield f"rope.dimension_count is {rotated}, a head of {arch} is {key} wide"
    sections = inventory.hparams.get("rope.dimension_sections")
    if isinstance(sections, tuple) and len(sections) != _SECTIONS and arch in _BY_SECTIONS:
        yield f"{arch}.rope.dimension_sections has {len(sections)} values, {arch} reads {_SECTIONS}"


def _listed(inventory: Inventory, layers: Layers) -> Iterator[str]:
    """Keys that must be a list, one for each layer, and lists that must say 0 of a recurrent layer."""
    arch, hparams = inventory.architecture, inventory.hparams
    for key, readers in _LISTS_ONLY.items():
        if arch in readers and key in hparams and not isinstance(hparams[key], tuple):
            yield f"{arch}.{key} is one value, {arch} reads a list of one for each layer"
    if not inventory.header_digest:
        return
    nothing = ["attention.head_count_kv"] if arch in _BY_HEADS else []
    nothing += ["feed_forward_length"] if arch.startswith("nemotron_h") else []
    for key in nothing:
        for n, value in enumerate(inventory.per_layer(key, layers.n_main) if key in hparams else ()):
            if value and layers.recurrent[n]:
                yield f"{arch}.{key} is {value} for layer {n}, which is recurrent: 0 says so"
                break


def _compressed(inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """Keys of a latent attention that do not go with each other, of which the engine dies."""
    number, arch = inventory.number, inventory.architecture
    if not is_latent(inventory):
        if any({"attn_k_b", "attn_v_b"} <= names for names in stems.values()):
            for key in ("attention.key_length_mla", "attention.value_length_mla"):
                if not number(key):
                    yield f"{arch}.{key} is missing, and attn_k_b and attn_v_b are a latent attention"
        return
    heads = kv_heads(inventory, layers.n_main)
    if wrong := {n for n, attends in zip(heads, layers.attention, strict=True) if attends and n != 1}:
        yield f"{arch}.attention.head_count_kv is {min(wrong)}, a latent attention has 1"
    kept, rope = number("attention.kv_lora_rank"), number("rope.dimension_count")
    width = number("attention.key_length", even_width(inventory))
    if kept and "rope.dimension_count" in inventory.hparams and width != kept + rope:
        sizes = f"{width}, kv_lora_rank and rope.dimension_count say {kept + rope}"
        yield f"{arch}.attention.key_length is {sizes}"
