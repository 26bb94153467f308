"""Refusals that say what would fit, and KV types that a GPU has no kernels for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import dense, machine, moe, plan, sites, timed

from atsplan import main
from planner.machine.attention_kernels import attends
from planner.model.inventory import to_text
from planner.workload import Workload


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
    advice = re.findall(r"((?:--kv-type q8_0)?(?: ?--ctx (?P<n>[0-9]+))?) \(fits\)", line.stderr)
    assert advice, line.stderr
    asked = list(words)
    for text, n_ctx in advice:
        given = [w for i, w in enumerate(asked) if w != "--ctx" and asked[i - 1] != "--ctx"]
        ctx = n_ctx or asked[asked.index("--ctx") + 1]
        kind = ["--kv-type", "q8_0"] if "q8_0" in text else []
        assert solve(model, *given, *kind, "--ctx", ctx).exit_code == 0, text
        if n_ctx:
            more = solve(model, *given, *kind, "--ctx", str(int(n_ctx) + 256))
            assert more.exit_code == 1, text


def test_nothing_is_advised_that_was_not_tried(model: Path) -> None:
    line = solve(model, "--budget", "500", "--no-cpu", "--ctx", "65536")
    assert line.exit_code == 1 and "--ctx" not in line.stderr and "--kv-type" not in line.stderr
    assert "allowing the CPU" in line.stderr


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
