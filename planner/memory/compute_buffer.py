"""Bytes of the engine's compute buffer on one device, itemised, without an engine at hand.

The buffer holds the graph of the largest batch. Its size is decided by the stage of a layer that
keeps most values alive (experts, dense feed-forward, attention, recurrent mixer) or by the output
head, whose logits are as wide as the vocabulary. Coefficients come from llama.cpp's allocator at
work on real models. The result is an upper estimate. Bounds that tests hold: the engine's number is
at most 3 % + 4 MiB above it; it is at most 11 % above the engine's for real models that lie whole on
one device, and at most twice it where host experts are staged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

from planner.machine.host_memory import OFFLOAD_BATCH
from planner.memory.indexer import Indexer, has_own_indexer, indexer_bytes
from planner.memory.kv_cache import (
    INDEXED,
    V4_COARSE,
    V4_FINE,
    Cells,
    by_flash,
    cache_row_bytes,
    cells_of,
    compressed,
    head_widths,
    state_widths,
    v4_ratio,
)
from planner.model.heads import is_latent, kv_heads
from planner.model.inventory import Inventory, Tensor
from planner.model.layers import CACHELESS, ENCODERS, Layers
from planner.model.structure import Structure
from planner.remember import remembered
from planner.workload import Workload

PIPELINE_COPIES = 4  # buffers of each split input when several GPUs work in a pipeline
_LIVE = 5  # copies of the residual stream alive in the middle of a layer
_PARALLEL = frozenset({"cohere2", "command-r", "plamo", "talkie"})
_SYMMETRIC = frozenset({"modern-bert", "gemma-embedding"})  # encoders with a window to both sides
_INPUT_BYTES = 64  # per token: ids, positions, cell indices, output rows


@dataclass(frozen=True, slots=True)
class Compute:
    """The compute buffer of one device, in bytes."""

    logits: int  # vocabulary times output rows
    masks: int  # attention masks: cells times tokens
    residual: int
    stage: str  # what decides the size inside the layers
    stage_bytes: int
    staging: int  # the largest host tensor that a prompt batch copies to this device
    inputs: int
    head: int  # beside the logits while they are made

    @property
    def total(self) -> int:
        """Stages and head do not live at the same time; masks and inputs do.

        The memory of the masks is free again when the logits are made, but these come to lie behind it as
        long as it is too small for them and what they are made from. Engines before b11434 use it better.
        """
        inner = self.residual + self.stage_bytes + self.staging + self.masks
        head = self.logits + self.head
        if self.masks < head:
            head += self.masks
        return max(inner, head) + self.inputs


class Parts(TypedDict, total=False):
    """What `compute_bytes` may be asked, as `compute_items` says."""

    layers: Collection[int] | None
    head: bool
    outputs: int
    staged_bytes: int
    copies: int
    swa_full: bool
    converts: bool


def compute_items(
    structure: Structure,
    workload: Workload,
    *,
    layers: Collection[int] | None = None,
    head: bool = True,
    outputs: int = 0,
    staged_bytes: int = 0,
    copies: int = 1,
    swa_full: bool = False,
    converts: bool = False,
) -> Compute:
    """The compute buffer of a device that runs `layers` (None: all main ones) and, with `head`, the output.

    `outputs`: rows of logits the context may ask for (0: any of a batch, as the engine does by itself).
    `staged_bytes` is what `staging_bytes` says of the tensors left in host memory; `copies` is
    PIPELINE_COPIES where several GPUs work in a pipeline, `converts` what `converts_caches` says of a device.
    """
    inventory, shape, tokens = structure.inventory, structure.layers, batch_tokens(workload)
    head = head and inventory.architecture not in ENCODERS
    chosen = range(shape.n_main) if layers is None else sorted(layers)
    stage_bytes, stage = _widest_stage(structure, workload, tuple(chosen), swa_full, converts)
    width, streams = inventory.number("embedding_length"), _streams(inventory)
    live = _live_streams(inventory, streams)
    piped = _piped(inventory, shape, tokens, width * streams)
    return Compute(
        logits=_logits(structure, min(outputs or tokens, tokens)) if head else 0,
        masks=copies * sum(_masks(structure, workload, chosen, swa_full)),
        residual=4 * tokens * width * live + _per_layer_inputs(inventory, shape, tokens),
        stage=stage,
        stage_bytes=stage_bytes,
        staging=staged_bytes,
        inputs=copies * tokens * _INPUT_BYTES + (copies - 1) * piped,
        head=4 * tokens * width * _head_copies(structure, workload, streams) if head else 0,
    )


@remembered
def _widest_stage(
    structure: Structure, workload: Workload, layers: tuple[int, ...], swa_full: bool, converts: bool
) -> tuple[int, str]:
    stages = [s for n in layers for s in _stages(structure, workload, n, swa_full, converts)]
    return max(stages, default=(0, "none"))


def _piped(inventory: Inventory, shape: Layers, tokens: int, width: int) -> int:
    """One more copy of a split's inputs, as seen: four or five residual streams, and inputs of each layer."""
    return 5 * 4 * tokens * width + _per_layer_inputs(inventory, shape, tokens)


