"""Names that begin with `blk.N.`: tensors, units and decisions of layer N."""

from __future__ import annotations

import re
from functools import lru_cache

_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]+)(?:\.|$)")
_WITHIN = re.compile(r"blk\.([0-9]{1,9})\.(.+)")


def block_name(layer: int) -> str:
    """The name of a layer, with which those of its tensors and units begin."""
    return f"blk.{layer}"


def within_block(name: str) -> tuple[int, str] | None:
    """Layer and rest of `blk.N.REST`; None for all other names, those of an encoder or decoder too."""
    found = _WITHIN.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def block_digits(name: str) -> str:
    """The layer's number as it is written, of an encoder's or decoder's too; "" for names of no layer."""
    found = _BLOCK.match(name)
    return found[1] if found else ""


@lru_cache(maxsize=1 << 14)  # the same names are asked for again and again
def block_of(name: str) -> int | None:
    """The layer of a tensor, unit or decision; None for names of no layer, and of one that cannot be."""
    digits = block_digits(name)
    return int(digits) if digits and len(digits) < 10 else None


def layer_of(name: str) -> int:
    """The layer of a name that is known to have one; ValueError for all others."""
    layer = block_of(name)
    if layer is None:
        raise ValueError(f"{name} is of no layer")
    return layer


def stem_of(name: str) -> str:
    """What a unit, weight or bias is, without its layer: `experts` of `blk.3.experts`, else the name."""
    block = within_block(name)
    return (block[1] if block else name).removesuffix(".weight").removesuffix(".bias")
