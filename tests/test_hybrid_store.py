"""Where the experts' bytes are kept, and what else lands in their buffer: the same logits all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hybrid_runs import Run, distance, run_all

from profiler.synth.synth import SynthSpec, write

EXACT = 2e-4
EVERYTHING = "ffn_.*_exps"  # biases too, as a stock command line would say it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts with biases."""
    return write(tmp_path_factory.mktemp("store") / "oss.gguf", SynthSpec("gpt-oss", type="f32", skew=1.0))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experts of a block in different files."""
    spec = SynthSpec("qwen3moe", type="f32", n_layers=2, shard_tensors=5)
    return write(tmp_path_factory.mktemp("split") / "moe.gguf", spec)


def test_every_kind_of_memory(model: Path, split: Path, tmp_path: Path) -> None:
    for path in (model, split):
        plain = Run(path)
        kinds = [
            plain.on(slots=3, memory="pinned"),
            plain.on(slots=3, memory="plain"),
            replace(plain.on(slots=3, memory="mapped"), mmap=True),
            replace(plain.on(slots=3, memory="pinned"), mmap=True),
        ]
        kinds += [replace(run, pattern=EVERYTHING) for run in kinds]
        ran = run_all([plain, *kinds], tmp_path)
        for run, answer in zip(kinds, ran[1:], strict=True):
            assert distance(ran[0].logits, answer.logits) < EXACT, run
            assert answer.report is not None
            assert answer.report.host_bytes == 0  # freed with the model
            assert len(answer.report.freed) == len({block.block for block in answer.report.freed})


def test_warm_up_is_no_choice_of_the_router(model: Path, tmp_path: Path) -> None:
    run = Run(model).on(slots=3, guests=1)
    cold, warm = run_all([run, replace(run, warm=True)], tmp_path)
    assert distance(cold.logits, warm.logits) < EXACT
    assert cold.report is not None and warm.report is not None
    for before, after in zip(cold.report.freed, warm.report.freed, strict=True):
        assert after.all_at_once > 0 == before.all_at_once
        assert (after.chosen, after.resident) == (before.chosen, before.resident)


def test_residents_change_between_tokens(tmp_path: Path) -> None:
    model = write(tmp_path / "moe.gguf", SynthSpec("qwen3moe", type="f32", skew=1.0))
    plain = Run(model)
    changing = replace(plain.on(slots=3, stage=0), changes=((0, (7, 2, 5)), (2, (1, 0, 6))))
    ran = run_all([plain, changing], tmp_path)
    assert distance(ran[0].logits, ran[1].logits) < EXACT
    assert ran[1].report is not None
    resident = {block.block: set(block.resident) for block in ran[1].report.freed}
    assert resident == {0: {7, 2, 5}, 1: {0, 1, 2}, 2: {1, 0, 6}, 3: {0, 1, 2}}
