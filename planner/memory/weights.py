"""Memory of a model under a workload, by formula: weights, KV cache, recurrent state, compute buffers.

Where an engine is at hand its own dry load is exact; these formulas serve where none is, and the
tests hold them to it: weights, KV and state to the byte, compute as stated in
`planner.memory.compute_buffer`.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.memory.compute_buffer import (
    Compute,
    batch_tokens,
    compute_bytes,
    compute_items,
    host_bytes,
    output_bytes,
    pipeline_copies,
    staging_bytes,
)
from planner.memory.kv_cache import kv_bytes, nextn_kv_bytes, padded, state_bytes, state_widths
from planner.model.inventory import Inventory, Tensor
from planner.model.layers import ENCODERS, layers_of

__all__ = [
    "BUFFER_STEP",
    "Compute",
    "batch_tokens",
    "compute_bytes",
    "compute_items",
    "context_bytes",
    "host_bytes",
    "kv_bytes",
    "loaded_tensors",
    "nextn_kv_bytes",
    "output_bytes",
    "pipeline_copies",
    "staging_bytes",
    "state_bytes",
    "state_widths",
    "tied_copy_bytes",
    "weight_bytes",
]

BUFFER_STEP = 32  # alignment of tensors in a CPU buffer; GPUs use 128 or 256
# These read the head before the embedding is loaded, and so hold it twice even on one device.
_ALWAYS_TWICE = frozenset({"gemma3n", "gemma4"})


def weight_bytes(tensors: Iterable[Tensor], step: int = BUFFER_STEP) -> int:
    """What tensors take in a buffer: each padded to the buffer's alignment."""
    return sum(padded(t.size_bytes, step) for t in tensors)


def loaded_tensors(inventory: Inventory, *, mtp: bool = False) -> tuple[Tensor, ...]:
    """The tensors the engine loads: without `mtp` it skips the NextN blocks."""
    n_main = layers_of(inventory).n_main
    if mtp:
        return inventory.tensors
    return tuple(t for t in inventory.tensors if not t.name.startswith("blk.") or _layer(t) < n_main)


def tied_copy_bytes(inventory: Inventory, *, head_on_host: bool) -> int:
    """The second copy of token_embd.weight that serves as output head; 0 when there is none.

    On the host both are the same tensor, but for Gemma 3n and 4. Encoders have no head.
    """
    sizes = {t.name: t.size_bytes for t in inventory.tensors}
    if "output.weight" in sizes or inventory.architecture in ENCODERS:
        return 0
    if head_on_host and inventory.architecture not in _ALWAYS_TWICE:
        return 0
    return sizes.get("token_embd.weight", 0)


def context_bytes(kv: Iterable[int], state: Iterable[int]) -> int:
    """KV cache and recurrent state of some layers together."""
    return sum(kv) + sum(state)


def _layer(tensor: Tensor) -> int:
    return int(tensor.name.split(".", 2)[1])
