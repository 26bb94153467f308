"""What an indexer, which chooses the cells that a sparse attention reads, adds to the compute buffer.

Read from the engine's graphs and held to its numbers (`tests/test_indexers.py`; of qwen4exp only its small
model, `tests/test_architectures.py`): for every token the scores of all cells (f32), the choice (i32, up to
three copies) and a mask made of it (f16), beside an attention that waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.memory.kv_cache import (
    INDEXED,
    V4_FINE,
    Cells,
    cache_row_bytes,
    compressed,
    has_indexer,
    head_widths,
    v4_ratio,
)
from planner.model.heads import kv_heads
from planner.model.structure import Structure
from planner.workload import Workload

_UNSEEN = 20  # bytes for each cell and token where no graph was read (qwen4exp)


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer in one batch; `attention_bytes` are those of the layer's attention."""

    structure: Structure
    workload: Workload
    cells: Cells
    tokens: int
    attention_bytes: int

    @property
    def queries(self) -> int:
        """Bytes a token of the indexer's own queries."""
        number = self.structure.inventory.number
        return 4 * number("attention.indexer.head_count") * number("attention.indexer.key_length")

    @property
    def beside(self) -> int:
        """Bytes a token of what the queries are made from."""
        number = self.structure.inventory.number
        key, _ = head_widths(self.structure.inventory, False)
        return 10 * (number("embedding_length") + number("attention.q_lora_rank") + key)

    def choice(self, seen: int) -> int:
        """Cells that are chosen of those seen."""
        return min(self.structure.inventory.number("attention.indexer.top_k"), seen)


def has_own_indexer(structure: Structure, layer: int) -> bool:
    """Whether a layer chooses the cells that it reads."""
    inventory = structure.inventory
    if inventory.architecture == "deepseek4":
        return v4_ratio(inventory, layer) == V4_FINE
    return inventory.architecture in INDEXED and has_indexer(inventory, layer, structure.layers.n_main)


def indexer_bytes(of: Indexer, layer: int) -> int:
    """Bytes beside the residual stream while a layer chooses its cells, its attention included."""
    inventory, seen = of.structure.inventory, of.cells.full
    match inventory.architecture:
        case "minimax-m3":  # scores of each head are kept, of one sequence before and after its choice
            heads = inventory.number("attention.indexer.head_count")
            cell = 8 * heads if of.cells.streams == 1 else 4 * heads
            return of.tokens * (2 * of.queries + cell * seen + 8 * inventory.number("embedding_length"))
        case "glm5-next":
            return of.attention_bytes + _pooled(of)
        case "deepseek4":
            return _compressed(of, layer)
        case "qwen4exp":
            return max(of.attention_bytes, of.tokens * (2 * of.queries + _UNSEEN * seen + of.beside))
    return of.attention_bytes + _scored(of)


def _scored(of: Indexer) -> int:
    """Scores of all cells and a mask; Hyper-connections keep the queries longer.

    Queries and choices lie where the attention's first products lay, as long as they fit there.
    """
    seen = of.cells.full
    choice, free = of.choice(seen), of.attention_bytes // 6
    hyper = of.structure.inventory.number("hyper_connection.count") > 1
    asked = of.tokens * (2 * of.queries + of.beside + 12 * choice) - free
    kept = of.tokens * ((2 if hyper else 1) * of.queries + of.beside + 8 * choice) - free
    return max(asked, of.tokens * (6 * seen + 4 * choice) + max(kept, 0))


def _pooled(of: Indexer) -> int:
    """GLM 5 pools keys of all cells of all sequences, whatever the batch, before it scores them."""
    seen = of.cells.full * of.cells.streams
    pooled = 17 * of.structure.inventory.number("attention.indexer.key_length") * seen
    choice = of.choice(seen)
    asked = max(of.tokens * (of.queries + of.beside) - of.attention_bytes // 2, 0)
    return max(pooled + 4 * of.tokens * choice, asked + of.tokens * max(9 * seen // 2, 19 * choice))


def _compressed(of: Indexer, layer: int) -> int:
    """DeepSeek-V4 scores compressed keys, and reads them behind those of its window: a copy of both."""
    inventory, seen = of.structure.inventory, compressed(of.cells, V4_FINE)
    key, _ = head_widths(inventory, False)
    heads = inventory.per_layer("attention.head_count", of.structure.layers.n_all)[layer]
    width = key * kv_heads(inventory, of.structure.layers.n_all)[layer]
    row = cache_row_bytes(of.workload, of.workload.type_k, width)
    copied = row * (seen + of.cells.sliding) * of.cells.streams
    choice = of.choice(seen)
    waiting = 4 * heads * key + of.beside + 12 * inventory.number("embedding_length")
    asked = of.tokens * (waiting + 2 * of.queries + 8 * seen + 4 * choice) + copied
    return max(asked, of.attention_bytes + copied + of.tokens * 2 * seen)