def compute_bytes(structure: Structure, workload: Workload, **parts: Unpack[Parts]) -> int:
    """The total of `compute_items`."""
    return compute_items(structure, workload, **parts).total


def _head_copies(structure: Structure, workload: Workload, streams: int) -> int:
    """Copies of the residual stream that may lie below the logits, as seen on CPU, Vulkan and CUDA."""
    arch = structure.inventory.architecture
    if arch == "gemma3n":
        return streams * (_LIVE + 1 if by_flash(structure.inventory, workload) else _LIVE + 3)
    if arch == "deepseek4":
        return 2 * streams + _LIVE + 1
    if arch in INDEXED:
        return _LIVE + 3 if streams > 1 else _LIVE + 5
    if not by_flash(structure.inventory, workload):
        return _LIVE + 3
    weights = frozenset[str]().union(*structure.weights.values())
    biased = any(name.endswith(".ffn_down_exps.bias") for name in structure.tensors)
    gated = {"ffn_gate_exps", "ffn_gate_up_exps"} & weights
    if gated and not biased and not {"ffn_down_shexp", "ffn_down"} & weights:
        return 13
    return 11 if gated and any(structure.layers.recurrent) else _LIVE + 1


def host_bytes(
    structure: Structure,
    workload: Workload,
    *,
    layers: Collection[int] | None = None,
    copies: int = 1,
    swa_full: bool = False,
) -> int:
    """The compute buffer that stays in host memory when every layer (None: all main ones) is on GPUs."""
    inventory, shape, tokens = structure.inventory, structure.layers, batch_tokens(workload)
    row = 4 * tokens * inventory.number("embedding_length")
    inputs = 4 * row + tokens * _INPUT_BYTES + (copies - 1) * (2 * row + 2 * tokens * _INPUT_BYTES)
    chosen = range(shape.n_main) if layers is None else layers
    masks = copies * sum(_masks(structure, workload, chosen, swa_full))
    return inputs + masks + _per_layer_inputs(inventory, shape, tokens)


def output_bytes(structure: Structure, workload: Workload) -> int:
    """The host buffer from which logits are read, or an encoder's vectors: one row per sequence."""
    inventory = structure.inventory
    encodes = inventory.architecture in ENCODERS
    return 4 * (inventory.number("embedding_length") if encodes else vocabulary(structure)) * workload.n_seq


def staging_bytes(
    host_tensors: Iterable[int], workload: Workload, *, op_offload: bool = True, hybrid: bool = False
) -> int:
    """Room on a GPU for weights that stay in host memory, from 32 tokens a batch on: the largest one.

    In models with recurrent layers (`hybrid`) the engine was seen to keep two of them at a time.
    """
    if not op_offload or batch_tokens(workload) < OFFLOAD_BATCH:
        return 0
    return sum(sorted(host_tensors)[-2 if hybrid else -1 :])


