"""A model's file, analysed once: its layers, its units and the edges between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.model.inventory import Inventory, Tensor, by_name
from planner.model.layers import Layers, layers_of
from planner.model.sliding_window import sliding_layers
from planner.model.units import Unit, UnitTable, units_of


@dataclass(frozen=True, slots=True)
class Structure:
    """What follows from an inventory alone, whatever the model is used for."""

    inventory: Inventory
    layers: Layers
    table: UnitTable
    slides: tuple[bool, ...]  # for each main layer, whether its attention sees only a window
    tensors: Mapping[str, Tensor]  # by name

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.table.units


def structure_of(inventory: Inventory) -> Structure:
    """Analyse an inventory; errors of `units_of`."""
    layers = layers_of(inventory)
    slides = sliding_layers(inventory, layers.n_main)
    return Structure(inventory, layers, units_of(inventory), slides, by_name(inventory))
