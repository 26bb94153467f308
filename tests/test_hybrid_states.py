"""Saved states, shifted contexts, control vectors and adapters: experts in slots change nothing of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines import python
from gguf import GGUFReader, GGUFWriter

from profiler.synth.synth import SynthSpec, write

EXACT = 2e-4


def adapter(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A low-rank adapter of every expert of the first block."""
    path = folder / "adapter.gguf"
    dice = np.random.default_rng(3)
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    for name, (n_in, n_out, n) in shapes.items():
        for part, shape in (("a", (n, 2, n_in)), ("b", (n, n_out, 2))):
            values = dice.normal(0, 0.2, shape).astype(np.float32)
            writer.add_tensor(f"{name}.lora_{part}", values)
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        finish()
    writer.close()
    return path


def test_the_same_logits_after_each(tmp_path: Path) -> None:
    model = write(tmp_path / "moe.gguf", SynthSpec("qwen3moe", type="f32", skew=1.0))
    tensors = GGUFReader(model).tensors
    shapes = {
        t.name: tuple(map(int, t.shape)) for t in tensors if t.name.startswith("blk.0.") and "exps" in t.name
    }
    lora = adapter(tmp_path, shapes)
    targets = [tmp_path / f"{way}.npz" for way in ("plain", "hybrid")]
    done = python("tests/hybrid_states.py", model, lora, *targets)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, hybrid = map(np.load, targets)
    assert plain.files == hybrid.files and len(plain.files) == 5
    usual = plain["as usual"]
    for part in plain.files:
        apart = ((plain[part] - hybrid[part]) ** 2).mean() ** 0.5 / plain[part].std()
        assert apart < EXACT, part
        # Each part did something, a loaded state excepted: that must not.
        same = np.allclose(plain[part], usual, atol=1e-4)
        assert same == (part in ("as usual", "a state was loaded")), part
    assert hybrid["a state was loaded"] == pytest.approx(hybrid["as usual"], abs=1e-4)
