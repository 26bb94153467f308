"""Other experts for the slots of a plan, by routing counted since; what a served plan counts as heat."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from engines import ROOT

from atsplan import main
from commands.heat.served_heat import heat_of_blocks, heat_written
from planner.constants import EXPERTS_KEY
from planner.errors import AtsplanError
from planner.model.inventory import from_text as inventory_from
from planner.plan.difference import check_while_running
from planner.plan.load_spec import load_spec
from planner.plan.plan import from_text
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import Heat, Phase
from runtime.hybrid.device import Block

INPUTS = ROOT / "plans" / "inputs"
MODEL = INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
PLAN = ROOT / "plans" / "Qwen3-30B-A3B-Q4_K_M+heat+hybrid--rtx3060-12gb-ddr4.yaml"
HEAT = INPUTS / "Qwen3-30B-A3B.heat.csv"


def atsplan(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def counted() -> Heat:
    return heats.from_text(HEAT.read_text(), str(HEAT))


def written(heat: Heat, path: Path) -> Path:
    path.write_text(heats.to_text(heat))
    return path


def turned(heat: Heat, by: int) -> Heat:
    """The same use of other experts."""
    parts = (
        replace(part, counts={layer: row[by:] + row[:by] for layer, row in part.counts.items()})
        for part in heat.parts
    )
    return replace(heat, parts=tuple(parts))


def test_other_habits_give_the_slots_to_other_experts(tmp_path: Path) -> None:
    now, out = written(turned(counted(), 40), tmp_path / "now.csv"), tmp_path / "other.yaml"
    done = atsplan("refine", PLAN, "--routing", now, "-o", out)
    assert done.exit_code == 0, done.output
    assert "other experts in the slots of 48 layers" in done.stdout and "less for the request" in done.stdout
    before, after = (from_text(path.read_text(), str(path)) for path in (PLAN, out))
    check_while_running(before, after, "other.yaml")  # a running server takes it over
    was, now_in = load_spec(before).residents, load_spec(after).residents
    assert [(n, total, len(e)) for n, total, e in was] == [(n, total, len(e)) for n, total, e in now_in]
    # As hot here as the plan's experts were where it was made: so the prediction is the plan's own.
    (part,) = counted().parts
    for (layer, _, old), (_, _, new) in zip(was, now_in, strict=True):
        here = [(e - 40) % 128 for e in old]
        assert sorted(part.counts[layer][e] for e in old) == sorted(
            part.counts[layer][(e + 40) % 128] for e in new
        )
        assert (
            len(set(here) ^ set(new)) <= 2
        )  # of two that were chosen alike often the lower number has a slot
    assert after.predicted.tpot_ns == before.predicted.tpot_ns and after.predicted.status == "edited"
    checked = atsplan("check", out, "--model", MODEL, "--heat", now)
    assert checked.exit_code == 0, checked.output


def test_the_same_habits_move_nothing(tmp_path: Path) -> None:
    done = atsplan("refine", PLAN, "--routing", HEAT, "-o", tmp_path / "other.yaml")
    assert done.exit_code == 0 and not (tmp_path / "other.yaml").exists()
    assert "are those that this routing uses most" in done.stdout


def test_what_gives_no_other_experts_is_one_line(tmp_path: Path) -> None:
    even = replace(counted(), parts=tuple(
        replace(part, counts=dict.fromkeys(part.counts, (100,) * 128)) for part in counted().parts
    ))  # fmt: skip
    flat = atsplan("refine", PLAN, "--routing", written(even, tmp_path / "even.csv"))
    without = atsplan("refine", PLAN.with_name(PLAN.name.replace("+heat+hybrid", "")), "--routing", HEAT)
    for done in (flat, without):
        assert done.exit_code == 1 and done.stderr.count("atsplan: no other experts for the slots") == 1
    neither = atsplan("refine", PLAN)
    assert neither.exit_code == 2 and "give --measured or --routing" in neither.stderr


def block(number: int, chosen: tuple[int, ...], model: int = 0) -> Block:
    zeros: dict[str, Any] = dict.fromkeys(Block.__dataclass_fields__, 0)
    given = {"model": model, "block": number, "kind": "exps", "experts": len(chosen)}
    lists = {"resident": (), "row_choices": (), "row_hits": ()}
    return Block(**{**zeros, **given, **lists, "chosen": chosen})


def served(order: tuple[int, ...] | None = None) -> Any:
    """The model as a file, whose first layer a rewrite has put in another order."""
    kvs = [SimpleNamespace(key=f"{EXPERTS_KEY}0", value=order)] if order else []
    headers = [SimpleNamespace(header=SimpleNamespace(kvs=kvs))]
    inventory = inventory_from(MODEL.read_text(), str(MODEL))
    return SimpleNamespace(inventory=inventory, headers=headers, paths=(MODEL,))


def test_counts_of_positions_are_of_original_experts() -> None:
    chosen = tuple(range(128))
    order = tuple((n * 5 + 3) % 128 for n in range(128))  # the expert at each position
    draft = block(0, (9,) * 128, model=1)
    heat = heat_of_blocks(served(order), [draft, block(0, chosen), block(1, chosen), block(2, (0,) * 128)])
    (part,) = heat.parts
    assert sorted(part.counts) == [0, 1] and part.phase is Phase.MIXED and part.tokens == sum(chosen) // 8
    assert all(part.counts[0][order[position]] == position for position in range(128))
    assert part.counts[1] == chosen
    assert heat_of_blocks(served(), []).parts == ()


@pytest.mark.parametrize("order", [(999,) * 128, tuple(range(64)), (0,) * 128, (-1, *range(127))])
def test_a_damaged_record_of_an_order_is_one_line(order: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(AtsplanError):
        heat_of_blocks(served(order), [block(0, (1,) * 128)])
    with heat_written(tmp_path / "heat", served(order), lambda: [("CUDA0", block(0, (1,) * 128))]):
        pass
    assert not (tmp_path / "heat").exists()


def test_counts_that_none_can_be_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with heat_written(tmp_path / "heat", served(), lambda: [("CUDA0", block(0, (1 << 60,) * 128))]):
        pass
    assert "a count that cannot be" in capsys.readouterr().err and not (tmp_path / "heat").exists()


def test_a_served_plan_keeps_its_heat(tmp_path: Path) -> None:
    path = tmp_path / "served.csv"
    with heat_written(path, served(), lambda: [("CUDA0", block(3, (8,) * 128))], every_s=60):
        assert not path.exists()
    found = heats.from_text(path.read_text(), str(path))
    assert found.parts[0].counts == {3: (8,) * 128} and found.parts[0].source == "serve"
    said = json.loads(atsplan("refine", PLAN, "--routing", HEAT, "--json").stdout)
    assert said["experts"] == 0 and said["proposed"] is None
