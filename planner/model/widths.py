"""Shapes that a file's metadata gives its tensors: the engine refuses a file whose tensors have others.

Only what every architecture computes alike, and only from keys that are stated; where architectures differ
(planner.model.width_rules) they were asked: tests hold each rule to models that the engine itself makes, and
the refusals to what it says of tables with one key changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.model.heads import even_width, is_latent, kv_heads
from planner.model.inventory import Inventory, Tensor, by_name
from planner.model.layers import Layers, layers_of, stems_by_layer, weights_by_layer
from planner.model.required_tensors import KEYS, required_of
from planner.model.sliding_window import has_window, sliding_layers, window
from planner.model.width_rules import (
    ALL_ROTATED,
    DENSE_EXPERTS,
    DIVIDED_EXPERTS,
    GATED,
    LEAST_GATE,
    MOST_GATE,
    NO_EXPERTS,
    OWN_EXPERTS,
    SECTIONED,
    SHARED_WIDTHS,
    Rule,
    indexer_rules,
    mixer_rules,
    stated,
    stream_rules,
    times,
)

_OTHER_INNER = frozenset({"arctic", "qwen"})  # dense parts as wide as the model; half of what is stated
_THIRDS = frozenset({"cogvlm", "qwen"})  # queries, keys and values in one, three times as wide as the model
_ONE_SHARED = frozenset({"kimi-k3", "kimi-linear", "llama4"})  # no shared expert by count is one
_INTERLEAVED = frozenset({"ernie4_5-moe", "llama4"})  # dense layers among the routed ones
_LISTS_ONLY: Mapping[str, frozenset[str]] = {
    "attention.sliding_window_pattern": frozenset(
        {"dots3note", "gemma4", "granite_swa", "mimo2", "spark2_5"}
    ),
    "attention.compress_ratios": frozenset({"deepseek4"}),
    "attention.indexer.types": frozenset({"dots3note"}),
}
# Counts that may not be 0; of these some not missing either.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "arwkv7": ("token_shift_count",),
    "deepseek4": ("hyper_connection.sinkhorn_iterations",),
    "dots1": ("expert_gating_func",),
    "ernie4_5-moe": ("interleave_moe_layer_step",),
    "glm5-next": ("hyper_connection.sinkhorn_iterations", "kpool"),
    "hy_v4": ("expert_gating_func",),
}
_SAID = frozenset({"token_shift_count", "expert_gating_func"})
# Which tell their recurrent layers by key-value heads.
_HEADED = """
plamo2 jamba nemotron_h nemotron_h_moe granitehybrid lfm2 lfm2moe bailingmoe3 kimi-k3 glm5-next
"""
_BY_HEADS = frozenset(_HEADED.split())


def shape_faults(inventory: Inventory) -> Iterator[str]:
    """Tensors of main layers whose shapes contradict the hyperparameters, a sentence each."""
    layers, weights = layers_of(inventory), weights_by_layer(inventory)
    slides = sliding_layers(inventory, layers.n_main)
    yield from _kinds(inventory, layers)
    for n in range(layers.n_main):
        own = weights.get(n, {})
        for rule in _rules(inventory, own, n, slides[n], layers.attention[n]):
            tensor = own.get(rule.stem)
            if tensor is not None and rule.axis < len(tensor.shape):
                yield from _fault(tensor, rule)


def _fault(tensor: Tensor, rule: Rule) -> Iterator[str]:
    wanted, there = [size for size in rule.wanted if size is not None], tensor.shape[rule.axis]
    if wanted and there not in wanted:
        shape, say = "x".join(map(str, tensor.shape)), "say" if "," in rule.keys else "says"
        yield f"tensor {tensor.name} is {shape}, {rule.keys} {say} {wanted[0]} in place of {there}"


def _rules(
    inventory: Inventory, own: Mapping[str, Tensor], n: int, slides: bool, attends: bool
) -> Iterator[Rule]:
    yield from _feed_forward(inventory, own, n)
    yield from _experts(inventory, n)
    yield from mixer_rules(inventory, own, n)
    yield from indexer_rules(inventory)
    yield from stream_rules(inventory)
    if attends:
        yield from _latent(inventory, n, slides) if is_latent(inventory) else _heads(inventory, n, slides)


def _heads(inventory: Inventory, n: int, slides: bool) -> Iterator[Rule]:
    heads = inventory.per_layer("attention.head_count", n + 1)[n]
    even = even_width(inventory) or None
    key, value = (stated(inventory, f"attention.{what}_length", even) for what in ("key", "value"))
    if inventory.architecture == "deepseek4":
        yield from _grouped(inventory, heads, key)
        return
    if slides:
        key, value = (
            stated(inventory, f"attention.{what}_length_swa", wide)
            for what, wide in (("key", key), ("value", value))
        )
    cached = kv_heads(inventory, n + 1)[n]
    queries = times(heads, key, 2 if inventory.architecture in GATED else 1)
    yield Rule("attn_q", 1, (queries,), "attention.head_count")
    yield Rule("attn_output", 0, (times(heads, value),), "attention.head_count")
    yield Rule("attn_k", 1, (times(cached, key),), "attention.head_count_kv")
    yield Rule("attn_v", 1, (times(cached, value),), "attention.head_count_kv")
    if key is not None and value is not None and inventory.architecture not in _THIRDS:
        fused = heads * key + cached * (key + value)
        yield Rule("attn_qkv", 1, (fused,), "attention.head_count, head_count_kv")


def _grouped(inventory: Inventory, heads: int, key: int | None) -> Iterator[Rule]:
    """DeepSeek-V4: one key for all heads, what they read projected back in groups."""
    groups, rank = (stated(inventory, f"attention.output_{what}") for what in ("group_count", "lora_rank"))
    queries = stated(inventory, "attention.q_lora_rank")
    yield Rule("attn_q_a", 1, (queries,), "attention.q_lora_rank")
    yield Rule("attn_q_b", 0, (queries,), "attention.q_lora_rank")
    yield Rule("attn_q_b", 1, (times(heads, key),), "attention.head_count, key_length")
    yield Rule("attn_kv", 1, (key,), "attention.key_length")
    yield Rule("attn_output_a", 1, (rank,), "attention.output_lora_rank")
    yield Rule("attn_output_a", 2, (groups,), "attention.output_group_count")
    yield Rule("attn_output_b", 0, (times(groups, rank),), "attention.output_group_count, output_lora_rank")


def _latent(inventory: Inventory, n: int, slides: bool) -> Iterator[Rule]:
    def local(key: str) -> int | None:
        """A count that may be another one for layers that slide."""
        wide = stated(inventory, f"attention.{key}")
        return stated(inventory, f"attention.{key}_swa", wide) if slides else wide

    heads = inventory.per_layer("attention.head_count", n + 1)[n]
    key, value, kept = map(local, ("key_length_mla", "value_length_mla", "kv_lora_rank"))
    rope, queries = stated(inventory, "rope.dimension_count"), stated(inventory, "attention.q_lora_rank")
    yield Rule("attn_q_a", 1, (queries,), "attention.q_lora_rank")
    yield Rule("attn_q_b", 0, (queries,), "attention.q_lora_rank")
    yield Rule("attn_q", 1, (times(heads, key),), "attention.head_count, key_length_mla")
    yield Rule("attn_q_b", 1, (times(heads, key),), "attention.head_count, key_length_mla")
    yield Rule("attn_v_b", 0, (kept,), "attention.kv_lora_rank")
    yield Rule("attn_v_b", 1, (value,), "attention.value_length_mla")
    yield Rule("attn_v_b", 2, (heads,), "attention.head_count")
    yield Rule("attn_k_b", 1, (kept,), "attention.kv_lora_rank")
    yield Rule("attn_k_b", 2, (heads,), "attention.head_count")
    yield Rule("attn_kv_a_norm", 0, (kept,), "attention.kv_lora_rank")
    if kept is not None and rope is not None:
        yield Rule("attn_kv_a_mqa", 1, (kept + rope,), "attention.kv_lora_rank, rope.dimension_count")
    yield Rule("attn_output", 0, (times(heads, value),), "attention.head_count, value_length_mla")


def _feed_forward(inventory: Inventory, own: Mapping[str, Tensor], n: int) -> Iterator[Rule]:
    key = "feed_forward_length"
    if "ffn_down" not in own or key not in inventory.hparams or inventory.architecture in _OTHER_INNER:
        return
    inner = inventory.per_layer(key, n + 1)[n]
    yield Rule("ffn_down", 0, (inner,), key)
    yield Rule("ffn_gate", 1, (inner,), key)
    halves = (inner,) if "ffn_gate" in own else (inner, 2 * inner)  # gate and up in one
    yield Rule("ffn_up", 1, halves, key)


def _experts(inventory: Inventory, n: int) -> Iterator[Rule]:
    number, arch = inventory.number, inventory.architecture
    dense = inventory.per_layer("feed_forward_length", n + 1)[n]
    own = inventory.per_layer("expert_feed_forward_length", n + 1)[n]
    inner: tuple[int | None, ...]
    if arch in DENSE_EXPERTS and "feed_forward_length" in inventory.hparams:
        own, inner = 0, (dense,)
    elif own or (arch in OWN_EXPERTS and "expert_feed_forward_length" in inventory.hparams):
        inner = (own,)
    else:  # unstated it is the width of dense layers, in some architectures divided
        divided = () if arch == "llama" else (2, max(number("expert_used_count"), 1))
        sizes = (dense, *(dense // parts for parts in divided))
        sure = "feed_forward_length" in inventory.hparams or (
            arch in DIVIDED_EXPERTS and bool(inventory.header_digest)
        )
        inner = sizes if sure else tuple(size or None for size in sizes)
    key = "expert_feed_forward_length" if own else "feed_forward_length"
    yield Rule("ffn_down_exps", 0, inner, key)
    yield Rule("ffn_up_exps", 1, inner, key)
    yield Rule("ffn_gate_exps", 1, inner, key)
    yield Rule("ffn_gate_up_exps", 1, tuple(times(2, size) for size in inner), key)
    yield from _shared(inventory, inner, dense)


def _shared(inventory: Inventory, inner: tuple[int | None, ...], dense: int) -> Iterator[Rule]:
    """Architectures read one of two keys, and know the width of one shared expert without either."""
    width, arch = stated(inventory, "expert_shared_feed_forward_length"), inventory.architecture
    said = inventory.number("expert_shared_count", 1)
    count = 1 if arch == "llama4" else said or (arch in _ONE_SHARED)
    shared: tuple[int | None, ...]
    if (width and arch in SHARED_WIDTHS) or arch == "nemotron_h_moe":
        shared = (width or 0,)
    elif arch in GATED:
        shared = (dense if inventory.header_digest else dense or None,)
    else:
        shared = (*(times(size, count) for size in inner), width or dense or None)
    key = "expert_shared_feed_forward_length" if width else "expert_shared_count"
    yield Rule("ffn_down_shexp", 0, shared, key)
    yield Rule("ffn_up_shexp", 1, shared, key)
    yield Rule("ffn_gate_shexp", 1, shared, key)


def _kinds(inventory: Inventory, layers: Layers) -> Iterator[str]:
    """Layers that are of another kind than the keys say that tell kinds apart."""
    stems = stems_by_layer(inventory)
    yield from _without_experts(inventory, stems)
    yield from _dense(inventory, layers, stems)
    yield from _full_attention(inventory, layers, stems)
    yield from _listed(inventory, layers)
    yield from _latent_keys(inventory, layers, stems)
    yield from _groups(inventory)
    yield from _rotated(inventory)
    yield from _lengths(inventory, layers)
    yield from _counted(inventory)
    yield from _per_layer_table(inventory)


def _dense(inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """Which of the first layers hold no experts."""
    arch, dense = inventory.architecture, inventory.hparams.get("leading_dense_block_count")
    if arch == "llama4" and "interleave_moe_layer_step" in inventory.hparams:
        yield from _interleaved(inventory, layers, stems)
    if not isinstance(dense, int) or "leading_dense_block_count" not in required_of(arch).get(KEYS, {}):
        return
    for n in range(layers.n_main):
        routed, plain = ("ffn_down_exps" in stems.get(n, ()), "ffn_down" in stems.get(n, ()))
        if n < dense and routed and not plain:
            yield f"layer {n} holds experts, leading_dense_block_count says {dense} dense layers"
        if n >= dense and plain and not routed and arch not in _INTERLEAVED:
            yield f"layer {n} holds no experts, leading_dense_block_count says {dense} dense layers"


def _without_experts(inventory: Inventory, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """Experts in an architecture whose mixtures have another name."""
    arch, routed = inventory.architecture, [n for n, names in stems.items() if "ffn_down_exps" in names]
    if arch in NO_EXPERTS and routed:
        yield f"layer {min(routed)} holds experts, and llama.cpp reads none of {arch}"


def _interleaved(inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    step = inventory.number("interleave_moe_layer_step")
    for n in range(layers.n_main):
        routed = "ffn_down_exps" in stems.get(n, ())
        if n in stems and routed != bool(step and (n + 1) % step == 0):
            holds = "experts" if routed else "no experts"
            yield f"layer {n} holds {holds}, interleave_moe_layer_step {step} says otherwise"


def _full_attention(
    inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]
) -> Iterator[str]:
    """Which layers of a recurrent model attend; a list of recurrent layers goes before the interval."""
    interval = inventory.hparams.get("full_attention_interval")
    listed = "attention.recurrent_layers" in inventory.hparams
    if inventory.architecture not in GATED or listed or not isinstance(interval, int) or not interval:
        return
    for n, attends in enumerate(layers.attention):
        if n in stems and attends != ((n + 1) % interval == 0):
            kind = "attends" if attends else "does not attend"
            yield f"layer {n} {kind}, full_attention_interval {interval} says otherwise"


def _groups(inventory: Inventory) -> Iterator[str]:
    groups, used = inventory.number("expert_group_count"), inventory.number("expert_group_used_count")
    experts = inventory.number("expert_count")
    if groups > 1 and experts and (groups >= experts or experts % groups):
        yield f"{inventory.architecture}.expert_group_count is {groups}, of {experts} experts"
    if groups > 1 and not 0 < used < groups:
        yield f"{inventory.architecture}.expert_group_used_count is {used}, of {groups} groups"


def _rotated(inventory: Inventory) -> Iterator[str]:
    arch, rotated = inventory.architecture, inventory.number("rope.dimension_count")
    key = inventory.number("attention.key_length", even_width(inventory))
    said = "rope.dimension_count" in inventory.hparams
    if arch in ALL_ROTATED and said and key and rotated != key and any(layers_of(inventory).attention):
        yield f"rope.dimension_count is {rotated}, a head of {arch} is {key} wide"
    factors = by_name(inventory).get("rope_freqs.weight")
    if arch == "gemma4" and factors is not None and rotated > 2 * factors.shape[0]:
        yield f"rope.dimension_count is {rotated}, rope_freqs.weight has factors for {2 * factors.shape[0]}"


def _counted(inventory: Inventory) -> Iterator[str]:
    """Single keys that an architecture reads and that may not be 0, or have one value."""
    arch, hparams, number = inventory.architecture, inventory.hparams, inventory.number
    if arch == "afmoe" and not window(inventory) and inventory.header_digest:
        yield "afmoe.attention.sliding_window is missing or 0"
    gate, least = hparams.get("expert_gating_func"), LEAST_GATE.get(arch)
    if isinstance(gate, int) and least is not None and not least <= gate <= MOST_GATE:
        yield f"{arch}.expert_gating_func is {gate}, of {least} to {MOST_GATE}"
    if arch in GATED and hparams.get("full_attention_interval") == 0:
        yield f"{arch}.full_attention_interval is 0"
    if arch == "deepseek4" and inventory.header_digest:
        yield from _of_one_key(inventory)
    wide = 2 * number("embedding_length")
    if arch == "jamba" and "ssm.inner_size" in hparams and number("ssm.inner_size") != wide:
        yield f"jamba.ssm.inner_size is {number('ssm.inner_size')}, twice embedding_length is {wide}"
    if "kpool" in _NEEDS.get(arch, ()):
        pool, kept = number("attention.indexer.kpool"), number("attention.indexer.top_k")
        if "attention.indexer.kpool" in hparams and (pool < 2 or kept % pool):
            yield f"{arch}.attention.indexer.kpool is {pool}, of {kept} cells that are chosen"
    for key in _NEEDS.get(arch, ()) if inventory.header_digest else ():
        if key != "kpool" and not number(key) and (key in hparams or key in _SAID):
            yield f"{arch}.{key} is missing or 0"
    if "rwkv" in arch and "wkv.head_size" in hparams and not number("wkv.head_size"):
        yield f"{arch}.wkv.head_size is 0"
    shifts = {"rwkv7": 2, "arwkv7": 1}.get(arch)
    if shifts and "token_shift_count" in hparams and number("token_shift_count") != shifts:
        yield f"{arch}.token_shift_count is {number('token_shift_count')}, {arch} has {shifts}"


def _of_one_key(inventory: Inventory) -> Iterator[str]:
    """DeepSeek-V4: one head of keys, which are the values too, and streams that are balanced in steps."""
    number = inventory.number
    if number("attention.head_count_kv") != 1:
        yield "deepseek4.attention.head_count_kv is not 1"
    if "attention.value_length" in inventory.hparams:
        key, value = number("attention.key_length", even_width(inventory)), number("attention.value_length")
        if key != value:
            yield f"deepseek4.attention.value_length is {value}, keys are {key} wide"


def _indexed(inventory: Inventory) -> Iterator[str]:
    """What must be said where layers choose the cells that they attend to."""
    there = any(".indexer." in tensor.name for tensor in inventory.tensors)
    for key in ("top_k", "head_count", "key_length", "types") if there and inventory.header_digest else ():
        if not inventory.hparams.get(f"attention.indexer.{key}"):
            yield f"{inventory.architecture}.attention.indexer.{key} is missing or 0, and there is an indexer"


def _per_layer_table(inventory: Inventory) -> Iterator[str]:
    """Gemma 4's table of inputs of each layer: all layers' side by side."""
    key, table = "embedding_length_per_layer_input", by_name(inventory).get("per_layer_token_embd.weight")
    if inventory.architecture != "gemma4" or key not in inventory.hparams or table is None:
        return
    width = inventory.number(key)
    if table.shape[0] != width * inventory.number("block_count"):
        shape = "x".join(map(str, table.shape))
        yield f"tensor {table.name} is {shape}, {key} says {width} for each layer"


def _lengths(inventory: Inventory, layers: Layers) -> Iterator[str]:
    """Lists of another length than their reader takes, or that say nothing of any layer."""
    arch, hparams, n_main = inventory.architecture, inventory.hparams, layers.n_main
    unread = arch == "deepseek4"  # all of whose layers slide
    patterned = "attention.sliding_window_pattern" in hparams and has_window(inventory) and not unread
    if patterned and not any(sliding_layers(inventory, n_main)):
        yield f"{arch}.attention.sliding_window_pattern lets no layer slide, and there is a window"
    of_layers = ["swiglu_clamp_exp", "swiglu_clamp_shexp"]
    if arch == "hy_v4":
        of_layers.append("attention.indexer.types")
        yield from _indexed(inventory)
    for key in of_layers:
        limits, count = hparams.get(key), inventory.number("block_count")
        if isinstance(limits, tuple) and len(limits) != count:
            yield f"{arch}.{key} has {len(limits)} values for {count} layers"
    ratios = hparams.get("attention.compress_ratios")
    if arch == "deepseek4" and isinstance(ratios, tuple) and len(ratios) < n_main:
        yield f"{arch}.attention.compress_ratios has {len(ratios)} values for {n_main} layers"
    sections = hparams.get("rope.dimension_sections")
    if arch in SECTIONED and isinstance(sections, tuple) and len(sections) != 4:
        yield f"{arch}.rope.dimension_sections has {len(sections)} values, {arch} reads 4"


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


def _latent_keys(inventory: Inventory, layers: Layers, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """Keys of a latent attention that do not go with each other, of which the engine dies."""
    number, arch = inventory.number, inventory.architecture
    if not is_latent(inventory):
        if any({"attn_k_b", "attn_v_b"} <= names for names in stems.values()):
            for key in ("attention.key_length_mla", "attention.value_length_mla"):
                if not number(key):
                    yield f"{arch}.{key} is missing, and attn_k_b and attn_v_b are a latent attention"
        return
    if inventory.header_digest and not number("attention.q_lora_rank"):
        divided = [n for n, names in stems.items() if "attn_q_a" in names and "attn_q" not in names]
        if divided:
            yield f"{arch}.attention.q_lora_rank is missing or 0, and layer {min(divided)} has attn_q_a"
    heads = kv_heads(inventory, layers.n_main)
    if wrong := {n for n, attends in zip(heads, layers.attention, strict=True) if attends and n != 1}:
        yield f"{arch}.attention.head_count_kv is {min(wrong)}, a latent attention has 1"
    rope = number("rope.dimension_count")
    local = ("_swa",) if "attention.kv_lora_rank_swa" in inventory.hparams else ()
    for swa in ("", *local):
        kept = number(f"attention.kv_lora_rank{swa}")
        width = number(f"attention.key_length{swa}", number("attention.key_length", even_width(inventory)))
        if kept and "rope.dimension_count" in inventory.hparams and width != kept + rope:
            sizes = f"{width}, kv_lora_rank{swa} and rope.dimension_count say {kept + rope}"
            yield f"{arch}.attention.key_length{swa} is {sizes}"
