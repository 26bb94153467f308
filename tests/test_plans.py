"""The plans in git still hold, cover what they should, and the script that makes them agrees."""

from __future__ import annotations

import json
import runpy
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from atsplan import main
from planner.model.inventory import from_text as inventory_from
from planner.plan.plan import Plan, from_text
from planner.site import SiteKind

PLANS = Path(__file__).resolve().parent.parent / "plans"
FILES = sorted(PLANS.glob("*--*.yaml"))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {path.name: from_text(path.read_text(), str(path)) for path in FILES}


def test_every_plan_is_what_its_inputs_give() -> None:
    result = CliRunner().invoke(main, ["check", "--no-resolve", "--json", str(PLANS)])
    assert "next:" not in result.stderr  # of a hundred plans none is the one to go on with
    report = json.loads(result.stdout)
    found = [f["message"] for file in report["files"] for f in file["findings"]]
    assert (result.exit_code, found) == (0, [])
    assert len(report["files"]) == len(FILES) >= 50


def test_twelve_models_on_four_machines_or_more(plans: dict[str, Plan]) -> None:
    machines: dict[str, set[str]] = defaultdict(set)
    for plan in plans.values():
        machines[plan.model.name].add(plan.machine.name)
    assert sum(len(found) >= 4 for found in machines.values()) >= 12
    everywhere = set().union(*machines.values())
    assert {"rtx4060-8gb-ddr5", "rtx3060-12gb-ddr4", "rtx4060ti-16gb-ddr5", "rtx4090-ddr5"} <= everywhere
    assert {"rtx3090-rtx3060-ddr4", "rtx4090-rpc"} <= everywhere


def test_assumed_machines_are_said_to_be_assumed(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        assert plan.machine.measured or any("assumed, not measured" in note for note in plan.notes), name


def test_no_plan_is_priced_above_a_stock_rule(plans: dict[str, Plan]) -> None:
    """The best stock rule by the plan's own objective, under its flags."""
    for name, plan in plans.items():
        stock = [
            plan.workload.gen * b.tpot_ns + b.prefill_ns
            for b in plan.baselines
            if b.feasible and b.name != "fit"
        ]
        assert plan.predicted.objective_ns <= min(stock), name


def test_some_plans_have_slots_and_none_beside_other_divisions(plans: dict[str, Plan]) -> None:
    found = {name: {u.site.kind for u in plan.units} for name, plan in plans.items()}
    slotted = {name: kinds for name, kinds in found.items() if SiteKind.HYBRID in kinds}
    assert len(slotted) > 6 and all("+hybrid" in name for name in slotted)
    assert not any({SiteKind.STRIPE, SiteKind.CACHE} & kinds for kinds in slotted.values())


def test_slots_are_in_no_plan_that_is_slower_than_the_one_without(plans: dict[str, Plan]) -> None:
    slotted = [name for name in plans if "+hybrid--" in name]
    for name in slotted:
        plain = plans[name.replace("+hybrid--", "--")]
        assert plans[name].predicted.objective_ns <= plain.predicted.objective_ns, name
    assert len(slotted) >= 30


def test_the_list_of_changes_says_how_many_plans_name_a_doubted_way(plans: dict[str, Plan]) -> None:
    told = [name for name, plan in plans.items() if any("--no-op-offload): " in note for note in plan.notes)]
    changes = (PLANS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"too doubtful to be chosen: {len(told)} plans of the library have that note." in changes


def test_some_plans_stripe_hot_experts_in_the_order_of_their_heat(plans: dict[str, Plan]) -> None:
    striped = [p for p in plans.values() if any(u.site.kind is SiteKind.STRIPE for u in p.units)]
    assert striped
    for plan in striped:
        layers = {int(u.unit.split(".")[1]) for u in plan.units if u.site.kind is SiteKind.STRIPE}
        assert {e.layer for e in plan.experts} == layers
        assert all(sorted(e.order) == list(range(len(e.order))) for e in plan.experts)


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b-MXFP4--rtx4090-ddr5", "Nemotron-3-Nano-30B-A3B-Q4_K_M--rtx3060-12gb-ddr4"]
)
def test_making_a_plan_again_gives_the_same_bytes(name: str) -> None:
    made = runpy.run_path(str(PLANS / "regenerate.py"))
    task = next(t for t in made["tasks"]() if t.path.stem == name)
    path = PLANS / "inputs" / f"{task.model.model}.inventory.yaml"
    assert made["plan_text"](task, inventory_from(path.read_text(), str(path))) == task.path.read_text()


def test_every_plan_belongs_to_the_library() -> None:
    wanted = {task.path.name for task in runpy.run_path(str(PLANS / "regenerate.py"))["tasks"]()}
    assert {path.name for path in FILES} <= wanted
