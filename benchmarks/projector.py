"""Small vision projectors that llama.cpp loads: LLaVA's and Qwen's, of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WINDOWS = "qwen2.5vl_merger"
_BOTH = {"weight", "bias"}


@dataclass(frozen=True, slots=True)
class Eyes:
    """The sizes of a projector; outputs of `deepstack` layers go to the model beside that of the last one."""

    kind: str = "mlp"
    width: int = 128
    inner: int = 512
    heads: int = 4
    patch: int = 14
    side: int = 336
    layers: int = 2
    deepstack: tuple[int, ...] = ()

    @property
    def qwen(self) -> bool:
        return self.kind != "mlp"


def write_projector(path: Path, width_out: int, eyes: Eyes | None = None) -> Path:
    """Write the file for a text model `width_out` wide; returns `path`."""
    import numpy as np
    from gguf import GGUFWriter

    eyes = eyes or Eyes()
    file = GGUFWriter(str(path), "clip")
    file.add_string("general.type", "mmproj")
    file.add_bool("clip.has_vision_encoder", True)
    file.add_bool("clip.use_silu" if eyes.kind == WINDOWS else "clip.use_gelu", True)
    file.add_string("clip.projector_type", eyes.kind)
    each = width_out // (1 + len(eyes.deepstack))
    counts = {
        "image_size": eyes.side, "patch_size": eyes.patch, "embedding_length": eyes.width,
        "feed_forward_length": eyes.inner, "projection_dim": each, "attention.head_count": eyes.heads,
        "block_count": eyes.layers, "spatial_merge_size": 2,
    }  # fmt: skip
    if eyes.kind == WINDOWS:
        counts |= {"n_wa_pattern": 2, "window_size": 8 * eyes.patch}
    for key, count in counts.items():
        file.add_uint32(f"clip.vision.{key}", count)
    file.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        file.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    if eyes.deepstack:
        file.add_array("clip.vision.is_deepstack_layers", [n in eyes.deepstack for n in range(eyes.layers)])
    random = np.random.default_rng(1)
    for name, shape in _tensors(eyes, each):
        kind = np.float16 if len(shape) > 1 and "position" not in name else np.float32
        file.add_tensor(name, (0.02 * random.standard_normal(shape[::-1])).astype(kind))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _tensors(eyes: Eyes, width_out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, ne0 first."""
    width, patch = eyes.width, eyes.patch
    yield "v.patch_embd.weight", (patch, patch, 3, width)
    if eyes.qwen:
        yield "v.patch_embd.weight.1", (patch, patch, 3, width)
    if eyes.kind in ("mlp", "qwen3vl_merger"):
        yield "v.patch_embd.bias", (width,)
        yield "v.position_embd.weight", (width, (eyes.side // patch) ** 2)
    norm = {"weight"} if eyes.kind == WINDOWS else _BOTH
    for layer in range(eyes.layers):
        yield from _layer(eyes, f"v.blk.{layer}", norm)
    yield from _parts("v.post_ln", (width,), norm)
    row = 4 * width if eyes.qwen else width
    first = row if eyes.qwen else width_out
    yield from _parts("mm.0", (row, first))
    yield from _parts("mm.2", (first, width_out))
    for layer in eyes.deepstack:
        yield from _parts(f"v.deepstack.{layer}.norm", (row,))
        yield from _parts(f"v.deepstack.{layer}.fc1", (row, row))
        yield from _parts(f"v.deepstack.{layer}.fc2", (row, width_out))


def _layer(eyes: Eyes, block: str, norm: set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = eyes.width, eyes.inner
    for name in ("ln1", "ln2"):
        yield from _parts(f"{block}.{name}", (width,), norm)
    products = {"attn_out": (width, width), "ffn_up": (width, inner), "ffn_down": (inner, width)}
    if eyes.kind == "qwen3vl_merger":
        products["attn_qkv"] = (width, 3 * width)
    else:
        products |= {f"attn_{x}": (width, width) for x in ("q", "k", "v")}
    if eyes.kind == WINDOWS:
        products["ffn_gate"] = (width, inner)
    for name, shape in products.items():
        yield from _parts(f"{block}.{name}", shape)


def _parts(
    name: str, shape: tuple[int, ...], which: set[str] = _BOTH
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A product's or a norm's weights and bias."""
    for part in sorted(which, reverse=True):
        yield f"{name}.{part}", shape if part == "weight" else shape[-1:]
