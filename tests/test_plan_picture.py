"""The picture of a plan: written whole, the same bytes for the same plan, refused early for a wrong name."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from planning_models import moe
from sample_plan import sample_plan

from atsplan import main
from commands.explain.plan_picture import draw_plan
from commands.solve.sweep import _LOOKS
from planner.model.inventory import to_text as inventory_text
from planner.plan.plan import from_text, to_text

ROOT = Path(__file__).parent.parent
HYBRID = "Qwen3-30B-A3B-Q4_K_M+heat+hybrid--rtx3060-12gb-ddr4.yaml"


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_plan_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        draw_plan(sample_plan(), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_it_has_a_cell_for_each_unit_in_the_colour_of_its_site(tmp_path: Path) -> None:
    draw_plan(sample_plan(), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    ElementTree.fromstring(text)
    # experts of layer 0 on CUDA0, of layer 1 on the CPU; each colour again in the legend or the bars
    assert text.count("#0072b2") >= 2
    assert text.count("#e69f00") >= 2


def test_its_legend_names_every_site_and_host_memory_has_a_bar(tmp_path: Path) -> None:
    """Texts of an SVG are shapes: what was to be drawn stands in its remarks."""
    plan = from_text((ROOT / "plans" / HYBRID).read_text(), HYBRID)
    draw_plan(plan, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    said = set(re.findall(r"<!-- (.*?) -->", text))
    assert {"on CUDA0", "experts in slots of CUDA0, the others by CPU and bus", "weights"} <= said
    assert "CPU (host memory)" in said and any("(assumed machine)" in line for line in said)


def test_lines_of_a_sweep_are_told_apart_without_colours(tmp_path: Path) -> None:
    """By dashes and marks, for each stock rule its own; an assumed machine is said to be one."""
    assert len({dashes for _, dashes, _ in _LOOKS}) == len({mark for *_, mark in _LOOKS}) == len(_LOOKS)
    inventory = tmp_path / "moe.yaml"
    inventory.write_text(inventory_text(moe()))
    budgets = ["--machine", "rtx4090-ddr5", "--budgets", "2000:3000:1000", "--contexts", "1k,4k"]
    done = CliRunner().invoke(main, ["sweep", str(inventory), *budgets, "--plot", str(tmp_path / "s.svg")])
    assert done.exit_code == 0, done.output
    said = set(re.findall(r"<!-- (.*?) -->", (tmp_path / "s.svg").read_text()))
    assert {"all-cpu", "n-cpu-moe", "this plan", "its error"} <= said
    assert any("(assumed machine)" in line for line in said)
    assert any("budget of CUDA0, context 1024" in line for line in said)


def test_explain_refuses_a_name_it_cannot_draw(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(sample_plan()))
    result = CliRunner().invoke(main, ["explain", str(path), "--plot", str(tmp_path / "plan.gif")])
    assert result.exit_code == 2
    assert "plan.gif: expected a name that ends in .png, .svg or .pdf" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]