def batch_tokens(workload: Workload) -> int:
    """Tokens of the largest batch the engine reserves for."""
    tokens = min(workload.n_ctx, max(workload.n_batch, workload.n_ubatch), workload.n_ubatch)
    return -(-tokens // workload.n_seq) * workload.n_seq


def vocabulary(structure: Structure) -> int:
    """Rows of the output head, from its tensor."""
    tensors = structure.tensors
    head = tensors.get("output.weight") or tensors.get("token_embd.weight")
    return _rows(head) if head else structure.inventory.number("vocab_size")


def _logits(structure: Structure, rows: int) -> int:
    # Image tokens are masked in a copy.
    copies = 2 if structure.inventory.architecture == "chameleon" else 1
    return 4 * vocabulary(structure) * rows * copies


def _streams(inventory: Inventory) -> int:
    """Residual streams that run side by side: Gemma 3n's four, hyper-connections."""
    if inventory.architecture == "gemma3n":
        return 4
    return max(1, inventory.number("hyper_connection.count", 1))


def _live_streams(inventory: Inventory, streams: int) -> int:
    """Copies of the residual stream alive in the middle of a layer.

    Hyper-connections keep all their streams twice; the layer works on one. Where attention and feed-forward
    part read one norm, what attention made waits too.
    """
    if inventory.architecture in _PARALLEL:
        return _LIVE + 1
    return streams * _LIVE if inventory.architecture == "gemma3n" or streams == 1 else 2 * streams + 2


def _per_layer_inputs(inventory: Inventory, shape: Layers, tokens: int) -> int:
    width = inventory.number("embedding_length_per_layer_input")
    return 2 * 4 * tokens * width * shape.n_main


def _masks(
    structure: Structure, workload: Workload, layers: Collection[int], swa_full: bool
) -> Iterator[int]:
    inventory = structure.inventory
    cells = _seen(inventory, workload, swa_full)
    one = (2 if by_flash(inventory, workload) else 4) * batch_tokens(workload)
    if inventory.architecture == "deepseek4":
        yield from (one * seen for seen in _v4_masks(inventory, cells, layers))
        return
    kinds = {structure.slides[n] for n in layers if _attends(structure.layers, n)}
    if inventory.architecture in _SYMMETRIC and inventory.number("attention.sliding_window"):
        kinds = {False, True}  # made whether a layer slides or not
    if False in kinds:
        yield cells.full * one
    if True in kinds:
        yield cells.sliding * one


def _v4_masks(inventory: Inventory, cells: Cells, layers: Collection[int]) -> Iterator[int]:
    """Cells of DeepSeek-V4's masks: of the window, and of compressed keys, twice where they are scored."""
    ratios = {v4_ratio(inventory, n) for n in layers}
    yield cells.sliding
    if V4_COARSE in ratios:
        yield compressed(cells, V4_COARSE)
    if V4_FINE in ratios:
        yield 2 * compressed(cells, V4_FINE)


def _seen(inventory: Inventory, workload: Workload, swa_full: bool = False) -> Cells:
    """What a batch attends to: the cells of the cache, or itself where there is none."""
    if inventory.architecture in CACHELESS:
        tokens = batch_tokens(workload)
        return Cells(tokens, tokens, 1)
    return cells_of(inventory, workload, swa_full=swa_full)


def _attends(shape: Layers, layer: int) -> bool:
    """NextN blocks are full attentions whatever the main layers are."""
    return layer >= shape.n_main or shape.attention[layer]


def _stages(
    structure: Structure, workload: Workload, layer: int, swa_full: bool, converts: bool
) -> Iterator[tuple[int, str]]:
    """Bytes beside the residual stream, of each stage of a layer."""
    inventory, shape = structure.inventory, structure.layers
    tensors = structure.weights.get(layer, {})
    tokens = 4 * batch_tokens(workload)
    yield tokens * _dense_values(inventory, tensors), "ffn"
    yield tokens * _expert_values(inventory, tensors, layer), "experts"
    if _attends(shape, layer):
        values = _attention_values(structure, workload, layer, swa_full)
        cast = _cast_bytes(structure, workload, layer, swa_full, converts)
        attention = tokens * values + cast
        yield attention, "attention"
        if has_own_indexer(structure, layer):
            cells, batch = _seen(inventory, workload, swa_full), batch_tokens(workload)
            own = Indexer(structure, workload, cells, batch, attention)
            yield indexer_bytes(own, layer), "indexer"
    if layer < shape.n_main and shape.recurrent[layer]:
        yield _recurrent_bytes(structure, workload, tensors), "recurrent"


def _dense_values(inventory: Inventory, tensors: Mapping[str, Tensor]) -> int:
    """Gate, up and their product are alive together; encoders without a gate have one of the three."""
    inner = max((tensors[n].shape[0] for n in ("ffn_down", "ffn_down_shexp") if n in tensors), default=0)
    plain = "ffn_up" in tensors and "ffn_gate" not in tensors and _rows(tensors["ffn_up"]) == inner
    return (1 if plain and inventory.architecture in ENCODERS else 3) * inner


def _expert_values(inventory: Inventory, tensors: Mapping[str, Tensor], layer: int) -> int:
    down = tensors.get("ffn_down_exps")
    if down is None:
        return 0
    used = inventory.per_layer("expert_used_count", layer + 1, 1)[layer]
    inner, outer = used * down.shape[0], used * _rows(down)
    gated = "ffn_gate_exps" in tensors or "ffn_gate_up_exps" in tensors
    if not gated:  # the activation is made in place and read by the last product
        return inner + outer
    beside = 2 * inventory.number("embedding_length") if inventory.architecture == "llama4" else 0
    freed = 2 * inner  # gate and up are gone when the last product starts
    return 3 * inner + (outer if outer > freed else 0) + beside


def _attention_values(structure: Structure, workload: Workload, layer: int, swa_full: bool) -> int:
    inventory, slides = structure.inventory, structure.slides[layer]
    heads = inventory.per_layer("attention.head_count", structure.layers.n_all)[layer]
    key, value = head_widths(inventory, slides)
    if is_latent(inventory):
        own, rope = inventory.number("attention.key_length_mla"), inventory.number("rope.dimension_count")
        values = heads * (own + rope + key + value)
    elif inventory.architecture == "deepseek4":  # queries and what is read, in groups of heads projected back
        number = inventory.number
        groups = number("attention.output_group_count") * number("attention.output_lora_rank")
        values = 2 * heads * key + groups + 3 * number("embedding_length")
    else:
        values = 4 * heads * max(key, value)
    if by_flash(inventory, workload):
        return values
    cells = _seen(inventory, workload, swa_full)
    return values + heads * (cells.sliding if slides else cells.full)


def converts_caches(device: str) -> bool:
    """Whether flash attention on a device works on a copy in f16 of every cache of another type.

    CUDA's kernels for more than a few tokens do (ggml-cuda/fattn.cu), and HIP's and MUSA's, which are the
    same. The copy is a part of the compute buffer in newer builds; in older ones it grows beside it. Behind
    a name of the network may be any of them.
    """
    return device.startswith(("CUDA", "ROCm", "HIP", "MUSA", "RPC"))


def _cast_bytes(structure: Structure, workload: Workload, layer: int, swa_full: bool, converts: bool) -> int:
    """Copies of the layer's cache that its attention works on.

    Flash attention reads an f32 cache as f16, and with `converts` any other too. Without it a latent
    attention transposes its values, which are a view of the keys.
    """
    inventory, slides = structure.inventory, structure.slides[layer]
    cells = _seen(inventory, workload, swa_full)
    rows = (cells.sliding if slides else cells.full) * cells.streams
    if not by_flash(inventory, workload):
        value = head_widths(inventory, slides)[1] if is_latent(inventory) else 0
        return rows * cache_row_bytes(workload, workload.type_k, value) if value else 0
    heads = kv_heads(inventory, structure.layers.n_all)[layer]
    key, value = head_widths(inventory, slides)
    if "f32" in (workload.type_k, workload.type_v):
        return 2 * rows * (key + value) * heads
    if not converts:
        return 0
    copied = [(workload.type_k, key), (workload.type_v, 0 if is_latent(inventory) else value)]
    return 2 * rows * heads * sum(width for kind, width in copied if kind != "f16")


def _recurrent_bytes(structure: Structure, workload: Workload, tensors: Mapping[str, Tensor]) -> int:
    """Mixer with a convolution and a state; the state is copied per sequence, whatever the batch."""
    inventory, tokens, sequences = structure.inventory, batch_tokens(workload), workload.n_seq
    shift, matrix = state_widths(structure)
    kernel = max(inventory.number("ssm.conv_kernel") - 1, 1)
    inner = inventory.number("ssm.inner_size")
    if inventory.architecture == "minimax-01":  # products and decay of every token with every other
        heads = inventory.per_layer("attention.head_count", 1)[0]
        return 4 * tokens * (2 * heads * tokens + 5 * inventory.number("embedding_length"))
    if "ssm_in" in tensors:
        values = _rows(tensors["ssm_in"]) + 2 * shift // kernel + inner
        if "attn_output" in tensors:  # falcon-h1: both mixers read one norm, and attention is made first
            values += inventory.number("embedding_length")
    elif "shortconv.in_proj" in tensors:
        values = 2 * _rows(tensors["shortconv.in_proj"])
    elif any(name.startswith("time_mix") for name in tensors):
        values = 16 * inventory.number("embedding_length")
    else:
        values = 2 * shift // kernel
    return 4 * (tokens * values + sequences * (3 * matrix + 2 * shift))


def _rows(tensor: Tensor) -> int:
    """Outputs of a projection; a damaged table may have lost the axis."""
    return tensor.shape[1] if len(tensor.shape) > 1 else 1
