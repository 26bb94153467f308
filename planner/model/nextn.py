"""Whether a model really has the NextN/MTP block that its metadata promises: the engine needs all of it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from planner.model.inventory import Inventory
from planner.model.layers import layers_of, stems_by_layer

# The projection that joins token and hidden state, under the names that architectures give it.
_JOINS = frozenset({"nextn.eh_proj", "nextn.pre_projection"})


@dataclass(eq=False)
class DraftAlone(InputError):
    """A file of NextN/MTP blocks without the model that they draft for."""

    path: str
    first: int  # its first block

    def message(self) -> str:
        return (
            f"{self.path}: holds a NextN/MTP block (blk.{self.first}) and no other layer: it only drafts for "
            "the model that it was cut from; plan that model, with the block in its own file (--mtp)"
        )


def check_not_alone(inventory: Inventory, path: str) -> None:
    """DraftAlone for a file that only drafts: the engine loads it, but computes no text with it."""
    if drafts_alone(inventory):
        raise DraftAlone(path, layers_of(inventory).n_main)


def drafts_alone(inventory: Inventory) -> bool:
    """Whether a file holds speculative blocks and none of the layers before them."""
    layers, stems = layers_of(inventory), stems_by_layer(inventory)
    return layers.n_nextn > 0 and bool(stems) and min(stems) >= layers.n_main > 0


def nextn_fault(inventory: Inventory) -> str:
    """Why the model cannot draft by itself, in words that follow "the model"; "" when it can."""
    layers, stems = layers_of(inventory), stems_by_layer(inventory)
    own = sorted(n for n, names in stems.items() if any(s.startswith("nextn.") for s in names))
    if not layers.n_nextn:
        if own:
            return f"holds a NextN/MTP block (blk.{own[0]}), but nextn_predict_layers does not count it"
        return "holds no NextN/MTP block"
    attending = [stems.get(n, frozenset()) for n, is_one in enumerate(layers.attention) if is_one]
    shared = {s for s in frozenset.intersection(*attending) if s.startswith("attn_")} if attending else set()
    for n in range(layers.n_main, layers.n_all):
        names = stems.get(n, frozenset())
        if not any(s.startswith("nextn.") for s in names):
            return f"promises a NextN/MTP block, but there is no blk.{n}.nextn.*: it holds no NextN/MTP block"
        missing = [] if names & _JOINS else ["nextn.eh_proj"]
        if any(s.startswith("attn_") for s in names):
            missing += sorted(shared - names)
        if missing:
            return f"holds a NextN/MTP block without blk.{n}.{missing[0]}: the engine does not draft with it"
    return ""


def promised_in_vain(inventory: Inventory) -> str:
    """What is wrong with a NextN/MTP block that the file promises or holds; "" for none, or a whole one."""
    layers = layers_of(inventory)
    there = any(s.startswith("nextn.") for names in stems_by_layer(inventory).values() for s in names)
    return nextn_fault(inventory) if layers.n_nextn or there else ""
