"""The named machine descriptions: canonical, marked as assumed, and within physical bounds."""

from __future__ import annotations

import pytest
from planning_models import machine, moe, plan

from planner.cost.build_problem import BeyondPlans
from planner.machine import presets
from planner.machine.presets import FOLDER, UnknownMachine
from planner.machine.profile import to_text


@pytest.mark.parametrize("name", presets.names())
def test_a_description_is_canonical_assumed_and_says_where_its_figures_come_from(name: str) -> None:
    profile = presets.load(name)
    assert to_text(profile) == (FOLDER / f"{name}.yaml").read_text()
    assert profile.name == name
    assert not profile.measured
    assert profile.source.startswith("assumed, not measured")
    assert profile.timings == ()
    assert profile.warnings == ()


@pytest.mark.parametrize("name", presets.names())
def test_every_device_can_be_reached_from_host_memory_and_back(name: str) -> None:
    profile = presets.load(name)
    others = {d.name for d in profile.devices} - {"CPU"}
    pairs = {(link.source, link.target) for link in profile.links}
    assert {("CPU", d) for d in others} | {(d, "CPU") for d in others} <= pairs
    assert {end for pair in pairs for end in pair} <= others | {"CPU"}
    for link in profile.links:
        assert link.zero_copy_bytes_per_s <= link.bandwidth_bytes_per_s


def test_bandwidths_are_achieved_ones_below_the_nominal_peak() -> None:
    peaks = {
        "RTX 3060 12GB": 360,
        "RTX 4090": 1008,
        "RTX 5090": 1792,
        "RX 9070 XT": 640,
        "DDR4-3200 x2": 51.2,
    }
    for name in presets.names():
        for device in presets.load(name).devices:
            for part, peak in peaks.items():
                if part in device.description:
                    assert device.bandwidth_bytes_per_s < 0.95e9 * peak


def test_an_unknown_machine_names_the_nearest_ones() -> None:
    with pytest.raises(UnknownMachine, match="rtx4090-ddr5") as caught:
        presets.load("rtx4090-ddr4")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "figures",
    [
        {"bandwidth_bytes_per_s": 1},
        {"bandwidth_bytes_per_s": 400},
        {"flops_per_s": 1},
        {"op_overhead_ns": 1 << 53},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["CUDA0", "CPU"])
def test_figures_whose_times_no_search_adds_up_are_named(device: str, figures: dict[str, int]) -> None:
    """A profile is a file: its numbers are bounded one by one, and their products are not."""
    profile = machine()
    devices = tuple(d.model_copy(update=figures if d.name == device else {}) for d in profile.devices)
    changed = profile.model_copy(update={"devices": devices})
    with pytest.raises(BeyondPlans, match="its figures give"):
        plan(moe(16), "4000", on=changed)
