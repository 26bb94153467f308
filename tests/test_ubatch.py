"""Without -ub, or with auto: the batch of prompts is chosen with the placement, the best of its sizes."""

from __future__ import annotations

import json
import re
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


def test_unless_stated_it_is_chosen(model: Path) -> None:
    use = ("--workload", "prompt=2048,gen=64")
    chosen, stated = plan(model, *use), plan(model, *use, "-ub", "auto")
    for made in (chosen, stated):
        made.pop("command")
    assert chosen == stated and chosen["workload"]["n_ubatch"] > 512
    short = solve(model, "--json")
    assert json.loads(short.stdout)["workload"]["n_ubatch"] == 512 and "batches" not in short.stderr


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (("-b", "1024"), 1024),
        (("-b", "300"), 300),  # of more the engine would compute no more at once
        (("-c", "max"), 512),  # the largest context: larger batches would take of its memory
        (("-c", "16k", "--ctx-min", "4096"), 512),
    ],
)
def test_what_bounds_it(model: Path, words: tuple[str, ...], size: int) -> None:
    assert plan(model, "--workload", "prompt=2048,gen=64", *words)["workload"]["n_ubatch"] == size


def test_a_sweep_chooses_as_solve_does(model: Path) -> None:
    use = ("--workload", "prompt=2048,gen=64")
    words = ("sweep", model, "--machine", "rtx3060-12gb-ddr4", "-c", "8k", *use, "--json")
    done = CliRunner().invoke(main, [*map(str, words), "--budgets", "1300M:2500M:1200M"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 2
    for row in rows:
        single = solve(model, *use, "--json", budget=f"{row['budget_bytes'] >> 20}MiB")
        assert row["tpot_ns"] == json.loads(single.stdout)["predicted"]["tpot_ns"]


def test_what_the_batch_brings_is_told_apart_from_the_placement(model: Path, tmp_path: Path) -> None:
    """And a plan of before, which does not tell it, is as good as it was."""
    path = tmp_path / "plan.yaml"
    use = ("--workload", "prompt=2048,gen=64")
    made, usual = plan(model, *use, "-o", path), plan(model, *use, "-ub", 512)
    assert made["untuned"] == usual["untuned"]  # whose other flags are not the engine's own either
    assert f" -ub {made['workload']['n_ubatch']}, which it could be given too" in solve(model, *use).stdout
    text = path.read_text()
    (line,) = (each for each in text.splitlines(keepends=True) if each.startswith("untuned:"))
    older = tmp_path / "older.yaml"
    older.write_text(text.replace(line, ""))
    for each in (path, older):
        checked = CliRunner().invoke(main, ["check", str(each), "--model", str(model), "--no-resolve"])
        assert checked.exit_code == 0, checked.output


def test_every_size_is_said(model: Path) -> None:
    said = solve(model, "--workload", "prompt=1024,gen=64", "-ub", "auto").stderr
    assert "prompts in batches of 1024" in said and "512: " in said and "1024: " in said


def test_a_size_that_does_not_fit_is_said_and_left(model: Path) -> None:
    use = ("--workload", "prompt=8192,gen=64", "-c", "9k", "--no-cpu")
    done = solve(model, *use, "--json", budget="3500MiB")
    assert done.exit_code == 0, done.output
    chosen = json.loads(done.stdout)["workload"]["n_ubatch"]
    assert re.search(r"512: [\d.]+ ms", done.stderr) and "8192: does not fit" in done.stderr and chosen < 8192


def test_what_fits_with_no_size_is_refused_as_with_the_first(model: Path) -> None:
    words = ("--workload", "prompt=2048", "--no-cpu")
    found, first = (solve(model, *words, "-ub", n, budget="10MiB") for n in ("auto", 512))
    assert (found.exit_code, found.stdout) == (1, "") and found.stderr == first.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("solve", "-ub", "much"), "much"),
        (("solve", "-ub", "0"), "0"),
        (("sweep", "--budgets", "1G:2G:1G", "-ub", "none"), "none"),
    ],
)
def test_other_words_are_one_line(model: Path, words: tuple[str, ...], said: str) -> None:
    command = [words[0], str(model), "--machine", "rtx3060-12gb-ddr4", *words[1:]]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 2 and said in found.stderr.splitlines()[-1]
