"""The picture of a plan: written whole, the same bytes for the same plan, refused early for a wrong name."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from sample_plan import sample_plan

from atsplan import main
from commands.explain.plan_picture import draw_plan
from planner.plan.plan import to_text


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


def test_explain_refuses_a_name_it_cannot_draw(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(sample_plan()))
    result = CliRunner().invoke(main, ["explain", str(path), "--plot", str(tmp_path / "plan.gif")])
    assert result.exit_code == 2
    assert "plan.gif: expected a name that ends in .png, .svg or .pdf" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]
