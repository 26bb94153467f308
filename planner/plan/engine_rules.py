"""Where each weight must be after a load by a spec: the engine's rules applied to the model's units."""

from __future__ import annotations

from collections.abc import Sequence

from planner.constants import CPU
from planner.model.structure import Structure
from planner.model.units import Kind
from planner.plan.load_spec import LoadSpec
from planner.plan.override_match import placed
from planner.plan.overrides import home
from planner.site import Site


def layers_by_ngl(n_blocks: int, ngl: int, shares: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The device of each of `n_blocks` layers (NextN included) and of the output head (llama-model.cpp).

    Layers before `n_blocks + 1 - ngl` stay on the CPU, the head counted as the last; the others are dealt to
    the devices of `shares` by cumulative share.
    """
    total = sum(share for _, share in shares)
    offloaded = min(ngl, n_blocks + 1) if total else 0
    found = [CPU] * (n_blocks + 1 - offloaded)
    dealt = upto = 0
    for device, share in shares if offloaded else ():
        upto += share
        first = -(-upto * offloaded // total)  # of the layers of later devices
        found += [device] * (first - dealt)
        dealt = first
    return tuple(found)


def spec_layer_devices(spec: LoadSpec, n_blocks: int) -> tuple[str, ...]:
    """The same for a load: shares are those of `tensor_split`."""
    return layers_by_ngl(n_blocks, spec.n_gpu_layers, list(zip(spec.devices, spec.tensor_split, strict=True)))


def tensor_devices(structure: Structure, spec: LoadSpec) -> dict[str, str]:
    """Tensor to device for every tensor the engine loads; a striped tensor belongs to its device."""
    layers = spec_layer_devices(spec, structure.layers.n_all)
    found: dict[str, str] = {}
    for unit in structure.units:
        if unit.kind is not Kind.FOREIGN:
            found.update(dict.fromkeys(unit.tensors, home(unit, layers)))
    for name, buffer in placed(structure.inventory, spec.overrides).items():
        found[name] = Site.of_buffer(buffer).device
    return found
