"""What weights take in buffers, and which of them the engine loads or holds twice: formulas, to the byte."""

from __future__ import annotations

from collections.abc import Iterable

from planner.block_names import within_block
from planner.memory.kv_cache import padded
from planner.model.inventory import Inventory, Tensor
from planner.model.layers import ENCODERS
from planner.model.structure import Structure

BUFFER_STEP = 32  # alignment of tensors in a CPU buffer; GPUs use 128 or 256
# These read the head before the embedding is loaded, and so hold it twice even on one device.
_ALWAYS_TWICE = frozenset({"gemma3n", "gemma4"})


def weight_bytes(tensors: Iterable[Tensor], step: int = BUFFER_STEP) -> int:
    """What tensors take in a buffer: each padded to the buffer's alignment."""
    return sum(padded(t.size_bytes, step) for t in tensors)


def loaded_tensors(structure: Structure, *, mtp: bool = False) -> tuple[Tensor, ...]:
    """The tensors the engine loads: without `mtp` it skips the NextN blocks."""
    tensors, n_main = structure.inventory.tensors, structure.layers.n_main
    return tensors if mtp else tuple(t for t in tensors if (within_block(t.name) or (-1, ""))[0] < n_main)


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
