"""check: every single-field corruption of a plan is caught or proven harmless; hand edits are priced."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from processes import alive, until

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan, read_plan
from planner.check.findings import Severity
from planner.cost.pins import parse_pin
from planner.machine.presets import load
from planner.model import inventory as inventories
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.passes.make_plan import make_plan
from planner.plan.plan import Plan, to_text
from planner.plan.request import Request
from planner.site import ON_CPU
from planner.workload import Workload

MACHINE = "rtx4060-8gb-ddr5"
FAST = CheckOptions(resolve=False)
# Values nobody computes with: the text of notes and reasons' spelling stay free, as does who made the plan.
QUESTION = ("workload", "constraints")
HARMLESS = ("notes", "command", "version")


@pytest.fixture(scope="module")
def inventory(moe_model: Path) -> Inventory:
    return read_model(moe_model).inventory


@pytest.fixture(scope="module")
def plan(inventory: Inventory) -> Plan:
    """Experts of layer 1 pinned to the CPU, everything else on the GPU."""
    profile = load(MACHINE)
    pins = tuple(parse_pin(text) for text in ("blk.1.experts=cpu", "blk.*.attention=gpu"))
    budgets = {"CUDA0": 2**31, "CPU": 2**34}
    work = Workload(n_ctx=512, prompt=64, gen=64)
    made = make_plan(inventory, profile, Request(budgets, work, pins=pins))
    assert [str(p.site) for p in made.units if p.unit.endswith("experts")] == [
        "gpu:CUDA0",
        "cpu",
        *["gpu:CUDA0"] * 2,
    ]
    return made


def findings(data: Any, inventory: Inventory, options: CheckOptions = FAST) -> list[str]:
    form: Any = {"sort_keys": False, "default_flow_style": None, "width": 2**31 - 1, "allow_unicode": True}
    text = yaml.dump(data, Dumper=yaml.CSafeDumper, **form)
    read, found = read_plan(text, "plan.yaml")
    if read is not None:
        found = check_plan(read, text, "plan.yaml", Inputs(inventory, load(MACHINE)), options)
    return [f.text() for f in found if f.severity is not Severity.NOTE]


def leaves(data: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from leaves(data[key], (*where, key))
    else:
        yield where


def corrupted(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2 + 7, -1]
    return [f"{value}x", ""]


def put(data: Any, where: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    node = changed
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    return changed


def test_the_plan_itself_has_no_findings(plan: Plan, inventory: Inventory) -> None:
    text = to_text(plan)
    assert check_plan(plan, text, "plan.yaml", Inputs(inventory, load(MACHINE)), CheckOptions()) == []


def test_every_corruption_of_one_value_is_caught(plan: Plan, inventory: Inventory) -> None:
    data = yaml.load(to_text(plan), Loader=yaml.CSafeLoader)
    tried, missed = 0, []
    for where in leaves(data):
        if where[0] in HARMLESS:
            continue
        node = data
        for key in where:
            node = node[key]
        for value in corrupted(node):
            tried += 1
            changed = put(data, where, value)
            if value == node or findings(changed, inventory):
                continue
            # Another question with the same answer, proven by solving it: harmless.
            if where[0] not in QUESTION or findings(changed, inventory, CheckOptions()):
                missed.append((where, value))
    assert tried >= 200
    assert not missed, missed


def test_every_missing_or_repeated_entry_is_caught(plan: Plan, inventory: Inventory) -> None:
    data = yaml.safe_load(to_text(plan))
    for name in ("devices", "layers", "baselines", "units", "overrides"):
        for index in range(len(data[name])):
            for change in ([*data[name][:index], *data[name][index + 1 :]], [*data[name], data[name][index]]):
                assert findings({**data, name: change}, inventory), (name, index)
    for name in data:
        assert findings({k: v for k, v in data.items() if k != name}, inventory) or name in HARMLESS


def swap_site(plan: Plan) -> Plan:
    """One expert unit moved from the GPU to the CPU by hand."""
    on_gpu = next(p for p in plan.units if p.unit.endswith("experts") and p.site != ON_CPU)
    units = tuple(p.model_copy(update={"site": ON_CPU}) if p is on_gpu else p for p in plan.units)
    return plan.model_copy(update={"units": units})


def test_a_legal_edit_is_priced_and_pointed_at(plan: Plan, inventory: Inventory) -> None:
    found = findings(yaml.safe_load(to_text(swap_site(plan))), inventory)
    assert any("legal, but priced for another placement" in f for f in found)


@pytest.fixture
def folder(tmp_path: Path, inventory: Inventory, plan: Plan) -> Path:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / f"{inventory.name}.inventory.yaml").write_text(inventories.to_text(inventory))
    (tmp_path / "a.yaml").write_text(to_text(plan))
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_hand_edit_reprice_and_check_again(folder: Path, plan: Plan) -> None:
    path = folder / "a.yaml"
    path.write_text(to_text(swap_site(plan)))
    code, text = run("check", str(folder))
    assert code == 1
    assert f"{path}:" in text
    assert run("fmt", "--reprice", str(path))[0] == 0
    code, text = run("check", str(folder))
    assert code == 0, text
    assert "edited by hand:" in text


def test_an_illegal_edit_names_its_line(folder: Path, plan: Plan) -> None:
    path = folder / "a.yaml"
    text = to_text(plan).replace(
        "{unit: blk.0.router, site: 'gpu:CUDA0'", "{unit: blk.0.router, site: cpu", 1
    )
    path.write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "unit: blk.0.router" in row)
    code, output = run("check", "--no-resolve", str(path))
    assert code == 1
    assert f"{path}:{line}: blk.0.router: site cpu is not possible" in output


def test_reports_agree(folder: Path) -> None:
    (folder / "b.yaml").write_text("schema: 1\nnonsense: true\n")
    sarif, junit = folder / "out.sarif", folder / "out.xml"
    code, text = run(
        "check", "--json", "--no-resolve", "--sarif", str(sarif), "--junit", str(junit), str(folder)
    )
    assert code == 2
    report, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    assert [len(f["findings"]) for f in report["files"]] == [0, 1]
    assert json.loads(sarif.read_text())["runs"][0]["results"][0]["ruleId"] == "schema"
    assert '<error message="' in junit.read_text()


def test_without_its_inputs_a_plan_cannot_pass_unless_that_is_allowed(folder: Path, plan: Plan) -> None:
    lonely = folder / "elsewhere"
    lonely.mkdir()
    (lonely / "a.yaml").write_text(to_text(plan))
    code, text = run("check", str(lonely))
    assert code == 2
    assert "overrides and cost were not checked" in text and "1 plan checked, 1 with findings" in text
    code, text = run("check", "--allow-missing", str(lonely))
    assert code == 0
    assert "overrides and cost were not checked" in text and "1 plan checked, 1 with notes only" in text
    assert "none with findings" not in text


def test_a_file_that_cannot_be_read_is_a_finding_and_the_others_are_judged(
    folder: Path, plan: Plan, inventory: Inventory
) -> None:
    """One spoilt file of many must not keep a gate from its report."""
    inputs = folder / "inputs"
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"name": "other"})})
    for name in ("c", "d"):
        (folder / f"{name}.yaml").write_text(to_text(other))
    (inputs / "other.inventory.yaml").write_text("schema: 1\nname: [\n")
    (folder / "b.yaml").write_bytes(b"schema: 1\0")
    (folder / "e.yaml").symlink_to(folder / "nowhere")
    report = folder / "j.xml"
    code, text = run("check", "--no-resolve", "--json", "--list", "--junit", str(report), str(folder))
    assert code == 2
    files = json.JSONDecoder().raw_decode(text)[0]["files"]
    assert [(Path(f["path"]).name, [found["rule"] for found in f["findings"]]) for f in files] == [
        ("a.yaml", []),
        ("b.yaml", ["schema"]),
        ("c.yaml", ["inputs"]),
        ("d.yaml", ["inputs"]),
        ("e.yaml", ["schema"]),
    ]
    said = [f["findings"][0]["message"] for f in files if f["findings"]]
    assert said[0] == "is not a text file" and said[3] == "no such file"
    assert said[1] == said[2] and said[1].startswith(f"{inputs / 'other.inventory.yaml'}:3: ")
    assert report.read_text().count("<error ") == 4


def test_none_with_findings_is_said_where_there_are_none(folder: Path) -> None:
    code, text = run("check", str(folder / "a.yaml"))
    assert code == 0 and text.splitlines()[0] == "1 plan checked, none with findings"


def test_plan_of_another_model_is_refused(folder: Path, inventory: Inventory) -> None:
    other = inventory.model_copy(update={"hparams": {**inventory.hparams, "rope.freq_base": 5.0}})
    path = folder / "other.inventory.yaml"
    path.write_text(inventories.to_text(other))
    code, text = run("check", "--model", str(path), str(folder / "a.yaml"))
    assert code == 2
    assert "another model" in text


def test_an_old_profile_is_a_note(plan: Plan, inventory: Inventory) -> None:
    old = load(MACHINE).model_copy(update={"created": "2025-01-01"})
    options = CheckOptions(resolve=False, today=date(2026, 1, 1))
    found = check_plan(plan, to_text(plan), "p", Inputs(inventory, old), options)
    assert any(f.rule == "stale" and f.severity is Severity.NOTE and "365 days" in f.message for f in found)


def test_foreign_tensors_are_a_note(plan: Plan, inventory: Inventory) -> None:
    """Vision tensors in the same file: legal for a plan, refused by the engine."""
    vision = inventory.tensors[-1].model_copy(update={"name": "v.blk.0.ln1.weight"})
    other = inventory.model_copy(update={"tensors": (*inventory.tensors, vision)})
    found = check_plan(plan, to_text(plan), "plan.yaml", Inputs(other, None), FAST)
    assert [(f.severity, f.message) for f in found] == [
        (
            Severity.NOTE,
            "1 tensor (v.blk.0.ln1.weight) is not of the text model: stock llama.cpp refuses such a file",
        )
    ]


def test_a_list_shows_devices_and_what_overrides_take(folder: Path, plan: Plan) -> None:
    """Patterns written by hand: what each takes, and why it is not what it reads."""
    path = folder / "a.yaml"
    loose = r"{pattern: '\.(1)\.*ffn_.*_exps', buffer: CPU, tensors: 3}"
    shadowed = r"{pattern: '^blk\.1\.ffn_up_exps\.weight$', buffer: CPU, tensors: 1}"
    head = path.read_text().partition("overrides:\n")[0]
    path.write_text(f"{head}overrides:\n- {loose}\n- {shadowed}\nexperts: []\n")
    code, output = run("check", str(path), "--list", "--no-resolve")
    use = plan.devices[0]
    assert code == 1
    assert (
        f"CUDA0: {use.used_bytes / 2**20:.0f} of 2048 MiB ({100 * use.used_bytes // 2**31} %): weights"
        in output
    )
    assert r"\.(1)\.*ffn_.*_exps → CPU: 3 tensors, " in output
    assert "layers 1; not anchored with ^ and $" in output
    assert "weight$ → CPU: 0 tensors, 0.0 MiB; loses every tensor to an earlier pattern" in output


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (0, 9, "layers 0 to 9: the last of the model is 4, the output head"),
        (1, 4, "layers 1 to 4: expected to go on at 0"),
        (0, 3, "4 entries for 4 layers and the output head"),
    ],
)
def test_layers_that_are_not_the_model_s(
    plan: Plan, inventory: Inventory, first: int, last: int, why: str
) -> None:
    data = yaml.safe_load(to_text(plan))
    data["layers"] = [{"first": first, "last": last, "device": "CUDA0"}]
    assert any(why in f for f in findings(data, inventory))


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("heard_by", ["all", "the first"])
def test_an_interrupt_ends_every_process_in_one_line(heard_by: str) -> None:
    """Ctrl-C reaches a whole group, kill -INT one process; the workers have nothing to say."""
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(
        [sys.executable, str(root / "atsplan.py"), "check", str(root / "plans")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while process.poll() is None and len(children(process.pid)) < 2:
            time.sleep(0.01)
        workers = children(process.pid)
        (os.killpg if heard_by == "all" else os.kill)(process.pid, signal.SIGINT)
        output, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output, messages) == (130, "", "atsplan: interrupted\n")
    assert len(workers) >= 2 and until(lambda: not alive(workers))


def test_processes_at_work_end_with_the_first() -> None:
    """Also where it has no time to tell them."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "atsplan.py"), "check", str(root / "plans")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and len(workers := children(process.pid)) < 2:
            time.sleep(0.01)
        process.kill()
    assert len(workers) >= 2 and until(lambda: not alive(workers))


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("n_cpu_moe", "n_cpu_moe: unknown key: the site of each unit says where its experts are"),
        ("tensor_split", "tensor_split: unknown key: layers says the device of each layer"),
        ("colour", "colour: unknown key [schema]"),
    ],
)
def test_settings_of_other_tools_are_refused_with_what_says_it_here(
    plan: Plan, inventory: Inventory, key: str, why: str
) -> None:
    (found,) = findings({**yaml.safe_load(to_text(plan)), key: [1]}, inventory)
    assert why in found


def test_a_cache_on_another_device_than_its_layer_is_refused(plan: Plan, inventory: Inventory) -> None:
    data = yaml.safe_load(to_text(plan))
    data["layers"][0]["kv_device"] = "CPU"
    (found,) = findings(data, inventory)
    assert "layers[0].kv_device: unknown key: the KV cache follows the device of its layer" in found
