"""Changes of device: as many in the graph that the engine makes of a plan as the plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning_models import plan, twins
from twin_devices import Ask, ask

from planner.model.gguf.reader import read_model
from planner.plan.load_spec import load_spec
from planner.plan.plan import Plan
from planner.plan.request import Pin
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

WORK = Workload(n_ctx=512, depth=0, n_ubatch=64, n_batch=64, prompt=16, gen=16)
SPECS = {
    "qwen3": SynthSpec("qwen3", n_layers=4),
    "gpt-oss": SynthSpec("gpt-oss", n_layers=4),  # biases of experts
    "gemma4": SynthSpec("gemma4", n_layers=4, n_expert=8),
    "deepseek2": SynthSpec("deepseek2", n_layers=4),
}


def planned(path: Path, kind: str) -> Plan:
    """Experts, or FFN, of the first layers on the CPU."""
    machine = twins(1024)
    near = tuple(d for d in machine.devices if d.name != "TWIN1")
    pins = (Pin(f"blk.[0-2].{kind}", "cpu"), Pin("output*", "TWIN0"))
    one = machine.model_copy(update={"devices": near})
    return plan(read_model(path).inventory, "TWIN0=900", on=one, workload=WORK, pins=pins)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """What plan and engine count for each model."""
    folder = tmp_path_factory.mktemp("splits")
    files = {name: write(folder / f"{name}.gguf", spec) for name, spec in SPECS.items()}
    plans = {name: planned(path, "ffn" if name == "qwen3" else "experts") for name, path in files.items()}
    said = ask([Ask(files[name], load_spec(made), ()) for name, made in plans.items()], n_devices=1)
    found = zip(plans.items(), said, strict=True)
    return {name: (made.predicted.splits, engine.splits_decode) for (name, made), engine in found}


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_counts_the_engine_s_splits(name: str, counted: dict[str, tuple[int, int]]) -> None:
    planned_, engine = counted[name]
    assert planned_ == engine > 2
