"""What export prints is never over a budget, and never slower than a stock rule that the plan records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engines import ROOT

from atsplan import main
from planner.check.for_stock import solved_for_stock
from planner.check.recorded_rules import flags, rule_plan, usable_rules
from planner.check.reprice import edited
from planner.machine.profile import from_text as profile_from
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.model.inventory import Inventory
from planner.model.inventory import from_text as inventory_from
from planner.model.structure import structure_of
from planner.plan.known import Known
from planner.plan.load_spec import plan_layer_devices
from planner.plan.plan import Plan, from_text, to_text

PLANS = sorted((ROOT / "plans").glob("*--*.yaml"))
INPUTS = ROOT / "plans" / "inputs"
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def read(path: Path) -> Plan:
    return from_text(path.read_text(), str(path))


def inventory_of(plan: Plan) -> Inventory:
    path = INPUTS / f"{plan.model.name}.inventory.yaml"
    return inventory_from(path.read_text(), str(path))


def exported(path: Path, *more: str) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(main, ["export", str(path), "--format", "json", *more])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def held_by_gpus(plan: Plan, model: Inventory, words: list[str]) -> dict[str, int]:
    """Weights, KV caches and states on each GPU by the words of a command line: the engine's rules anew."""
    given = {w: words[i + 1] for i, w in enumerate(words[:-1]) if w.startswith("--")}
    devices = [] if given["--device"] == "none" else given["--device"].split(",")
    ngl, blocks = int(given["--n-gpu-layers"]), len(kv_bytes(structure_of(model), plan.workload))
    split = [int(n) for n in given.get("--tensor-split", str(ngl)).split(",")]
    homes = ["CPU"] * (blocks + 1 - ngl)
    for device, count in zip(devices, split, strict=False):
        homes += [device] * count
    rules = [tuple(each.rsplit("=", 1)) for each in given.get("--override-tensor", "").split(",") if each]
    if "--cpu-moe" in words:
        rules.append((EXPERTS, "CPU"))
    rules += [(rf"blk\.{n}{EXPERTS}", "CPU") for n in range(int(given.get("--n-cpu-moe", 0)))]
    tied = all(t.name != "output.weight" for t in model.tensors)
    held: dict[str, int] = {}
    for tensor in model.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if block and int(block[1]) >= blocks:
            continue  # NextN, not loaded
        told = next((b for p, b in rules if re.search(p, tensor.name)), "")
        home = homes[int(block[1])] if block else homes[-1]
        if tensor.name.startswith(("token_embd", "per_layer_token_embd")):
            home = homes[-1] if tied and tensor.name == "token_embd.weight" else "CPU"
        held[told or home] = held.get(told or home, 0) + tensor.size_bytes
    for home, kv, state in zip(
        homes,
        kv_bytes(structure_of(model), plan.workload),
        state_bytes(structure_of(model), plan.workload),
        strict=False,
    ):
        held[home] = held.get(home, 0) + kv + state
    return {device: size for device, size in held.items() if device != "CPU"}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_in_git_is_exported_within_its_budgets_and_no_slower_than_its_rules(path: Path) -> None:
    plan = read(path)
    data, _ = exported(path)
    took = data["predicted_tpot_ns"] * plan.workload.gen + data["predicted_prefill_ns"]
    rules = [b.tpot_ns * plan.workload.gen + b.prefill_ns for b in plan.baselines if b.feasible]
    assert took <= min(rules)
    short = {name.split("[")[0]: size for name, size in plan.constraints.budgets.items()}
    for device, size in held_by_gpus(plan, inventory_of(plan), data["arguments"]).items():
        assert 0 < size <= short[device], device


@pytest.mark.parametrize("path", [p for p in PLANS if "+heat" in p.name], ids=lambda path: path.stem)
@pytest.mark.parametrize("beside", [True, False])
def test_striped_plans_are_exported_as_their_best_rule(path: Path, beside: bool, tmp_path: Path) -> None:
    plan = read(path)
    if not beside:
        (tmp_path / "p.yaml").write_text(path.read_text())
        path = tmp_path / "p.yaml"
    data, said = exported(path)
    rule = min((b for b in plan.baselines if b.feasible), key=lambda b: b.tpot_ns)
    if "solved for what stock tools can be told" in said:
        # With its inputs the request is solved again, and that is spelt where it is faster.
        took = data["predicted_tpot_ns"] * plan.workload.gen + data["predicted_prefill_ns"]
        assert beside and 100 * took < 99 * (rule.tpot_ns * plan.workload.gen + rule.prefill_ns)
        return
    assert data["predicted_tpot_ns"] == rule.tpot_ns and not data["exact"]
    assert f"instead: the plan's stock rule {rule.name} ({rule.setting})" in said
    words = data["arguments"]
    assert words[words.index("--n-cpu-moe") + 1] == rule.setting.split()[-1]
    assert words[words.index("--n-gpu-layers") + 1] == rule.setting.split()[1]
    assert "--override-tensor" not in words and "--no-op-offload" not in words


