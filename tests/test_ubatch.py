"""`-ub auto`: the batch of prompts is chosen with the placement, and is the best of its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from planning_models import moe

from atsplan import main
from commands.solve.ubatch import SIZES, worth_trying
from planner.model.inventory import to_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ubatch") / "moe.inventory.yaml"
    path.write_text(to_text(moe()))
    return path


def solve(model: Path, *more: object, budget: str = "1500MiB") -> Result:
    words = ("solve", model, "--machine", "rtx3060-12gb-ddr4", "-c", "8k", "--budget", budget, *more)
    return CliRunner().invoke(main, list(map(str, words)))


def plan(model: Path, *more: object) -> dict[str, Any]:
    done = solve(model, *more, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_sizes_up_to_the_prompt() -> None:
    assert worth_trying(1) == worth_trying(512) == (512,)
    assert worth_trying(513) == (512, 1024)
    assert worth_trying(100_000) == SIZES


def test_the_best_size_is_chosen_with_its_placement(model: Path, tmp_path: Path) -> None:
    use = ("--workload", "prompt=2048,gen=64")
    fixed = {n: plan(model, *use, "-ub", n) for n in (512, 1024, 2048)}
    path = tmp_path / "plan.yaml"
    chosen = plan(model, *use, "-ub", "auto", "-o", path)
    size = chosen["workload"]["n_ubatch"]
    times = {n: each["predicted"]["objective_ns"] for n, each in fixed.items()}
    assert size > 512 and times[512] > times[size] <= 1.01 * min(times.values())
    for made in (chosen, fixed[size]):
        made.pop("command")
    assert chosen == fixed[size]
    assert CliRunner().invoke(main, ["check", str(path), "--model", str(model)]).exit_code == 0
    told = CliRunner().invoke(main, ["export", str(path), "--format", "json"])
    words = json.loads(told.stdout)["arguments"]
    assert words[words.index("--ubatch-size") + 1] == str(size)


def test_every_size_is_said(model: Path) -> None:
    said = solve(model, "--workload", "prompt=1024,gen=64", "-ub", "auto").stderr
    assert "prompts in batches of 1024" in said and "512: " in said and "1024: " in said


def test_what_fits_with_no_size_is_refused_as_with_the_first(model: Path) -> None:
    words = ("--workload", "prompt=2048", "--no-cpu")
    found, first = (solve(model, *words, "-ub", n, budget="10MiB") for n in ("auto", 512))
    assert (found.exit_code, found.stdout) == (1, "") and found.stderr == first.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("solve", "-ub", "much"), "much"),
        (("solve", "-ub", "0"), "0"),
        (("sweep", "--budgets", "1G:2G:1G", "-ub", "auto"), "give a number: only solve chooses it"),
    ],
)
def test_other_words_are_one_line(model: Path, words: tuple[str, ...], said: str) -> None:
    command = [words[0], str(model), "--machine", "rtx3060-12gb-ddr4", *words[1:]]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 2 and said in found.stderr.splitlines()[-1]
