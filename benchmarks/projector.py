"""A small vision projector that llama.cpp loads: LLaVA's, two layers and a perceptron, random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

WIDTH, INNER, HEADS, PATCH, SIDE, LAYERS = 128, 512, 4, 14, 336, 2


def write_projector(path: Path, width_out: int) -> Path:
    """Write the file for a text model `width_out` wide; returns `path`."""
    import numpy as np
    from gguf import GGUFWriter

    file = GGUFWriter(str(path), "clip")
    file.add_string("general.type", "mmproj")
    file.add_bool("clip.has_vision_encoder", True)
    file.add_bool("clip.use_gelu", True)
    file.add_string("clip.projector_type", "mlp")
    counts = {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": INNER,
        "projection_dim": width_out, "attention.head_count": HEADS, "block_count": LAYERS,
    }  # fmt: skip
    for key, count in counts.items():
        file.add_uint32(f"clip.vision.{key}", count)
    file.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        file.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    random = np.random.default_rng(1)
    for name, shape in _tensors(width_out):
        kind = np.float16 if len(shape) > 1 and "position" not in name else np.float32
        file.add_tensor(name, (0.02 * random.standard_normal(shape[::-1])).astype(kind))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _tensors(width_out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, ne0 first."""
    yield "v.patch_embd.weight", (PATCH, PATCH, 3, WIDTH)
    yield "v.patch_embd.bias", (WIDTH,)
    yield "v.position_embd.weight", (WIDTH, (SIDE // PATCH) ** 2)
    for layer in range(LAYERS):
        block = f"v.blk.{layer}"
        for norm in ("ln1", "ln2"):
            yield f"{block}.{norm}.weight", (WIDTH,)
            yield f"{block}.{norm}.bias", (WIDTH,)
        products = {f"attn_{x}": (WIDTH, WIDTH) for x in ("q", "k", "v", "out")}
        for name, shape in {**products, "ffn_up": (WIDTH, INNER), "ffn_down": (INNER, WIDTH)}.items():
            yield f"{block}.{name}.weight", shape
            yield f"{block}.{name}.bias", shape[1:]
    yield "v.post_ln.weight", (WIDTH,)
    yield "v.post_ln.bias", (WIDTH,)
    for name, shape in {"mm.0": (WIDTH, width_out), "mm.2": (width_out, width_out)}.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[1:]
