"""What `solve` must refuse or say when files beside the model, pins or types are not what they seem."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from engines import ROOT
from planning_models import MIB, dense, machine, moe, plan, real, sites, timed
from sparse_model import write_sparse

from atsplan import main
from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.findings import Severity
from planner.cost.build_problem import analyse, build_problem
from planner.errors import OptionProblem
from planner.machine.budgets import budgets_for
from planner.machine.presets import load as load_machine
from planner.memory.buffer_parts import buffer_parts
from planner.memory.memory import Reserve
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.model.tensor_roles import Role, part_of
from planner.model.units import units_of
from planner.passes.case import Case
from planner.passes.largest_context import largest_context
from planner.passes.make_plan import make_plan
from planner.passes.refusal import Infeasible, refuse
from planner.passes.stock_rules import candidates
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.load_spec import load_spec
from planner.plan.plan import from_text as plan_text
from planner.plan.plan import to_text
from planner.plan.request import Pin, Request
from planner.site import SiteKind
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

_VISION = {
    "vision.embedding_length": 1152,
    "vision.feed_forward_length": 4304,
    "vision.image_size": 896,
    "vision.patch_size": 14,
}


def solve(model: Path, *arguments: str | Path) -> Result:
    given = ["solve", str(model), "--machine", "rtx4090-ddr5", *map(str, arguments)]
    return CliRunner().invoke(main, given)


def refused(answer: Result, code: int) -> str:
    assert answer.exit_code == code, answer.output
    assert answer.stdout == ""
    (line,) = answer.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """883 MiB of projector, none of it on disk."""
    rows = [Row("v.blk.0.attn_q.weight", "f16", (1152, 402_000), 1152 * 402_000 * 2)]
    path = tmp_path_factory.mktemp("vision") / "mmproj.gguf"
    return write_sparse(path, inventory_of("vision", "clip", dict(_VISION), rows))


def test_a_file_beside_the_model_must_be_what_its_option_asks_for(
    dense_model: Path, moe_model: Path, projector: Path
) -> None:
    given = ("--budget", "2000")
    line = refused(solve(moe_model, *given, "--mmproj", dense_model), 2)
    assert "--mmproj synth-llama: is a llama model; a vision projector (clip) is needed" in line
    assert "a language model is needed" in refused(solve(moe_model, *given, "--draft", projector), 2)
    answer = CliRunner().invoke(main, ["inventory", str(moe_model), "--mmproj", str(dense_model)])
    assert "a vision projector (clip) is needed" in refused(answer, 2)


def test_speculation_needs_the_block_that_speculates(dense_model: Path, tmp_path: Path) -> None:
    line = refused(solve(dense_model, "--budget", "2000", "--mtp", "-o", tmp_path / "plan.yaml"), 2)
    assert "--mtp" in line and "holds no NextN/MTP block" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pin", ["per_layer_token_embd.weight=gpu", "lookup=CUDA0", "token_embd*=gpu:CUDA0"])
def test_tables_that_are_looked_up_cannot_be_pinned_to_a_gpu(tmp_path: Path, pin: str) -> None:
    model = write(tmp_path / "m.gguf", SynthSpec("gemma3n"))
    line = refused(solve(model, "--budget", "2000", "--pin", pin), 2)
    assert f"--pin {pin}: " in line
    assert "stays in host memory" in line
    assert solve(model, "--budget", "2000", "--pin", pin.partition("=")[0] + "=cpu").exit_code == 0


def test_a_projector_that_does_not_fit_its_gpu_is_refused_with_numbers(
    moe_model: Path, projector: Path, tmp_path: Path
) -> None:
    target = tmp_path / "plan.yaml"
    asked = ("--mmproj", projector, "--mmproj-device", "gpu", "-o", target)
    line = refused(solve(moe_model, "--budget", "1000", *asked), 1)
    assert "CUDA0 needs 13" in line and "reserve 1343" in line and "--mmproj-device cpu" in line
    assert not target.exists()
    made = solve(moe_model, "--budget", "1500", "--mmproj", projector, "-o", target)
    assert made.exit_code == 0
    use = next(use for use in plan_text(target.read_text(), "plan").devices if use.name == "CUDA0")
    assert 1041 * MIB < use.reserve_bytes < 1500 * MIB


def test_a_projector_that_overfills_its_gpu_is_refused_though_another_has_room() -> None:
    pair = machine("2x-rtx4060ti-16gb")
    held = Reserve(name="projector", device="CUDA0", size_bytes=1041 * MIB)
    beside = EngineSettings(reserves=(held,))
    with pytest.raises(
        Infeasible, match=r"CUDA0 needs 1361 MiB, budget 1300.*try --mmproj-device cpu"
    ) as refusal:
        plan(moe(), "CUDA0=1300,CUDA1=8000", on=pair, settings=beside)
    assert "CUDA1" not in str(refusal.value) and "--kv-type" not in str(refusal.value)
    made = plan(moe(), "CUDA0=1400,CUDA1=8000", on=pair, settings=beside)
    use = next(use for use in made.devices if use.name == "CUDA0")
    assert (use.weights_bytes, use.compute_bytes, use.reserve_bytes) == (0, 0, 1361 * MIB)
    assert "CUDA0" not in load_spec(made).devices


def test_what_a_projector_takes_of_a_shared_memory_is_gone_for_all() -> None:
    unified, held = machine("apu-unified"), Reserve(name="projector", device="Vulkan0", size_bytes=2048 * MIB)
    ways = [EngineSettings(reserves=r) for r in ((), (held,))]
    notes = [plan(moe(), "5000", on=unified, settings=way).notes for way in ways]
    most = [int(re.search(r"at most (\d+) MiB together", " ".join(n))[1]) for n in notes]  # type: ignore[index]
    assert most[0] - most[1] == 2048


def test_the_memory_of_a_draft_on_the_host_counts_in_a_plan_without_gpus() -> None:
    slow = machine(CUDA0={"bandwidth_bytes_per_s": 10**9, "op_overhead_ns": 10**6})
    held = Reserve(name="draft embedding", device="CPU", size_bytes=39_800 * MIB)
    assert {u.name for u in plan(moe(), "CUDA0=20000,CPU=40000", on=slow).devices} == {"CPU"}
    made = plan(moe(), "CUDA0=20000,CPU=40000", on=slow, settings=EngineSettings(reserves=(held,)))
    assert "CUDA0" in {u.name for u in made.devices}


def test_a_gpu_filled_to_the_brim_is_said_and_noted() -> None:
    small = machine(CUDA0={"memory_bytes": 1600 * MIB, "free_bytes": 1500 * MIB})
    full, roomy = (plan(moe(), "1450", on=on) for on in (small, machine()))
    (note,) = [note for note in full.notes if "grow for hours" in note]
    use = next(use for use in full.devices if use.name == "CUDA0")
    assert note.startswith(f"CUDA0: {1500 - -(-use.used_bytes // MIB)} MiB stay free, 512 are usual")
    assert not any("grow for hours" in note for note in roomy.notes)
    found = check_plan(full, to_text(full), "plan.yaml", Inputs(moe(), small), CheckOptions(resolve=False))
    assert [(f.severity, f.message) for f in found] == [(Severity.NOTE, note)]


@pytest.mark.parametrize("tensor", ["blk.2.ffn_up_exps.weight", "blk.2.attn_q.weight", "output.weight"])
def test_tensors_of_unknown_type_stay_on_the_cpu(tensor: str) -> None:
    model = retyped(moe(), tensor)
    made = plan(model, "20000")
    unit = next(u for u in units_of(model).units if tensor in u.tensors)
    assert sites(made)[unit.name] == "cpu"
    assert "tensor type type153 is not known: kept on the CPU unless pinned elsewhere" in made.notes
    assert all(not b.feasible for b in made.baselines if b.name == "ngl" and b.setting.endswith(" 9"))
    free = plan(model, "20000", pins=(Pin(unit.name, "gpu"),))
    assert sites(free)[unit.name] == "gpu:CUDA0"


def test_a_type_that_was_measured_on_the_gpu_may_live_there() -> None:
    model = retyped(moe(), "blk.2.ffn_up_exps.weight")
    timing = timed("MUL_MAT_ID", "type153", (2048, 768, 128), used=8)
    measured = machine().model_copy(update={"timings": (timing,)})
    made = plan(model, "20000", on=measured)
    assert sites(made)["blk.2.experts"] == "gpu:CUDA0"
    assert not any("type153" in note for note in made.notes)


def test_a_tied_head_of_unknown_type_stays_on_the_cpu_with_its_table() -> None:
    tied = moe().model_copy(update={"tensors": tuple(t for t in moe().tensors if t.name != "output.weight")})
    assert sites(plan(tied, "20000"))["output"] == "gpu:CUDA0"
    assert sites(plan(retyped(tied, "token_embd.weight"), "20000"))["output"] == "cpu"


@pytest.mark.parametrize("arch", ["clip", "qwen3moe"])
def test_a_file_without_layers_is_no_model_to_place(arch: str, projector: Path, tmp_path: Path) -> None:
    rows = [Row("token_embd.weight", "f32", (32, 8), 1024)]
    words = write_sparse(tmp_path / "words.gguf", inventory_of("words", arch, {}, rows))
    line = refused(solve(words, "--budget", "2000"), 2)
    assert f"words: a file of architecture {arch} without layers to place" in line
    assert "--mmproj" in refused(solve(projector, "--budget", "2000"), 2)


def test_a_file_that_hides_its_attention_is_planned_without_cache_and_says_so() -> None:
    model = moe(arch="frobnicate").model_copy(update={"hparams": {"block_count": 8}})
    assert any("the KV cache is not counted" in note for note in plan(model, "20000").notes)


def test_layers_beyond_the_stated_number_stay_with_the_head() -> None:
    model = moe()
    shorter = model.model_copy(update={"hparams": {**model.hparams, "block_count": 5}})
    made = plan(shorter, "20000")
    assert sites(made)["blk.7.nextn"] == "gpu:CUDA0"
    assert any("blk.5.attn_norm.weight" in note and "more" in note for note in made.notes)


def test_layers_without_tensors_are_said() -> None:
    model = moe()
    longer = model.model_copy(update={"hparams": {**model.hparams, "block_count": 10}})
    note = "not recognised, stays with its layer: no tensors of blk.8, no tensors of blk.9"
    assert note in plan(longer, "20000").notes


def test_a_plan_says_what_was_not_recognised() -> None:
    model = moe(arch="frobnicate")
    odd = model.tensors[0].model_copy(update={"name": "v.patch_embd.weight"})
    made = plan(model.model_copy(update={"tensors": (*model.tensors, odd)}), "20000")
    assert "not recognised, stays with its layer: architecture frobnicate" in made.notes
    assert any(
        note.startswith("1 tensor (v.patch_embd.weight) is not of the text model") for note in made.notes
    )
    assert not any("recognised" in note for note in plan(moe(), "20000").notes)


def test_stock_rules_state_their_own_memory_when_the_plan_uses_the_cpu_alone() -> None:
    slow = machine(CUDA0={"bandwidth_bytes_per_s": 10**9, "op_overhead_ns": 10**6})
    made = plan(moe(), "20000", on=slow)
    assert {use.name for use in made.devices} == {"CPU"}
    memory = {b.name: b.vram_bytes for b in made.baselines if b.feasible}
    assert memory.pop("all-cpu") == 0
    assert memory and all(memory.values())


def test_a_rule_that_leaves_a_gpu_empty_counts_the_projector_there() -> None:
    slow = machine(CUDA0={"bandwidth_bytes_per_s": 10**9, "op_overhead_ns": 10**6})
    eyes = Reserve(name="projector", device="CUDA0", size_bytes=900 * MIB)
    plain = EngineSettings(reserves=(eyes,), op_offload=False)
    request = Request({"CUDA0": 1300 * MIB, "CPU": 2**36}, Workload())
    priced = build_problem(analyse(structure_of(moe()), request.workload), slow, request, plain, Known())
    rule = next(each for each in candidates(priced) if each.setting == "-ngl 0")
    assert rule.vram_bytes == 900 * MIB + slow.device("CUDA0").context_bytes


def test_hybrids_stage_two_host_tensors_at_once() -> None:
    workload, gpu = Workload(), machine().device("CUDA0")
    for name, count in (("Qwen3.6-35B-A3B-q4_K", 2), ("Qwen3-30B-A3B-Q4_K_M", 1)):
        model = real(name)
        moved = sorted(t.size_bytes for t in model.tensors if part_of(t).role in (Role.EXPERTS, Role.FFN))
        assert buffer_parts(structure_of(model), workload, gpu).staging_bytes == sum(moved[-count:])


def retyped(model: Inventory, name: str) -> Inventory:
    """The model with one tensor of a type that nobody here knows."""
    tensors = (t.model_copy(update={"type": "type153"}) if t.name == name else t for t in model.tensors)
    return model.model_copy(update={"tensors": tuple(tensors)})


def test_a_pin_on_what_is_not_loaded_says_so(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", SynthSpec("glm4moe", n_layers=2, n_nextn=1))
    line = refused(solve(model, "--budget", "2000", "--pin", "*.nextn=cpu"), 2)
    assert line == "atsplan: --pin *.nextn=cpu: blk.2.nextn is not loaded without --mtp"
    assert solve(model, "--budget", "2000", "--pin", "*.nextn=cpu", "--mtp").exit_code == 0


def test_a_pin_to_no_site_names_every_kind_of_site(moe_model: Path) -> None:
    line = refused(solve(moe_model, "--budget", "2000", "--pin", "*.experts=slots"), 2)
    assert "no such site" in line and all(f" {kind}," in line for kind in SiteKind)


def test_memory_that_devices_share_is_refused_as_one() -> None:
    profile = load_machine("apu-unified")
    budgets = budgets_for(profile, {})
    with pytest.raises(Infeasible) as caught:
        make_plan(real("Qwen3-Next-80B-A3B-Q4_K_M"), profile, Request(budgets))
    (need,) = caught.value.needs
    assert need.device == "the one memory of Vulkan0 and CPU"
    assert need.budget_bytes < min(budgets.values())
    assert need.total_bytes > 44 * 2**30


def test_a_host_of_unknown_memory_needs_a_budget() -> None:
    profile = load_machine("rtx4090-ddr5")
    host = profile.device("CPU").model_copy(update={"memory_bytes": 0, "free_bytes": 0})
    others = tuple(d for d in profile.devices if d.name != "CPU")
    unknown = profile.model_copy(update={"devices": (*others, host)})
    with pytest.raises(OptionProblem, match="CPU: the device does not say how much memory it has"):
        budgets_for(unknown, {"CUDA0": 2**30})
    assert budgets_for(unknown, {"CUDA0": 2**30, "CPU": 2**34}) == {"CUDA0": 2**30, "CPU": 2**34}


def test_only_host_memory_can_be_paged() -> None:
    profile, work = load_machine("rtx4060-8gb-ddr5"), Workload()
    with pytest.raises(Infeasible) as host:
        make_plan(real("gpt-oss-120b-MXFP4"), profile, Request({"CUDA0": 7 * 2**30, "CPU": 2**34}, work))
    assert "--page" in host.value.hints
    pins = (Pin("*.experts", "gpu"),)
    budgets = {"CUDA0": 7 * 2**30, "CPU": 2**36}
    with pytest.raises(Infeasible) as device:
        make_plan(real("gpt-oss-120b-MXFP4"), profile, Request(budgets, work, pins=pins))
    assert "--page" not in device.value.hints


def test_contexts_and_rules_keep_to_what_a_paging_host_holds() -> None:
    """What `max` finds has a plan, one step of cells more has none, and a rule beyond it is not feasible."""
    whole = real("Qwen3-30B-A3B-Q4_K_M")
    few = tuple(t for t in whole.tensors if not re.match(r"blk\.([6-9]|\d\d)\.", t.name))
    model = whole.model_copy(update={"tensors": few, "hparams": {**whole.hparams, "block_count": 6}})
    profile, work = load_machine("rtx3060-12gb-ddr4"), Workload(n_ctx=131_072)
    request = Request({"CUDA0": 2400 * MIB, "CPU": 500 * MIB}, work, page=True)
    with pytest.raises(Infeasible) as refused:
        make_plan(model, profile, request)
    need = refused.value.needs[0]
    assert need.device == "CPU" and need.memory.weights == 0 and need.memory.kv == 256 * MIB
    assert need.budget_bytes == 500 * MIB < need.total_bytes
    case = Case(structure_of(model), profile, replace(request, lowest_ctx=1024))
    assert largest_context(case, EngineSettings())[0] == 130_816
    made = make_plan(model, profile, replace(request, workload=Workload(n_ctx=130_816)))
    assert all(use.over_bytes(page=True) <= 0 for use in made.devices)
    assert made.baselines and not any(rule.feasible for rule in made.baselines)


def test_of_weights_only_those_of_a_host_are_paged() -> None:
    model, request = moe(), Request({"CUDA0": 600 * MIB, "CPU": 1000 * MIB}, Workload(), page=True)
    analysed = analyse(structure_of(model), request.workload)
    needs = [
        refuse(build_problem(analysed, machine(), asked, EngineSettings(), Known()), asked).needs[0]
        for asked in (request, replace(request, no_cpu=True))
    ]
    assert needs[0].memory.weights == 0 and needs[1].memory.weights > 600 * MIB


def test_of_host_memory_only_weights_are_paged() -> None:
    """Caches and buffers are in no file: a context that memory cannot hold is refused with --page too."""
    profile, model = load_machine("rtx4060-8gb-ddr5"), real("gpt-oss-20b-MXFP4")
    budgets, work = {"CUDA0": 7 * 2**30, "CPU": 2**34}, Workload(n_ctx=4_000_000)
    with pytest.raises(Infeasible) as refused:
        make_plan(model, profile, Request(budgets, work, page=True))
    assert refused.value.needs[0].memory.weights == 0 and refused.value.needs[0].memory.kv > 2**34
    assert not any("--page" in hint for hint in refused.value.hints)
    budgets["CPU"] = 2**32  # less than the weights, more than all else
    made = make_plan(model, profile, Request(budgets, Workload(n_ctx=4096), page=True))
    host = next(use for use in made.devices if use.name == "CPU")
    assert host.used_bytes > host.budget_bytes and host.over_bytes(page=True) <= 0 < host.over_bytes(
        page=False
    )
    fuller = host.model_copy(update={"kv_bytes": 2**33})
    wrong = made.model_copy(update={"devices": tuple(fuller if u is host else u for u in made.devices)})
    found = check_plan(wrong, to_text(wrong), "plan", Inputs(None, None), CheckOptions(resolve=False))
    assert any("more than its budget" in each.message for each in found)


@pytest.mark.parametrize("pool", ["", "one"])
def test_a_host_that_pages_is_named_whether_it_has_its_own_memory_or_not(pool: str) -> None:
    """There is room for all together, but the caches of layers that no GPU has room for lie on the host."""
    apart = load_machine("rtx4090-ddr5")
    size = {"memory_pool": pool, "free_bytes": 2**36, "memory_bytes": 2**36}
    profile = apart.model_copy(update={"devices": tuple(d.model_copy(update=size) for d in apart.devices)})
    budgets = {"CUDA0": 1800 * MIB, "CPU": 550 * MIB}
    with pytest.raises(Infeasible) as refused:
        make_plan(dense([16384] * 12), profile, Request(budgets, Workload(n_ctx=65536), page=True))
    (need,) = refused.value.needs
    assert need.device == "CPU" and need.memory.kv > 0 == need.memory.weights
    assert "may be paged" in refused.value.why


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--budget", "300MiB"),
            "CUDA0 takes no part: its budget of 300 MiB is taken, 320 MiB by the driver",
        ),
        (("--reserve", "30000"), "320 MiB by the driver and 30000 by --reserve"),
        (("--budget", "2000MiB"), ""),
    ],
)
def test_a_gpu_whose_budget_is_all_set_aside_is_named(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    model = ROOT / "plans" / "inputs" / "Mixtral-8x7B-Q4_K_M.inventory.yaml"
    found = CliRunner().invoke(main, ["solve", str(model), "--machine", "rtx4090-epyc", *words])
    assert found.exit_code == 0, found.output
    assert told in " ".join(found.output.split()) and ("takes no part" in found.output) == bool(told)
