"""From a plan to the engine's device list: layer arithmetic with the output head and NextN blocks counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plan import sample_plan

from planner.plan.engine_rules import spec_layer_devices
from planner.plan.load_spec import LayerGap, LoadSpec, layer_devices, load_spec, map_devices
from planner.plan.plan import LayerRange, Override, Plan
from planner.workload import Workload


def plan_of(*runs: tuple[str, int]) -> Plan:
    """A plan with these runs of layers, the output head in the last."""
    ranges, at = [], 0
    for device, count in runs:
        ranges.append(LayerRange(first=at, last=at + count - 1, device=device))
        at += count
    return sample_plan().model_copy(
        update={"layers": tuple(ranges), "units": (), "devices": (), "overrides": ()}
    )


def layers_by_engine(spec: LoadSpec, n_blocks: int) -> list[str]:
    """llama.cpp's rule in its own words: cumulative float splits, upper_bound, the last n_gpu_layers."""
    import numpy as np

    sums = np.cumsum(np.array(spec.tensor_split, dtype=np.float32))
    points = sums / sums[-1] if len(sums) else sums
    first = max(n_blocks + 1 - spec.n_gpu_layers, 0)
    active = min(spec.n_gpu_layers, n_blocks + 1) if spec.devices else 0
    found = []
    for layer in range(n_blocks + 1):
        if layer < first or layer - first >= active:
            found.append("CPU")
        else:
            share = np.float32(layer - first) / np.float32(active)
            found.append(spec.devices[int(np.searchsorted(points, share, side="right"))])
    return found


@pytest.mark.parametrize("n_offloaded", [0, 1, 28, 29])
def test_the_last_layers_go_to_the_device_and_the_head_is_one_of_them(n_offloaded: int) -> None:
    runs = [("CPU", 29 - n_offloaded), ("CUDA0", n_offloaded)]
    spec = load_spec(plan_of(*[r for r in runs if r[1]]))
    assert (spec.n_gpu_layers, spec.devices) == (n_offloaded, ("CUDA0",) if n_offloaded else ())


def test_one_device_has_one_canonical_form() -> None:
    spec = load_spec(plan_of(("CUDA0", 29)))
    assert (spec.devices, spec.tensor_split, spec.n_gpu_layers) == (("CUDA0",), (29,), 29)


def test_layers_in_any_order_are_spelt_with_repeats_and_the_cpu() -> None:
    spec = load_spec(plan_of(("CUDA0", 2), ("CPU", 1), ("CUDA0", 2)))
    assert spec.devices == ("CUDA0", "CPU", "CUDA0")
    assert spec.tensor_split == (2, 1, 2)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(["CPU", "CUDA0", "CUDA1"]), min_size=2, max_size=120))
def test_the_engine_arrives_at_the_planned_devices(devices: list[str]) -> None:
    plan = plan_of(*[(device, 1) for device in devices])
    spec = load_spec(plan)
    there = list(spec_layer_devices(spec, len(devices) - 1))
    assert there == layers_by_engine(spec, len(devices) - 1)
    assert len(spec.devices) <= 16
    assert spec.notes or there == devices


def test_more_runs_than_the_engine_takes_become_the_nearest_legal_list() -> None:
    plan = plan_of(*[("CUDA0" if n % 2 else "CUDA1", 3 if n % 2 else 1) for n in range(20)])
    spec = load_spec(plan)
    assert len(spec.devices) <= 16
    assert sum(spec.tensor_split) == sum(r.last - r.first + 1 for r in plan.layers)
    assert "16 entries" in spec.notes[0]


def test_nextn_blocks_count_before_the_head() -> None:
    ranges = [LayerRange(first=0, last=63, device="CUDA0"), LayerRange(first=64, last=64, device="CPU")]
    assert layer_devices(ranges, 65) == ("CUDA0",) * 64 + ("CPU",) * 2
    whole = [LayerRange(first=0, last=65, device="CUDA0")]
    assert layer_devices(whole, 65) == ("CUDA0",) * 66


@pytest.mark.parametrize("ranges", [[], [(1, 3)], [(0, 2), (2, 3)], [(0, 1), (3, 4)], [(2, 1)]])
def test_incomplete_layers_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(LayerGap):
        layer_devices([LayerRange(first=a, last=b, device="CPU") for a, b in ranges])


def spec_of(devices: tuple[str, ...], split: tuple[int, ...], *overrides: tuple[str, str]) -> LoadSpec:
    """A spec of all layers listed."""
    return LoadSpec(devices, split, sum(split), overrides, Workload())


def test_a_device_mapped_to_the_cpu_vanishes() -> None:
    spec = spec_of(("CUDA0",), (5,), ("^a$", "CPU"), ("^b$", "CUDA0"))
    here = map_devices(spec, {"CUDA0": "CPU"})
    assert (here.devices, here.n_gpu_layers) == ((), 0)
    assert here.overrides == (("^a$", "CPU"), ("^b$", "CPU"))


def test_devices_mapped_to_one_are_joined() -> None:
    here = map_devices(spec_of(("CUDA0", "CUDA1"), (3, 4)), {"CUDA0": "Vulkan0", "CUDA1": "Vulkan0"})
    assert (here.devices, here.tensor_split) == (("Vulkan0",), (7,))


def test_one_of_two_devices_mapped_to_the_cpu() -> None:
    spec = spec_of(("CUDA0", "CUDA1"), (3, 4), ("^s$", "stripe:CUDA0:8"))
    here = map_devices(spec, {"CUDA0": "CPU"})
    assert (here.devices, here.tensor_split, here.n_gpu_layers) == (("CUDA1",), (4,), 4)
    assert here.overrides == (("^s$", "CPU"),)


def test_devices_without_layers_are_listed_when_something_is_theirs() -> None:
    plan = sample_plan().model_copy(update={"layers": (LayerRange(first=0, last=4, device="CPU"),)})
    # The device computes prompts for weights of the host.
    assert load_spec(plan).devices == ("CUDA0",)
    assert load_spec(plan).n_gpu_layers == 0
    assert spec_layer_devices(load_spec(plan), 4) == ("CPU",) * 5
    second = Override(pattern="^a$", buffer="CUDA1", tensors=1)
    spec = load_spec(plan_of(("CUDA0", 5)).model_copy(update={"overrides": (second,)}))
    assert (spec.devices, spec.tensor_split) == (("CUDA0", "CUDA1"), (5, 0))
    assert spec_layer_devices(spec, 4) == ("CUDA0",) * 5 == tuple(layers_by_engine(spec, 4))
    here = map_devices(spec, {"CUDA1": "CPU"})
    assert (here.devices, here.overrides) == (("CUDA0",), (("^a$", "CPU"),))
