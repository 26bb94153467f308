"""What `solve` must refuse or say when files beside the model, pins or types are not what they seem."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sparse_model import write_sparse

from atsplan import main
from planner.tables import Row, inventory_of
from profiler.synth import SynthSpec, write

_VISION = {
    "vision.embedding_length": 1152,
    "vision.feed_forward_length": 4304,
    "vision.image_size": 896,
    "vision.patch_size": 14,
}


def solve(model: Path, *arguments: str | Path) -> Result:
    given = ["solve", str(model), "--machine", "rtx4090-ddr5", *map(str, arguments)]
    return CliRunner().invoke(main, given)


def refused(answer: Result, code: int) -> str:
    assert answer.exit_code == code, answer.output
    assert answer.stdout == ""
    (line,) = answer.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """883 MiB of projector, none of it on disk."""
    rows = [Row("v.blk.0.attn_q.weight", "f16", (1152, 402_000), 1152 * 402_000 * 2)]
    path = tmp_path_factory.mktemp("vision") / "mmproj.gguf"
    return write_sparse(path, inventory_of("vision", "clip", dict(_VISION), rows))


def test_a_file_beside_the_model_must_be_what_its_option_asks_for(
    dense_model: Path, moe_model: Path, projector: Path
) -> None:
    given = ("--budget", "2000")
    line = refused(solve(moe_model, *given, "--mmproj", dense_model), 2)
    assert "--mmproj synth-llama: is a llama model; a vision projector (clip) is needed" in line
    assert "a language model is needed" in refused(solve(moe_model, *given, "--draft", projector), 2)
    answer = CliRunner().invoke(main, ["inventory", str(moe_model), "--mmproj", str(dense_model)])
    assert "a vision projector (clip) is needed" in refused(answer, 2)


def test_speculation_needs_the_block_that_speculates(dense_model: Path, tmp_path: Path) -> None:
    line = refused(solve(dense_model, "--budget", "2000", "--mtp", "-o", tmp_path / "plan.yaml"), 2)
    assert "--mtp" in line and "holds no NextN/MTP block" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pin", ["per_layer_token_embd.weight=gpu", "lookup=CUDA0", "token_embd*=gpu:CUDA0"])
def test_tables_that_are_looked_up_cannot_be_pinned_to_a_gpu(tmp_path: Path, pin: str) -> None:
    model = write(tmp_path / "m.gguf", SynthSpec("gemma3n"))
    line = refused(solve(model, "--budget", "2000", "--pin", pin), 2)
    assert f"--pin {pin}: " in line
    assert "stays in host memory" in line
    assert solve(model, "--budget", "2000", "--pin", pin.partition("=")[0] + "=cpu").exit_code == 0
