"""How many threads of the CPU a plan asks for, from the profile to the command line of a stock tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hand_plans import with_uses
from planning_models import machine, moe, plan
from small_plans import plan_for

from atsplan import main
from planner.machine.profile import Profile
from planner.model.gguf.reader import read_model
from planner.plan.load_spec import load_spec, map_devices
from planner.plan.plan import Plan, from_text, to_text
from planner.site import ON_CPU
from runtime.load.load_params import usable_cores, usable_threads


@pytest.fixture(scope="module")
def many() -> Profile:
    """A machine that decodes fastest with 12 threads of its CPU."""
    return machine("rtx4090-ddr5", CPU={"threads": 12})


def test_a_plan_with_work_for_the_cpu_takes_the_profile_s_best_count(many: Profile) -> None:
    made = plan(moe(), "1500", on=many)
    assert any(p.site == ON_CPU and p.unit.endswith("experts") for p in made.units)
    assert made.machine.threads == 12
    assert load_spec(made).threads == 12
    assert plan(moe(), "50", on=many).machine.threads == 12  # the CPU alone


def test_a_cpu_that_only_waits_gets_few(many: Profile) -> None:
    made = plan(moe(), "8000", on=many)
    assert {str(p.site) for p in made.units if p.time_ns} == {"gpu:CUDA0"}
    assert made.machine.threads == 4
    two = machine("rtx4090-ddr5", CPU={"threads": 2})
    assert plan(moe(), "8000", on=two).machine.threads == 2
    assert load_spec(made).threads == 4


def test_a_profile_that_does_not_know_leaves_all_cores() -> None:
    unknown = machine("rtx4090-ddr5", CPU={"threads": 0})
    assert plan(moe(), "1500", on=unknown).machine.threads == 0


def test_a_device_that_becomes_the_cpu_takes_all_cores(many: Profile) -> None:
    spec = load_spec(plan(moe(), "8000", on=many))
    assert map_devices(spec, {"CUDA0": "CPU"}).threads == 0
    assert map_devices(spec, {"CUDA0": "Vulkan0"}).threads == 4


def test_check_sees_a_count_that_the_profile_does_not_give(many: Profile) -> None:
    from planner.check.check import CheckOptions, Inputs, check_plan
    from planner.machine.budgets import budgets_for

    model, profile = moe(), many
    made = plan(model, "1500", on=profile)
    assert made.constraints.budgets == {**budgets_for(profile, {}), **made.constraints.budgets}
    options = CheckOptions(resolve=False)
    assert check_plan(made, to_text(made), "p", Inputs(model, profile), options) == []
    changed = made.model_copy(update={"machine": made.machine.model_copy(update={"threads": 3})})
    found = check_plan(changed, to_text(changed), "p", Inputs(model, profile), options)
    assert any("threads is 3, the inputs give 12" in each.message for each in found)


def with_threads(model: Path, count: int) -> Plan:
    made = plan_for(model)
    return made.model_copy(update={"machine": made.machine.model_copy(update={"threads": count})})


def test_export_says_them_and_takes_others(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(with_threads(moe_model, 12)))
    for options, said in (((), "--threads 12"), (("--threads", "3"), "--threads 3")):
        done = CliRunner().invoke(main, ["export", str(path), *options])
        assert done.exit_code == 0 and said in done.stdout
    path.write_text(to_text(with_threads(moe_model, 0)))
    assert "--threads" not in CliRunner().invoke(main, ["export", str(path)]).stdout


def test_a_plan_of_a_larger_machine_does_not_crowd_this_one(moe_model: Path, tmp_path: Path) -> None:
    from commands.shared.plan_job import open_job

    path = tmp_path / "plan.yaml"
    path.write_text(to_text(with_threads(moe_model, 500)))
    assert open_job(moe_model, path, (), 0).spec.threads == usable_threads()
    assert open_job(moe_model, path, (), 7).spec.threads == 7
    assert open_job(moe_model, path, ("CUDA0=CPU",), 0).spec.threads == 0
    path.write_text(to_text(with_threads(moe_model, 1)))
    assert open_job(moe_model, path, (), 0).spec.threads == 1


def test_stock_rules_are_measured_with_the_engine_s_own_count(moe_model: Path, tmp_path: Path) -> None:
    made = with_threads(moe_model, 1).model_copy(update={"devices": (), "overrides": ()})
    path = tmp_path / "plan.yaml"
    text = to_text(made).replace("'gpu:CUDA0'", "cpu").replace("device: CUDA0", "device: CPU")
    path.write_text(to_text(with_uses(from_text(text, "plan"), read_model(moe_model).inventory)))
    base = ["bench", str(moe_model), "--plan", str(path), "--rounds", "1", "--against", "all-cpu", "--json"]
    done = CliRunner().invoke(main, [*base, "--prompts", "4", "-n", "2"])
    assert done.exit_code in (0, 1), done.output  # two tokens may call either faster
    counts = {each["name"]: each["threads"] for each in json.loads(done.stdout)["contenders"]}
    assert counts == {"plan": 1, "all-cpu": usable_cores()}
