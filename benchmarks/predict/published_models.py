"""Tensor tables of published models of which no table is at hand, from their published sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Hparam, Inventory, Shard, Tensor

Shapes = Mapping[str, tuple[int, ...]]
_NORMS = ("attn_norm", "ffn_norm")
_GEMMA_NORMS = (*_NORMS, "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")


def gemma_12b() -> Inventory:
    """Gemma 12B: 48 layers of 3840, 16 heads of 256, 8 of them for KV, FFN 15360."""
    shapes = {**attention(3840, 4096, 2048), **ffn(3840, 15360)}
    tensors = [
        _tensor("token_embd.weight", "q6_K", (3840, 262144)),
        *_layers([shapes] * 48, "q4_K", 3840, _GEMMA_NORMS),
    ]
    hparams = _hparams(48, 3840, 15360, 262144, (16, 8, 256)) | {"attention.sliding_window": 1024}
    return _inventory("gemma-12b", "gemma3", hparams, tensors)


def gemma_e2b() -> Inventory:
    """Gemma 4 E2B: 35 layers of 1536, 8 heads of 256, one for KV; FFN 6144 in the first 15, then 12288.

    The others read the KV of earlier layers; every layer has an embedding of its own of 256 a token.
    """
    own = {"inp_gate": (1536, 256), "proj": (256, 1536)}
    widths = [6144] * 15 + [12288] * 20
    blocks = [{**attention(1536, 2048, 256), **ffn(1536, inner), **own} for inner in widths]
    tensors = [
        _tensor("token_embd.weight", "q6_K", (1536, 262144)),
        _tensor("per_layer_token_embd.weight", "q4_K", (8960, 262144)),
        _tensor("per_layer_model_proj.weight", "q8_0", (1536, 8960)),
        *_layers(blocks, "q4_K", 1536, (*_GEMMA_NORMS, "post_norm")),
    ]
    hparams = _hparams(35, 1536, 12288, 262144, (8, 1, 256))
    return _inventory("gemma-e2b", "gemma3", hparams | {"attention.sliding_window": 512}, tensors)


def llama_7b() -> Inventory:
    """LLaMA 7B in Q4_0: 32 layers of 4096, 32 heads of 128, FFN 11008."""
    shapes = {**attention(4096, 4096, 4096), **ffn(4096, 11008)}
    tensors = [
        _tensor("token_embd.weight", "q4_0", (4096, 32000)),
        _tensor("output.weight", "q6_K", (4096, 32000)),
        *_layers([shapes] * 32, "q4_0", 4096),
    ]
    return _inventory("llama-7b", "llama", _hparams(32, 4096, 11008, 32000, (32, 32, 128)), tensors)


def attention(width: int, queries: int, keys: int) -> Shapes:
    """Weights of attention by stem."""
    return {
        "attn_q": (width, queries),
        "attn_k": (width, keys),
        "attn_v": (width, keys),
        "attn_output": (queries, width),
    }


def ffn(width: int, inner: int) -> Shapes:
    """Weights of a gated feed-forward."""
    return {"ffn_gate": (width, inner), "ffn_up": (width, inner), "ffn_down": (inner, width)}


def _layers(blocks: Sequence[Shapes], kind: str, width: int, norms: Sequence[str] = _NORMS) -> list[Tensor]:
    found = []
    for layer, shapes in enumerate(blocks):
        found += [_tensor(f"blk.{layer}.{stem}.weight", kind, shape) for stem, shape in shapes.items()]
        found += [_tensor(f"blk.{layer}.{n}.weight", "f32", (width,)) for n in norms]
    return found


def _hparams(
    layers: int, width: int, inner: int, vocab: int, heads: tuple[int, int, int]
) -> dict[str, Hparam]:
    return {
        "block_count": layers,
        "embedding_length": width,
        "feed_forward_length": inner,
        "vocab_size": vocab,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.key_length": heads[2],
        "attention.value_length": heads[2],
    }


def _inventory(name: str, arch: str, hparams: dict[str, Hparam], tensors: Sequence[Tensor]) -> Inventory:
    width = hparams["embedding_length"]
    assert isinstance(width, int)
    return Inventory(
        name=name,
        architecture=arch,
        header_digest="",
        hparams=hparams,
        shards=(Shard(file="", size_bytes=0, data_offset=0, alignment=32),),
        tensors=(*tensors, _tensor("output_norm.weight", "f32", (width,))),
    )


def _tensor(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name=name, type=kind, shape=shape, size_bytes=tensor_bytes(kind, shape), shard=0, offset=0)
