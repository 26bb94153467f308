"""The trained model of 64 experts: PyTorch's choices in the engine, routing that is local on real text."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.model.gguf.reader import read_model
from planner.model.routed_layers import moe_shape
from planner.plan.load_spec import LoadSpec
from planner.routing.trace import Trace
from planner.workload import Workload
from profiler.routing_trace import Options, Prompt, trace
from runtime.engine.libllama import Engine
from runtime.session.session import Session

MODEL = Path(__file__).parent / "data" / "tiny-moe-64.gguf"
EXPERTS, USED, LAYERS = 64, 8, 4
PIECE = 240  # bytes of a prompt; the model was trained on 192 and has room for 256


def reference() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(MODEL.with_suffix(".json").read_text())
    return data


def spec() -> LoadSpec:
    work = Workload(n_ctx=256, n_batch=256, n_ubatch=256)
    return LoadSpec((), (), 0, (), work, threads=1)


def routed(prompts: Sequence[Prompt]) -> Trace:
    return trace(None, MODEL, spec(), prompts, EXPERTS, Options(gen=1, cost=False))[0]


def test_it_is_small_and_has_the_experts_it_is_named_after() -> None:
    shape = moe_shape(read_model(MODEL).inventory)
    assert (shape.n_expert, shape.n_used, len(shape.layers)) == (EXPERTS, USED, LAYERS)
    assert MODEL.stat().st_size < 10e6


def test_the_engine_computes_what_pytorch_does() -> None:
    with Session(Engine.find(), MODEL, spec()) as session:
        for entry in reference()["prompts"].values():
            logits = session.logits(session.tokenize(entry["text"]), last=True)[0]
            assert np.abs(logits - entry["logits"]).max() < 0.02
            assert logits.argmax() == np.argmax(entry["logits"])


def test_traced_choices_are_pytorch_s() -> None:
    entries = reference()["prompts"]
    found = routed([Prompt(name, entry["text"]) for name, entry in entries.items()])
    same = total = 0
    for source, entry in enumerate(entries.values()):
        for layer in range(LAYERS - 1):
            rows = (found.source == source) & ~found.decode & (found.layer == layer)
            for mine, theirs in zip(found.ids[rows].tolist(), entry["experts"][layer], strict=True):
                same += len({*mine} & {*theirs})
                total += USED
    assert same / total > 0.99


def test_the_learned_router_knows_whom_to_ask() -> None:
    judged = reference()["judged"]
    for kind in ("code", "docs"):
        assert judged[f"{kind}.bits"] + 1.0 < judged[f"{kind}.bits_shuffled_router"]


@pytest.fixture(scope="module")
def layers() -> list[list[list[int]]]:
    """Experts by layer and token on text the training never saw: this project's prose, then its code."""
    text = MODEL.with_suffix(".txt").read_text(encoding="ascii")
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    found = routed([Prompt(str(index), piece) for index, piece in enumerate(pieces)])
    picked = [found.ids[(found.layer == layer) & ~found.decode].tolist() for layer in range(LAYERS - 1)]
    assert {len(tokens) for tokens in picked} == {len(text)}
    return picked


def lru(tokens: Sequence[Sequence[int]], slots: int) -> float:
    """Hits in the second half, a token's experts looked up together."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for index, ids in enumerate(tokens):
        if index >= len(tokens) // 2:
            hits += len(kept.keys() & set(ids))
        for expert in ids:
            kept[expert] = None
            kept.move_to_end(expert)
        while len(kept) > slots:
            kept.popitem(last=False)
    return hits / (len(tokens) - len(tokens) // 2) / USED


def static(tokens: Sequence[Sequence[int]], slots: int) -> float:
    """Choices of the second half on the hottest experts of the first."""
    half = len(tokens) // 2
    hot = {expert for expert, _ in Counter(e for ids in tokens[:half] for e in ids).most_common(slots)}
    return sum(len(hot & set(ids)) for ids in tokens[half:]) / (len(tokens) - half) / USED


def neighbours(tokens: Sequence[Sequence[int]]) -> float:
    """Share of a token's experts that the previous token had."""
    return sum(len({*a} & {*b}) for a, b in pairwise(tokens)) / (len(tokens) - 1) / USED


def test_neighbours_share_experts_above_chance_and_more_so_in_depth(layers: list[list[list[int]]]) -> None:
    shares = [neighbours(tokens) for tokens in layers]
    assert min(shares) > 1.4 * USED / EXPERTS
    assert shares == sorted(shares)


@pytest.mark.parametrize(("slots", "margin"), [(8, 0.03), (12, 0.02)])
def test_beyond_the_first_layer_a_small_lru_beats_the_hottest_experts(
    layers: list[list[list[int]]], slots: int, margin: float
) -> None:
    """The first layer sees little but the byte itself, and there counts win, as in OLMoE's first."""
    deeper = layers[1:]
    moving = sum(lru(tokens, slots) for tokens in deeper) / len(deeper)
    still = sum(static(tokens, slots) for tokens in deeper) / len(deeper)
    assert moving > still + margin
    assert moving > 1.4 * slots / EXPERTS
    assert lru(layers[0], slots) < static(layers[0], slots)
