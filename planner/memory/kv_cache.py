"""Bytes of KV cache and recurrent state, layer by layer, by llama.cpp's own rules.

Exact for every architecture in `planner.model.layers.KNOWN` that the tests hold against the engine; sizes
follow the per-layer hyperparameters of the file, never an average layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.constants import CELL_STEP
from planner.errors import InputError
from planner.model.ggml_types import BY_NAME
from planner.model.heads import even_width, is_latent, kv_heads, shaped_width
from planner.model.inventory import Inventory
from planner.model.layers import CACHELESS
from planner.model.sliding_window import window
from planner.model.structure import Structure
from planner.workload import Workload, cells_each

_TENSOR_STEP = 32  # and every cache tensor to the alignment of a CPU buffer

# DeepSeek-V4: every 4th token is kept in a first compressed cache, every 128th in a second.
V4_FINE, V4_COARSE = 4, 128
# Architectures whose state the engine can take back by some tokens, which costs copies of it.
_ROLLBACK = re.compile(
    r"kimi-k3|qwen35(moe)?|qwen4exp|deepseek4|glm5-next|nemotron_h(_moe)?|lfm2(moe)?|bailingmoe3"
)
_INDEXED_VALUES = frozenset({"minimax-m3", "qwen4exp"})  # the indexer's cache has values of one head, unused
_MIXERS = (
    ("rwkv", "time_mix_receptance"),
    ("shortconv", "shortconv.conv"),
    ("kda", "ssm_conv1d_q"),
    ("ssm", "ssm_conv1d"),
)
_UNGROUPED = frozenset({"mamba", "jamba"})  # Mamba-1: the convolution sees the inner width alone
# Architectures that say which of their layers have an indexer, and those whose speculative block has none.
_TYPED = frozenset({"glm-dsa", "glm5-next", "dots3note", "hy_v4"})
_PLAIN_NEXTN = frozenset({"glm-dsa", "deepseek32", "dots3note"})
_GLM_5_2, _GLM_LAYERS = 1 << 20, 78  # context and layers of the first that shares them
_NO_FLASH = frozenset({"grok"})  # the engine turns it off
INDEXED = frozenset({"deepseek32", "glm-dsa", "glm5-next", "qwen4exp", "minimax-m3", "dots3note", "hy_v4"})


@dataclass(eq=False)
class KvTypeProblem(InputError):
    """A cache type that llama.cpp refuses for this model."""

    type_k: str
    type_v: str
    why: str

    def message(self) -> str:
        return f"KV cache types {self.type_k} and {self.type_v}: {self.why}"


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells per stream and streams of the two kinds of cache."""

    full: int
    sliding: int
    streams: int


def cells_of(
    inventory: Inventory, workload: Workload, *, unified: bool = False, swa_full: bool = False
) -> Cells:
    """How many cells the engine makes of a workload.

    `unified`: all sequences share one stream. `swa_full`: sliding layers keep the whole context.
    """
    streams = 1 if unified else workload.n_seq
    full = cells_each(workload.n_ctx, streams)
    n_batch = min(workload.n_ctx, workload.n_batch)
    span = window(inventory) * (workload.n_seq if unified else 1) + min(n_batch, workload.n_ubatch)
    return Cells(full, full if swa_full else padded(min(full, span), CELL_STEP), streams)


def kv_bytes(
    structure: Structure, workload: Workload, *, unified: bool = False, swa_full: bool = False
) -> tuple[int, ...]:
    """KV cache of each main layer in bytes; 0 for layers that keep none or read another's, and encoders.

    Source: llama_kv_cache and its relatives; indexer keys of sparse attention are included. Raises
    KvTypeProblem for types the engine would refuse.
    """
    check_types(structure, workload)
    inventory, layers = structure.inventory, structure.layers
    if inventory.architecture in CACHELESS:
        return (0,) * layers.n_main
    cells = cells_of(inventory, workload, unified=unified, swa_full=swa_full)
    if inventory.architecture == "deepseek4":
        return tuple(_v4_bytes(inventory, workload, cells, n) for n in range(layers.n_main))
    return tuple(
        _layer_kv(structure, workload, cells, layer)
        if layers.attention[layer] and layer not in structure.readers
        else 0
        for layer in range(layers.n_main)
    )


