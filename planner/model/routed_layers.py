"""Routed layers of a model: which layers route, over how many experts, and what an expert weighs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import InputError
from planner.model.inventory import Inventory

_EXPERTS = re.compile(r"blk\.([0-9]{1,9})\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight")


@dataclass(eq=False)
class NotMoe(InputError):
    """A model without routed experts, where some are needed."""

    model: str

    def message(self) -> str:
        return f"{self.model}: no routed experts (no blk.N.ffn_*_exps.weight), nothing to route"


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The routed part of a model."""

    digest: str  # table digest; a permutation of experts does not change it
    n_expert: int
    n_used: int
    n_group: int  # groups of group-limited routing, 1 when all experts compete
    expert_bytes: Mapping[int, int]  # layer -> bytes of one expert, all its matrices

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that route, ascending."""
        return tuple(self.expert_bytes)


def routed_weight(name: str) -> tuple[int, str] | None:
    """Layer and matrix (gate, up, down, gate_up) of a weight of a layer's experts; None for all others."""
    found = _EXPERTS.fullmatch(name)
    return (int(found[1]), found[2]) if found and not found[3] else None


def moe_shape(inventory: Inventory) -> MoeShape:
    """Shape of the routed experts; NextN layers, which route nothing of their own, are left out.

    Raises NotMoe.
    """
    last = inventory.number("block_count") - inventory.number("nextn_predict_layers")
    sizes: dict[int, int] = {}
    n_expert = 0
    for tensor in inventory.tensors:
        found = _EXPERTS.fullmatch(tensor.name)
        if found and (int(found[1]) < last or last <= 0):
            n_expert = tensor.shape[-1]
            layer = int(found[1])
            sizes[layer] = sizes.get(layer, 0) + tensor.size_bytes // n_expert
    if not sizes:
        raise NotMoe(inventory.name)
    return MoeShape(
        inventory.table_digest(),
        n_expert,
        inventory.number("expert_used_count"),
        max(1, inventory.number("expert_group_count", 1)),
        dict(sorted(sizes.items())),
    )
