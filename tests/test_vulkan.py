"""A second device that is no CPU: experts on the host, the rest on Vulkan, the same logits nearly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decode_models import Answer, decode_all

EXPERTS = r"^blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight$"
# Other kernels, other order of sums, 8-bit activations on the CPU: relative to the spread of the logits.
TOLERANCE = 0.05


def placements(model: Path) -> list[dict[str, object]]:
    """All on the CPU; all on Vulkan; experts on the CPU and the rest on Vulkan."""
    cpu: dict[str, object] = {"model": str(model)}
    vulkan = {**cpu, "devices": ["Vulkan0"], "tensor_split": [1], "n_gpu_layers": 99}
    return [cpu, vulkan, {**vulkan, "overrides": [[EXPERTS, "CPU"]]}]


def distance(first: Answer, second: Answer) -> float:
    """Root mean square difference of two runs' logits, in deviations of the first's."""
    for answer in (first, second):
        assert "error" not in answer, answer["error"]
    one, two = np.array(first["logits"]), np.array(second["logits"])
    return float(np.sqrt(np.mean((one - two) ** 2)) / one.std())


def run_on(engine: Path, model: Path) -> list[Answer]:
    return decode_all([{**request, "engine": str(engine)} for request in placements(model)])


@pytest.mark.parametrize("name", ["moe_model", "gdn_model"])
def test_experts_on_the_host_and_the_rest_on_vulkan(
    vulkan_engine: Path, name: str, request: pytest.FixtureRequest
) -> None:
    cpu, vulkan, mixed = run_on(vulkan_engine, request.getfixturevalue(name))
    assert distance(cpu, vulkan) < TOLERANCE
    assert distance(cpu, mixed) < TOLERANCE
    # The placement is what was asked for, of the weights and of the work.
    weights = {name: device for name, device in mixed["weights"].items() if name.startswith("blk.")}
    experts = {device for name, device in weights.items() if "_exps" in name}
    rest = {device for name, device in weights.items() if "_exps" not in name}
    assert (experts, rest) == ({"CPU"}, {"Vulkan0"})
    assert mixed["work"]["CPU"] > 0
    assert mixed["work"]["Vulkan0"] > mixed["work"]["CPU"]
    assert set(cpu["work"]) == {"CPU"}


def test_a_build_with_other_layouts_loads_the_same_way(node_engine: Path, moe_model: Path) -> None:
    cpu, vulkan, mixed = run_on(node_engine, moe_model)
    assert distance(cpu, vulkan) < TOLERANCE
    assert distance(cpu, mixed) < TOLERANCE


def test_the_distance_sees_a_misplaced_weight(moe_model: Path, gdn_model: Path) -> None:
    first, second = (decode_all([{"model": str(model)}])[0] for model in (moe_model, gdn_model))
    assert distance(first, second) > 1
