"""Units: the tensors that must move together, and the edges of the graph between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a unit is; decides where it may live."""

    EMBEDDING = "embedding"  # token_embd: looked up on the host, one row a token
    LOOKUP = "lookup"  # per-layer and n-gram tables: host only
    ATTENTION = "attention"  # with the layer's norms; bound to the layer device, owns KV
    RECURRENT = "recurrent"  # T0 and T1 of a recurrent mixer and the norms; bound, owns state
    ROUTER = "router"  # router, its biases, shared experts, expert biases and scales; bound
    FFN = "ffn"  # dense gate/up/down weights: the layer device or the CPU
    EXPERTS = "experts"  # routed gate/up/down weights: the layer device, the CPU, a cache, a stripe
    LAYER = "layer"  # a whole layer of an architecture we do not know; bound
    OUTPUT = "output"  # output head and final norm
    NEXTN = "nextn"  # a NextN/MTP block: only loaded on request
    FOREIGN = "foreign"  # vision and other tensors the text engine does not load


BOUND = frozenset({Kind.ATTENTION, Kind.RECURRENT, Kind.ROUTER, Kind.LAYER})


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that must move together."""

    name: str  # token_embd, blk.3.attention, blk.3.experts, output
    kind: Kind
    layer: int | None
    tensors: tuple[str, ...]  # in file order
    size_bytes: int
    active_bytes: int  # read for one decoded token: experts times used share, one row of a table
