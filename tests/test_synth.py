"""Generated models: every architecture loads and decodes, bytes depend on the specification alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decode_models import TEXT, Answer, decode_all

from profiler.synth.bytes import TYPES, Source, raise_first, size_bytes, type_number
from profiler.synth.routing import coverage, skew_for
from profiler.synth.synth import ARCHITECTURES, SynthProblem, SynthSpec, write

# Beside every architecture as it is: its variants, by a name of the test's own.
VARIANTS = {
    "mixtral": SynthSpec("llama", n_expert=8),
    "gemma4 shared kv": SynthSpec("gemma4", n_layers=6),
    "gemma4 experts": SynthSpec("gemma4", n_expert=8),
    "granite experts": SynthSpec("granitehybrid", n_expert=8),
    "fused": SynthSpec("qwen35moe", fused_gate_up=True),
    "nextn gdn": SynthSpec("qwen35moe", n_nextn=1),
    "nextn glm": SynthSpec("glm4moe", n_nextn=1),
    "nextn mla": SynthSpec("deepseek2", n_nextn=1),
    "tied": SynthSpec("qwen3", tied=True),
    "mxfp4": SynthSpec("gpt-oss", types={"experts": "mxfp4"}),
    "aligned": SynthSpec("llama", n_layers=2, alignment=4096),
    "split": SynthSpec("qwen3moe", n_layers=2, shard_tensors=10),
    **{type_: SynthSpec("qwen3moe", n_layers=2, type=type_, skew=1.0) for type_ in TYPES},
}
MODELS = {**{arch: SynthSpec(arch) for arch in ARCHITECTURES}, **VARIANTS}


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What the engine made of each model, all of them in one child process."""
    folder = tmp_path_factory.mktemp("synth")
    paths = [write(folder / f"{name}.gguf", spec) for name, spec in MODELS.items()]
    return dict(zip(MODELS, decode_all([{"model": str(path)} for path in paths]), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_loads_and_decodes(decoded: dict[str, Answer], name: str) -> None:
    result = decoded[name]
    assert "error" not in result, result["error"]
    assert result["text"] == TEXT
    assert len(result["tokens"]) < len(TEXT)  # merges work
    logits = np.array(result["logits"])
    assert logits.shape == (len(result["tokens"]), 512)
    assert 0.3 < logits.std() < 3  # finite, and far from saturation
    assert len(result["made"]) == 4


def test_the_same_specification_gives_the_same_bytes(tmp_path: Path) -> None:
    spec = SynthSpec("qwen35moe", n_layers=4, type="q4_K", skew=0.5)
    first = write(tmp_path / "first.gguf", spec).read_bytes()
    assert first == write(tmp_path / "second.gguf", spec).read_bytes()
    other = SynthSpec("qwen35moe", n_layers=4, type="q4_K", skew=0.5, seed=2)
    assert first != write(tmp_path / "third.gguf", other).read_bytes()


def test_a_tensor_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    from gguf import GGUFReader

    def payload(spec: SynthSpec) -> bytes:
        reader = GGUFReader(write(tmp_path / "model.gguf", spec))
        return next(bytes(t.data) for t in reader.tensors if t.name == "blk.1.attn_q.weight")

    assert payload(SynthSpec("qwen3", n_layers=2)) == payload(SynthSpec("qwen3", n_layers=3, n_vocab=600))


@pytest.mark.parametrize("type_", TYPES)
def test_blocks_have_the_asked_deviation_and_no_mean(type_: str) -> None:
    from gguf import GGMLQuantizationType, quants

    source, shape, deviation = Source(3), (512, 4096), 1 / 512**0.5
    rows = source.matrix("weight", type_, shape, deviation).copy()
    assert rows.nbytes == size_bytes(type_, shape)
    raise_first(rows, type_, deviation)
    values = quants.dequantize(rows, GGMLQuantizationType(type_number(type_))) / deviation
    wide = 0.4 if type_ == "mxfp4" else 0.02  # its scale is a power of two
    assert values.std() == pytest.approx(1, abs=wide)
    assert abs(values.mean()) < 0.12
    assert values[:, 0].std() < 0.01  # the same in every row
    assert 1.4 < values[:, 0].mean() < 2.2


def test_long_tensors_repeat_a_pool_but_start_elsewhere() -> None:
    source, shape = Source(1), (2048, 8192, 4)
    first, second = (np.concatenate(list(source.chunks(name, "q8_0", shape, 0.02))) for name in "ab")
    assert first.nbytes == second.nbytes == size_bytes("q8_0", shape)
    assert not np.array_equal(first[:4096], second[:4096])


def test_skew_and_coverage_agree() -> None:
    for n_expert, n_used in ((8, 2), (128, 8)):
        assert coverage(0.0, n_expert, n_used) < 0.57
        skew = skew_for(0.74, n_expert, n_used)
        assert coverage(skew, n_expert, n_used) == pytest.approx(0.74, abs=0.01)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SynthSpec("llamma"), "arch"),
        (SynthSpec("llama", type="q3_K"), "type"),
        (SynthSpec("llama", types={"expert": "q8_0"}), "role"),
        (SynthSpec("llama", n_nextn=1), "n_nextn"),
        (SynthSpec("qwen3moe", fused_gate_up=True), "fused_gate_up"),
        (SynthSpec("qwen3moe", exp_probs_b=True), "exp_probs_b"),
        (SynthSpec("llama", n_vocab=100), "n_vocab"),
    ],
)
def test_what_the_engine_would_refuse_is_refused(tmp_path: Path, spec: SynthSpec, field: str) -> None:
    with pytest.raises(SynthProblem) as caught:
        write(tmp_path / "model.gguf", spec)
    assert caught.value.field == field
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write(tmp_path / "missing" / "model.gguf", SynthSpec("llama"))
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write(tmp_path / "taken", SynthSpec("llama"))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
