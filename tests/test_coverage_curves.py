"""Coverage curves: concave, honest about sources not seen, and orders that are permutations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.routing import coverage
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import Heat, Part, Phase

E = 8


def heat_of(rows: dict[str, list[list[int]]], tokens: int | None = None, used: int = 2) -> Heat:
    parts = [
        Part(
            name,
            Phase.DECODE,
            tokens if tokens is not None else sum(layers[0]) // used,
            {la: tuple(row) for la, row in enumerate(layers)},
        )
        for name, layers in rows.items()
    ]
    return heats.make("", len(parts[0].counts[0]), used, parts)


def zipf(rng: np.random.Generator, n: int, experts: int, order: list[int], power: float) -> list[int]:
    share = 1.0 / np.arange(1, experts + 1) ** power
    drawn = rng.multinomial(n, share / share.sum())
    row = [0] * experts
    for rank, expert in enumerate(order):
        row[expert] = int(drawn[rank])
    return row


layer_row = st.lists(st.integers(0, 5000), min_size=E, max_size=E)
sources = st.dictionaries(
    st.sampled_from("abcd"), st.lists(layer_row, min_size=2, max_size=2), min_size=1, max_size=4
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(sources, st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
def test_curves_are_concave_and_orders_are_permutations(
    rows: dict[str, list[list[int]]], tokens: int, n_group: int
) -> None:
    heat = heat_of(rows, tokens)
    curves = coverage.curves(heat, n_group)
    orders = coverage.hot_order(heat, n_group)
    assert tuple(curves) == heat.layers == tuple(o.layer for o in orders)
    for curve in curves.values():
        steps = np.diff(curve)
        assert curve[0] == 0.0 and curve[-1] == 1.0 and len(curve) == E + 1
        assert (steps >= -1e-12).all() and (np.diff(steps) <= 1e-9).all()
    for order in orders:
        assert sorted(order.order) == list(range(E))
        size = E // n_group
        blocks = [{e // size for e in order.order[i : i + size]} for i in range(0, E, size)]
        assert all(len(block) == 1 for block in blocks)


def test_one_prompt_is_not_believed_like_many() -> None:
    row = [900, 80, 10, 5, 3, 1, 1, 0]
    short = coverage.curves(heat_of({"one": [row]}, tokens=64))[0]
    long = coverage.curves(heat_of({"one": [[c * 10**4 for c in row]]}, tokens=5 * 10**6))[0]
    own = np.cumsum([0, *row]) / sum(row)
    assert short[1] < 0.5 * own[1]
    assert long[1] == pytest.approx(own[1], abs=1e-3)


def test_hot_sets_that_do_not_transfer_are_seen() -> None:
    """Each source has its own favourites: in-sample coverage is high, held-out at or below uniform."""
    rows = {f"s{i}": [[10000 if e // 2 == i else 1 for e in range(E)]] for i in range(4)}
    curve = coverage.curves(heat_of(rows))[0]
    assert curve[2] <= 2 / E + 0.01


def test_shared_favourites_are_seen_through_noise() -> None:
    rng = np.random.default_rng(5)
    order = list(rng.permutation(64))
    heat = heat_of({f"s{i}": [zipf(rng, 20000, 64, order, 1.0)] for i in range(4)})
    share = np.cumsum(1 / np.arange(1, 65)) / np.sum(1 / np.arange(1, 65))
    curve = coverage.curves(heat)[0]
    assert curve[16] == pytest.approx(share[15], abs=0.02)


def test_a_long_source_does_not_drown_the_others() -> None:
    short = [0, 0, 4000, 3000, 0, 0, 0, 0]
    heat = heat_of({"long": [[10**8, 0, 0, 0, 0, 0, 0, 0]], "b": [short], "c": [short], "d": [short]})
    assert coverage.hot_order(heat)[0].order[0] == 2


def test_judging_is_plain_counting() -> None:
    train, test = heat_of({"a": [[5, 4, 3, 2, 1, 0, 0, 0]]}), heat_of({"b": [[0, 0, 0, 0, 1, 2, 3, 4]]})
    got = coverage.judge(test, coverage.hot_order(train))[0]
    assert got == pytest.approx((0, 0, 0, 0, 0, 0.1, 0.3, 0.6, 1.0))


def test_distinct_experts_of_a_batch() -> None:
    even = heat_of({"a": [[10**6] * E]}, used=2)
    assert coverage.expected_distinct(even, 1)[0] == pytest.approx(2.0)
    assert coverage.expected_distinct(even, 4)[0] == pytest.approx(E * (1 - 0.75**4))
    skewed = heat_of({"a": [[10**6, 10**6, 0, 0, 0, 0, 0, 0]]}, used=2)
    assert coverage.expected_distinct(skewed, 512)[0] < 2.1
