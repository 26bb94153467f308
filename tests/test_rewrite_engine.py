"""Rewritten models in the real engine: the same logits, whatever the order of tensors and experts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_logits import logits
from hand_plans import hand_plan

from planner.model.gguf.reader import ModelFile, read_model
from planner.model.units import Unit, units_of
from profiler.synth.synth import SynthSpec, write
from rewriter import experts
from rewriter.experts import OrderRefused
from rewriter.layout import Copy, Gather, Segment
from rewriter.rewrite import RewriteOptions, carry_out, decide, rewrite
from rewriter.stream import write_file

SPECS = {
    "llama": SynthSpec("llama", n_layers=2),
    "mixtral": SynthSpec("llama", n_layers=2, n_expert=8),
    "qwen3moe": SynthSpec("qwen3moe", n_layers=2, types={"experts": "q4_K"}),
    "qwen35moe": SynthSpec("qwen35moe"),
    "fused-gate-up": SynthSpec("qwen35moe", fused_gate_up=True),
    "deepseek2-groups": SynthSpec("deepseek2", n_layers=2, n_expert=16, n_group=4),
    "gpt-oss-biases": SynthSpec("gpt-oss", n_layers=2),
    "glm4moe-nextn": SynthSpec("glm4moe", n_layers=2, n_nextn=1),
    "gemma4-tied": SynthSpec("gemma4", n_layers=2, n_expert=8),
    "nemotron-latent": SynthSpec("nemotron_h_moe"),
    "tied": SynthSpec("qwen3moe", n_layers=2, tied=True),
}
# Sums over experts change their order: in float32 that is rounding, not another answer.
TOLERANCE = 1e-4


def shuffled(model: ModelFile, seed: int = 1) -> dict[int, tuple[int, ...]]:
    """A random legal order for every layer with experts: groups as blocks, experts inside them."""
    dice = random.Random(seed)
    groups = max(model.inventory.number("expert_group_count"), 1)
    orders = {}
    for unit in units_of(model.inventory).units:
        if unit.experts and unit.layer is not None:
            size = unit.experts // groups
            blocks = [dice.sample(range(n * size, (n + 1) * size), size) for n in range(groups)]
            dice.shuffle(blocks)
            orders[unit.layer] = tuple(expert for block in blocks for expert in block)
    return orders


@pytest.mark.parametrize("name", SPECS)
def test_logits_survive_a_rewrite(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "m.gguf", SPECS[name])
    model = read_model(source)
    same, moved, back = (tmp_path / f"{n}.gguf" for n in ("same", "moved", "back"))
    assert rewrite(model, hand_plan(model), same, RewriteOptions()).verified
    orders = shuffled(model)
    report = rewrite(model, hand_plan(model, experts=orders), moved, RewriteOptions())
    assert report.moved_layers == tuple(orders)
    before, identical, permuted = logits(source, same, moved)
    assert np.abs(before).max() > 0.1
    assert np.array_equal(before, identical)
    assert np.abs(before - permuted).max() <= TOLERANCE * np.abs(before).max()
    if orders:
        rewrite(read_model(moved), hand_plan(model), back, RewriteOptions())
        assert back.read_bytes() == same.read_bytes()


def test_experts_without_their_router_are_another_model(tmp_path: Path) -> None:
    """The comparison above can fail: leave the router's rows in place and the logits change."""
    source = write(tmp_path / "m.gguf", SPECS["qwen3moe"])
    model = read_model(source)
    plan = hand_plan(model, experts=shuffled(model))
    work = decide(model, plan, "half.gguf", RewriteOptions(), "plan")
    (file,) = work.layout.files
    whole = decide(model, hand_plan(model), "half.gguf", RewriteOptions(), "plan").layout.files[0]
    assert len(file.segments) > len(whole.segments)
    wrong = tmp_path / "half.gguf"
    segments = tuple(_without_router(model, s) for s in file.segments)
    write_file(replace(file, segments=segments), model.paths, wrong, lambda _: None)
    before, after = logits(source, wrong)
    assert np.abs(before - after).max() > 0.01 * np.abs(before).max()


