"""A measured profile belongs to one machine as it was: what changed is named, and nobody reuses it there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import machine, moe, plan

from atsplan import main
from planner.machine.fingerprint import differences, host_facts, may_be_same
from planner.machine.profile import Device, Profile, to_text
from planner.plan.plan import from_text as plan_from
from planner.plan.plan import to_text as plan_text
from profiler import host

CHANGED: dict[str, dict[str, object]] = {
    "processor": {"cpu": "another CPU"},
    "cores": {"cores": 3},
    "driver": {"driver": "nvidia 580.1"},
    "NUMA policy": {"numa": "0:0-31 1:32-63 interleave:0-1"},
}


def profile_here(**changes: object) -> Profile:
    """A measured profile of the CPU of this machine, with changes to its fingerprint."""
    fingerprint = host.fingerprint("xllamacpp").model_copy(update=changes)
    cpu = machine().device("CPU").model_copy(update={"threads": 1})
    return machine().model_copy(
        update={"measured": True, "fingerprint": fingerprint, "devices": (cpu,), "links": (), "name": "here"}
    )


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def solved(model: Path, profile: Profile, folder: Path) -> tuple[Path, Result]:
    (folder / "profile.yaml").write_text(to_text(profile))
    out = folder / "plan.yaml"
    result = call("solve", model, "--profile", folder / "profile.yaml", "--ctx", 256, "-o", out)
    assert result.exit_code == 0, result.output
    return out, result


def test_a_plan_records_what_its_timings_belong_to() -> None:
    gpu = machine().model_copy(update={"measured": True})
    made = plan(moe(), "1500", on=gpu)
    known = made.machine.measured_on
    assert known is not None
    assert known["CUDA0"] == gpu.device("CUDA0").description
    assert known["processor"] == gpu.fingerprint.cpu
    assert plan_from(plan_text(made), "plan.yaml") == made
    assert "CUDA0" not in (plan(moe(), "50", on=gpu).machine.measured_on or {})  # it holds nothing


def test_an_assumed_machine_binds_nobody() -> None:
    made = plan(moe(), "1500")
    assert made.machine.measured_on is None
    assert "measured_on" not in plan_text(made)


@pytest.mark.parametrize("what", CHANGED)
def test_run_refuses_a_plan_whose_profile_does_not_hold(what: str, moe_model: Path, tmp_path: Path) -> None:
    path, _ = solved(moe_model, profile_here(**CHANGED[what]), tmp_path)
    arguments = ("run", moe_model, "--plan", path, "-p", "a", "-n", 2, "--threads", 1)
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert "its profile does not hold here" in line
    assert f"{what} was {next(iter(CHANGED[what].values()))}, is " in line
    assert "--other-machine" in line


def test_the_same_machine_and_one_that_is_told_to_run(moe_model: Path, tmp_path: Path) -> None:
    arguments = ("-p", "a", "-n", 2, "--ignore-eos", "--threads", 1)
    path, _ = solved(moe_model, profile_here(), tmp_path)
    assert call("run", moe_model, "--plan", path, *arguments).exit_code == 0
    path, _ = solved(moe_model, profile_here(cpu="another CPU"), tmp_path)
    result = call("run", moe_model, "--plan", path, "--other-machine", *arguments)
    assert result.exit_code == 0, result.output


def test_bench_refuses_before_it_measures(moe_model: Path, tmp_path: Path) -> None:
    path, _ = solved(moe_model, profile_here(numa="0:0 1:1 bind:0"), tmp_path)
    result = call("bench", moe_model, "--plan", path, "--against", "all-cpu", "--rounds", 1)
    assert result.exit_code == 2, result.output
    assert "NUMA policy was 0:0 1:1 bind:0, is " in result.stderr


def test_solving_for_another_machine_stays_legal(moe_model: Path, tmp_path: Path) -> None:
    _, other = solved(moe_model, profile_here(cpu="another CPU"), tmp_path)
    assert "profile again" not in other.stderr
    _, changed = solved(moe_model, profile_here(numa="0:0 1:1 bind:0"), tmp_path)
    assert "is of this machine, profile again: NUMA policy was 0:0 1:1 bind:0" in changed.stderr
    _, same = solved(moe_model, profile_here(), tmp_path)
    assert "profile again" not in same.stderr


def test_doctor_judges_a_profile(tmp_path: Path) -> None:
    build = json.loads(call("doctor", "--json").stdout)["build"]
    engine = f"{build['label']} ({build['commit']})" if build["commit"] else build["label"]
    path = tmp_path / "p.yaml"
    path.write_text(to_text(profile_here(engine=engine)))
    good = call("doctor", "--profile", path)
    assert good.exit_code == 0, good.output
    assert f"{path} holds here" in good.stdout
    gpu = Device(
        name="CUDA0", kind="gpu", description="NVIDIA H200", memory_bytes=1, free_bytes=1,
        bandwidth_bytes_per_s=1, flops_per_s=1, op_overhead_ns=1,
    )  # fmt: skip
    before = profile_here(engine="llama.cpp b1", driver="nvidia 1")
    path.write_text(to_text(before.model_copy(update={"devices": (gpu, *before.devices)})))
    bad = call("doctor", "--profile", path)
    assert bad.exit_code == 1
    for what in ("driver was nvidia 1", "CUDA0 is not here", "engine was llama.cpp b1"):
        assert what in bad.stderr.splitlines()[-1]


def test_only_facts_that_both_know_are_compared() -> None:
    known = {"processor": "a", "CUDA0": "NVIDIA H200"}
    assert differences(known, {"processor": "a"}) == ()
    assert differences(known, {"processor": "a", "CUDA0": "NVIDIA L4"}) == (
        "CUDA0 was NVIDIA H200, is NVIDIA L4",
    )
    here = host_facts(host.fingerprint(""))
    assert may_be_same(here, {**here, "NUMA policy": "x"})
    assert not may_be_same(here, {**here, "driver": "nvidia 1"})
