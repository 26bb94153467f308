"""Refusals that say what would fit, and KV types that a GPU has no kernels for."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import dense, machine, moe, plan, real, sites, timed

from atsplan import main
from planner.machine.attention_kernels import attends
from planner.model.inventory import to_text
from planner.passes.remedies import tried
from planner.workload import Workload

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "moe.inventory.yaml"
    path.write_text(to_text(moe()))
    return path


def solve(model: Path, *words: str) -> Result:
    given = ["solve", str(model), "--machine", "rtx4090-ddr5", *words]
    return CliRunner().invoke(main, given)


@pytest.mark.parametrize(
    "words",
    [
        ("--budget", "3900", "--ctx", "131072", "--no-cpu"),
        ("--budget", "4200", "--ctx", "65536", "--no-cpu"),
        ("--budget", "1000", "--ctx", "131072", "--pin", "blk.*.attention=gpu"),
    ],
)
def test_what_a_refusal_advises_fits_and_a_little_more_does_not(model: Path, words: tuple[str, ...]) -> None:
    line = solve(model, *words)
    assert line.exit_code == 1 and line.stdout == "", line.output
    advice = advised(line)
    assert any("--ctx" in text for text in advice) and any("q8_0" in text for text in advice)
    for text in advice:
        assert solve(model, *changed(words, text)).exit_code == 0, text
        if "--ctx" in text:
            more = text.replace(text.split()[-1], str(int(text.split()[-1]) + 256))
            assert solve(model, *changed(words, more)).exit_code == 1, text


def test_the_refusal_of_the_page_is_the_program_s() -> None:
    page = " ".join((INPUTS.parents[1] / "docs" / "findings-solver.md").read_text(encoding="utf-8").split())
    whole = INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
    line = solve(whole, "--budget", "21000", "--ctx", "131072", "--no-cpu")
    hints = re.findall(r"(?:--kv-type \S+ )?--ctx \d+ \(fits\)", line.stderr)
    assert len(hints) == 2 and all(f"`{hint}`" in page for hint in hints), (hints, line.stderr)
    assert solve(whole, "--budget", "21000", "--ctx", "29696", "--no-cpu").exit_code == 1
    assert real("Qwen3-30B-A3B-Q4_K_M").number("context_length") == 40960


def advised(line: Result) -> list[str]:
    """The changes that a refusal names, each of them tried."""
    _, _, hints = line.stderr.strip().rpartition("; try ")
    found = [tried(text) for text in hints.split(" or ")]
    assert found and all(found), line.stderr
    return [text.removeprefix("a smaller quantisation, such as ") for text in found]


def changed(words: tuple[str, ...], advice: str) -> list[str]:
    """A command line with a piece of advice taken."""
    pairs = [words[0:2], *((w, v) for w, v in pairwise(words) if w in ("--ctx", "--pin"))]
    if "--no-cpu" in words and advice != "allowing the CPU":
        pairs.append(("--no-cpu",))
    if advice == "fewer pins":
        pairs = [pair for pair in pairs if pair[0] != "--pin"]
    given = [] if advice in ("fewer pins", "allowing the CPU") else advice.split()
    return [w for pair in pairs if pair[0] not in given for w in pair] + given


def test_the_shortage_that_matters_comes_first_with_what_ends_it() -> None:
    """Host memory lacks 300 GB and the GPU 243 MiB: no smaller batch helps."""
    line = solve(INPUTS / "DeepSeek-V3.1-Terminus-q4_K.inventory.yaml", "--budget", "500", "--ctx", "16384")
    needs = re.findall(r"([a-zA-Z0-9 ]+) needs? ([0-9]+) MiB, budget ([0-9]+)", line.stderr)
    lacks = [int(needed) - int(there) for _, needed, there in needs]
    assert len(lacks) == 2 and lacks == sorted(lacks, reverse=True) and lacks[0] > 250_000
    assert advised(line) == ["--page"] and "slow" in line.stderr


def test_what_a_person_minds_least_is_advised_first_and_disk_last() -> None:
    llama = INPUTS / "Llama-3.1-70B-Q4_K_M.inventory.yaml"
    words = ("--machine", "rtx4060-8gb-ddr5", "-c", "8k")
    line = CliRunner().invoke(main, ["solve", str(llama), *words])
    assert advised(line) == ["--quant .=q3_K", "--page"]
    for advice in advised(line):
        taken = CliRunner().invoke(main, ["solve", str(llama), *words, *advice.split()])
        assert taken.exit_code == 0, taken.output
    assert (
        "which fits now"
        in CliRunner().invoke(main, ["solve", str(llama), *words, "--quant", ".=q3_K"]).stderr
    )


def test_no_context_is_advised_that_the_model_was_not_trained_for() -> None:
    model = INPUTS / "gpt-oss-20b-MXFP4.inventory.yaml"
    line = solve(model, "--budget", "7000", "--ctx", "10000000")
    contexts = [int(text.split()[-1]) for text in advised(line) if "--ctx" in text]
    assert contexts and max(contexts) <= 131_072
    long = solve(model, "--budget", "20000", "--ctx", "200000")
    assert "context of 200000 is beyond the 131072 that the model was trained with" in long.stderr
    slots = solve(model, "--budget", "20000", "--ctx", "200000", "--workload", "seqs=2")
    assert slots.exit_code == 0 and "trained with" not in slots.stderr


def test_changes_that_only_help_together_are_named_together(model: Path) -> None:
    """Host memory is too small for experts and caches, the GPU for the caches that are pinned to it."""
    pins = ("--pin", "*.attention=gpu", "--pin", "*.experts=cpu")
    line = solve(model, "--budget", "CUDA0=1000,CPU=2600", "--ctx", "131072", *pins)
    assert advised(line) == ["--page and fewer pins"]
    paged = solve(model, "--budget", "CUDA0=1000,CPU=2600", "--ctx", "131072", "--page")
    assert paged.exit_code == 0, paged.output


def test_nothing_is_advised_that_was_not_tried(model: Path) -> None:
    line = solve(model, "--budget", "500", "--no-cpu", "--ctx", "65536")
    assert line.exit_code == 1 and advised(line) == ["allowing the CPU"]


@pytest.mark.parametrize(("k", "v"), [("q5_1", "q5_1"), ("q8_0", "q4_0"), ("iq4_nl", "iq4_nl")])
def test_kv_without_kernels_on_a_gpu_keeps_its_layers_off_it(k: str, v: str) -> None:
    work = Workload(type_k=k, type_v=v)
    made = plan(dense([8192] * 6), "8000", workload=work)
    assert not any(site.startswith("gpu") for site in sites(made, "attention").values())
    (note,) = [text for text in made.notes if "no attention on KV" in text]
    assert f"of type {' and '.join(dict.fromkeys((k, v)))} on CUDA0" in note and "q8_0" in note
    usual = plan(dense([8192] * 6), "8000", workload=Workload(type_k="q8_0", type_v="q8_0"))
    assert set(sites(usual, "attention").values()) == {"gpu:CUDA0"}
    assert not any("no attention" in text for text in usual.notes)


def test_a_build_that_was_timed_with_a_type_has_its_kernels() -> None:
    profile = machine()
    gpu, work = profile.device("CUDA0"), Workload(type_k="q5_1", type_v="q5_1")
    known = timed("FLASH_ATTN_EXT", "q5_1", (128, 32, 4), depth=4096)
    assert not attends(gpu, work) and attends(gpu, work, [known])
    assert not attends(gpu, work, [known.model_copy(update={"device": "CPU"})])
    assert not attends(gpu, work.model_copy(update={"type_v": "f16"}), [known])


@pytest.mark.parametrize("name", ["CUDA0", "ROCm0", "RPC0[10.0.0.2:50052]"])
def test_backends_of_the_same_kernels_have_the_same_limits(name: str) -> None:
    device = machine().device("CUDA0").model_copy(update={"name": name})
    assert attends(device, Workload(type_k="q4_0", type_v="q4_0"))
    assert not attends(device, Workload(type_k="q4_1", type_v="q4_1"))
    assert attends(device.model_copy(update={"name": "Vulkan0"}), Workload(type_k="q4_1", type_v="q4_1"))
