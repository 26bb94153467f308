"""A NextN block that is promised and absent, or there in part: named by every command that meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import ROOT

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.model.inventory import Inventory, from_text, to_text
from planner.model.nextn import nextn_fault
from planner.plan.plan import from_text as plan_from

GLM = ROOT / "plans" / "inputs" / "GLM-4.5-q4_K.inventory.yaml"
ASKED = ("--machine", "rtx4090-epyc", "--budget", "20000", "--mtp", "--page")


def glm() -> Inventory:
    return from_text(GLM.read_text(), str(GLM))


def without(model: Inventory, gone: Callable[[str], bool]) -> Inventory:
    return model.model_copy(update={"tensors": tuple(t for t in model.tensors if not gone(t.name))})


def uncounted(model: Inventory) -> Inventory:
    changed = {k: 0 if k.endswith("nextn_predict_layers") else v for k, v in model.hparams.items()}
    return model.model_copy(update={"hparams": changed})


BROKEN: dict[str, tuple[Callable[[Inventory], Inventory], str]] = {
    "no block": (lambda m: without(m, lambda n: ".nextn." in n), "no blk.92.nextn.*"),
    "no projection": (lambda m: without(m, lambda n: n.endswith("eh_proj.weight")), "blk.92.nextn.eh_proj"),
    "no keys": (lambda m: without(m, lambda n: n == "blk.92.attn_k.weight"), "without blk.92.attn_k"),
    "key 0": (uncounted, "nextn_predict_layers does not count it"),
}


def test_a_whole_block_is_no_fault() -> None:
    assert nextn_fault(glm()) == ""


@pytest.mark.parametrize("name", BROKEN)
def test_solve_check_and_inventory_name_what_is_missing(name: str, tmp_path: Path) -> None:
    change, why = BROKEN[name]
    model = change(glm())
    if name == "no keys":  # the bias goes with its weight
        model = without(model, lambda n: n.startswith("blk.92.attn_k."))
    path, plan_path = tmp_path / "m.inventory.yaml", tmp_path / "plan.yaml"
    path.write_text(to_text(model))
    done = CliRunner().invoke(main, ["solve", str(path), *ASKED, "-o", str(plan_path)])
    assert done.exit_code == 2 and why in done.output and not plan_path.exists(), done.output
    strict = CliRunner().invoke(main, ["inventory", str(path), "--strict"])
    assert why in strict.output
    assert strict.exit_code == (2 if name == "key 0" else 1)  # of these the engine loads all but one
    told = CliRunner().invoke(main, ["inventory", str(path)])
    assert told.exit_code == 0 and why in told.stderr
    made = CliRunner().invoke(main, ["solve", str(GLM), *ASKED, "-o", str(plan_path)])
    assert made.exit_code == 0, made.output
    text = plan_path.read_text()
    plan = plan_from(text, "plan")
    found = check_plan(plan, text, "plan", Inputs(model, None), CheckOptions(resolve=False))
    assert any(why in each.message for each in found)


def test_a_block_without_its_model_is_called_a_draft(tmp_path: Path) -> None:
    """The engine loads such a file, to draft; no command plans it as a model."""
    alone = tmp_path / "alone.inventory.yaml"
    alone.write_text(to_text(without(glm(), lambda n: n.startswith("blk.") and not n.startswith("blk.92."))))
    told = CliRunner().invoke(main, ["inventory", str(alone)])
    assert told.exit_code == 0 and "it only drafts" in told.stderr and "not recognised" not in told.output
    for words in (["solve", str(alone), *ASKED], ["solve", str(GLM), *ASKED, "--draft", str(alone)]):
        done = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "plan.yaml")])
        assert done.exit_code == 2 and "NextN/MTP block" in done.stderr, done.output
        assert not (tmp_path / "plan.yaml").exists()
