"""Layouts of real models, from their tensor tables: sparse files as large as the models, nothing copied."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hand_plans import hand_plan
from sparse_model import write_sparse

from planner.model.gguf.reader import ModelFile, read_model
from planner.model.inventory import from_text
from planner.model.units import units_of
from rewriter.layout import Copy, Gather
from rewriter.rewrite import RewriteOptions, decide

INPUTS = Path(__file__).resolve().parent.parent / "plans" / "inputs"
NAMES = (
    "DeepSeek-V3.1-Terminus-q4_K",
    "Kimi-K2-Thinking-q4_K",
    "Mixtral-8x7B-Q4_K_M",
    "Nemotron-3-Nano-30B-A3B-Q4_K_M",
    "Qwen3-Next-80B-A3B-Q4_K_M",
    "gemma-4-26B-A4B-Q4_K_M",
    "gpt-oss-120b-MXFP4",
)
# What has an expert axis, written down apart from the rules of the rewriter.
MOVES = re.compile(
    r"blk\.\d+\.(ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)|ffn_gate_inp\.(weight|bias)|exp_probs_b.*)"
)


def orders(model: ModelFile) -> dict[int, tuple[int, ...]]:
    """Experts of every layer in another order, reversed inside their groups."""
    groups = max(model.inventory.number("expert_group_count"), 1)
    made = {}
    for unit in units_of(model.inventory).units:
        if unit.experts and unit.layer is not None:
            size = unit.experts // groups
            blocks = [range((n + 1) * size - 1, n * size - 1, -1) for n in range(groups)]
            random.Random(unit.layer).shuffle(blocks)
            made[unit.layer] = tuple(expert for block in blocks for expert in block)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_real_model_can_be_laid_out(tmp_path: Path, name: str) -> None:
    path = INPUTS / f"{name}.inventory.yaml"
    model = read_model(write_sparse(tmp_path / "m.gguf", from_text(path.read_text(), str(path))))
    wanted = orders(model)
    assert wanted
    (file,) = decide(model, hand_plan(model, experts=wanted), "o.gguf", RewriteOptions(), "p").layout.files
    moved = {segment.start for segment in file.segments if isinstance(segment, Gather)}
    expected = {t.offset for t in model.inventory.tensors if MOVES.fullmatch(t.name)}
    assert moved == expected
    payload = sum(s.length for s in file.segments if isinstance(s, (Copy, Gather)))
    assert payload >= model.inventory.size_bytes
    assert sorted(file.tensors) == sorted(t.name for t in model.inventory.tensors)