def by_flash(inventory: Inventory, workload: Workload) -> bool:
    """Whether attention is computed in one operator: asked for, and not of an architecture without it."""
    return workload.flash_attn and inventory.architecture not in _NO_FLASH


def check_types(structure: Structure, workload: Workload) -> None:
    """Raise KvTypeProblem where llama.cpp would refuse the cache types of a workload."""
    inventory = structure.inventory
    type_k, type_v = workload.type_k, workload.type_v
    latent = is_latent(inventory) or inventory.architecture == "deepseek4"
    if latent and type_k != type_v:
        raise KvTypeProblem(type_k, type_v, "a latent attention (MLA) needs the same type for both")
    if not by_flash(inventory, workload) and _layout(workload, type_v)[0] > 1:
        why = "a quantised V (type_v) needs flash attention "
        why += f"and {inventory.architecture} has none" if workload.flash_attn else "(flash_attn: true)"
        raise KvTypeProblem(type_k, type_v, why)
    for slides in {s for s, a in zip(structure.slides, structure.layers.attention, strict=False) if a}:
        for type_name, width in zip((type_k, type_v), head_widths(inventory, slides), strict=True):
            if width % _layout(workload, type_name)[0]:
                why = f"blocks of {_layout(workload, type_name)[0]} values do not divide heads of {width}"
                raise KvTypeProblem(type_k, type_v, why)


def nextn_kv_bytes(structure: Structure, workload: Workload) -> tuple[int, ...]:
    """KV cache of each NextN block in its own context, which has the cells of the main one.

    A block slides where the file's pattern or the architecture says so; one cache of the whole context
    holds those of Dots3-note all the same.
    """
    inventory, layers = structure.inventory, structure.layers
    cells = cells_of(inventory, workload, swa_full=inventory.architecture == "dots3note")
    return tuple(_layer_kv(structure, workload, cells, layer) for layer in range(layers.n_main, layers.n_all))


def state_bytes(structure: Structure, workload: Workload, *, rollback: int = 0) -> tuple[int, ...]:
    """Recurrent state of each main layer in bytes: per sequence, independent of the context.

    `rollback`: tokens that speculation may take back; each keeps one more copy of the state where the
    engine can do so, elsewhere it makes no difference.
    """
    inventory, layers = structure.inventory, structure.layers
    rows = workload.n_seq * (1 + (rollback if _ROLLBACK.fullmatch(inventory.architecture) else 0))
    if inventory.architecture == "deepseek4":
        return tuple(_v4_state(inventory, rows, n) for n in range(layers.n_main))
    shift, matrix = state_widths(structure)
    one = padded(4 * shift * rows, _TENSOR_STEP) + padded(4 * matrix * rows, _TENSOR_STEP)
    history = padded(4 * _history_width(inventory) * rows, _TENSOR_STEP)
    tables = structure.stems if history else {}
    return tuple(
        (one + (history if "ple_key" in tables.get(n, ()) else 0)) if layers.recurrent[n] else 0
        for n in range(layers.n_main)
    )


