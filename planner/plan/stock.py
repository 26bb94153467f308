"""The nearest placement that stock llama.cpp tools can load, of a plan and of a load spec.

The tools list no CPU among devices, split a device list of at most 15 entries, and know no stripes. A plan
gets legal decisions, CPU layers first, to be priced again; a spec keeps its decisions as far as overrides
can say them: layers of the CPU between device layers keep their weights there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from planner.block_names import block_of
from planner.constants import CPU, MAX_ENGINE_DEVICES
from planner.plan.engine_rules import spec_layer_devices
from planner.plan.load_spec import LoadSpec, layer_ranges, plan_layer_devices
from planner.plan.overrides import numbers
from planner.plan.plan import Placement, Plan
from planner.site import ON_CPU, Site, SiteKind

_FREE = (".experts", ".ffn")  # units that need not be where their layer is

MAX_SPLIT = MAX_ENGINE_DEVICES - 1  # the tools' option parser refuses llama_max_devices() entries


def stock_plan(plan: Plan) -> Plan:
    """The plan with its decisions changed to legal ones; price it again before use (planner.check.reprice).

    As many layers stay on the CPU as before, but they come first: that is how the tools count. The
    output head keeps its device.
    """
    before = plan_layer_devices(plan)
    after = (*sorted(before[:-1], key=lambda device: device != CPU), before[-1])
    cached = next((p.site for p in plan.units if p.site.kind is SiteKind.CACHE), ON_CPU)
    units = tuple(p.model_copy(update={"site": _site(p, before, after, cached)}) for p in plan.units)
    # Pins name units whose layers have moved.
    free = plan.constraints.model_copy(update={"pins": ()})
    return plan.model_copy(update={"layers": layer_ranges(after), "units": units, "constraints": free})


def _site(placement: Placement, before: Sequence[str], after: Sequence[str], cached: Site) -> Site:
    """The legal site; `cached` is that of host experts of device layers, the CPU without a MoE cache."""
    layer = block_of(placement.unit)
    if placement.site.kind in (SiteKind.STRIPE, SiteKind.HYBRID):
        return cached
    if layer is not None and placement.unit.endswith(".experts") and placement.site in (ON_CPU, cached):
        return ON_CPU if after[layer] == CPU else cached
    if layer is None or layer >= len(before) or before[layer] == after[layer]:
        return placement.site
    # Weights that were on the CPU stay there, or a layer new to the device would not fit.
    if after[layer] == CPU or (placement.unit.endswith(_FREE) and placement.site == ON_CPU):
        return ON_CPU
    return Site.on(after[layer])


def stock_spec(spec: LoadSpec, n_blocks: int) -> LoadSpec:
    """The spec in the tools' terms, with notes of what stands for what they cannot be told.

    `n_blocks` counts NextN blocks.
    """
    notes = list(spec.notes)
    legal = _with_gpu_layers(_without_stripes(spec, notes), n_blocks, notes)
    return replace(legal, notes=tuple(notes))


def _without_stripes(spec: LoadSpec, notes: list[str]) -> LoadSpec:
    striped = sum(Site.of_buffer(buffer).divided for _, buffer in spec.overrides)
    if striped:
        notes.append(f"the tools know no stripes: {striped} striped tensors stay on the CPU whole")
    overrides = tuple((p, CPU if Site.of_buffer(b).divided else b) for p, b in spec.overrides)
    return replace(spec, overrides=overrides)


def _with_gpu_layers(spec: LoadSpec, n_blocks: int, notes: list[str]) -> LoadSpec:
    """CPU layers behind the first device layer become device layers with their weights kept on the CPU."""
    layers = list(spec_layer_devices(spec, n_blocks))
    if CPU not in spec.devices and len(spec.devices) <= MAX_SPLIT:
        return spec
    first = next((n for n, device in enumerate(layers) if device != CPU), len(layers))
    moved = [n for n in range(first, len(layers)) if layers[n] == CPU]
    for n in moved:
        layers[n] = layers[n - 1]
    runs = [(device, len(list(group))) for device, group in groupby(layers[first:])]
    if len(runs) > MAX_SPLIT:
        runs, dropped = runs[-MAX_SPLIT:], sum(count for _, count in runs[:-MAX_SPLIT])
        runs[0] = (runs[0][0], runs[0][1] + dropped)
        notes.append(f"the tools split over {MAX_SPLIT} entries: {dropped} layers follow later ones")
    if moved:
        notes.append(_why_moved(moved, n_blocks))
    return replace(
        spec,
        devices=tuple(device for device, _ in runs),
        tensor_split=tuple(count for _, count in runs),
        n_gpu_layers=len(layers) - first,
        # Behind the plan's own patterns: the first match wins.
        overrides=(*spec.overrides, *_kept_on_cpu(moved, n_blocks)),
    )


def _kept_on_cpu(layers: list[int], n_blocks: int) -> list[tuple[str, str]]:
    blocks = [n for n in layers if n < n_blocks]
    found = [(rf"^blk\.(?:{numbers(blocks)})\..*$", CPU)] if blocks else []
    if n_blocks in layers:
        # A head without a tensor of its own is token_embd, which the device would get a copy of.
        found.append((r"^(?:output|output_norm|token_embd)\.weight$", CPU))
    return found


def _why_moved(layers: list[int], n_blocks: int) -> str:
    why = "the tools list no CPU among devices: "
    blocks = [n for n in layers if n < n_blocks]
    if not blocks:
        return (
            why + "the output head counts as a layer of the neighbouring device, its weights stay on the CPU"
        )
    named = ", ".join(map(str, blocks))
    return (
        f"{why}KV cache and state of layer{'s' * (len(blocks) > 1)} {named} move to the neighbouring "
        "device, the weights stay on the CPU"
    )
