"""Models of real size for the GPU benchmark: random weights, routers with a chosen skew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from planner.model.inventory import Hparam, Inventory, Shard, Tensor
from profiler.synth.build import Builder
from profiler.synth.bytes import PEAK, size_bytes
from profiler.synth.synth import ARCHITECTURES, SynthSpec, with_defaults, write
from profiler.synth.synth import _type as tensor_type

# Factor of the exponential law of the experts' constant logits; coverage of the hottest half beside it.
ROUTING: Mapping[str, float] = {"uniform": 0.0, "moderate": 0.15, "strong": 0.36}  # 0.50, 0.60, 0.75

_dense = partial(SynthSpec, n_vocab=151936, n_ctx_train=32768)
_routed = partial(_dense, skew=1.0)

MODELS: Mapping[str, SynthSpec] = {
    "qwen3moe": _routed(
        arch="qwen3moe",
        name="qwen3moe-128x8-48l",
        n_layers=48,
        n_embd=2048,
        n_head=32,
        n_head_kv=4,
        head_dim=128,
        n_expert=128,
        n_used=8,
        n_ff_exp=768,
        n_ff=6144,
        type="q4_K",
        types={"output": "q6_K"},
    ),
    "qwen35moe": _routed(
        arch="qwen35moe",
        name="qwen35moe-256x8-40l",
        n_layers=40,
        n_embd=2048,
        n_head=16,
        n_head_kv=2,
        head_dim=256,
        n_expert=256,
        n_used=8,
        n_ff_exp=512,
        n_ff=2048,
        type="q4_K",
        types={"output": "q6_K"},
    ),
    "gpt-oss": _routed(
        arch="gpt-oss",
        name="gpt-oss-128x4-12l",
        n_layers=12,
        n_embd=2880,
        n_head=64,
        n_head_kv=8,
        head_dim=64,
        n_expert=128,
        n_used=4,
        n_ff_exp=2880,
        n_ff=2880,
        type="q8_0",
        types={"experts": "mxfp4"},
    ),
    "dense": _dense(
        arch="llama",
        name="dense-32b-64l",
        n_layers=64,
        n_embd=5120,
        n_head=64,
        n_head_kv=8,
        head_dim=128,
        n_ff=25600,
        type="q4_K",
        types={"output": "q6_K"},
    ),
}


def make(name: str, folder: Path) -> Path:
    """The model file of that name, written once."""
    found = path(name, folder)
    return found if found.exists() else write(found, MODELS[name])


def path(name: str, folder: Path) -> Path:
    """Where the model of that name lies."""
    return folder / f"{name}.gguf"


def inventory(name: str) -> Inventory:
    """The tensor table of the model of that name, without writing it."""
    return inventory_of(MODELS[name], f"{name}.gguf")


def inventory_of(spec: SynthSpec, file: str) -> Inventory:
    """The tensor table of the file that a specification makes."""
    spec = with_defaults(spec)
    builder = Builder(spec)
    ARCHITECTURES[spec.arch].build(builder)
    tensors, offset = [], 0
    for plan in builder.tensors:
        type_ = tensor_type(spec, plan)
        size = size_bytes(type_, plan.shape)
        tensors.append(
            Tensor(name=plan.name, type=type_, shape=plan.shape, size_bytes=size, shard=0, offset=offset)
        )
        offset += -(-size // 32) * 32
    prefix = f"{spec.arch}."
    return Inventory(
        name=spec.name,
        architecture=spec.arch,
        header_digest="",
        hparams={k.removeprefix(prefix): _plain(v) for k, v in builder.kv.items()},
        shards=(Shard(file=file, size_bytes=offset, data_offset=0, alignment=32),),
        tensors=tuple(tensors),
    )


def _plain(value: Any) -> Hparam:
    return tuple(value) if isinstance(value, list) else value


def set_routing(path: Path, level: str) -> None:
    """Rewrite the routers in place: hot experts first, skewed by `level`.

    Element 0 of the residual stream is constant in a generated model, so column 0 of a router is a
    constant logit for each expert. A dense model has no router and stays as it is.
    """
    factor = ROUTING.get(level, 0.0)
    for router in _routers(path):
        n_expert = router.shape[0]
        rank = (np.arange(n_expert) + 0.5) / n_expert
        router[:, 0] = factor * (-np.log(rank) - 1) / PEAK
        router.base.flush()


def _routers(path: Path) -> Iterator[Any]:
    from gguf import GGUFReader

    for tensor in GGUFReader(path, "r").tensors:
        if tensor.name.endswith("ffn_gate_inp.weight"):
            shape = tuple(int(size) for size in tensor.shape[::-1])
            yield np.memmap(path, np.float32, "r+", offset=int(tensor.data_offset), shape=shape)
