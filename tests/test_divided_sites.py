"""A unit divided as it cannot be: every command refuses it, for the same reason, naming the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hand_plans import hand_plan
from hybrid_plans import slotted_plan
from planning_models import machine
from planning_models import plan as planned
from small_plans import plan_for

from atsplan import main
from planner.check.divided_sites import site_faults
from planner.model.gguf.reader import read_model
from planner.plan.known import Known
from planner.plan.plan import CachePoint, ExpertOrder, Plan, from_text, to_text
from planner.plan.request import Pin
from planner.site import Site
from planner.workload import Workload

HERE = ("--device-map", "CUDA0=CPU")
CASES = [
    ("dense", ".ffn", "stripe:CUDA0:4", "only routed experts can be divided"),
    ("dense", ".ffn", "hybrid:CUDA0:4", "only routed experts can be divided"),
    ("dense", ".ffn", "cache:CUDA0:500000", "only routed experts can be divided"),
    ("dense", ".attention", "stripe:CUDA0:4", "only routed experts can be divided"),
    ("moe", ".router", "cache:CUDA0:500000", "only routed experts can be divided"),
    ("moe", ".experts", "stripe:CUDA0:99", "a stripe of 99 experts, the layer has 8"),
    ("moe", ".experts", "hybrid:CUDA0:9", "slots of 9 experts, the layer has 8"),
]


def divided(plan: Plan, tail: str, site: str) -> tuple[Plan, str]:
    """The plan with one unit at a site, and that unit's place."""
    index = next(i for i, p in enumerate(plan.units) if p.unit.startswith("blk.1") and p.unit.endswith(tail))
    units = list(plan.units)
    units[index] = units[index].model_copy(update={"site": Site.parse(site)})
    return plan.model_copy(
        update={"units": tuple(units)}
    ), f"units[{index}].site: {units[index].unit}: {site}"


@pytest.mark.parametrize(("kind", "tail", "site", "why"), CASES)
def test_every_command_gives_one_answer(
    kind: str, tail: str, site: str, why: str, moe_model: Path, dense_model: Path, tmp_path: Path
) -> None:
    model = moe_model if kind == "moe" else dense_model
    plan, where = divided(plan_for(model), tail, site)
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    commands = {
        "check": (path, "--model", model),
        "explain": (path, "--model", model),
        "export": (path, "--inventory", model),
        "rewrite": (model, "--plan", path, "-o", tmp_path / "out.gguf"),
        "run": (model, "--plan", path, *HERE, "-p", "x"),
        "serve": (model, "--plan", path, *HERE),
        "bench": (model, "--plan", path, *HERE),
    }
    for name, words in commands.items():
        done = CliRunner().invoke(main, [name, *map(str, words)])
        assert done.exit_code == 2, (name, done.output)
        assert where in done.output and why in done.output, (name, done.output)
    assert not (tmp_path / "out.gguf").exists()


ORDERS: dict[str, tuple[Callable[[ExpertOrder], tuple[ExpertOrder, ...]], str]] = {
    "twice": (lambda e: (with_order(e, (*e.order[1:], e.order[1])),), "layer 0: the order is not one of 8"),
    "beyond": (lambda e: (with_order(e, (*e.order[1:], 999)),), "layer 0: the order is not one of 8"),
    "longer": (lambda e: (with_order(e, tuple(range(9))),), "an order of 9 experts, it has 8"),
    "two": (lambda e: (e, e), "layer 0 has two orders"),
    "elsewhere": (
        lambda e: (e, e.model_copy(update={"layer": 77})),
        "layer 77: an order of 8 experts, it has",
    ),
    "absent": (lambda e: (), "no order of its experts|no order that fills them"),
}


def with_order(entry: ExpertOrder, order: tuple[int, ...]) -> ExpertOrder:
    return entry.model_copy(update={"order": order})


@pytest.mark.parametrize("kind", ORDERS)
def test_orders_of_experts_that_are_none_are_refused_everywhere(
    kind: str, moe_model: Path, tmp_path: Path
) -> None:
    """Slots go by them: a device would refuse to start, or a command end in the middle."""
    change, why = ORDERS[kind]
    plan = slotted_plan(moe_model, tmp_path, 3)
    path = tmp_path / "plan.yaml"
    first, *others = plan.experts
    assert first.layer == 0
    path.write_text(to_text(plan.model_copy(update={"experts": (*change(first), *others)})))
    commands = {
        "explain": (path, "--model", moe_model),
        "export": (path, "--inventory", moe_model),
        "run": (moe_model, "--plan", path, *HERE, "-p", "x"),
        "serve": (moe_model, "--plan", path, *HERE),
        "bench": (moe_model, "--plan", path, *HERE),
    }
    for name, words in commands.items():
        done = CliRunner().invoke(main, [name, *map(str, words)])
        assert done.exit_code == 2 and re.search(why, done.output), (name, done.output)
    alone = CliRunner().invoke(main, ["check", str(path), "--model", str(moe_model)])
    assert alone.exit_code != 0 and "[sites]" in alone.output, alone.output


