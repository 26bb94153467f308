"""Types of the KV cache that a fork adds, and kernels for all: stated of a machine, they bind its devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import findings, machine, moe, plan

from atsplan import main
from planner.errors import AnswerIsNo
from planner.machine.attention_kernels import attends
from planner.machine.profile import Profile, from_text, to_text
from planner.memory.kv_cache import kv_bytes
from planner.model.inventory import to_text as inventory_text
from planner.model.structure import structure_of
from planner.plan.plan import from_text as plan_from
from planner.workload import CacheType, Workload

TURBO = CacheType(name="turbo4", values=32, block_bytes=18, devices=("CUDA", "CPU"))
ON_CPU = CacheType(name="turbo3", values=32, block_bytes=14, devices=("CPU",))
ON_GPU = CacheType(name="turbo2", values=32, block_bytes=10, devices=("CUDA",))


def forked(**changed: object) -> Profile:
    """The machine with an engine that has these types."""
    return machine().model_copy(update={"cache_types": (TURBO, ON_CPU, ON_GPU), **changed})


def use(one: CacheType, **more: object) -> Workload:
    fields = {"n_ctx": 8192, "type_k": one.name, "type_v": one.name, "cache_types": (one,), **more}
    return Workload.model_validate(fields)


def test_its_blocks_are_counted() -> None:
    model = moe()
    same = Workload(n_ctx=8192, type_k="q4_0", type_v="q4_0")  # 18 bytes for 32 values too
    assert kv_bytes(structure_of(model), use(TURBO)) == kv_bytes(structure_of(model), same)
    assert (
        sum(kv_bytes(structure_of(model), use(ON_GPU))) * 18 == sum(kv_bytes(structure_of(model), same)) * 10
    )


def test_layers_with_a_cache_go_where_it_is_computed() -> None:
    model = moe()
    free = plan(model, "20000", on=forked(), workload=use(TURBO))
    assert {entry.device for entry in free.layers} == {"CUDA0"}
    kept = plan(model, "20000", on=forked(), workload=use(ON_CPU))
    blocks = range(8)
    assert all(entry.device == "CPU" for entry in kept.layers if entry.first in blocks)
    (note,) = [n for n in kept.notes if "no attention on KV" in n]
    assert "type turbo3 on CUDA0" in note and "CPU computes it" in note and "q8_0" in note
    assert sum(d.kv_bytes for d in kept.devices if d.name == "CPU") == sum(
        kv_bytes(structure_of(model), use(ON_CPU))
    )
    assert not [f for f in findings(kept, model, forked()) if f.severity.value == "error"]


def test_no_plan_where_nothing_computes_it() -> None:
    nowhere = CacheType(name="turbo1", values=32, block_bytes=6, devices=("Vulkan",))
    with pytest.raises(AnswerIsNo, match="no device computes attention on KV of type turbo1"):
        plan(moe(), "20000", on=forked(), workload=use(nowhere))


def test_a_device_with_all_kernels_takes_what_others_do_not() -> None:
    mixed = Workload(type_k="q8_0", type_v="q5_1")
    gpu = machine().device("CUDA0")
    assert not attends(gpu, mixed)
    assert attends(gpu.model_copy(update={"all_kv_types": True}), mixed)
    assert not attends(gpu.model_copy(update={"all_kv_types": True}), use(ON_CPU))


def test_a_type_is_known_only_where_it_is_stated() -> None:
    with pytest.raises(ValueError, match=r"Input should be 'f32', .* or 'turbo4'"):
        use(TURBO, type_v="turbo5")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_commands_take_it_from_a_profile(tmp_path: Path) -> None:
    model, profile, made = tmp_path / "m.inventory.yaml", tmp_path / "p.yaml", tmp_path / "plan.yaml"
    model.write_text(inventory_text(moe()))
    profile.write_text(to_text(forked()))
    assert from_text(profile.read_text(), "p") == forked()
    asked = ("solve", model, "--profile", profile, "--budget", "2000", "--ctx", "4096")
    found = run(*asked, "--kv-type", "turbo4", "-o", made)
    assert found.exit_code == 0, found.output
    written = plan_from(made.read_text(), "plan")
    assert written.workload.type_k == "turbo4" and written.workload.cache_types == (TURBO,)
    unknown = run(*asked, "--kv-type", "turbo9")
    assert unknown.exit_code == 2 and "--kv-type" in unknown.stderr and "or 'iq4_nl'" in unknown.stderr
    assert "stated of its machine: machines --kv-fork" in unknown.stderr
    line = run("export", made, "--stock").stdout
    assert "--cache-type-k turbo4" in line and "--cache-type-v turbo4" in line


def test_a_machine_is_described_with_it(tmp_path: Path) -> None:
    model = tmp_path / "m.inventory.yaml"
    model.write_text(inventory_text(moe()))
    parts = ("--gpu", "RTX 4090", "--ram", "64GiB", "--memory", "ddr5-6000", "--cpu", "8")
    told = run(
        "fit", model, *parts, "--kv-fork", "turbo4=32:18:CUDA,CPU", "--kv-type", "turbo4", "-c", "4096"
    )
    assert told.exit_code == 0, told.output
    for wrong in ("turbo4", "turbo4=0:18:CUDA", "turbo4=32:x:CUDA", "q8_0=32:34:CUDA", "T=1:1:CPU", "a=1:1:"):
        found = run("fit", model, *parts, "--kv-fork", wrong)
        assert found.exit_code == 2 and "--kv-fork" in found.stderr, wrong
