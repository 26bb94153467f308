"""The tools' own rule for experts stands for overrides only where it places exactly the same tensors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import ROOT, server_help

from atsplan import main
from planner.check.recorded_rules import rule_plan
from planner.check.reprice import edited
from planner.machine.profile import from_text as profile_from
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.inventory import from_text as inventory_from
from planner.plan.known import Known
from planner.plan.load_spec import LoadSpec, load_spec
from planner.plan.overrides import collate
from planner.plan.plan import Plan, to_text
from planner.plan.plan import from_text as plan_from
from planner.workload import Workload
from runtime.tools.expert_rule import expert_rule
from runtime.tools.llama_bench import words
from runtime.tools.llama_server import find_program, serving
from runtime.tools.options import options, stock

PLANS = ROOT / "plans"
INPUTS = PLANS / "inputs"


def inventory_of(name: str) -> Inventory:
    path = INPUTS / f"{name}.inventory.yaml"
    return inventory_from(path.read_text(), str(path))


def some_plan(name: str) -> Plan:
    path = PLANS / name
    return plan_from(path.read_text(), str(path))


def with_experts_of(model: Inventory, layers: set[int], ngl: int, *also: tuple[str, str]) -> LoadSpec:
    """A load with these layers' expert weights on the CPU, spelt as this program spells it."""
    names = [
        t.name
        for t in model.tensors
        if (m := re.match(r"blk\.(\d+)\.ffn_(up|down|gate)_exps\.weight$", t.name)) and int(m[1]) in layers
    ]
    found = tuple((o.pattern, o.buffer) for o in collate(dict.fromkeys(names, "CPU")))
    return LoadSpec(("CUDA0",), (ngl,), ngl, (*found, *also), Workload())


@pytest.mark.parametrize("n", [1, 7, 12, 47])
def test_the_first_layers_experts_are_a_number(n: int) -> None:
    model, plan = inventory_of("Qwen3-30B-A3B-Q4_K_M"), some_plan("Qwen3-30B-A3B-Q4_K_M--rtx4090-ddr5.yaml")
    rule = expert_rule(with_experts_of(model, set(range(n)), 49), 48, model, plan)
    assert rule is not None and rule.option == ("--n-cpu-moe", str(n)) and rule.others == ()


def test_all_experts_are_one_word_and_dense_layers_count() -> None:
    model, plan = inventory_of("GLM-4.7-Flash-q4_K"), some_plan("GLM-4.7-Flash-q4_K--rtx4090-ddr5.yaml")
    rule = expert_rule(with_experts_of(model, set(range(47)), 48), 47, model, plan)
    assert rule is not None and rule.option == ("--cpu-moe", "")
    # The first layer is dense and counts: experts of layers 1 to 4 are --n-cpu-moe 5.
    rule = expert_rule(with_experts_of(model, {1, 2, 3, 4}, 48), 47, model, plan)
    assert rule is not None and rule.option == ("--n-cpu-moe", "5")
    # Layers that are on the CPU whole need no override, and the rule may name them.
    rule = expert_rule(with_experts_of(model, set(range(10, 47)), 38), 47, model, plan)
    assert rule is not None and rule.option == ("--cpu-moe", "")


def test_other_overrides_stay_beside_the_rule() -> None:
    model, plan = inventory_of("Qwen3-30B-A3B-Q4_K_M"), some_plan("Qwen3-30B-A3B-Q4_K_M--rtx4090-ddr5.yaml")
    head = (r"^output\.weight$", "CPU")
    spec = with_experts_of(model, {0, 1}, 49, head)
    rule = expert_rule(spec, 48, model, plan)
    assert rule is not None and (rule.layers, rule.others) == (2, (head,))
    told = dict(options(replace(stock(spec, 48), rule=rule), "m"))
    assert (told["--n-cpu-moe"], told["--override-tensor"]) == ("2", r"^output\.weight$=CPU")
    bench = words(replace(stock(spec, 48), rule=rule), "m", 8, 8, 0)
    assert bench[bench.index("-ncmoe") + 1] == "2"
    assert bench[bench.index("-ot") + 1] == r"^output\.weight$=CPU"


@pytest.mark.parametrize("layers", [{1}, {0, 2}, {47}, set(range(12)) - {5}])
def test_a_gap_is_no_rule(layers: set[int]) -> None:
    model, plan = inventory_of("Qwen3-30B-A3B-Q4_K_M"), some_plan("Qwen3-30B-A3B-Q4_K_M--rtx4090-ddr5.yaml")
    assert expert_rule(with_experts_of(model, layers, 49), 48, model, plan) is None


