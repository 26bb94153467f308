"""Routing traced from the engine, held to what PyTorch chose in the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_moe
from engines import ENVIRONMENT
from tiny_moe import EXPERTS, LAYERS, USED

from planner.errors import AtsplanError, EngineProblem, InputError
from planner.model.gguf.reader import read_model
from planner.model.routed_layers import NotMoe, moe_shape
from planner.plan.load_spec import LoadSpec
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.routing.expert_counts import Phase
from planner.routing.trace import Trace
from planner.workload import Workload
from profiler.routing_trace import Cost, Options, Progress, Prompt, trace
from profiler.synth.synth import SynthSpec, write
from runtime.engine.libllama import Engine
from runtime.session.session import Session

GEN = 12


def spec(ubatch: int = 512, device: str = "") -> LoadSpec:
    work = Workload(n_ctx=256, n_batch=max(ubatch, 64), n_ubatch=ubatch)
    return LoadSpec(
        (device,) if device else (), (1,) if device else (), 999 if device else 0, (), work, threads=1
    )


def prompts() -> list[Prompt]:
    return [Prompt(name, entry["text"]) for name, entry in tiny_moe.reference()["prompts"].items()]


def run(at: LoadSpec, engine: str | None = None, options: Options | None = None) -> tuple[Trace, Cost]:
    return trace(engine, tiny_moe.MODEL, at, prompts(), EXPERTS, options or Options(gen=GEN, cost=False))


def agreement(found: Trace) -> float:
    """Share of the prefill's choices that are PyTorch's, over all prompts and layers."""
    same = total = 0
    for source, entry in enumerate(tiny_moe.reference()["prompts"].values()):
        for layer in range(LAYERS):
            rows = (found.source == source) & ~found.decode & (found.layer == layer)
            mine = found.ids[rows].tolist()
            theirs: Sequence[Sequence[int]] = entry["experts"][layer][-len(mine) :]
            same += sum(len({*a} & {*b}) for a, b in zip(mine, theirs, strict=True))
            total += USED * len(mine)
    return same / total


def test_the_engine_computes_what_pytorch_does() -> None:
    with Session(Engine.find(), tiny_moe.MODEL, spec()) as session:
        for entry in tiny_moe.reference()["prompts"].values():
            logits = session.logits(session.tokenize(entry["text"]), last=True)[0]
            assert np.abs(logits - entry["logits"]).max() < 0.02
            assert logits.argmax() == np.argmax(entry["logits"])


def test_the_learned_router_knows_whom_to_ask() -> None:
    judged = tiny_moe.reference()["judged"]
    for kind in ("code", "docs"):
        assert judged[f"{kind}.bits"] + 1.5 < judged[f"{kind}.bits_shuffled_router"]


@pytest.mark.parametrize("ubatch", [512, 32])
def test_traced_choices_are_the_model_s(ubatch: int) -> None:
    found, _ = run(spec(ubatch))
    assert agreement(found) > 0.99
    for source, entry in enumerate(tiny_moe.reference()["prompts"].values()):
        n = len(entry["text"].encode())
        for layer in range(LAYERS):
            rows = (found.source == source) & (found.layer == layer)
            # The last layer routes only the one token whose logits are wanted.
            assert (rows & ~found.decode).sum() == (n if layer < LAYERS - 1 else 1)
            assert found.step[rows & found.decode].tolist() == list(range(GEN - 1))
        passes = found.step[(found.source == source) & ~found.decode]
        assert passes.max() == -(-n // ubatch) - 1


def test_the_trace_becomes_heat_of_both_phases() -> None:
    found, cost = run(spec(), options=Options(gen=GEN))
    heat = traces.heat_of(found)
    assert heat.sources == ("code", "docs") and heat.n_used == USED
    for part in heat.parts:
        text = tiny_moe.reference()["prompts"][part.source]["text"]
        assert part.tokens == (GEN - 1 if part.phase is Phase.DECODE else len(text.encode()))
        assert all(sum(row) == USED * part.tokens for la, row in part.counts.items() if la < LAYERS - 1)
    assert cost.watched_ns > 0 and cost.plain_ns > 0


def test_progress_is_told_token_by_token() -> None:
    seen: list[Progress] = []
    options = Options(gen=GEN, cost=False)
    trace(None, tiny_moe.MODEL, spec(), prompts(), EXPERTS, options, seen.append)
    assert [p.prompt for p in seen] == sorted(p.prompt for p in seen)
    assert {p.prompt for p in seen} == {0, 1}


def test_the_same_seed_writes_the_same_trace() -> None:
    options = Options(gen=GEN, seed=5, cost=False)
    first, second = run(spec(), options=options)[0], run(spec(), options=options)[0]
    assert traces.to_text(first) == traces.to_text(second)


def test_a_router_on_another_device_is_read_alike(
    vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and router on Vulkan (slow, in software), experts on the CPU; a prefix routes alike."""
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", ENVIRONMENT["GGML_VK_VISIBLE_DEVICES"])
    entry = tiny_moe.reference()["prompts"]["docs"]
    at = dataclasses.replace(spec(64, "Vulkan0"), overrides=((r"^blk\..*_exps\.weight$", "CPU"),))
    prompt = [Prompt("docs", entry["text"][:16])]
    options = Options(gen=2, cost=False)
    found, _ = trace(str(vulkan_engine), tiny_moe.MODEL, at, prompt, EXPERTS, options)
    for layer in range(LAYERS - 1):
        mine = found.ids[(found.layer == layer) & ~found.decode].tolist()
        pairs = zip(mine, entry["experts"][layer][:16], strict=True)
        assert sum(len({*a} & {*b}) for a, b in pairs) > 0.95 * 16 * USED


