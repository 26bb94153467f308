"""Weights of a CPU without GPU: in the layout of its kernels, or as stored, by what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from planning_models import machine

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.machine.budgets import budgets_for
from planner.machine.op_time import roofline_ns
from planner.machine.profile import OpTiming, Profile
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.passes.make_plan import make_plan
from planner.plan.load_spec import load_spec
from planner.plan.plan import Plan, from_text, to_text
from planner.plan.request import Request
from planner.workload import Workload
from profiler.operators.cases import cases_of
from runtime.engine import locate
from runtime.load import dry_run

WORK = Workload(n_ctx=512, prompt=128, gen=64, n_ubatch=128)
REPACKED = ("q4_K", "q4_0")


def measured(table: Inventory, repacked: float, *, gpu: bool = False) -> Profile:
    """A machine whose CPU takes `repacked` times as long in the layout of its kernels, where there is one."""
    profile = machine()
    kept = profile.devices if gpu else (profile.device("CPU"),)
    timings = []
    for case in cases_of(table, WORK.n_ubatch):
        ns = roofline_ns(profile, case, "CPU")
        timings.append(_timing(case, "CPU", ns))
        if case.op.startswith("MUL_MAT") and case.type in REPACKED:
            timings.append(_timing(case, "CPU_REPACK", round(ns * repacked)))
    return profile.model_copy(
        update={"devices": kept, "links": profile.links if gpu else (), "timings": tuple(timings)}
    )


def _timing(case: object, buffer: str, ns: int) -> OpTiming:
    names = ("op", "type", "shape", "batch", "used", "depth")
    fields = {name: getattr(case, name) for name in names}
    return OpTiming(**fields, device="CPU", buffer=buffer, time_ns=max(ns, 1), spread_ns=0, samples=9)


def solved(table: Inventory, profile: Profile, gpu_mib: int = 0) -> Plan:
    given = {d.name: gpu_mib << 20 for d in profile.devices if d.kind != "cpu"}
    budgets = budgets_for(profile, given) if given else {"CPU": 8 << 30}
    return make_plan(table, profile, Request(budgets, WORK))


@pytest.fixture(scope="module")
def table(moe_model: Path) -> Inventory:
    return read_model(moe_model).inventory


def test_the_faster_layout_is_chosen_and_both_are_priced(table: Inventory) -> None:
    slow, same, fast = (solved(table, measured(table, factor)) for factor in (1.6, 1.0, 0.5))
    assert (slow.repack, same.repack, fast.repack) == (False, None, None)
    assert slow.predicted.tpot_ns == same.predicted.tpot_ns  # the layout of the file is what it is
    assert fast.predicted.tpot_ns < same.predicted.tpot_ns
    stock = next(b for b in slow.baselines if b.name == "all-cpu")  # the engine repacks on its own
    assert stock.tpot_ns > slow.predicted.tpot_ns
    assert stock.prefill_ns > slow.predicted.prefill_ns


def test_a_profile_without_such_cases_changes_nothing(table: Inventory) -> None:
    profile = measured(table, 1.6)
    plain = profile.model_copy(update={"timings": tuple(t for t in profile.timings if t.buffer == "CPU")})
    assert solved(table, plain).repack is None
    assert "repack" not in to_text(solved(table, plain))


def test_beside_a_gpu_host_weights_are_pinned_and_never_repacked(table: Inventory) -> None:
    quick, slow = (solved(table, measured(table, factor, gpu=True), 4000) for factor in (0.1, 10.0))
    assert quick.predicted == slow.predicted
    assert quick.repack is slow.repack is None


def test_a_check_derives_it_again(table: Inventory) -> None:
    profile = measured(table, 1.6)
    made = solved(table, profile)
    inputs = Inputs(table, profile)
    assert check_plan(made, to_text(made), "plan.yaml", inputs, CheckOptions()) == []
    forged = made.model_copy(update={"repack": None})
    rules = {f.rule for f in check_plan(forged, to_text(forged), "plan.yaml", inputs, CheckOptions())}
    assert "cost" in rules
    assert from_text(to_text(made), "plan.yaml") == made


def test_the_engine_is_told(table: Inventory, moe_model: Path, tmp_path: Path) -> None:
    slow, fast = (solved(table, measured(table, factor)) for factor in (1.6, 0.5))
    engine = locate.find(None)
    stored, packed = (set(dry_run.measure(engine, moe_model, load_spec(p)).buffers) for p in (slow, fast))
    assert "CPU_REPACK" in packed
    assert "CPU_REPACK" not in stored
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(slow))
    shown = CliRunner().invoke(
        main, ["export", str(path), "--format", "llama-server", "--model", str(moe_model)]
    )
    assert shown.exit_code == 0, shown.output
    assert "--no-repack" in shown.output
