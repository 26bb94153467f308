"""Inventories of a few tensors for tests, written as `name: shape` lines."""

from __future__ import annotations

from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.model.inventory import Hparam, Inventory


def table(arch: str, text: str, **hparams: Hparam) -> Inventory:
    """An f32 inventory; in keys `__` stands for a dot: attention__head_count."""
    rows = []
    for line in text.split("\n"):
        name, _, sizes = line.strip().partition(" ")
        if name:
            shape = tuple(int(size) for size in sizes.split("x"))
            size = 4
            for extent in shape:
                size *= extent
            rows.append(Row(name, "f32", shape, size))
    return inventory_of("test", arch, {k.replace("__", "."): v for k, v in hparams.items()}, rows)


def attention(layer: int, *, width: int = 64) -> str:
    """Lines of a plain attention layer."""
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    return "\n".join(
        [f"blk.{layer}.attn_norm.weight {width}", f"blk.{layer}.ffn_norm.weight {width}"]
        + [f"blk.{layer}.{name}.weight {width}x{width}" for name in names]
    )


def dense(layer: int, *, width: int = 64, inner: int = 128) -> str:
    """Lines of a dense feed-forward."""
    return "\n".join(
        [f"blk.{layer}.{name}.weight {width}x{inner}" for name in ("ffn_gate", "ffn_up")]
        + [f"blk.{layer}.ffn_down.weight {inner}x{width}"]
    )


def experts(layer: int, count: int, *, width: int = 64, inner: int = 32) -> str:
    """Lines of routed experts and their router."""
    return "\n".join(
        [f"blk.{layer}.ffn_gate_inp.weight {width}x{count}"]
        + [f"blk.{layer}.{name}.weight {width}x{inner}x{count}" for name in ("ffn_gate_exps", "ffn_up_exps")]
        + [f"blk.{layer}.ffn_down_exps.weight {inner}x{width}x{count}"]
    )


def ends(*, vocabulary: int = 100, width: int = 64, tied: bool = False) -> str:
    """Lines of embedding, final norm and, unless tied, output head."""
    lines = [f"token_embd.weight {width}x{vocabulary}", f"output_norm.weight {width}"]
    return "\n".join(lines if tied else [*lines, f"output.weight {width}x{vocabulary}"])
