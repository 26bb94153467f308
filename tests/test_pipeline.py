"""Several devices: when the engine pipelines prompts, what its copies take, and plans that count them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_models import dense, findings, machine, plan, sites, twins
from twin_devices import Answer, Ask, ask

from planner.check.consistency import check_agreement
from planner.machine.profile import Profile
from planner.memory.compute_buffer import compute_bytes, host_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.prompt_pipeline import unpiped
from planner.plan.load_spec import LoadSpec, load_spec
from planner.plan.plan import Plan
from planner.plan.request import Pin
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

MIB = 2**20
BOTH = ("TWIN0", "TWIN1")
SPECS = {
    "qwen3": SynthSpec("qwen3", n_embd=512, n_layers=6),
    "qwen3moe": SynthSpec("qwen3moe", n_embd=512, n_ff_exp=512, n_expert=16, n_used=4, n_layers=6),
    "gemma4": SynthSpec("gemma4", n_vocab=4096, n_layers=6),
    "gpt-oss": SynthSpec("gpt-oss", n_embd=512, n_vocab=4096, n_layers=6),
    "deepseek2": SynthSpec("deepseek2", n_layers=6),
}


def spec(devices: tuple[str, ...], split: tuple[int, ...], work: Workload) -> LoadSpec:
    return LoadSpec(devices, split, sum(split), (), work, use_extra_bufts=False)


def close(estimate: int, engine: int) -> bool:
    """An upper estimate: at most half as much again and 2 MiB."""
    return engine <= estimate * 1.03 + 4 * MIB and estimate <= 1.5 * engine + 2 * MIB


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipeline")
    return {name: write(folder / f"{name}.gguf", each) for name, each in SPECS.items()}


@pytest.mark.parametrize("n_ubatch", [128, 512])
def test_copies_are_counted_on_both_devices_and_the_host(models: dict[str, Path], n_ubatch: int) -> None:
    work = Workload(n_ctx=8192, n_ubatch=n_ubatch)
    free = [Ask(path, spec(BOTH, (3, 4), work)) for path in models.values()]
    answers = ask([*free, *(Ask(each.path, kept(each)) for each in free)], n_devices=2)
    for each, piped, plain in zip(free, answers, answers[len(free) :], strict=False):
        model = read_model(each.path).inventory
        for copies, found in ((4, piped), (1, plain)):
            assert not found.problem, found.problem
            largest = max(found.memory[name].compute for name in BOTH)
            assert close(compute_bytes(structure_of(model), work, copies=copies), largest), (
                each.path.name,
                copies,
            )
            host = host_bytes(structure_of(model), work, copies=copies)
            assert close(host, found.memory["CPU"].compute), (each.path.name, copies)
        # The override moves nothing: the same weights, caches and graph, less memory.
        for name in (*BOTH, "CPU"):
            before, after = piped.memory[name], plain.memory[name]
            assert (before.model, before.context) == (after.model, after.context)
        assert piped.splits_decode == plain.splits_decode
        assert piped.memory["CPU"].compute > 2 * plain.memory["CPU"].compute


def kept(each: Ask) -> LoadSpec:
    """The same, kept from pipelining by an override that moves nothing."""
    override = unpiped(read_model(each.path).inventory, ["TWIN0"] * 6)
    return replace(each.spec, overrides=((override.pattern, override.buffer),))


# Plans, held to the engine.


def planned(
    path: Path, budget: str, *pins: Pin, work: Workload | None = None
) -> tuple[Plan, Inventory, Profile]:
    model, profile = read_model(path).inventory, twins(4096)
    work = work or Workload(n_ctx=8192, depth=0)
    made = plan(model, budget, on=profile, workload=work, pins=pins)
    assert findings(made, model, profile) == []
    check_agreement(made, model, "plan.yaml")
    return made, model, profile


def loaded(path: Path, made: Plan) -> Answer:
    (found,) = ask([Ask(path, load_spec(made))], n_devices=2)
    assert not found.problem, found.problem
    for use in (use for use in made.devices if use.kind == "gpu"):
        assert found.memory[use.name].compute <= use.compute_bytes * 1.03 + 4 * MIB, use.name
    return found


HALVES = (Pin("blk.[0-2].*", "TWIN0"), Pin("blk.[3-9].*", "TWIN1"), Pin("output*", "TWIN1"))


def test_a_whole_model_on_two_gpus_counts_its_pipeline(models: dict[str, Path]) -> None:
    path = models["qwen3"]
    made, model, _ = planned(path, "TWIN0=2000,TWIN1=2000", *HALVES)
    assert any("are pipelined" in note for note in made.notes) and made.overrides == ()
    assert made.devices[0].compute_bytes > 3 * compute_bytes(structure_of(model), made.workload) - 4 * MIB
    assert loaded(path, made).memory["TWIN0"].compute > 2 * compute_bytes(structure_of(model), made.workload)


def test_where_its_copies_do_not_fit_the_engine_is_kept_from_it(models: dict[str, Path]) -> None:
    path = models["qwen3"]
    roomy, _, _ = planned(path, "TWIN0=2000,TWIN1=2000", *HALVES)
    tight = (max(use.used_bytes for use in roomy.devices if use.kind == "gpu") - 8 * MIB) // MIB
    made, _, _ = planned(path, f"TWIN0={tight},TWIN1={tight}", *HALVES)
    assert sites(made) == sites(roomy) and [o.buffer for o in made.overrides] == ["TWIN0"]
    assert any("not pipelined" in note for note in made.notes)
    found = loaded(path, made)
    assert found.memory["TWIN0"].total <= made.devices[0].used_bytes + 4 * MIB
    stock = next(b for b in made.baselines if b.name == "ngl")
    assert not (stock.feasible and stock.setting == "-ngl 7")  # the rule would pipeline, which does not fit


def test_with_weights_on_the_host_there_are_no_copies(models: dict[str, Path]) -> None:
    path = models["qwen3moe"]
    made, model, _ = planned(path, "TWIN0=2000,TWIN1=2000", *HALVES[:1], Pin("blk.5.experts", "cpu"))
    assert not any("pipelined" in note for note in made.notes)
    gpus = [use for use in made.devices if use.kind == "gpu"]
    assert all(use.compute_bytes < 2 * compute_bytes(structure_of(model), made.workload) for use in gpus)
    loaded(path, made)


def test_a_layer_of_the_cpu_behind_a_gpu_is_no_stage_of_a_pipeline(models: dict[str, Path]) -> None:
    path = models["qwen3"]
    work = Workload(n_ctx=8192, prompt=16, n_ubatch=16)
    pins = (Pin("blk.[0-3].*", "TWIN0"), Pin("blk.[45].*", "cpu"), Pin("output*", "TWIN0"))
    made, _, _ = planned(path, "TWIN0=2000", *pins, work=work)
    assert [o.buffer for o in made.overrides] == ["TWIN0"]
    loaded(path, made)


def test_gpus_over_the_network_have_no_pipeline() -> None:
    remote = "RPC0[10.0.0.2:50052]"
    pins = (Pin("blk.[0-2].*", "CUDA0"), Pin("blk.[3-5].*", remote), Pin("output", remote))
    made = plan(dense([8192] * 6), f"CUDA0=4000,{remote}=4000", on=machine("rtx4090-rpc"), pins=pins)
    assert {use.name for use in made.devices} >= {"CUDA0", remote}
    assert not any("pipelined" in note for note in made.notes) and made.overrides == ()


@pytest.mark.parametrize("host", [40, 60, 70, 80, 400])
def test_copies_on_a_host_that_pages_have_room_beside_what_no_file_holds(host: int) -> None:
    """Only weights are paged: copies of inputs must be in memory, or the engine is kept from making them."""
    work = Workload(n_ctx=8192, depth=0)
    made = plan(
        dense([8192] * 6),
        f"TWIN0=2000,TWIN1=2000,CPU={host}",
        on=twins(4096),
        workload=work,
        pins=HALVES,
        page=True,
    )
    assert all(use.over_bytes(page=True) <= 0 for use in made.devices)
    assert bool(made.overrides) == (host < 75)