@pytest.mark.parametrize("path", [p for p in PLANS if "+heat" not in p.name][::5], ids=lambda path: path.stem)
def test_a_recorded_rule_written_again_costs_what_is_recorded(path: Path) -> None:
    plan = read(path)
    profile_path = INPUTS / f"{plan.machine.name}.profile.yaml"
    profile = profile_from(profile_path.read_text(), str(profile_path))
    for rule in usable_rules(plan):
        again = edited(rule_plan(plan, rule), inventory_of(plan), profile, Known())
        assert (again.predicted.tpot_ns, again.predicted.prefill_ns) == (rule.tpot_ns, rule.prefill_ns), rule


def test_settings_that_are_more_than_flags_are_left_alone() -> None:
    assert flags("-ngl 20 -ts 12,8, 3 overrides") is None
    assert flags("finds no placement") is None
    one = flags("--device CUDA1 -ngl 7")
    assert one is not None and (one.device, one.ngl, one.alone) == ("CUDA1", 7, False)
    none = flags("-ngl 0 --device none")
    assert none is not None and none.alone


def changed(tmp_path: Path, name: str, **update: Any) -> Path:
    plan = read(next(p for p in PLANS if p.stem == name))
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan.model_copy(update=update)))
    return path


def test_a_request_is_solved_again_for_the_tools(tmp_path: Path) -> None:
    """Layers of the CPU in between cannot be told: the first ones are taken, within the same budgets."""
    name, machine = "Qwen3-Next-80B-A3B-Q4_K_M", "rtx3060-12gb-epyc"
    source, path = INPUTS / f"{name}.inventory.yaml", tmp_path / "p.yaml"
    asked = ["--machine", machine, "--budget", "4000MiB", "--ctx", "262144", "-o", str(path)]
    done = CliRunner().invoke(main, ["solve", str(source), *asked])
    assert done.exit_code == 0, done.output
    (tmp_path / "inputs").symlink_to(INPUTS)
    plan = read(path)
    assert "CPU" in plan_layer_devices(plan)[1:-1]
    model, profile = inventory_of(plan), INPUTS / f"{machine}.profile.yaml"
    made = solved_for_stock(plan, model, profile_from(profile.read_text(), str(profile)), Known())
    assert made is not None
    homes = plan_layer_devices(made)[:-1]
    on_cpu = homes.count("CPU")
    assert on_cpu and homes == ("CPU",) * on_cpu + ("CUDA0",) * (len(homes) - on_cpu)
    assert all(use.used_bytes <= use.budget_bytes for use in made.devices)
    data, said = exported(path)
    assert "solved for what stock tools can be told" in said
    assert data["predicted_tpot_ns"] == made.predicted.tpot_ns >= plan.predicted.tpot_ns
    assert held_by_gpus(plan, model, data["arguments"])["CUDA0"] <= plan.constraints.budgets["CUDA0"]


def test_nothing_that_fits_is_refused_with_the_reason(tmp_path: Path) -> None:
    name = "Qwen3-30B-A3B-Q4_K_M+heat--rtx4090-ddr5"
    plan = read(next(p for p in PLANS if p.stem == name))
    none = tuple(b.model_copy(update={"feasible": False}) for b in plan.baselines)
    done = CliRunner().invoke(main, ["export", str(changed(tmp_path, name, baselines=none))])
    assert done.exit_code == 1 and done.stdout == ""
    assert "no stock tool can be told a placement that fits" in done.stderr
    assert "stripes" in done.stderr and "--budget" in done.stderr


def test_a_plan_over_its_budget_is_not_exported(tmp_path: Path) -> None:
    name = "Qwen3-30B-A3B-Q4_K_M--rtx4060-8gb-ddr5"
    plan = read(next(p for p in PLANS if p.stem == name))
    grown = plan.devices[0].model_copy(update={"compute_bytes": 2**33})
    path = changed(tmp_path, name, devices=(grown, *plan.devices[1:]))
    data, said = exported(path)
    assert not data["exact"] and "not exported: CUDA0 needs" in said and "MiB" in said
    none = tuple(b.model_copy(update={"feasible": False}) for b in plan.baselines)
    path = changed(tmp_path, name, devices=(grown, *plan.devices[1:]), baselines=none)
    done = CliRunner().invoke(main, ["export", str(path)])
    assert done.exit_code == 1 and done.stdout == "" and "its budget is 7000 MiB" in done.stderr


def test_a_slower_plan_gives_way_to_its_rule_unless_a_person_asked_for_it(tmp_path: Path) -> None:
    name = "Qwen3-30B-A3B-Q4_K_M--rtx3060-12gb-ddr4"
    plan = read(next(p for p in PLANS if p.stem == name))
    slow = plan.predicted.model_copy(update={"tpot_ns": 90_000_000})
    data, said = exported(changed(tmp_path, name, predicted=slow))
    assert "--n-cpu-moe" in data["arguments"] and "instead: the plan's stock rule n-cpu-moe" in said
    asked = plan.constraints.model_copy(update={"pins": ("blk.0.*=cpu",)})
    data, said = exported(changed(tmp_path, name, predicted=slow, constraints=asked))
    assert "--override-tensor" in data["arguments"] and "stock rule" not in said  # none keeps the pin
    edited = slow.model_copy(update={"status": "edited"})
    data, said = exported(changed(tmp_path, name, predicted=edited))
    assert "--override-tensor" in data["arguments"] and "slower than the stock rule" in said