def test_groups_that_lose_their_experts_are_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why such an order is refused: group-limited routing then chooses among other experts."""
    source = write(tmp_path / "m.gguf", SPECS["deepseek2-groups"])
    model = read_model(source)
    order = tuple(random.Random(4).sample(range(16), 16))
    plan = hand_plan(model, experts={1: order})
    with pytest.raises(OrderRefused):
        rewrite(model, plan, tmp_path / "o.gguf", RewriteOptions())
    monkeypatch.setattr(experts, "_refuse_split_groups", lambda *_: None)
    rewrite(model, plan, tmp_path / "o.gguf", RewriteOptions())
    before, after = logits(source, tmp_path / "o.gguf")
    assert np.abs(before - after).max() > 0.01 * np.abs(before).max()


def _without_router(model: ModelFile, segment: Segment) -> Segment:
    routers = {t.offset for t in model.inventory.tensors if t.name.endswith("ffn_gate_inp.weight")}
    if isinstance(segment, Gather) and segment.start in routers:
        return Copy(segment.shard, segment.start, segment.length)
    return segment


@pytest.mark.parametrize(
    "options",
    [
        RewriteOptions(shard_by_device=True),
        RewriteOptions(shard_bytes=1 << 20),
        RewriteOptions(alignment=4096),
        RewriteOptions(alignment=4096, shard_by_device=True),
    ],
    ids=["by-device", "by-size", "aligned", "aligned-shards"],
)
def test_other_files_of_the_same_model(tmp_path: Path, options: RewriteOptions) -> None:
    source = write(tmp_path / "m.gguf", SPECS["qwen3moe"])
    model = read_model(source)
    plan = hand_plan(model, experts=shuffled(model))
    report = rewrite(model, plan, tmp_path / "out.gguf", options)
    assert (len(report.files) > 1) == (options.shard_by_device or options.shard_bytes > 0)
    before, after = logits(source, report.files[0])
    assert np.abs(before - after).max() <= TOLERANCE * np.abs(before).max()


def test_shards_in(tmp_path: Path, split_model: Path) -> None:
    model = read_model(split_model)
    one = rewrite(model, hand_plan(model), tmp_path / "one.gguf", RewriteOptions())
    two = rewrite(model, hand_plan(model), tmp_path / "two.gguf", RewriteOptions(shard_by_device=True))
    assert (len(model.paths) > 2, len(one.files), len(two.files)) == (True, 1, 2)
    (tmp_path / "src").mkdir()
    here = [tmp_path / "src" / path.name for path in model.paths]
    for path, copy in zip(model.paths, here, strict=True):
        copy.write_bytes(path.read_bytes())
    before, merged, parted = logits(here[0], one.files[0], two.files[0])
    assert np.array_equal(before, merged) and np.array_equal(before, parted)


def test_stripes_and_caches_have_their_regions(tmp_path: Path, moe_model: Path) -> None:
    model = read_model(moe_model)

    def site(unit: Unit) -> str:
        if unit.experts:
            return ("stripe:CUDA0:3", "cache:CUDA0:250000", "cpu", "stripe:CUDA0:5")[unit.layer or 0]
        return "gpu:CUDA1" if unit.layer == 1 else "gpu:CUDA0"

    work = decide(model, hand_plan(model, site), "out.gguf", RewriteOptions(), "plan")
    assert [r.name for r in work.regions] == ["gpu:CUDA0", "gpu:CUDA1", "stripe:CUDA0", "cache:CUDA0", "cpu"]
    assert sum(len(r.tensors) for r in work.regions) == len(model.inventory.tensors)
    carry_out(model, hand_plan(model, site), work, tmp_path / "out.gguf", RewriteOptions())
