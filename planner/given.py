"""A placement decided elsewhere, in the solver's terms: llama.cpp's own --fit as one more baseline."""

from __future__ import annotations

from planner.arch import layers_of
from planner.expected import expected_devices, spec_layer_devices
from planner.inventory import Inventory, by_name
from planner.loading import CPU, LoadSpec
from planner.options import Given
from planner.units import Kind, Unit, units_of


def given_of(inventory: Inventory, spec: LoadSpec, name: str) -> Given:
    """The layer devices and CPU units of a load.

    A feed-forward that the load cuts (--fit cuts at most one a device) counts as being where most of
    its bytes are.
    """
    layers = layers_of(inventory)
    devices = spec_layer_devices(spec, layers.n_all)
    where = expected_devices(inventory, spec)
    moved = {
        unit.name: "cpu"
        for unit in units_of(inventory).units
        if unit.kind in (Kind.FFN, Kind.EXPERTS)
        and unit.layer is not None
        and devices[unit.layer] != CPU
        and _mostly_on_host(inventory, unit, where)
    }
    return Given(name, _setting(spec, layers.n_all + 1), (*devices[: layers.n_main], devices[-1]), moved)


def _mostly_on_host(inventory: Inventory, unit: Unit, where: dict[str, str]) -> bool:
    sizes = {name: tensor.size_bytes for name, tensor in by_name(inventory).items() if name in unit.tensors}
    return 2 * sum(size for name, size in sizes.items() if where.get(name) == CPU) > sum(sizes.values())


def _setting(spec: LoadSpec, most: int) -> str:
    split = f" -ts {','.join(map(str, spec.tensor_split))}" if len(spec.tensor_split) > 1 else ""
    overrides = f", {len(spec.overrides)} overrides" if spec.overrides else ""
    return f"-ngl {min(spec.n_gpu_layers, most)}{split}{overrides}"
