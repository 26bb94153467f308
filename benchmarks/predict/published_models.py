"""Tensor tables of published models of which no table is at hand, from their published sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Hparam, Inventory, Shard, Tensor

Shapes = Mapping[str, tuple[int, ...]]
_NORMS = ("attn_norm", "ffn_norm")
_GEMMA_NORMS = (*_NORMS, "post_attention_norm", "post_ffw_norm")


def gemma_12b() -> Inventory:
    """Gemma 4 12B, Q4_K_M: 48 layers of 3840, 16 heads, FFN 15360; every sixth layer sees everything.

    Those have heads of 512, one for KV and no projection of values; the others 256 and eight. Figures and the
    counts of types that `_more` explains (284 q4_K, 45 q6_K): logs of llama.cpp's loader in zackshen/gguf#21
    and ikawrakow/ik_llama.cpp#1921.
    """
    slides = [layer % 6 != 5 for layer in range(48)]
    attends = [attention(3840, 4096, 2048) if each else attention(3840, 8192, 512) for each in slides]
    for layer, each in enumerate(slides):
        if not each:
            del attends[layer]["attn_v"]
    hparams = _hparams(48, 3840, 15360, 262144, (16, 8, 512)) | {
        "attention.head_count_kv": tuple(8 if each else 1 for each in slides),
        **_gemma_hparams(slides, 1024),
    }
    tensors = [
        _tensor("token_embd.weight", "q6_K", (3840, 262144)),
        *_layers([{**each, **ffn(3840, 15360)} for each in attends], "q4_K", 3840, _GEMMA_NORMS, more="q6_K"),
        *_gemma_small(slides),
    ]
    return _inventory("gemma-12b", "gemma4", hparams, tensors)


def gemma_e2b() -> Inventory:
    """Gemma 4 E2B, Q4_K_M: 35 layers of 1536, 8 heads, one for KV; FFN 6144 in the first 15, then 12288.

    The others read the KV of earlier layers; every fifth layer sees everything with heads of 512; every layer
    has an embedding of its own of 256 a token. Figures: a log of llama.cpp's loader for unsloth's file, whose
    gates of those embeddings are f32; vllm-project/tpu-inference#2690.
    """
    slides = [layer % 5 != 4 for layer in range(35)]
    widths = [6144] * 15 + [12288] * 20
    blocks = [
        {**(attention(1536, 2048, 256) if each else attention(1536, 4096, 512)), **ffn(1536, inner)}
        for each, inner in zip(slides, widths, strict=True)
    ]
    hparams = _hparams(35, 1536, 12288, 262144, (8, 1, 512)) | {
        "feed_forward_length": tuple(widths),
        "attention.shared_kv_layers": 20,
        "embedding_length_per_layer_input": 256,
        **_gemma_hparams(slides, 512),
    }
    tensors = [
        _tensor("token_embd.weight", "q6_K", (1536, 262144)),
        _tensor("per_layer_token_embd.weight", "q5_K", (8960, 262144)),
        _tensor("per_layer_model_proj.weight", "bf16", (1536, 8960)),
        _tensor("per_layer_proj_norm.weight", "f32", (256,)),
        *_layers(blocks, "q4_K", 1536, (*_GEMMA_NORMS, "post_norm"), more="q6_K"),
        *(_tensor(f"blk.{n}.inp_gate.weight", "f32", (1536, 256)) for n in range(35)),
        *(_tensor(f"blk.{n}.proj.weight", "f32", (256, 1536)) for n in range(35)),
        *_gemma_small(slides),
    ]
    return _inventory("gemma-e2b", "gemma4", hparams, tensors)


def llama_7b() -> Inventory:
    """LLaMA 7B in Q4_0: 32 layers of 4096, 32 heads of 128, FFN 11008."""
    shapes = {**attention(4096, 4096, 4096), **ffn(4096, 11008)}
    tensors = [
        _tensor("token_embd.weight", "q4_0", (4096, 32000)),
        _tensor("output.weight", "q6_K", (4096, 32000)),
        *_layers([shapes] * 32, "q4_0", 4096),
    ]
    return _inventory("llama-7b", "llama", _hparams(32, 4096, 11008, 32000, (32, 32, 128)), tensors)


def attention(width: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
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


def _layers(
    blocks: Sequence[Shapes], kind: str, width: int, norms: Sequence[str] = _NORMS, more: str = ""
) -> list[Tensor]:
    """The layers' tensors; those that a file of mixed types gives more bits are of type `more`."""
    found, better = [], _more(blocks) if more else frozenset()
    for layer, shapes in enumerate(blocks):
        for stem, shape in shapes.items():
            name = f"blk.{layer}.{stem}"
            found.append(_tensor(f"{name}.weight", more if name in better else kind, shape))
        found += [_tensor(f"blk.{layer}.{n}.weight", "f32", (width,)) for n in norms]
    return found


def _more(blocks: Sequence[Shapes]) -> frozenset[str]:
    """Tensors that Q4_K_M gives more bits: values and down projections at both ends, every third between."""
    found = set()
    for stem in ("attn_v", "ffn_down"):
        having = [layer for layer, shapes in enumerate(blocks) if stem in shapes]
        eighth, last = len(having) // 8, 7 * len(having) // 8
        found |= {
            f"blk.{layer}.{stem}"
            for place, layer in enumerate(having)
            if place < eighth or place >= last or (place - eighth) % 3 == 2
        }
    return frozenset(found)


def _gemma_hparams(slides: Sequence[bool], width: int) -> dict[str, Hparam]:
    return {
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": width,
        "attention.sliding_window_pattern": tuple(slides),
    }


def _gemma_small(slides: Sequence[bool]) -> list[Tensor]:
    """Norms of heads, the scale of each layer, factors of the rotation."""
    found = [_tensor("rope_freqs.weight", "f32", (256,))]
    for layer, each in enumerate(slides):
        head = (256 if each else 512,)
        found += [_tensor(f"blk.{layer}.attn_{n}_norm.weight", "f32", head) for n in "qk"]
        found.append(_tensor(f"blk.{layer}.layer_output_scale.weight", "f32", (1,)))
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
