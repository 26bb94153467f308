"""What llama.cpp's own --fit chose: as the plan records it, and as one more stock rule for the solver."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.block_names import block_name, layer_of
from planner.constants import CPU
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.structure import Structure
from planner.model.units import Kind
from planner.plan.engine_rules import spec_layer_devices, tensor_devices
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import EngineFit, FitOverride
from planner.plan.stock_rule import FIT, Rule
from planner.site import ON_CPU
from planner.workload import Workload


def fit_record(inventory: Inventory, engine: str, spec: LoadSpec | None, workload: Workload) -> EngineFit:
    """What is written down of a --fit; `spec` None: it found no placement."""
    if spec is None:
        return EngineFit(engine=engine, n_ctx=workload.n_ctx, n_gpu_layers=None)
    spec = with_counted_layers(inventory, spec)
    return EngineFit(
        engine=engine,
        n_ctx=spec.workload.n_ctx,
        n_gpu_layers=spec.n_gpu_layers,
        devices=spec.devices,
        tensor_split=spec.tensor_split,
        overrides=tuple(FitOverride(pattern=p, buffer=b) for p, b in spec.overrides),
    )


def with_counted_layers(inventory: Inventory, spec: LoadSpec) -> LoadSpec:
    """The same load with its layers counted: --fit may leave shares of memory, and too many layers."""
    layers = Counter(spec_layer_devices(spec, layers_of(inventory).n_all))
    split = tuple(layers[device] for device in spec.devices)
    return replace(spec, tensor_split=split, n_gpu_layers=sum(split))


def fit_rules(structure: Structure, fit: EngineFit, workload: Workload) -> tuple[Rule, ...]:
    """The placement, once or twice; nothing where --fit found none.

    --fit cuts the feed-forward of at most one layer a device: some of its tensors on the GPU, some on
    the CPU. No unit is cut here: such a one is read as being on the GPU whole, which flatters --fit, and,
    for a budget that this overfills, as being on the CPU.
    """
    if fit.n_gpu_layers is None:
        return ()
    overrides = tuple((o.pattern, o.buffer) for o in fit.overrides)
    spec = LoadSpec(fit.devices, fit.tensor_split, fit.n_gpu_layers, overrides, workload)
    devices = spec_layer_devices(spec, structure.layers.n_all)
    whole, cut = _on_host(structure, spec, devices)
    setting = _setting(fit)
    if not cut:
        return (Rule(FIT, setting, devices, dict.fromkeys(whole, ON_CPU)),)
    layers = ", ".join(block_name(layer_of(name)) for name in cut)
    return tuple(
        Rule(FIT, f"{setting}, {layers} cut: counted on the {place}", devices, dict.fromkeys(moved, ON_CPU))
        for place, moved in (("GPU", whole), (CPU, (*whole, *cut)))
    )


def _on_host(
    structure: Structure, spec: LoadSpec, devices: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Units of GPU layers that are moved to the CPU, and those that are cut or on another GPU."""
    where, sizes = tensor_devices(structure, spec), structure.tensors
    whole: list[str] = []
    cut: list[str] = []
    for unit in structure.units:
        if unit.kind not in (Kind.FFN, Kind.EXPERTS) or unit.layer is None or devices[unit.layer] == CPU:
            continue
        heavy = [n for n in unit.tensors if len(sizes[n].shape) > 1]  # biases may stay behind
        there = {where.get(name, devices[unit.layer]) for name in heavy}
        if there != {devices[unit.layer]}:
            (whole if there == {CPU} else cut).append(unit.name)
    return tuple(whole), tuple(cut)


def _setting(fit: EngineFit) -> str:
    split = f" -ts {','.join(map(str, fit.tensor_split))}" if len(fit.tensor_split) > 1 else ""
    overrides = f", {len(fit.overrides)} overrides" if fit.overrides else ""
    return f"-ngl {fit.n_gpu_layers}{split}{overrides}"
