"""Heads of attention: how many read keys and values, how wide they are where a file does not say it."""

from __future__ import annotations

from planner.block_names import within_block
from planner.model.inventory import Inventory


def unstated_heads(inventory: Inventory) -> str:
    """What is amiss with the heads' widths that a file leaves to its reader; "" when nothing is."""
    for name in ("key", "value"):
        shaped, even = shaped_width(inventory, name), even_width(inventory)
        if f"attention.{name}_length" not in inventory.hparams and shaped and shaped != even:
            return (
                f"the file does not say attention.{name}_length: {shaped} by the shape of its "
                f"attn_{name[0]}, {even} to llama.cpp, which cannot load it so"
            )
    return ""


def even_width(inventory: Inventory) -> int:
    """Width of a head that the engine takes where a file states none: the model's over its heads."""
    heads = inventory.per_layer("attention.head_count", 1)[0]
    return inventory.number("embedding_length") // heads if heads else 0


def shaped_width(inventory: Inventory, name: str) -> int:
    """Width of a head by the first projection of keys or values; 0 where there is none of its own."""
    if is_latent(inventory) or inventory.architecture == "deepseek4":
        return 0
    ending = f".attn_{name[0]}.weight"
    found = next((t for t in inventory.tensors if t.name.endswith(ending) and len(t.shape) == 2), None)
    block = within_block(found.name) if found else None
    if found is None or block is None:
        return 0
    heads = kv_heads(inventory, block[0] + 1)[-1]
    return found.shape[1] // heads if heads and found.shape[1] % heads == 0 else 0


def kv_heads(inventory: Inventory, n_layers: int) -> tuple[int, ...]:
    """Key-value heads of each layer; the query heads where the file does not say."""
    key = "attention.head_count_kv"
    return inventory.per_layer(key if key in inventory.hparams else "attention.head_count", n_layers)


def is_latent(inventory: Inventory) -> bool:
    """Whether the cache holds one compressed row per token (MLA), from which values are views."""
    return bool(inventory.number("attention.key_length_mla")) and bool(
        inventory.number("attention.value_length_mla")
    )
