"""A plan whose parts contradict one another, or its file, is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_plans import plan_for

from atsplan import main
from planner.check.consistency import Contradiction, check_agreement, check_order
from planner.errors import InputError
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.plan.load_spec import LoadSpec, Unloadable, load_spec
from planner.plan.plan import ExpertOrder, Override, Plan, to_text
from planner.workload import Workload
from runtime.engine.libllama import Engine
from runtime.load import load_params

Text = Callable[[str], str]


@pytest.fixture
def inventory(moe_model: Path) -> Inventory:
    """The tensors of the small mixture of experts."""
    return read_model(moe_model).inventory


@pytest.fixture
def plan(moe_model: Path) -> Plan:
    """Its experts on the CPU, all else on CUDA0."""
    return plan_for(moe_model)


def test_a_plan_that_agrees(plan: Plan, inventory: Inventory) -> None:
    check_agreement(plan, inventory, "plan.yaml")


EDITS: tuple[tuple[Text, str], ...] = (
    (lambda t: t.replace("blk.0.experts, site: cpu", "blk.0.experts, site: 'gpu:CUDA0'"), "ffn_down_exps"),
    (lambda t: t.replace("buffer: CPU", "buffer: CUDA9"), "put it on CUDA9, its site needs CPU"),
    (lambda t: t.replace("'^blk", "'blk"), "not anchored"),
    (lambda t: t.replace("tensors: 12}", "tensors: 11}"), "places 12 tensors, not 11"),
    (lambda t: t.replace("last: 4", "last: 99"), "100 layers with the output head, the model has 5"),
    (lambda t: t.replace("last: 4", "last: 2"), "3 layers with the output head, the model has 5"),
    (lambda t: t.replace("unit: blk.3.router", "unit: blk.7.router"), "blk.7.router is no unit of the model"),
    (lambda t: t.replace("unit: blk.3.router", "unit: blk.2.router"), "blk.2.router appears twice"),
    (lambda t: t.replace("unit: output, site: 'gpu:CUDA0'", "unit: output, site: moon"), "is no site"),
)


@pytest.mark.parametrize(("edit", "part"), EDITS)
def test_a_plan_that_contradicts_itself_is_not_loaded(
    plan: Plan, moe_model: Path, tmp_path: Path, edit: Text, part: str
) -> None:
    text = edit(to_text(plan))
    assert text != to_text(plan)
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    arguments = ["run", str(moe_model), "--plan", str(path), "--device-map", "CUDA0=CPU", "-p", "a"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"atsplan: {path}:") and len(done.stderr.splitlines()) == 1
    assert part in done.stderr


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda t: t.replace("last: 4", "last: 999999999999"), "layers[0].last"),
        (lambda t: t.replace("device: CUDA0", "device: ''"), "layers[0].device"),
        (lambda t: t.replace("n_ctx: 256", "n_ctx: 4294967552"), "workload.n_ctx"),
        (lambda t: t.replace("n_ubatch: 64", "n_ubatch: 4294967297"), "workload.n_ubatch"),
        (lambda t: t.replace("type_v: f16, flash_attn: true", "type_v: q4_0, flash_attn: false"), "q4_0"),
        (lambda t: t.replace("buffer: CPU", "buffer: stripe:CUDA0"), "is no site"),
        (lambda t: t.replace("buffer: CPU", "buffer: stripe:CUDA0:x"), "is no site"),
    ],
)
def test_values_that_no_engine_takes_are_refused_by_export_too(
    plan: Plan, tmp_path: Path, edit: Text, part: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(edit(to_text(plan)))
    done = CliRunner().invoke(main, ["export", str(path)])
    assert done.exit_code == 2, done.output
    assert part in done.stderr and len(done.stderr.splitlines()) == 1


def test_export_compares_the_plan_with_an_inventory_that_is_there(
    plan: Plan, moe_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan).replace("buffer: CPU", "buffer: CUDA9"))
    done = CliRunner().invoke(main, ["export", str(path), "--inventory", str(moe_model)])
    assert done.exit_code == 2, done.output
    assert "put it on CUDA9, its site needs CPU" in done.stderr


def test_stripes_need_a_file_with_the_experts_in_the_plan_s_order(plan: Plan) -> None:
    order = (3, 1, 0, 2, 4, 5, 6, 7)
    ordered = plan.model_copy(update={"experts": (ExpertOrder(layer=1, order=order),)})
    striped = LoadSpec(("CUDA0",), (5,), 5, (("^a$", "stripe:CUDA0:4"),), plan.workload)
    check_order(ordered, striped, {1: order}, "plan.yaml")
    check_order(ordered, dataclasses.replace(striped, overrides=()), {}, "plan.yaml")
    with pytest.raises(Contradiction, match=r"experts of layer 1 .*atsplan rewrite it first"):
        check_order(ordered, striped, {}, "plan.yaml")
    with pytest.raises(Contradiction):
        check_order(ordered, striped, {1: order[::-1]}, "plan.yaml")


def test_a_device_is_mapped_once_and_the_cpu_not_at_all(plan: Plan, moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    for maps, part in (
        (("CUDA0=CPU", "CUDA0=Vulkan0"), "is mapped to CPU already"),
        (("CPU=CUDA0",), "stays there"),
    ):
        given = [word for each in maps for word in ("--device-map", each)]
        done = CliRunner().invoke(main, ["run", str(moe_model), "--plan", str(path), *given, "-p", "a"])
        assert done.exit_code == 2, done.output
        assert part in done.stderr


def test_more_threads_than_the_engine_takes(plan: Plan) -> None:
    engine, spec = Engine.find(), load_spec(plan)
    with pytest.raises(InputError, match="at most 512"):
        load_params.check(engine, dataclasses.replace(spec, threads=513))
    load_params.check(engine, dataclasses.replace(spec, threads=512))


def test_a_temperature_that_is_no_number(plan: Plan, moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    done = CliRunner().invoke(main, ["run", str(moe_model), "--plan", str(path), "-p", "a", "--temp", "nan"])
    assert done.exit_code == 2, done.output
    assert "finite number" in done.stderr


# What each field of a plan does for a load: named here, so that a new field cannot be forgotten.
# Becomes a parameter of the engine.
TOLD = {"workload", "layers", "overrides", "devices", "op_offload", "repack", "host_memory", "following"}
# The load is refused when the file or the engine disagrees.
COMPARED = {"model", "units", "experts", "devices", "engines"}
# Said beside what is measured, or in what is exported.
SPOKEN = {"machine", "predicted", "command", "projector", "speculation"}
# How the decision came about.
PAST = {"schema_", "version", "constraints", "baselines", "untuned", "fit", "notes", "search"}


def test_every_field_of_a_plan_is_passed_compared_or_about_the_past() -> None:
    assert set(Plan.model_fields) == TOLD | COMPARED | SPOKEN | PAST


WORKLOAD_CHANGES = {
    "n_ctx": 512,
    "n_seq": 2,
    "n_batch": 128,
    "n_ubatch": 32,
    "type_k": "q8_0",
    "type_v": "q8_0",
    "flash_attn": False,
    "mtp": True,
}
# What a placement is judged by, and what is known of types that a fork adds: nothing to load.
PRICED_ONLY = {"depth", "prompt", "gen", "cache_types"}


def params_of(spec: LoadSpec) -> dict[str, object]:
    """Every plain parameter that the engine is given for a spec."""
    engine, kept = Engine.find(), load_params.Kept()
    both = {
        "model": load_params.model_params(engine, spec, kept),
        "context": load_params.context_params(engine, spec, kept),
    }
    pointers = {"devices", "tensor_split", "tensor_buft_overrides"}
    return {
        f"{part}.{name}": getattr(params, name)
        for part, params in both.items()
        for name, _ in params._fields_
        if name not in pointers
    }


def base_spec() -> LoadSpec:
    return LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64), threads=1)


def test_every_field_of_a_workload_reaches_the_engine() -> None:
    assert set(Workload.model_fields) == WORKLOAD_CHANGES.keys() | PRICED_ONLY
    base = base_spec()
    before = params_of(base)
    for name, value in WORKLOAD_CHANGES.items():
        changed = base.workload.model_copy(update={name: value})
        assert params_of(dataclasses.replace(base, workload=changed)) != before, name


SPEC_CHANGES: dict[str, Any] = {
    "n_gpu_layers": 3,
    "main_gpu": 1,
    "use_mmap": False,
    "use_extra_bufts": False,
    "cache_bytes": 2**20,
    "threads": 2,
    "swa_full": True,
    "op_offload": False,
    "rollback": 3,
}
ARRAYS = {"devices", "tensor_split", "overrides"}  # proven by where the weights are after loading
SLOTS = {
    "residents",
    "guests",
    "banks",
    "adaptation",
}  # told to the device that wraps a GPU, not to the engine


def test_every_field_of_a_load_spec_reaches_the_engine() -> None:
    names = {each.name for each in dataclasses.fields(LoadSpec)}
    assert names == SPEC_CHANGES.keys() | ARRAYS | {"workload", "notes", "mapped"} | SLOTS
    base = base_spec()
    before = params_of(base)
    for name, value in SPEC_CHANGES.items():
        assert params_of(dataclasses.replace(base, **{name: value})) != before, name


def test_an_override_pattern_that_lost_its_tail_is_refused(plan: Plan, inventory: Inventory) -> None:
    loose = Override(pattern=r"\.([0-3])\.*", buffer="CPU", tensors=12)
    with pytest.raises(Contradiction, match="its tail may match nothing"):
        check_agreement(plan.model_copy(update={"overrides": (loose,)}), inventory, "plan.yaml")


def test_quantised_v_without_flash_attention_has_no_spec(plan: Plan) -> None:
    work = plan.workload.model_copy(update={"type_v": "q8_0", "flash_attn": False})
    with pytest.raises(Unloadable, match="type_v q8_0 needs flash_attn: true"):
        load_spec(plan.model_copy(update={"workload": work}))
