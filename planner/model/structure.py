"""A model's file, analysed once: its layers, its units and the edges between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.model.inventory import Inventory, Tensor, by_name
from planner.model.layers import Layers, layers_of, shared_kv, stems_by_layer, weights_by_layer
from planner.model.sliding_window import all_sliding
from planner.model.units import Unit, UnitTable, units_of


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Structure:
    """What follows from an inventory alone, whatever the model is used for."""

    inventory: Inventory
    layers: Layers
    table: UnitTable
    slides: tuple[bool, ...]  # for each layer, speculative ones too: whether it attends to a window only
    readers: Mapping[int, int]  # main layers that read another's KV cache, and whose
    stems: Mapping[int, frozenset[str]]  # of each block: names of its tensors within it, without suffix
    weights: Mapping[int, Mapping[str, Tensor]]  # of each block, by name within it, without `.weight`
    tensors: Mapping[str, Tensor]  # by name

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.table.units


def structure_of(inventory: Inventory) -> Structure:
    """Analyse an inventory; errors of `units_of`."""
    layers = layers_of(inventory)
    return Structure(
        inventory,
        layers,
        units_of(inventory),
        all_sliding(inventory, layers.n_main, layers.n_all),
        shared_kv(inventory, layers),
        stems_by_layer(inventory),
        weights_by_layer(inventory),
        by_name(inventory),
    )
