"""Prompts of host weights: copied to a GPU for each batch, or computed where they are; the link decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_models import dense, findings, linked, machine, moe, plan, prompting, real, sites
from small_plans import plan_for

from atsplan import main
from planner.check.explain import sentences
from planner.check.recorded_rules import rule_plan
from planner.check.reprice import edited, reprice
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.presets import load as load_machine
from planner.model.requantise import parse_rule, requantised
from planner.passes.make_plan import make_plan
from planner.plan.known import Known
from planner.plan.load_spec import load_spec
from planner.plan.plan import to_text
from planner.plan.request import Pin, Request
from planner.site import ON_CPU
from planner.workload import Workload
from runtime.engine.libllama import Engine
from runtime.load import dry_run


@pytest.mark.parametrize(
    ("gb_per_s", "prompt", "copied"), [(2, 34, False), (2, 8192, False), (50, 8192, True)]
)
def test_a_slow_link_keeps_prompts_on_the_cpu_and_a_fast_one_does_not(
    gb_per_s: float, prompt: int, copied: bool
) -> None:
    model, profile = moe(), linked(gb_per_s)
    made = plan(model, "1500", on=profile, workload=prompting(prompt))
    assert any(p.site == ON_CPU and p.unit.endswith("experts") for p in made.units)
    assert made.op_offload is copied
    for stock in made.baselines:
        if stock.feasible:
            theirs = made.workload.gen * stock.tpot_ns + stock.prefill_ns
            assert made.predicted.objective_ns <= theirs
    assert findings(made, model, profile) == []


def test_the_prompt_is_faster_and_no_room_is_left_for_copies() -> None:
    model, profile = moe(), linked(2)
    made = plan(model, "1500", on=profile, workload=prompting(8192))
    copying = made.model_copy(update={"op_offload": True})
    found = {f.message.split(" is ")[0] for f in findings(copying, model, profile)}
    assert "predicted.prefill_ns" in found  # priced again, it is another plan
    streamed = reprice(copying, model, profile, Known()).plan
    assert made.predicted.prefill_ns * 2 < streamed.predicted.prefill_ns
    gpu = next(use for use in made.devices if use.name == "CUDA0")
    fast = plan(model, "1500", on=linked(50), workload=prompting(8192))
    assert gpu.compute_bytes < next(u for u in fast.devices if u.name == "CUDA0").compute_bytes


def test_a_changed_flag_is_drift() -> None:
    model, profile = moe(), linked(50)
    made = plan(model, "1500", on=profile, workload=prompting(8192))
    assert made.op_offload
    changed = made.model_copy(update={"op_offload": False})
    assert any("predicted.prefill_ns" in f.message for f in findings(changed, model, profile))


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    gb_per_s=st.sampled_from([1, 6, 12, 25, 60]),
    prompt=st.sampled_from([31, 32, 200, 4096]),
    budget=st.sampled_from(["700", "1400", "2400"]),
    sparse=st.booleans(),
)
def test_checks_solve_to_the_same_answer(gb_per_s: int, prompt: int, budget: str, sparse: bool) -> None:
    model = moe(4) if sparse else dense([4096, 6144, 8192, 6144] * 2)
    profile = linked(gb_per_s)
    made = plan(model, budget, on=profile, workload=prompting(prompt))
    assert findings(made, model, profile) == []
    assert made.predicted.bound_ns <= made.predicted.objective_ns
    if prompt < 32:
        assert made.op_offload  # nothing would be copied anyway


@pytest.mark.parametrize(
    ("batch", "pins"), [(16, ()), (16, (Pin("blk.*", "cpu"), Pin("output", "cpu"))), (512, ())]
)
def test_a_plan_that_opens_no_gpu_is_checked_without_one(batch: int, pins: tuple[Pin, ...]) -> None:
    model, profile = dense([2048, 8192, 6144, 8192, 6144, 2048]), machine("rtx4090-epyc")
    work = Workload(n_ctx=8192, prompt=batch, gen=16, n_ubatch=batch)
    made = plan(model, "400", on=profile, workload=work, pins=pins)
    assert [use.name for use in made.devices] == ["CPU"]
    assert findings(made, model, profile) == []


@pytest.mark.parametrize("n_ubatch", [16, 32, 512])
def test_where_the_room_for_copies_is_not_there_the_plan_does_without(n_ubatch: int) -> None:
    """One huge expert tensor on the host: from 32 tokens a batch on its copy would take all of the GPU."""
    model, profile = requantised(moe(4), [parse_rule("blk.0.ffn_down_exps=f32")]), linked(50)
    huge = max(t.size_bytes for t in model.tensors)
    work = Workload(n_ctx=4096, prompt=512, gen=256, n_ubatch=n_ubatch)
    made = plan(model, str(800 + 100), on=profile, workload=work)
    gpu = made.devices[0]
    assert huge > 700 * 2**20 and gpu.kind == "gpu" and gpu.used_bytes <= gpu.budget_bytes
    assert made.op_offload == (n_ubatch < 32) and gpu.compute_bytes < huge
    assert sites(made)["blk.0.experts"] == "cpu"
    assert sum(site.startswith("gpu") for site in sites(made, "attention").values()) == 4
    assert findings(made, model, profile) == []


def test_short_prompts_leave_the_room_for_copies_to_weights() -> None:
    model, profile = moe(), linked(50)
    made = plan(model, "1500", on=profile, workload=prompting(8))
    copying = plan(model, "1500", on=profile, workload=prompting(8192))
    on_gpu = [sum(s.startswith("gpu") for s in sites(p).values()) for p in (copying, made)]
    assert not made.op_offload and copying.op_offload and on_gpu[0] < on_gpu[1]
    assert findings(made, model, profile) == []


def test_what_fits_only_without_copies_is_no_refusal() -> None:
    model = requantised(moe(4), [parse_rule("blk.0.ffn_down_exps=f32")])
    pins = (Pin("blk.*.attention", "gpu"), Pin("blk.0.experts", "cpu"))
    made = plan(model, "500", on=linked(50), pins=pins)
    assert not made.op_offload and findings(made, model, linked(50)) == []


def test_explain_says_it_in_a_sentence() -> None:
    made = plan(moe(), "1500", on=linked(2), workload=prompting(8192))
    rules = [f"{b.name} ({b.setting})" for b in made.baselines]
    told = list(sentences(made))
    own = [line for line in told if not line.startswith(("A request is answered", *rules))]
    assert sum("--no-op-offload" in line for line in own) == 1
    (apart,) = [line for line in told if line.startswith("A request is answered")]
    assert "by --no-mmap --no-op-offload, which it could be given too" in apart
    fast = plan(moe(), "1500", on=linked(50), workload=prompting(8192))
    assert not any("op-offload" in line for line in sentences(fast))


def test_stock_tools_are_told(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model).model_copy(update={"op_offload": False})))
    told = {
        "llama-server": "--no-op-offload",
        "preset": "no-op-offload = true",
        "env": "# no variable says this, add the options: --no-op-offload",
        "json": '"--no-op-offload"',
        "llama-cpp-python": "op_offload=False",
        "docker-compose": "--no-op-offload",
    }
    for form, words in told.items():
        done = CliRunner().invoke(main, ["export", str(path), "--format", form])
        assert done.exit_code == 0, done.output
        assert words in done.stdout, form
    path.write_text(to_text(plan_for(moe_model)))
    assert "op-offload" not in CliRunner().invoke(main, ["export", str(path)]).stdout


def test_the_engine_keeps_prompts_on_the_cpu_when_told(
    moe_model: Path, node_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    made = plan_for(moe_model, Workload(n_ctx=1024, n_ubatch=64, n_batch=64))
    renamed = to_text(made).replace("CUDA0", "Vulkan0")
    from planner.plan.plan import from_text

    spec = load_spec(from_text(renamed, "plan"))
    engine = Engine.find(str(node_engine))
    copied, plain = (dry_run.measure(engine, moe_model, replace(spec, op_offload=on)) for on in (True, False))
    assert plain.splits_prefill == plain.splits_decode < copied.splits_prefill
    assert plain.devices["Vulkan0"].compute < copied.devices["Vulkan0"].compute


def test_stock_rules_keep_the_engine_s_default(moe_model: Path, tmp_path: Path) -> None:
    import json

    made = plan_for(moe_model).model_copy(update={"op_offload": False})
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(made))
    base = ["bench", str(moe_model), "--plan", str(path), "--device-map", "CUDA0=CPU", "--rounds", "1"]
    done = CliRunner().invoke(main, [*base, "--against", "all-cpu", "--prompts", "4", "-n", "2", "--json"])
    assert done.exit_code in (0, 1), done.output  # two tokens may call either faster
    offload = {each["name"]: each["op_offload"] for each in json.loads(done.stdout)["contenders"]}
    assert offload == {"plan": False, "all-cpu": True}


def test_a_batch_just_long_enough_to_be_copied_costs_no_more_than_one_that_is_not() -> None:
    """From 32 tokens on weights would be copied; where that takes longer the plan keeps to the CPU's way."""
    model, profile = real("Kimi-K2-Thinking-q4_K"), machine("rtx4090-epyc")
    times = [
        plan(model, "21000", on=profile, workload=Workload(n_ctx=4096, n_ubatch=n, prompt=2000, gen=100))
        for n in (31, 32)
    ]
    assert times[1].predicted.objective_ns <= times[0].predicted.objective_ns


def test_rules_are_judged_under_the_flags_of_the_plan() -> None:
    """What keeping prompts where the weights are brings is not the placement's merit."""
    model = real("Qwen3-Next-80B-A3B-Q4_K_M")
    profile = load_machine("rtx3060-12gb-epyc")
    budgets = budgets_for(profile, parse_budget("7000MiB"))
    made = make_plan(model, profile, Request(budgets))
    assert made.op_offload is False
    (rule,) = [b for b in made.baselines if b.name == "n-cpu-moe"]
    assert rule.setting.endswith(" --no-op-offload")
    again = edited(rule_plan(made, rule), model, profile, Known())
    assert again.op_offload is False
    assert (again.predicted.tpot_ns, again.predicted.prefill_ns) == (rule.tpot_ns, rule.prefill_ns)
    took = rule.tpot_ns * made.workload.gen + rule.prefill_ns
    assert made.predicted.objective_ns <= took < 1.1 * made.predicted.objective_ns
    repriced = reprice(made, model, profile, Known()).plan
    assert repriced.baselines == made.baselines
