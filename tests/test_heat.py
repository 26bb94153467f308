"""The heat record: canonical text, merging, and ids mapped back through a permutation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import FieldProblem
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import Heat, Part, Phase, WrongModel

N = 6

rows = st.lists(st.integers(0, 10**9), min_size=N, max_size=N).map(tuple)
parts = st.builds(
    Part,
    source=st.text(min_size=1, max_size=8),
    phase=st.sampled_from(Phase),
    tokens=st.integers(0, 10**9),
    counts=st.dictionaries(st.integers(0, 90), rows, max_size=4),
)
some_heat = st.builds(
    heats.make, st.sampled_from(["", "sha256:ab"]), st.just(N), st.integers(0, 3), st.lists(parts, max_size=4)
)


def one(source: str, counts: dict[int, tuple[int, ...]], tokens: int = 10, model: str = "") -> Heat:
    return heats.make(
        model, len(next(iter(counts.values()))), 1, [Part(source, Phase.DECODE, tokens, counts)]
    )


@settings(max_examples=150, derandomize=True, deadline=None)
@given(some_heat)
def test_text_is_canonical_and_says_everything(heat: Heat) -> None:
    text = heats.to_text(heat)
    assert heats.from_text(text, "x") == heat
    assert heats.to_text(heats.from_text(text, "x")) == text


@settings(max_examples=60, derandomize=True, deadline=None)
@given(some_heat, some_heat)
def test_merge_adds_every_count_and_ignores_the_order(a: Heat, b: Heat) -> None:
    if a.model and b.model and a.model != b.model:
        return
    merged = heats.merge([a, b])
    want = {la: list(row) for la, row in a.total().items()}
    for layer, row in b.total().items():
        want[layer] = [x + y for x, y in zip(want.get(layer, [0] * N), row, strict=True)]
    assert {la: list(row) for la, row in merged.total().items()} == want
    assert merged.parts == heats.merge([b, a]).parts


def test_a_plain_reader_sees_the_total() -> None:
    heat = heats.merge([one("a", {0: (1, 0, 2)}), one("b", {0: (4, 0, 0), 3: (0, 7, 0)})])
    seen: dict[tuple[int, int], int] = {}
    for line in heats.to_text(heat).splitlines():
        if not line.startswith("#") and line != heats.COLUMNS:
            layer, expert, count = map(int, line.split(","))
            seen[layer, expert] = seen.get((layer, expert), 0) + count
    assert seen == {(0, 0): 5, (0, 2): 2, (3, 1): 7}


def test_weights_scale_a_whole_heat() -> None:
    merged = heats.merge([one("a", {0: (4, 2)}), one("b", {0: (1, 1)})], [0.5, 3.0])
    assert [p.counts[0] for p in merged.parts] == [(2, 1), (3, 3)]
    assert [p.tokens for p in merged.parts] == [5, 30]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (one("a", {0: (1, 2)}), one("b", {0: (1, 2, 3)})),
        (one("a", {0: (1,)}, 1, "x"), one("b", {0: (1,)}, 1, "y")),
    ],
)
def test_other_models_do_not_merge(a: Heat, b: Heat) -> None:
    with pytest.raises(WrongModel):
        heats.merge([a, b])


@pytest.mark.parametrize(
    "part",
    [
        Part("a", Phase.DECODE, -5, {0: (1, 2)}),
        Part("a", Phase.DECODE, 1 << 60, {0: (1, 2)}),
        Part("a", Phase.DECODE, 5, {-1: (1, 2)}),
        Part("a", Phase.DECODE, 5, {512: (1, 2)}),
        Part("a", Phase.DECODE, 5, {0: (-1, 2)}),
        Part("a", Phase.DECODE, 5, {0: (1, 1 << 60)}),
        Part("a", Phase.DECODE, 5, {0: (1, 2)}, depth=-1),
    ],
)
def test_what_could_not_be_read_again_is_not_made(part: Part) -> None:
    with pytest.raises(heats.NoCount):
        heats.make("", 2, 1, [part])
    with pytest.raises(heats.NoCount):
        heats.make("", 2, 3, [])


def test_sums_stay_what_a_file_can_say() -> None:
    most = one("a", {0: (heats.MAX_COUNT, 1)})
    for heat, weights in (([most, most], None), ([most], [2.0])):
        with pytest.raises(heats.NoCount, match="a count that cannot be"):
            heats.merge(heat, weights)


def test_positions_become_original_ids() -> None:
    rng = random.Random(3)
    counts = tuple(rng.randrange(100) + 1 for _ in range(N))
    order = rng.sample(range(N), N)
    by_position = one("a", {2: tuple(counts[e] for e in order), 4: counts})
    back = heats.original(by_position, {2: order})
    assert back.total() == {2: counts, 4: counts}


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3)])
def test_what_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(WrongModel):
        heats.original(one("a", {0: (1, 2, 3)}), {0: order})


HEAD = "# heat: 1\n# model:\n# experts: 4\n# used: 2\nlayer,expert,count\n"


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("", 0, ""),
        ("layer,expert,count\n0,0,1\n", 1, "heat"),
        ("# heat: 2\n# experts: 4\nlayer,expert,count\n", 1, "heat"),
        ("# heat: 1\nlayer,expert,count\n", 2, "experts"),
        ("# heat: 1\n# experts: 0x4\n", 2, "experts"),
        (HEAD + "0,4,1\n", 6, "expert"),
        (HEAD + "0,1,1\n0,1,1\n", 7, "expert"),
        (HEAD + "0,1,-1\n", 6, ""),
        (HEAD + "0,1\n", 6, ""),
        (HEAD + "0,1,1.5\n", 6, ""),
        (HEAD + "# phase: later\n", 6, "phase"),
        (HEAD + "# colour: red\n", 6, "colour"),
        (HEAD + "# tokens: many\n", 6, "tokens"),
        (HEAD + "layer,expert,count\n", 6, ""),
        (HEAD.replace("used: 2", "used: 5"), 5, "used"),
        (HEAD.replace("model:", "model: \x1b[31m"), 2, "model"),
        (HEAD + f"# source: a\n0,0,{heats.MAX_COUNT}\n# source: a\n0,0,1\n", 0, ""),
    ],
)
def test_wrong_text_is_refused_with_its_line(text: str, line: int, field: str) -> None:
    with pytest.raises(FieldProblem) as caught:
        heats.from_text(text, "x.csv")
    assert (caught.value.line, caught.value.field) == (line, field)


def test_a_phase_keeps_mixed_parts_and_never_empties() -> None:
    heat = heats.make(
        "",
        2,
        1,
        [Part("a", p, 1, {0: (i + 1, 0)}) for i, p in enumerate([Phase.PREFILL, Phase.DECODE, Phase.MIXED])],
    )
    assert heats.only(heat, Phase.DECODE).total() == {0: (5, 0)}
    prefill = heats.make("", 2, 1, heat.parts[1:2])
    assert heats.only(prefill, Phase.DECODE) == prefill