@pytest.mark.parametrize("architecture", ["deepseek2", "qwen35moe", "nemotron_h_moe"])
def test_each_layer_with_experts_is_seen(architecture: str, tmp_path: Path) -> None:
    """Groups, recurrent layers, dense layers in between: the layers that route are those with experts."""
    path = write(tmp_path / "m.gguf", SynthSpec(architecture))
    shape = moe_shape(read_model(path).inventory)
    options = Options(gen=2, cost=False)
    found, _ = trace(None, path, spec(), [Prompt("a", "the text of the thing")], shape.n_expert, options)
    assert tuple(np.unique(found.layer)) == shape.layers
    assert found.n_used == shape.n_used


def test_problems_of_the_child_are_one_line(dense_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        trace(None, tiny_moe.MODEL, spec(), [Prompt("a", "")], EXPERTS, Options(cost=False))
    with pytest.raises(InputError, match="context of 256"):
        trace(None, tiny_moe.MODEL, spec(), [Prompt("a", "x" * 300)], EXPERTS, Options(cost=False))
    with pytest.raises(EngineProblem, match="ffn_moe_topk"):
        trace(None, dense_model, spec(), [Prompt("a", "hello")], EXPERTS, Options(gen=2, cost=False))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_moe.MODEL.read_bytes()[:200_000])
    with pytest.raises(AtsplanError) as caught:
        trace(None, broken, spec(), prompts(), EXPERTS)
    assert "\n" not in str(caught.value)


def test_a_child_that_dies_at_once_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EngineProblem, match="ended with status 1"):
        trace(None, tiny_moe.MODEL, spec(), [Prompt("a", "x" * 10**6)], EXPERTS)


def test_the_shape_of_the_model(dense_model: Path) -> None:
    shape = moe_shape(read_model(tiny_moe.MODEL).inventory)
    assert (shape.n_expert, shape.n_used, shape.layers, shape.n_group) == (EXPERTS, USED, (0, 1, 2, 3), 1)
    assert set(shape.expert_bytes.values()) == {3 * 128 * 64 * 2}
    with pytest.raises(NotMoe):
        moe_shape(read_model(dense_model).inventory)


def test_heat_of_a_traced_model_is_canonical() -> None:
    heat = dataclasses.replace(traces.heat_of(run(spec())[0]), model="sha256:x")
    assert heats.from_text(heats.to_text(heat), "x") == heat
