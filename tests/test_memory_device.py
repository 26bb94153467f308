"""Memory formulas on a device of its own: caches follow the layers, host experts are staged for prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.memory.compute_buffer import compute_bytes, host_bytes, staging_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.memory.weights import weight_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.model.tensor_roles import Role, part_of
from planner.model.units import Kind, units_of
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.engine.libllama import Engine
from runtime.load.dry_run import DryRun, measure

MIB = 2**20
SPECS = {
    "qwen3moe": SynthSpec("qwen3moe", n_embd=512, n_ff_exp=512, n_expert=16, n_used=4, n_layers=3),
    "qwen35moe": SynthSpec("qwen35moe", n_embd=512, n_ff_exp=512, n_expert=16, n_used=4),
    "gemma4": SynthSpec("gemma4", n_vocab=4096, n_layers=6),
    "gpt-oss": SynthSpec("gpt-oss", n_embd=512, n_vocab=4096),
}
EXPERTS = ((r"^blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_exps\.weight$", "CPU"),)


@pytest.fixture
def engine(vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")  # or llama.cpp leaves software devices out
    return Engine.find(str(vulkan_engine))


@pytest.mark.parametrize("name", SPECS)
def test_everything_on_the_device(name: str, engine: Engine, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", SPECS[name])
    model, work = read_model(path).inventory, Workload(n_ctx=2048)
    found = load(engine, path, work, ())
    device, host = found.devices["Vulkan0"], found.devices["CPU"]
    assert device.context == sum(kv_bytes(structure_of(model), work)) + sum(
        state_bytes(structure_of(model), work)
    )
    assert close(compute_bytes(structure_of(model), work), device.compute)
    assert close(host_bytes(structure_of(model), work), host.compute)
    assert device_weights(model, step=1) <= device.model <= device_weights(model, step=256)


@pytest.mark.parametrize("n_ubatch", [16, 32, 512])
def test_host_experts_are_staged_from_32_tokens_on(n_ubatch: int, engine: Engine, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", SPECS["qwen3moe"])
    model, work = read_model(path).inventory, Workload(n_ctx=2048, n_ubatch=n_ubatch)
    host = [t.size_bytes for t in model.tensors if part_of(t).role is Role.EXPERTS]
    found = load(engine, path, work, EXPERTS).devices["Vulkan0"]
    staged = staging_bytes(host, work)
    assert (staged > 0) == (n_ubatch >= 32)
    assert close(compute_bytes(structure_of(model), work, staged_bytes=staged), found.compute)
    assert (found.compute > max(host)) == (staged > 0)


def load(engine: Engine, path: Path, work: Workload, overrides: tuple[tuple[str, str], ...]) -> DryRun:
    spec = LoadSpec(("Vulkan0",), (1,), 99, overrides, work, use_mmap=False, use_extra_bufts=False)
    return measure(engine, path, spec)


def device_weights(model: Inventory, *, step: int) -> int:
    """All but what is looked up on the host, at an alignment; the tied head a second time."""
    on_host = {Kind.EMBEDDING, Kind.LOOKUP}
    units = [unit for unit in units_of(model).units if unit.kind not in on_host]
    names = {name for unit in units for name in unit.tensors}
    tied = sum(unit.tied_bytes for unit in units)
    return weight_bytes((t for t in model.tensors if t.name in names), step) + tied


def close(estimate: int, engine: int) -> bool:
    """An upper estimate: on a GPU at most half as much again and 2 MiB."""
    return engine <= estimate * 1.05 + MIB and estimate <= 1.5 * engine + 2 * MIB
