"""Where each weight must be after a load by a spec: the engine's rules applied to the model's units."""

from __future__ import annotations

from planner.model.structure import Structure
from planner.model.units import Kind
from planner.plan.load_spec import CPU, LoadSpec
from planner.plan.override_match import placed
from planner.plan.overrides import home
from planner.site import Site


def spec_layer_devices(spec: LoadSpec, n_blocks: int) -> tuple[str, ...]:
    """The device of each of `n_blocks` layers (NextN included) and of the output head, by the engine's rule.

    The last `n_gpu_layers` of the layers, the head counted as the last, go to the listed devices in
    proportion to `tensor_split`; the others stay on the CPU.
    """
    offloaded = min(spec.n_gpu_layers, n_blocks + 1) if spec.devices else 0
    total = sum(spec.tensor_split)
    found = [CPU] * (n_blocks + 1 - offloaded)
    for index in range(offloaded):
        share, upto = index * total, 0
        for device, count in zip(spec.devices, spec.tensor_split, strict=True):
            upto += count
            if share < upto * offloaded:
                found.append(device)
                break
    return tuple(found)


def expected_devices(structure: Structure, spec: LoadSpec) -> dict[str, str]:
    """Tensor to device for every tensor the engine loads; a striped tensor belongs to its device."""
    layers = spec_layer_devices(spec, structure.layers.n_all)
    found: dict[str, str] = {}
    for unit in structure.units:
        if unit.kind is not Kind.FOREIGN:
            found.update(dict.fromkeys(unit.tensors, home(unit, layers)))
    for name, buffer in placed(structure.inventory, spec.overrides).items():
        found[name] = Site.of_buffer(buffer).device
    return found