def test_experts_elsewhere_than_on_the_cpu_are_no_rule() -> None:
    model, plan = inventory_of("Qwen3-30B-A3B-Q4_K_M"), some_plan("Qwen3-30B-A3B-Q4_K_M--rtx4090-ddr5.yaml")
    other = (r"^blk\.3\.ffn_up_exps\.weight$", "CUDA1")
    assert expert_rule(with_experts_of(model, {0, 1}, 49, other), 48, model, plan) is None


def test_biases_that_the_plan_leaves_on_the_gpu_are_no_rule() -> None:
    """gpt-oss: --n-cpu-moe would move the experts' biases as well."""
    model, plan = inventory_of("gpt-oss-20b-MXFP4"), some_plan("gpt-oss-20b-MXFP4--rtx4060-8gb-ddr5.yaml")
    assert any(t.name.endswith("_exps.bias") for t in model.tensors)
    assert expert_rule(load_spec(plan), 24, model, plan) is None
    assert expert_rule(load_spec(plan), 24, None, plan) is None


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_plan_alone_says_no_more_than_the_tensors_prove(path: Path) -> None:
    plan = some_plan(path.name)
    model = inventory_of(plan.model.name)
    blocks = max(int(p.unit.split(".")[1]) for p in plan.units if p.unit.startswith("blk.")) + 1
    spec = stock(load_spec(plan), blocks).spec
    alone = expert_rule(spec, blocks, None, plan)
    assert alone in (None, expert_rule(spec, blocks, model, plan))


@pytest.mark.parametrize("beside", [True, False])
def test_export_prints_the_rule_s_own_option(beside: bool, tmp_path: Path) -> None:
    plan = some_plan("Qwen3-30B-A3B-Q4_K_M--rtx4060-8gb-ddr5.yaml")
    rule = next(b for b in plan.baselines if b.name == "n-cpu-moe")
    assert rule.setting.endswith("--n-cpu-moe 37")
    path = INPUTS / f"{plan.machine.name}.profile.yaml"
    profile = profile_from(path.read_text(), str(path))
    made = edited(rule_plan(plan, rule), inventory_of(plan.model.name), profile, Known())
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(made))
    if beside:  # inventory and profile
        (tmp_path / "inputs").symlink_to(INPUTS)
    done = CliRunner().invoke(main, ["export", str(path)])
    assert done.exit_code == 0, done.output
    assert "--n-cpu-moe 37 " in done.stdout and "--override-tensor" not in done.stdout
    form = CliRunner().invoke(main, ["export", str(path), "--format", "env"]).stdout
    assert "LLAMA_ARG_N_CPU_MOE=37\n" in form
    data = json.loads(CliRunner().invoke(main, ["export", str(path), "--format", "json"]).stdout)
    assert data["environment"]["LLAMA_ARG_N_CPU_MOE"] == "37"


def test_the_real_server_moves_what_the_plan_moves(
    moe_model: Path, vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    model = read_model(moe_model).inventory
    spec = with_experts_of(model, {0, 1}, 5)
    small = Workload(n_ctx=256, n_batch=64, n_ubatch=64)
    spec = replace(spec, devices=("Vulkan0",), workload=small)
    plan = some_plan("Qwen3-30B-A3B-Q4_K_M--rtx4090-ddr5.yaml")
    placed = stock(spec, 4)
    moved = []
    for rule in (None, expert_rule(spec, 4, model, plan)):
        told = [w for pair in options(replace(placed, rule=rule), str(moe_model)) for w in pair if w]
        assert ("--n-cpu-moe" in told) is (rule is not None)
        log: list[str] = []
        with serving(
            find_program(str(vulkan_engine)),
            [*told, "--no-warmup", "--verbose"],
            on_line=log.append,
            timeout_s=120,
        ):
            pass
        moved.append(
            sorted(
                re.sub(r".*?(blk\.\S+) .*(to \S+)$", r"\1 \2", line)
                for line in log
                if "buffer type overridden" in line
            )
        )
    assert len(moved[0]) == 6 and moved[0] == moved[1]


def test_the_tools_know_the_options(server_engine: Path) -> None:
    text = server_help(server_engine)
    assert "--cpu-moe" in text and "--n-cpu-moe N" in text