def checkpoint_bytes(structure: Structure, workload: Workload) -> int:
    """Host memory of one of a server's checkpoints of one slot: what cannot be cut back in place.

    That is the recurrent state, to the byte, and the sliding caches, at most. Models of full attention have
    none.
    """
    n_ctx = max(workload.n_ctx // workload.n_seq, 1)
    one = workload.model_copy(update={"n_seq": 1, "n_ctx": n_ctx})
    sliding = sum(k for k, s in zip(kv_bytes(structure, one), structure.slides, strict=False) if s)
    return sum(state_bytes(structure, one)) + sliding


def state_widths(structure: Structure) -> tuple[int, int]:
    """Values per recurrent layer and sequence: the convolution (or token shift) part, the matrix part.

    The kind of mixer is told by its tensors; a file may state sizes of other kinds too.
    """
    inventory, number = structure.inventory, structure.inventory.number
    width, heads = number("embedding_length"), max(inventory.per_layer("attention.head_count", 1)[0], 0)
    kernel, inner, state = number("ssm.conv_kernel"), number("ssm.inner_size"), number("ssm.state_size")
    match mixer_kind(structure):
        case "rwkv":
            return number("token_shift_count", 2) * width, width * number("wkv.head_size")
        case "shortconv":
            return width * max(number("shortconv.l_cache") - 1, 0), 0
        case "kda":
            head = number("kda.head_dim")
            return 3 * (kernel - 1 if kernel else 3) * heads * head, head * head * heads
        case "lightning":
            head = number("attention.key_length", width // max(heads, 1))
            return 0, head * head * heads
    groups = 0 if inventory.architecture in _UNGROUPED else number("ssm.group_count")
    return max(kernel - 1, 0) * (inner + 2 * groups * state), state * inner


def mixer_kind(structure: Structure) -> str:
    """rwkv, shortconv, kda, lightning or ssm: what the recurrent layers are; "" when there are none."""
    if structure.inventory.architecture == "minimax-01":
        return "lightning"
    stems = frozenset[str]().union(*structure.stems.values())
    for kind, stem in _MIXERS:
        if stem in stems:
            return kind
    return ""


def head_widths(inventory: Inventory, slides: bool) -> tuple[int, int]:
    """Width of one key head and one value head.

    Where the file does not state them, those of its projections: the engine takes the width of the model
    over its heads, and refuses the file, or dies of it, where that is another. Values of a latent attention
    are a view of its keys, whatever the file says of their width.
    """
    key, value = (_head(inventory, name) for name in ("key", "value"))
    if slides:
        key = inventory.number("attention.key_length_swa", key)
        value = inventory.number("attention.value_length_swa", value)
    if is_latent(inventory):
        value = inventory.number("attention.kv_lora_rank", value)
        value = inventory.number("attention.kv_lora_rank_swa", value) if slides else value
    return key, value


def _head(inventory: Inventory, name: str) -> int:
    stated = f"attention.{name}_length"
    if stated in inventory.hparams:
        return inventory.number(stated)
    return shaped_width(inventory, name) or even_width(inventory)


def padded(size: int, step: int) -> int:
    """`size` rounded up to a multiple of `step`."""
    return -(-size // step) * step


def _layer_kv(structure: Structure, workload: Workload, cells: Cells, layer: int) -> int:
    inventory, layers, slides = structure.inventory, structure.layers, structure.slides[layer]
    heads = kv_heads(inventory, layers.n_all)
    key, value = head_widths(inventory, slides)
    rows = (cells.sliding if slides else cells.full) * cells.streams
    total = _row(workload, workload.type_k, key * heads[layer]) * rows
    if not is_latent(inventory):
        # Without flash attention values are stored transposed, all layers as wide as the widest.
        widest = value * heads[layer] if by_flash(inventory, workload) else _widest_value(structure)
        total += _row(workload, workload.type_v, widest) * rows
    return total + _indexer(inventory, workload, layer, layers.n_main) * rows


def _widest_value(structure: Structure) -> int:
    heads = kv_heads(structure.inventory, structure.layers.n_all)
    widths = (head_widths(structure.inventory, slides)[1] for slides in structure.slides)
    return max(width * n for width, n in zip(widths, heads, strict=True))


def _row(workload: Workload, type_name: str, width: int) -> int:
    return cache_row_bytes(workload, type_name, width) if width else 0


def cache_row_bytes(workload: Workload, name: str, values: int) -> int:
    """Bytes of so many values of a type of the cache; ValueError where they are not whole blocks."""
    block, size = _layout(workload, name)
    if values % block:
        raise ValueError(f"{values} values are not whole {name} blocks of {block}")
    return values // block * size


def _layout(workload: Workload, name: str) -> tuple[int, int]:
    """Values and bytes of a block, of the engine's types and of those of a fork."""
    fork = workload.forks.get(name)
    return (fork.values, fork.block_bytes) if fork else (BY_NAME[name].block, BY_NAME[name].bytes)


def _indexer(inventory: Inventory, workload: Workload, layer: int, n_main: int) -> int:
    """Bytes per cell that a sparse attention keeps beside keys and values."""
    width = inventory.number("attention.indexer.key_length")
    if inventory.architecture not in INDEXED or not width or not has_indexer(inventory, layer, n_main):
        return 0
    if inventory.architecture == "glm5-next" and inventory.number("attention.indexer.kpool"):
        width *= 3  # key, gate and pooled value
    row = _row(workload, workload.type_k, width)
    if inventory.architecture in _INDEXED_VALUES:
        row += _row(workload, workload.type_v, head_widths(inventory, False)[1])
    return row


def has_indexer(inventory: Inventory, layer: int, n_main: int) -> bool:
    """Whether a layer keeps keys of an indexer of its own; a speculative block counts from `n_main` on."""
    arch = inventory.architecture
    if layer >= n_main:
        return arch not in _PLAIN_NEXTN
    if arch == "minimax-m3":
        return layer >= inventory.number("leading_dense_block_count")
    if arch == "hy_v4" and not inventory.number("attention.indexer.top_k"):
        return False
    kinds = inventory.hparams.get("attention.indexer.types")
    if arch not in _TYPED or kinds is None:
        # GLM 5.2 and later, told by their context, share indexers where the file does not say which.
        late = arch == "glm-dsa" and inventory.number("context_length") >= _GLM_5_2
        return not late or layer < 2 or (layer % 4 == 2 and layer < _GLM_LAYERS)
    each = kinds if isinstance(kinds, tuple) else (kinds,) * n_main
    return layer < len(each) and bool(each[layer])


def _history_width(inventory: Inventory) -> int:
    """Values of the n-gram convolution history per sequence (Qwen4-exp)."""
    kernel, ngram = inventory.number("ple.conv_kernel"), inventory.number("ple.ngram_size")
    lanes = inventory.number("hyper_connection.count") * inventory.number("embedding_length")
    return max(kernel - 1, 0) * ngram * lanes


def compressed(cells: Cells, ratio: int) -> int:
    """DeepSeek-V4: cells of compressed keys, of a stream."""
    return padded(max(1, -(-cells.full // ratio)), CELL_STEP)


def v4_ratio(inventory: Inventory, layer: int) -> int:
    """DeepSeek-V4: cells of the context that a layer's compressed keys stand for; 0 where it has none."""
    return inventory.per_layer("attention.compress_ratios", layer + 1)[layer]


def _v4_bytes(inventory: Inventory, workload: Workload, cells: Cells, layer: int) -> int:
    """DeepSeek-V4: keys of the sliding window, and compressed keys of the whole context."""
    key, _ = head_widths(inventory, False)
    row = _row(workload, workload.type_k, key * kv_heads(inventory, layer + 1)[layer])
    ratio = v4_ratio(inventory, layer)
    total = row * cells.sliding
    if ratio in (V4_FINE, V4_COARSE):
        kept = compressed(cells, ratio)
        total += row * kept
        if ratio == V4_FINE:
            total += _row(workload, workload.type_k, inventory.number("attention.indexer.key_length")) * kept
    return total * workload.n_seq


def _v4_state(inventory: Inventory, rows: int, layer: int) -> int:
    key, _ = head_widths(inventory, False)
    ratio = v4_ratio(inventory, layer)
    if ratio == V4_COARSE:
        values = key * V4_COARSE
    elif ratio == V4_FINE:
        values = 2 * (key + inventory.number("attention.indexer.key_length")) * 2 * V4_FINE
    else:
        values = 0
    return 2 * 4 * values * rows
