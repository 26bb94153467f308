"""Names that begin with `blk.N.`: tensors, units and decisions of layer N."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]+)(?:\.|$)")


def block_digits(name: str) -> str:
    """The layer's number as it is written, of an encoder's or decoder's too; "" for names of no layer."""
    found = _BLOCK.match(name)
    return found[1] if found else ""


def block_of(name: str) -> int | None:
    """The layer of a tensor, unit or decision; None for names of no layer, and of one that cannot be."""
    digits = block_digits(name)
    return int(digits) if digits and len(digits) < 10 else None