@pytest.mark.parametrize("other", ["stripe:CUDA0:4", "cache:CUDA0:500000"])
def test_slots_stand_beside_no_other_division(other: str, moe_model: Path) -> None:
    plan, _ = divided(plan_for(moe_model), ".experts", other)
    assert site_faults(plan, None) == []
    first = next(i for i, p in enumerate(plan.units) if p.unit.endswith(".experts"))
    units = list(plan.units)
    units[first] = units[first].model_copy(update={"site": Site.parse("hybrid:CUDA0:4")})
    (fault,) = site_faults(plan.model_copy(update={"units": tuple(units)}), None)
    assert units[fault.index].unit == "blk.1.experts" and "beside layers with slots" in fault.why


def test_without_the_model_names_and_orders_tell(moe_model: Path, tmp_path: Path) -> None:
    plan = hand_plan(read_model(moe_model), experts={1: tuple(range(8))})
    wrong, where = divided(plan, ".experts", "stripe:CUDA0:9")
    assert [f.why for f in site_faults(wrong, None)] == [f"{where}: a stripe of 9 experts, the layer has 8"]
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(wrong))
    for name in ("explain", "export"):
        done = CliRunner().invoke(main, [name, str(path)])
        assert done.exit_code == 2 and where in done.output
    done = CliRunner().invoke(main, ["check", "--allow-missing", str(path)])
    assert done.exit_code == 1 and where in done.output


@pytest.mark.parametrize(
    "site", ["stripe:CUDA0:8", "hybrid:CUDA0:8", "hybrid:CUDA0:1", "cache:CUDA0:1000000"]
)
def test_what_can_be_divided_is_no_fault(site: str, moe_model: Path) -> None:
    file = read_model(moe_model)
    plan, _ = divided(hand_plan(file), ".experts", site)
    assert site_faults(plan, file.inventory) == site_faults(plan, None) == []
    assert from_text(to_text(plan), "plan") == plan


def test_a_plan_with_a_cache_is_rewritten_and_checked_against_both(moe_model: Path, tmp_path: Path) -> None:
    inventory, path, out = read_model(moe_model).inventory, tmp_path / "plan.yaml", tmp_path / "out.gguf"
    made = planned(
        inventory,
        "1000",
        on=machine("rtx4090-ddr5"),
        workload=Workload(n_ctx=256, prompt=16, gen=16, n_batch=64, n_ubatch=64),
        pins=(Pin("*.experts", "cache"), Pin("blk.*.attention", "gpu"), Pin("output", "gpu")),
        known=Known(cache=(CachePoint(share_ppm=500_000, hit_ppm=800_000),)),
    )
    path.write_text(to_text(made))
    done = CliRunner().invoke(main, ["rewrite", str(moe_model), "--plan", str(path), "-o", str(out)])
    assert done.exit_code == 0 and "cache:CUDA0" in done.output, done.output
    for model in (moe_model, out):
        done = CliRunner().invoke(main, ["check", str(path), "--model", str(model)])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("site", ["stripe:CUDA0:8", "stripe:CUDA9:2", "gpu:CUDA9", "gpu:CUDA0"])
def test_a_site_that_no_override_follows_is_refused_everywhere(
    site: str, moe_model: Path, tmp_path: Path
) -> None:
    """With the model and without it: the engine would be told the overrides, and put the unit elsewhere."""
    plan, _ = divided(plan_for(moe_model), ".experts", site)  # which the overrides put on the CPU
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    commands = (
        ("check", path, "--model", moe_model),
        ("check", path, "--allow-missing"),
        ("explain", path, "--model", moe_model),
        ("explain", path),
        ("export", path, "--inventory", moe_model),
        ("export", path),
        ("rewrite", moe_model, "--plan", path, "-o", tmp_path / "out.gguf"),
        ("run", moe_model, "--plan", path, *HERE, "-p", "x"),
    )
    for words in commands:
        done = CliRunner().invoke(main, list(map(str, words)))
        assert done.exit_code in {2, 1 if words[0] == "check" else 2}, (words, done.output)
        told = ("blk.1", "layer 1", "weights of")
        assert any(word in done.output for word in told), (words, done.output)
    assert not (tmp_path / "out.gguf").exists()
