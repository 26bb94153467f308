"""Options and numbers as people know them from llama.cpp, on real command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from planning_models import dense, moe

from atsplan import COMMANDS, main
from planner.model.inventory import to_text

ROOT = Path(__file__).parent.parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "moe.inventory.yaml"
    path.write_text(to_text(moe()))
    return path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def planned(model: Path, *words: str) -> dict[str, Any]:
    found = run("solve", model, "--machine", "rtx4090-ddr5", "--json", *words)
    assert found.exit_code == 0, found.output
    data: dict[str, Any] = json.loads(found.stdout)
    del data["command"]
    return data


@pytest.mark.parametrize(
    ("known", "own"),
    [
        (("--budget", "8G", "-c", "32k"), ("--budget", "8192", "--ctx", "32768")),
        (("--budget", "8GiB", "--ctx-size", "128K"), ("--budget", "8192", "--ctx", "131072")),
        (("--budget", "2000", "-ub", "1024"), ("--budget", "2000", "--ubatch", "1024")),
        (("--budget", "2000", "-ctk", "q8_0"), ("--budget", "2000", "--kv-type", "q8_0/f16")),
        (
            ("--budget", "2000", "--cache-type-k", "q8_0", "--cache-type-v", "q4_0"),
            ("--budget", "2000", "--kv-type", "q8_0/q4_0"),
        ),
        (("--budget", "2000", "-np", "2"), ("--budget", "2000", "--workload", "seqs=2")),
        (("--budget", "2000", "-b", "2048"), ("--budget", "2000")),
        (("--budget", "CUDA0=2000", "--budget", "CPU=30000"), ("--budget", "CUDA0=2000,CPU=30000")),
        (
            ("--budget", "2000", "-np", "2", "--workload", "gen=64"),
            ("--budget", "2000", "--workload", "gen=64,seqs=2"),
        ),
        (
            ("--budget", "2000", "--n-cpu-moe", "2"),
            ("--budget", "2000", "--pin", "blk.0.experts=cpu", "--pin", "blk.1.experts=cpu"),
        ),
        (("--budget", "2000", "-cmoe"), ("--budget", "2000", "--pin", "blk.*.experts=cpu")),
        (("--budget", "2000", "-ngl", "99", "-fa", "on"), ("--budget", "2000")),
    ],
)
def test_a_known_spelling_gives_the_plan_of_its_own_one(
    model: Path, known: tuple[str, ...], own: tuple[str, ...]
) -> None:
    assert planned(model, *known) == planned(model, *own)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "8"), "--budget 8: a bare number counts MiB: write 8GiB, or 8MiB if that is meant"),
        (("--budget", "7.5"), "write 7.5GiB"),
        (("--budget", "CUDA0=8"), "write CUDA0=8GiB"),
        (("--reserve", "1"), "--reserve 1: a bare number counts MiB"),
        (("-ngl", "20"), "-ngl 20: the plan chooses the layers; --no-cpu demands"),
        (("-ot", "exps=CPU"), "-ot exps=CPU: a plan writes these itself: --pin"),
        (("-t", "8"), "-t 8: the profile says"),
        (("-b", "256", "-ub", "512"), "--batch 256: is below -ub 512"),
        (("--budget", "80"), "write 80GiB"),
        (("-fa", "off"), "--flash-attn off: plans are made for flash attention"),
        (("-ts", "3,1"), "-ts 3,1: the plan chooses the split"),
        (("-m", "model.gguf"), "-m model.gguf: the model is an argument of its own"),
        (("-ctk", "q8_0", "--kv-type", "f16"), "leave out -ctk and -ctv"),
        (("-np", "2", "--workload", "seqs=3"), "give one of the two"),
        (("-c", "32q"), "--ctx 32q: expected a number of tokens, or max"),
        (("--ctx-sise", "9"), "Did you mean"),
        (("--machine", "rtx4070"), "no machine named rtx4070; there are rtx4090"),
    ],
)
def test_what_is_not_to_be_had_is_answered_in_one_line(
    model: Path, words: tuple[str, ...], said: str
) -> None:
    machine = () if "--machine" in words else ("--machine", "rtx4090-ddr5")
    found = run("solve", model, *machine, *words)
    assert found.exit_code == 2 and found.stdout == ""
    assert said in found.stderr and len(found.stderr.splitlines()) == 1


def test_a_range_of_budgets_has_units_too(model: Path) -> None:
    sweep = ("sweep", model, "--machine", "rtx4090-ddr5", "--json", "--budgets")
    found = run(*sweep, "2G:4G:1G")
    assert [point["budget_bytes"] for point in json.loads(found.stdout)] == [2 << 30, 3 << 30, 4 << 30]
    asked = run(*sweep, "4:24:1")
    assert asked.exit_code == 2 and "write 24GiB" in asked.stderr
    part = run(*sweep, "2G:4G:0.05G")
    assert part.exit_code == 2 and part.stderr.endswith(": 0.05G is not a whole number of MiB\n")


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-c", "32k"), "-c 32k: the plan says it: atsplan solve -c"),
        (("-ot", "a=CPU"), "the plan says it: atsplan solve --pin"),
        (("-m", "model.gguf"), "the model is an argument of its own"),
    ],
)
def test_a_loaded_plan_says_the_rest(command: str, words: tuple[str, ...], said: str) -> None:
    found = run(command, *words)
    assert (found.exit_code, found.stdout) == (2, "") and said in found.stderr


def test_a_command_that_is_not_there_names_the_near_ones() -> None:
    found = run("sovle", "model.gguf")
    assert found.exit_code == 2 and "Did you mean solve" in found.stderr
    assert all(name in run("xyzzyx").stderr for name in COMMANDS)


@pytest.mark.parametrize("words", [("inventory",), ("profile",), ("solve",), ("export",), ("heat", "merge")])
def test_output_is_spelt_the_same_everywhere(words: tuple[str, ...]) -> None:
    told = run(*words, "--help").stdout
    assert "--output" in told and "--out," in told.replace("--out ", "--out,")


def test_experts_of_the_first_layers_are_counted_as_llama_cpp_counts_them(tmp_path: Path) -> None:
    """Dense layers count, more layers than there are stand for all; a model without experts is told so."""
    late, flat = tmp_path / "late.inventory.yaml", tmp_path / "dense.inventory.yaml"
    late.write_text(to_text(moe(4, dense_first=1)))
    flat.write_text(to_text(dense([4096] * 2)))
    budget = ("--budget", "2000")
    assert planned(late, *budget, "-ncmoe", "2") == planned(late, *budget, "--pin", "blk.1.experts=cpu")
    assert planned(late, *budget, "-ncmoe", "99") == planned(
        late, *budget, *(f for n in (1, 2, 3) for f in ("--pin", f"blk.{n}.experts=cpu"))
    )
    for words in (("-ncmoe", "2"), ("-cmoe",)):
        found = run("solve", flat, "--machine", "rtx4090-ddr5", *budget, *words)
        assert found.exit_code == 2 and "moe" in found.stderr and "no routed experts" in found.stderr
