"""Where a vision projector computes: the GPU, the CPU where that has no room, or as it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sparse_model import write_sparse

from atsplan import main
from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.memory.projector import projector_compute_bytes
from planner.plan.plan import Plan, from_text

MIB = 2**20
_VISION = {
    "vision.embedding_length": 1152,
    "vision.feed_forward_length": 4304,
    "vision.image_size": 896,
    "vision.patch_size": 14,
}
EYES = inventory_of(
    "mmproj",
    "clip",
    dict(_VISION),
    [Row("v.blk.0.attn_q.weight", "f16", (1152, 402_000), 1152 * 402_000 * 2)],
)


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """883 MiB of projector, none of it on disk."""
    return write_sparse(tmp_path_factory.mktemp("vision") / "mmproj.gguf", EYES)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def solved(model: Path, path: Path, *words: str | Path) -> tuple[Plan, str]:
    found = run("solve", model, "--machine", "rtx4090-ddr5", *words, "-o", path)
    assert found.exit_code == 0, found.output
    return from_text(path.read_text(), str(path)), found.stderr


def reserved(plan: Plan, device: str) -> int:
    return sum(r.size_bytes for r in plan.constraints.reserves if r.device == device)


def test_on_the_gpu_where_it_fits(moe_model: Path, projector: Path, tmp_path: Path) -> None:
    plan, said = solved(moe_model, tmp_path / "p.yaml", "--budget", "1500", "--mmproj", projector)
    assert plan.projector is not None and plan.projector.device == "CUDA0" and "goes to the CPU" not in said
    assert reserved(plan, "CUDA0") == 1152 * 402_000 * 2 + projector_compute_bytes(EYES)
    line = run("export", tmp_path / "p.yaml", "--inventory", moe_model).stdout
    assert "--mmproj mmproj.gguf" in line and "--no-mmproj-offload" not in line
    moved = run("export", tmp_path / "p.yaml", "--device-map", "CUDA0=CPU").stdout
    assert "--no-mmproj-offload" in moved


@pytest.mark.parametrize("budget", ["600", "1000", "1300"])
def test_on_the_cpu_where_the_gpu_has_no_room(
    budget: str, moe_model: Path, projector: Path, tmp_path: Path
) -> None:
    path = tmp_path / "p.yaml"
    plan, said = solved(moe_model, path, "--budget", budget, "--mmproj", projector)
    assert plan.projector is not None and plan.projector.device == "CPU" and "goes to the CPU" in said
    assert reserved(plan, "CUDA0") == 0 and reserved(plan, "CPU") > 883 * MIB
    assert any("computes on the CPU" in note for note in plan.notes)
    host = next(use for use in plan.devices if use.name == "CPU")
    assert host.reserve_bytes == reserved(plan, "CPU")
    assert run("check", path, "--model", moe_model).exit_code == 0
    for form, wanted in (("llama-server", "--no-mmproj-offload"), ("env", "LLAMA_ARG_NO_MMPROJ_OFFLOAD=1")):
        assert wanted in run("export", path, "--format", form).stdout
    line = json.loads(run("export", path, "--format", "json", "--mmproj", "/other/eyes.gguf").stdout)
    assert "/other/eyes.gguf" in line["arguments"] and "--no-mmproj-offload" in line["arguments"]


def test_where_it_is_told_to(moe_model: Path, projector: Path, tmp_path: Path) -> None:
    words = ("--mmproj", projector, "--mmproj-device")
    plan, _ = solved(moe_model, tmp_path / "p.yaml", "--budget", "2000", *words, "cpu")
    assert plan.projector is not None and plan.projector.device == "CPU"
    refused = run("solve", moe_model, "--machine", "rtx4090-ddr5", "--budget", "1000", *words, "gpu")
    assert refused.exit_code == 1 and "--mmproj-device cpu" in refused.stderr
    bare = run("solve", moe_model, "--machine", "rtx4090-ddr5", "--mmproj-device", "cpu")
    assert bare.exit_code == 2 and "needs --mmproj" in bare.stderr


def test_neither_has_room(moe_model: Path, projector: Path) -> None:
    words = ("--budget", "CUDA0=1000,CPU=700", "--mmproj", projector)
    found = run("solve", moe_model, "--machine", "rtx4090-ddr5", *words)
    assert found.exit_code == 1 and "CUDA0 needs" in found.stderr  # the refusal of what was tried first


def test_a_machine_without_gpus(moe_model: Path, projector: Path, tmp_path: Path) -> None:
    found = run(
        "solve", moe_model, "--machine", "cpu-only-ddr5", "--mmproj", projector, "-o", tmp_path / "p.yaml"
    )
    assert found.exit_code == 0, found.output
    plan = from_text((tmp_path / "p.yaml").read_text(), "p")
    assert plan.projector is not None and plan.projector.device == "CPU"


def test_without_a_projector_nothing_is_said_of_its_place(moe_model: Path, tmp_path: Path) -> None:
    plan, _ = solved(moe_model, tmp_path / "p.yaml", "--budget", "1500")
    assert "projector:" not in (tmp_path / "p.yaml").read_text()
    assert any("no memory reserved for a vision projector" in note for note in plan.notes)
