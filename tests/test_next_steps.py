"""Every command names the next one, in words that the program takes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from atsplan import COMMANDS, main
from commands.demo import write_moe
from commands.shared.console import without
from planner.machine import presets
from planner.machine.profile import to_text as profile_text

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"
QWEN = INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
HEAT = INPUTS / "Qwen3-30B-A3B.heat.csv"
CARD = ("--machine", "rtx4060-8gb-ddr5")
LOAD = ("model.gguf", "--plan", "plan.yaml", "--device-map", "CUDA0=CPU")
# Each command with what of its next step is known. serve and demo are asked by their own tests.
STEPS: tuple[tuple[str, str], ...] = (
    ("inventory model.gguf", "atsplan fit model.gguf"),
    ("fit model.gguf --machine rtx4060-8gb-ddr5 -ub 256", "-ub 256 -o plan.yaml"),
    ("fit model.gguf --machine rtx4060-8gb-ddr5 -ub 256", "atsplan run model.gguf --plan plan.yaml"),
    ("machines", "atsplan fit MODEL --machine 2x-rtx4060ti-16gb"),
    ("machines rtx4060-8gb-ddr5", "atsplan fit MODEL --machine rtx4060-8gb-ddr5"),
    ("machines rtx4060-8gb-ddr5 -o card.yaml", "atsplan fit MODEL --profile card.yaml"),
    ("profile --seconds 1 --no-calibration -o here.yaml", "solve MODEL --profile here.yaml -o plan.yaml"),
    ("heat import {heat} -o copy.csv", "atsplan heat report copy.csv"),
    ("heat merge {heat} --model {qwen} -o sum.csv", "atsplan heat report sum.csv --model {qwen}"),
    ("heat report {heat}", "atsplan solve MODEL --profile profile.yaml --heat {heat} --hybrid -o plan.yaml"),
    ("heat export {heat} --to heat -o other.csv", "atsplan heat report {heat}"),
    ("heat trace model.gguf --text ant -n 4 --no-cost --trace trace.txt -o moe.csv", "heat report moe.csv"),
    ("simulate trace.txt --slots 4", "atsplan solve MODEL --profile profile.yaml --cache trace.txt"),
    ("solve model.gguf --machine rtx4060-8gb-ddr5", "--machine rtx4060-8gb-ddr5 -o plan.yaml"),
    ("solve {qwen} --machine rtx4060-8gb-ddr5 -o big.yaml", "atsplan explain big.yaml --model {qwen}"),
    ("solve {qwen} --machine rtx4060-8gb-ddr5 --quant .=q3_K", "--quant .=q3_K --tensor-types types.txt"),
    ("sweep model.gguf --machine rtx4060-8gb-ddr5 --budgets=600:1000:200 --json", "--budget CUDA0="),
    ("sweep model.gguf --machine rtx4060-8gb-ddr5 -c 8k --budgets 600:1000:200", "-c 8192 -o plan.yaml"),
    ("explain plan.yaml --model model.gguf", "atsplan export plan.yaml"),
    ("check plan.yaml --model model.gguf", "atsplan export plan.yaml"),
    ("check plan.yaml", "atsplan check plan.yaml --model MODEL --profile PROFILE"),
    ("check edited.yaml --model model.gguf", "atsplan fmt edited.yaml --reprice"),
    ("diff plan.yaml small.yaml", "atsplan explain small.yaml"),
    ("fmt --check loose.yaml", "atsplan fmt loose.yaml"),
    ("fmt loose.yaml", "atsplan check loose.yaml"),
    ("rewrite model.gguf --plan plan.yaml -o planned.gguf --dry-run", "--plan plan.yaml -o planned.gguf"),
    (
        "rewrite model.gguf --plan plan.yaml -o planned.gguf",
        "run planned.gguf --plan plan.yaml -p 'Once upon",
    ),
    ("rewrite planned.gguf --undo -o back.gguf", "atsplan verify planned.gguf back.gguf"),
    ("rewrite planned.gguf --recover", "atsplan inventory planned.gguf"),
    ("verify model.gguf planned.gguf --plan plan.yaml", "run planned.gguf --plan plan.yaml -p 'Once upon"),
    ("verify model.gguf back.gguf", "atsplan fit back.gguf"),
    ("run {load} -p ant -n 4 --json", "atsplan bench {load}"),
    ("bench {load} --against all-cpu --rounds 1 --prompts 8 -n 4", "--prompts 8 -n 4 --json"),
    ("refine plan.yaml --measured run.json --model model.gguf", "atsplan "),
    ("export plan.yaml", "atsplan refine plan.yaml --measured server.log"),
    ("doctor", "atsplan fit MODEL"),
    ("doctor --profile card.yaml", "atsplan profile MODEL -o card.yaml"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, plans for it, and what was measured; the commands run here, one after the other."""
    place = tmp_path_factory.mktemp("steps")
    write_moe(place / "model.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        (place / "card.yaml").write_text(profile_text(presets.load(CARD[1])))
        for name, budget in (("plan", "800"), ("small", "400")):
            told("solve", "model.gguf", *CARD, "--budget", budget, "-o", f"{name}.yaml")
        text = (place / "plan.yaml").read_text()
        (place / "loose.yaml").write_text(f"# a remark\n{text}")
        (place / "edited.yaml").write_text(text.replace("  tpot_ns: ", "  tpot_ns: 1", 1))
        spent = {"prompt_tokens": 8, "prefill_ns": 10**7, "tpot_ns": 10**7, "tokens": [1, 2, 3]}
        (place / "run.json").write_text(json.dumps(spent))
        yield place


def told(*words: str) -> tuple[str, str]:
    """What a command line says on stdout and stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["atsplan", *words])
        done = CliRunner().invoke(main, list(words))
    assert done.exit_code in (0, 1, 2) and "Traceback" not in done.output, done.output
    return done.stdout, done.stderr


def taken(step: str) -> str:
    """The name of the command that a step calls; click.UsageError for options that it has not."""
    program, name, *rest = shlex.split(step)
    assert program == "atsplan"
    context = click.Context(main)
    command = main.get_command(context, name)
    if isinstance(command, click.Group):
        command = command.get_command(context, rest.pop(0))
    assert command is not None, step
    command.make_parser(click.Context(command)).parse_args(rest)
    return name


@pytest.mark.parametrize(("line", "expected"), STEPS, ids=[line for line, _ in STEPS])
def test_a_command_names_the_next_one(folder: Path, line: str, expected: str) -> None:
    words = {"heat": HEAT, "qwen": QWEN, "load": shlex.join(LOAD)}
    stdout, stderr = told(*shlex.split(line.format(**words)))
    steps = [each.removeprefix("next: ") for each in stderr.splitlines() if each.startswith("next: ")]
    assert steps and "next: " not in stdout, stderr
    assert any(expected.format(**words) in step for step in steps), steps
    assert all(taken(step) in COMMANDS for step in steps)


def test_no_command_is_left_out() -> None:
    asked = {line.split()[0] for line, _ in STEPS}
    assert asked == set(COMMANDS) - {"serve", "demo"}
    heat = main.get_command(click.Context(main), "heat")
    assert isinstance(heat, click.Group)
    assert {line.split()[1] for line, _ in STEPS if line.startswith("heat ")} == set(heat.commands)


def test_where_nothing_is_to_do_nothing_is_said(folder: Path) -> None:
    assert told("diff", "plan.yaml", "plan.yaml") == told("fmt", "plan.yaml") == ("", "")
    for name in ("model.gguf", "card.yaml"):  # no plan, whatever else is given
        findings, messages = told("check", name)
        assert name in findings and "next: " not in messages


def test_options_are_taken_out_with_their_values() -> None:
    words = ("atsplan", "sweep", "m", "--plot", "a.png", "--budgets=1:2:1", "-c", "--json", "--json", "x")
    assert without(words, ("--plot", "--budgets", "-c"), ("--json",)) == ["atsplan", "sweep", "m", "x"]
