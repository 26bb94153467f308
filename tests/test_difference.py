"""diff: silent on equal plans, moves in words, everything else that differs by its path."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from sample_plan import sample_plan

from atsplan import main
from planner.plan.difference import Change, Move, difference
from planner.plan.plan import Plan, from_text, to_text
from planner.site import Site


def moved(plan: Plan) -> Plan:
    placements = tuple(p.model_copy(update={"site": Site.on("CUDA0")}) for p in plan.units)
    predicted = plan.predicted.model_copy(update={"tpot_ns": 1_000_000})
    return plan.model_copy(update={"units": placements, "predicted": predicted})


def test_plan_text_round_trips() -> None:
    text = to_text(sample_plan())
    assert from_text(text, "x") == sample_plan()
    assert to_text(from_text(text, "x")) == text


def test_equal_plans_have_no_difference() -> None:
    assert not difference(sample_plan(), sample_plan())


def test_a_move_is_reported_once() -> None:
    found = difference(sample_plan(), moved(sample_plan()))
    assert found.moves == (Move("blk.1.experts", 3 * 2**20, "cpu", "gpu:CUDA0"),)
    assert found.changes == (Change("predicted.tpot_ns", "2000000", "1000000"),)


def test_layer_ranges_compare_by_layer_not_by_spelling() -> None:
    plan = sample_plan()
    first, last = (
        plan.layers[0].model_copy(update={"last": 0}),
        plan.layers[0].model_copy(update={"first": 1}),
    )
    assert not difference(plan, plan.model_copy(update={"layers": (first, last)}))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_diff_command(tmp_path: Path) -> None:
    old, new = tmp_path / "a.yaml", tmp_path / "b.yaml"
    old.write_text(to_text(sample_plan()))
    new.write_text(to_text(moved(sample_plan())))
    assert run("diff", str(old), str(old)) == (0, "")
    code, text = run("diff", str(old), str(new))
    assert code == 1
    assert "1 unit, 3 MiB: cpu -> gpu:CUDA0" in text
    assert "predicted decode: 2.00 ms -> 1.00 ms (-50.0 %)" in text
    code, text = run("diff", "--json", str(old), str(new))
    assert json.JSONDecoder().raw_decode(text)[0]["moves"][0]["unit"] == "blk.1.experts"


def test_diff_of_a_missing_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    code, text = run("diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert (code, text) == (2, f"atsplan: {tmp_path}/a.yaml: no such file\n")


def test_fmt_rewrites_only_what_is_not_canonical(tmp_path: Path) -> None:
    good, loose = tmp_path / "good.yaml", tmp_path / "loose.yaml"
    canonical = to_text(sample_plan())
    good.write_text(canonical)
    loose.write_text("# by hand\n" + canonical.replace("notes: []", "notes:  [ ]"))
    assert run("fmt", "--check", str(tmp_path)) == (
        1,
        f"{loose}: not canonical\nnext: atsplan fmt {tmp_path}\n",
    )
    assert run("fmt", str(tmp_path)) == (0, f"{loose}: rewritten\nnext: atsplan check {tmp_path}\n")
    assert loose.read_text() == canonical
    assert run("fmt", "--check", str(tmp_path)) == (0, "")
