"""atsplan fit: one answer for a model and a machine, held against solve, through real files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from atsplan import main
from commands.demo import write_moe

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"
QWEN = INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
SMALL = INPUTS / "Qwen3.5-0.8B-q8_0.inventory.yaml"
LLAMA = INPUTS / "Llama-3.1-70B-Q4_K_M.inventory.yaml"
MINE = ("--gpu", "RTX 4070", "--ram", "64GiB", "--memory", "ddr5-6000", "--cpu", "8")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], env={"COLUMNS": "80"})


def data(*words: str | Path, code: int = 0) -> dict[str, Any]:
    found = run("fit", *words, "--no-levers", "--json")
    assert found.exit_code == code, found.output
    read: dict[str, Any] = json.loads(found.stdout)
    return read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_moe(path)
    return path


@pytest.mark.parametrize(
    ("path", "words", "verdict"),
    [
        (SMALL, ("--machine", "rtx4060-8gb-ddr5"), "fits"),
        (QWEN, MINE, "fits with experts in host memory"),
        (LLAMA, ("--machine", "rtx4090-ddr5"), "fits with layers in host memory"),
        (SMALL, ("--machine", "cpu-only-ddr5"), "fits in host memory: the CPU computes all of it"),
    ],
)
def test_the_verdict_is_that_of_the_plan(path: Path, words: tuple[str, ...], verdict: str) -> None:
    found = run("fit", path, *words)
    assert found.exit_code == 0, found.output
    assert f"\n{verdict}: " in found.stdout
    rows = [line for line in found.stdout.splitlines() if line.startswith((" plan", " best", " all-CPU"))]
    assert len(rows) >= 2 and "assumed, not measured" in found.stdout
    table = found.stdout[: found.stdout.index("largest context: ")].splitlines()
    assert all(len(line) <= 80 for line in table if line.startswith(" "))
    assert "next: atsplan solve " in found.stderr


def test_rows_are_those_of_solve() -> None:
    machine = ("--machine", "rtx4060-8gb-ddr5", "--budget", "7000", "-c", "8k")
    fit = data(QWEN, *machine)
    plan = json.loads(run("solve", QWEN, *machine, "--json").stdout)
    rows = {row["name"]: row for row in fit["placements"]}
    assert rows["plan"]["tpot_ns"] == plan["predicted"]["tpot_ns"]
    stock = {b["name"]: b["tpot_ns"] for b in plan["baselines"] if b["feasible"]}
    assert rows["all-CPU"]["tpot_ns"] == stock.pop("all-cpu")
    assert rows["best stock rule"]["tpot_ns"] == min(stock.values())
    assert fit["error_ppm"] == plan["predicted"]["error_ppm"]


def test_the_use_is_that_of_solve() -> None:
    """With the spellings of llama.cpp, and handed on to the next command."""
    machine = ("--machine", "rtx4060-8gb-ddr5")
    use = ("-c", "8k", "-ub", "1024", "-b", "4096", "-np", "2", "-ctk", "q8_0", "-fa", "on")
    rows = {row["name"]: row for row in data(QWEN, *machine, *use)["placements"]}
    plan = json.loads(run("solve", QWEN, *machine, *use, "--json").stdout)
    assert rows["plan"]["tpot_ns"] == plan["predicted"]["tpot_ns"]
    assert (plan["workload"]["n_batch"], plan["workload"]["n_seq"]) == (4096, 2)
    told = run("fit", QWEN, *machine, *use, "--no-levers").stderr
    assert "-c 8192 --kv-type q8_0/f16 -ub 1024 -b 4096 --workload seqs=2" in told
    assert data(SMALL, *machine, "-c", "max")["n_ctx"] == data(SMALL, *machine)["largest_ctx"]


def test_a_row_has_its_own_error() -> None:
    """Experts in slots are priced with a model of their own: its error is not that of the plan without."""
    asked = (QWEN, "--machine", "rtx3060-12gb-ddr4", "-c", "16k", "--heat", INPUTS / "Qwen3-30B-A3B.heat.csv")
    found = data(*asked)
    errors = {row["name"]: row["error_ppm"] for row in found["placements"]}
    slots = run("solve", *asked, "--hybrid", "--json").stdout
    assert errors["hybrid"] == json.loads(slots)["predicted"]["error_ppm"] != errors["plan"]
    assert errors["plan"] == errors["best stock rule"] == found["error_ppm"]
    text = run("fit", *asked, "--no-levers").stdout
    assert f"each row ±{errors['plan'] / 1e4:.0f} %, hybrid ±{errors['hybrid'] / 1e4:.0f} %, since" in text


def test_the_largest_context_has_a_plan_and_no_larger_one() -> None:
    machine = ("--machine", "rtx4060-8gb-ddr5", "--budget", "7000")
    fit = data(QWEN, *machine)
    told = run("solve", QWEN, *machine, "--ctx", "max")
    assert f"context {fit['largest_ctx']}: the largest with" in told.stderr


def test_a_refusal_says_the_smallest_change_and_it_fits() -> None:
    machine = ("--machine", "rtx4060-8gb-ddr5", "-c", "12k")
    refusal = data(LLAMA, *machine, code=1)
    assert refusal["verdict"] == "does not fit" and not refusal["feasible"]
    more = next(int(m[1]) for c in refusal["smallest_change"] if (m := re.match(r"(\d+) GiB more host", c)))
    bigger = ("--ram", f"{32 + more}GiB", "--memory", "ddr5-6000", "--cpu", "8", "-c", "12k")
    assert data(LLAMA, "--gpu", "RTX 4060", *bigger)["feasible"]
    text = run("fit", LLAMA, *machine)
    assert text.exit_code == 1 and "does not fit\nshort by " in text.stdout
    told = text.stdout[text.stdout.index("it would fit with one of these, each tried:\n") :].splitlines()[1:]
    assert [line.split(",")[0].split(":")[0].strip() for line in told] == [
        "a smaller quantisation",
        f"{more} GiB more host memory",
        "--page",
    ]
    assert text.stderr == "atsplan: does not fit\n"


def test_a_shorter_context_is_a_way_out_that_was_tried() -> None:
    machine = ("--machine", "rtx4090-ddr5", "-c", "1M")
    refusal = data(LLAMA, *machine, code=1)
    context = next(re.search(r"--ctx (\d+)", hint) for hint in refusal["tested"] if hint.startswith("--ctx"))
    assert context and data(LLAMA, "--machine", "rtx4090-ddr5", "-c", context[1])["feasible"]


def test_the_command_to_paste_is_that_of_export(model: Path, tmp_path: Path) -> None:
    machine = ("--machine", "rtx4060-8gb-ddr5")
    words = shlex.split(data(model, *machine)["command"])
    assert words[0] == "llama-server" and words[words.index("--model") + 1] == str(model)
    plan = tmp_path / "plan.yaml"
    assert run("solve", model, *machine, "-o", plan).exit_code == 0
    exported = run("export", plan, "--format", "llama-server", "--model", model).stdout
    assert words == shlex.split(exported, comments=True)


def test_next_steps_run_as_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = run("fit", SMALL, *MINE).stderr
    steps = [line.removeprefix("next: ") for line in told.splitlines() if line.startswith("next: ")]
    assert len(steps) == 2
    for step in steps:
        done = run(*shlex.split(step)[1:])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "plan.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say what its memory is: --memory ddr5-6000. For another: --gpu"),
        (("--machine", "rtx4070"), "no machine named rtx4070; there are rtx4090"),
        (("--machine", "rtx4090-ddr5", *MINE), "leave out --profile and --machine"),
        (("--machine", "rtx4090-ddr5", "--budget", "8"), "write 8GiB"),
        (("--machine", "rtx4090-ddr5", "-c", "many"), "expected a number of tokens"),
        (("--machine", "rtx4090-ddr5", "-ncmoe", "20"), "every number is tried here"),
        (("--machine", "rtx4090-ddr5", "-cmoe"), "every number is tried here"),
        (("--machine", "rtx4090-ddr5", "-b", "256"), "--batch 256: is below -ub 512"),
        (("--gpu", "RTX 4070", "--ram", "64", *MINE[4:]), "write 64GiB"),
        (("--vram", "12", *MINE), "write 12GiB"),
        (("--machine", "rtx4090-ddr5", "--budget", "80"), "write 80GiB"),
        (("--machine", "rtx4090-ddr5", "-ngl", "20"), "-ngl 20: the plan chooses the layers"),
        (("--machine", "rtx4090-ddr5", "-ctk", "q9_0"), "--kv-type q9_0/f16: "),
    ],
)
def test_bad_questions_are_one_line(words: tuple[str, ...], said: str) -> None:
    found = run("fit", SMALL, *words)
    assert (found.exit_code, found.stdout) == (2, "") and said in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_what_lies_elsewhere_is_read_by_fit_alone() -> None:
    for where in ("hf:owner/repo/file.gguf", "https://example.org/file.gguf"):
        for command in (("solve", where, "--machine", "rtx4090-ddr5"), ("inventory", where)):
            found = run(*command)
            assert found.exit_code == 2 and "lies elsewhere, which only fit reads: download" in found.stderr


def test_a_wrong_file_is_told_before_the_machine_is_asked_for(tmp_path: Path) -> None:
    found = run("fit", tmp_path / "none.gguf")
    assert found.exit_code == 2 and found.stderr.endswith("none.gguf: no such file\n")


def test_rows_say_how_sure_they_are_against_each_other() -> None:
    found = run("fit", QWEN, *MINE, "--no-levers").stdout
    rows = [line.split() for line in found.splitlines() if re.match(" (plan|best stock|all-CPU) ", line)]
    assert len(rows) == 3  # none goes on in another line of 80 letters
    assert "since the machine is assumed; all rows move together" in found


def test_each_lever_is_what_solve_says_of_it() -> None:
    machine = ("--machine", "rtx4060-8gb-ddr5", "--budget", "7000", "-c", "16k")
    found = json.loads(run("fit", QWEN, *machine, "--json").stdout)
    levers = {lever["name"]: lever for lever in found["levers"]}
    assert set(levers) == {"placement", "lanes", "quantisation", "KV type", "context"}
    assert levers["KV type"]["after_ns"] <= levers["KV type"]["before_ns"]
    plan = json.loads(run("solve", QWEN, *machine[:-1], "8k", "--json").stdout)
    assert levers["context"]["after_ns"] == plan["predicted"]["tpot_ns"]
    assert levers["context"]["option"] == "-c 8192" and found["flags"] == ["--no-mmap"]
    other = json.loads(run("solve", QWEN, *machine, "--quant", ".=q3_K", "--json").stdout)
    assert levers["quantisation"]["option"] == "solve --quant .=q3_K"
    assert levers["quantisation"]["after_ns"] == other["predicted"]["tpot_ns"]


def test_what_slots_bring_without_routing_statistics_is_what_the_readme_says() -> None:
    """Beside the gain with them, which its example shows."""
    told = json.loads(run("fit", QWEN, *MINE, "--json").stdout)
    lanes = next(lever for lever in told["levers"] if lever["name"] == "lanes")
    readme = (INPUTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"without them {lanes['before_ns'] / lanes['after_ns']:.2f}×" in readme
