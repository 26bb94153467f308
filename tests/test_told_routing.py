"""Generated models that route as told: every figure asked for, measured on the real engine's routing.

The measuring here shares no code with the generator's own: plain loops over the traced experts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler.routed import fit, model, trace_figures, traced
from profiler.routed.codes import Habits, UnfitRouting, chosen_by_code, frequencies
from profiler.routed.presets import PRESETS
from profiler.routed.stream import FIRST_ID, codes_of, ids_of

NEAR = 0.03
TOKENS = 6144
SEED = 2  # of the stream: another than the habits were found with
Layers = list[list[list[int]]]  # layer, token, experts: best first


def engine_trace(name: str, folder: Path, tokens: int = TOKENS) -> tuple[Layers, list[int]]:
    """What the engine chose in the small model of a preset, and the topic of each token."""
    preset = PRESETS[name]
    path = model.write(folder / f"{name}.gguf", preset.spec("small"), preset.habits)
    habits = model.habits_of(path)  # from the file: what a benchmark has
    ids = ids_of(habits, tokens, SEED)
    chosen = traced.trace(path, ids, habits.n_expert)
    assert chosen.shape[1:] == (tokens, habits.n_used)
    return chosen.tolist(), habits.topic_of(ids - FIRST_ID).tolist()


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def covered(seen: Sequence[list[int]], judged: Sequence[list[int]], slots: int) -> float:
    hot = {expert for expert, _ in Counter(e for ids in seen for e in ids).most_common(slots)}
    return mean(expert in hot for ids in judged for expert in ids)


def lru(tokens: Sequence[list[int]], slots: int) -> float:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for index, ids in enumerate(tokens):
        for expert in ids:
            if index >= len(tokens) // 2:
                hits.append(expert in kept)
            kept[expert] = None
            kept.move_to_end(expert)
            if len(kept) > slots:
                kept.popitem(last=False)
    return mean(hits)


def between_topics(tokens: Sequence[list[int]], topics: Sequence[int], slots: int) -> float:
    parts = [[ids for ids, t in zip(tokens, topics, strict=True) if t == one] for one in sorted({*topics})]
    return mean(covered(a, b, slots) for a in parts for b in parts if a is not b)


def figure(name: str, layers: Layers, topics: list[int], n_expert: int) -> float:
    """One figure by its name, such as `lru@32`, mean over layers."""
    kind, _, size = name.partition("@")
    slots, half, quarter = int(size or 0), len(topics) // 2, len(topics) // 4
    if kind == "static":
        return mean(covered(tokens[:half], tokens[half:], slots) for tokens in layers)
    if kind == "late":
        return mean(covered(tokens[:quarter], tokens[-quarter:], slots) for tokens in layers)
    if kind == "lru":
        return mean(lru(tokens, slots) for tokens in layers)
    if kind == "other_topic":
        return mean(between_topics(tokens, topics, slots) for tokens in layers)
    if kind == "consecutive":
        pairs = ((a, b) for tokens in layers for a, b in pairwise(tokens))
        return mean(len({*a} & {*b}) / len(b) for a, b in pairs)
    batches = (tokens[at : at + 512] for tokens in layers for at in range(0, len(tokens) - 511, 512))
    return mean(len({e for ids in batch for e in ids}) / n_expert for batch in batches)


@pytest.mark.parametrize("name", PRESETS)
def test_each_figure_is_as_asked_in_the_engine(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    layers, topics = engine_trace(name, tmp_path)
    asked = preset.asked.flat()
    found = {key: round(figure(key, layers, topics, preset.habits.n_expert), 3) for key in asked}
    assert {key: found[key] for key in asked if abs(found[key] - asked[key]) > NEAR} == {}, found
    assert len(asked) >= 3


@pytest.mark.parametrize("architecture", model.ARCHITECTURES)
@pytest.mark.parametrize("experts", ["q4_0", "mxfp4", "q8_0"])
def test_the_engine_routes_by_the_token_alone(architecture: str, experts: str, tmp_path: Path) -> None:
    """Shared experts, recurrent mixers, biases and windows leave the code as it is."""
    preset = PRESETS["gpt-oss"]
    spec = replace(preset.spec("small"), arch=architecture, types={"experts": experts})
    path = model.write(tmp_path / "m.gguf", spec, preset.habits)
    ids = ids_of(preset.habits, 300, SEED)
    found = traced.trace(path, ids, preset.habits.n_expert)
    wanted = chosen_by_code(preset.habits, len(found))[:, ids - FIRST_ID]
    assert (np.sort(found) == np.sort(wanted)).mean() > 0.999


@pytest.mark.parametrize("type_", ["q4_K", "q6_K", "f16"])
def test_wide_blocks_leave_the_code_as_it_is_too(type_: str, tmp_path: Path) -> None:
    """Types of 256-element blocks need rows of that width."""
    preset = PRESETS["gpt-oss"]
    wide: dict[str, Any] = {
        "n_embd": 256,
        "n_ff_exp": 256,
        "n_layers": 3,
        "types": {"experts": type_, "attention": type_},
    }
    spec = replace(preset.spec("small"), arch="qwen3moe", **wide)
    path = model.write(tmp_path / "m.gguf", spec, preset.habits)
    ids = ids_of(preset.habits, 300, SEED)
    found = traced.trace(path, ids, preset.habits.n_expert)
    wanted = chosen_by_code(preset.habits, len(found))[:, ids - FIRST_ID]
    assert (np.sort(found) == np.sort(wanted)).mean() > 0.999


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def test_the_same_habits_give_the_same_bytes(tmp_path: Path) -> None:
    preset = PRESETS["strong"]
    spec = preset.spec("small")
    files = [model.write(tmp_path / f"{n}.gguf", spec, preset.habits) for n in range(2)]
    other = model.write(tmp_path / "other.gguf", spec, replace(preset.habits, seed=2))
    assert digest(files[0]) == digest(files[1]) != digest(other)
    assert files[0].stat().st_size < 16e6
    first, again = (ids_of(preset.habits, 500, 7) for _ in range(2))
    assert first.tolist() == again.tolist() != ids_of(preset.habits, 500, 8).tolist()


def test_rerouting_in_place_is_writing_anew(tmp_path: Path) -> None:
    strong, moderate = PRESETS["strong"], PRESETS["moderate"]
    changed = model.write(tmp_path / "a.gguf", strong.spec("small"), strong.habits)
    model.reroute(changed, moderate.habits)
    anew = model.write(tmp_path / "b.gguf", moderate.spec("small"), moderate.habits)
    assert digest(changed) == digest(anew)
    assert model.habits_of(changed) == moderate.habits
    with pytest.raises(UnfitRouting, match="other numbers of experts"):
        model.reroute(changed, PRESETS["olmoe"].habits)
    assert digest(changed) == digest(anew)


def test_text_of_a_stream_is_read_as_its_tokens(tmp_path: Path) -> None:
    from profiler.routed.stream import text_of
    from runtime.engine.libllama import Engine
    from runtime.session.session import Session

    preset = PRESETS["gpt-oss"]
    path = model.write(tmp_path / "m.gguf", preset.spec("small"), preset.habits)
    ids = ids_of(preset.habits, 200)
    with Session(Engine.find(), path, traced.load_spec(1)) as session:
        assert session.tokenize(text_of(ids)) == ids.tolist()


def test_hot_experts_come_first_where_asked() -> None:
    habits = PRESETS["strong"].habits
    chosen = chosen_by_code(habits, 2)[:, codes_of(habits, 4096)]
    for layer in chosen:
        prefix = np.mean(layer < 64)
        assert abs(prefix - 0.77) < NEAR
    shuffled = chosen_by_code(replace(habits, hot_first=False), 1)[:, codes_of(habits, 4096)]
    assert np.mean(shuffled < 64) < 0.65


def test_topics_and_drift_are_as_asked() -> None:
    """The sharper the topics, the less a profile of one is worth in another; drift makes profiles age."""
    base = Habits(64, 8, ((32, 0.6),), n_passages=16, n_tokens=32, passage=1.0, topic=0.2)
    asked = trace_figures.Figures(static={32: 0.6}, other_topic={32: 0.45})
    found = fit.fit(base, asked, ("topic",), 16)
    assert found.topic > 2 * base.topic
    stream = codes_of(found, TOKENS, SEED)
    layers = chosen_by_code(found, 3)[:, stream].tolist()
    topics = found.topic_of(stream).tolist()
    assert abs(figure("other_topic@32", layers, topics, 64) - 0.45) <= NEAR
    assert abs(figure("static@32", layers, topics, 64) - 0.60) <= NEAR


def test_the_fit_finds_habits_from_figures_or_says_which_it_cannot() -> None:
    start = Habits(32, 4, passage=0.1, n_passages=32, n_tokens=32)
    asked = trace_figures.Figures(static={8: 0.40}, consecutive=0.35)
    found = fit.fit(start, asked, ("passage",), 14)
    assert fit.fit(start, asked, ("passage",), 14) == found
    stream = codes_of(found, TOKENS, SEED)
    layers = chosen_by_code(found, 2)[:, stream].tolist()
    assert abs(figure("consecutive", layers, [0] * TOKENS, 32) - 0.35) <= NEAR
    with pytest.raises(UnfitRouting, match=r"consecutive 0\.90"):
        fit.fit(start, replace(asked, consecutive=0.9), ("passage",), 8)


@pytest.mark.parametrize(
    ("static", "why"),
    [(((8, 0.2), (16, 0.6)), "colder"), (((4, 0.99),), "every token"), (((40, 0.5),), "32 experts")],
)
def test_impossible_coverage_is_refused(static: tuple[tuple[int, float], ...], why: str) -> None:
    with pytest.raises(UnfitRouting, match=why):
        frequencies(Habits(32, 4, static))


def test_sizes_without_room_for_codes_are_refused(tmp_path: Path) -> None:
    preset = PRESETS["gpt-oss"]
    spec = preset.spec("small")
    for change, why in (
        ({"n_embd": 64}, "above 64"),
        ({"n_vocab": 1000}, "tokens are needed"),
        ({"arch": "gemma4"}, "routed models are made of"),
        ({"tied": True}, "tied"),
    ):
        with pytest.raises(UnfitRouting, match=why):
            model.write(tmp_path / "m.gguf", replace(spec, **change), preset.habits)
    assert not list(tmp_path.iterdir())


def test_other_files_say_nothing_of_habits(moe_model: Path) -> None:
    with pytest.raises(UnfitRouting, match=model.KEY):
        model.habits_of(moe_model)
