"""Real routing: published coverage comes out again, and one prompt is not believed like twelve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.heat import COLIBRI, HELD, drifting_trace
from planner.routing import cache_simulation as sim
from planner.routing import coverage, report
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import Heat

DATA = Path(__file__).parent / "data" / "heat"


def load(name: str) -> Heat:
    path = DATA / f"{name}.csv"
    heat = heats.from_text(path.read_text(), str(path))
    assert heats.to_text(heat) == path.read_text()
    return heat


def mean_at(curves: dict[int, tuple[float, ...]], k: int) -> float:
    return coverage.mean_curve(curves)[k]


@pytest.mark.parametrize(
    ("name", "k", "published"), [("qwen3-30b-a3b", 32, 0.65), ("gemma4-26b-a4b-general", 21, 0.595)]
)
def test_published_coverage(name: str, k: int, published: float) -> None:
    heat = load(name)
    assert mean_at(coverage.judge(heat, coverage.hot_order(heat)), k) == pytest.approx(published, abs=0.001)


def test_the_tokens_of_the_trace_add_up() -> None:
    heat = load("qwen3-30b-a3b")
    assert {sum(row) for row in heat.total().values()} == {heat.n_used * heat.parts[0].tokens}


def test_one_prompt_promises_more_than_it_keeps() -> None:
    prompt, general = load("gemma4-26b-a4b-one-prompt"), load("gemma4-26b-a4b-general")
    for k in (13, 21, 32, 64):
        promised = mean_at(coverage.judge(prompt, coverage.hot_order(prompt)), k)
        kept = mean_at(coverage.judge(general, coverage.hot_order(prompt)), k)
        expected = mean_at(coverage.curves(prompt), k)
        assert expected <= kept < promised
        assert abs(expected - kept) < abs(promised - kept)


def test_both_gemma_sources_judge_each_other() -> None:
    both = heats.merge([load("gemma4-26b-a4b-one-prompt"), load("gemma4-26b-a4b-general")])
    judged = report.report(both, 21 / 128)
    assert judged.exploitable
    asked = next(i for i in judged.intervals if i.resident == 21 / 128)
    assert 0.5 < asked.low <= asked.value <= asked.high < 0.72
    transfer = np.array(judged.transfer)
    assert transfer[1, 0] == pytest.approx(0.549, abs=0.001)  # chosen on one prompt, judged on twelve


def test_curves_of_real_layers_are_concave_and_far_from_uniform() -> None:
    for curve in coverage.curves(load("qwen3-30b-a3b")).values():
        steps = np.diff(curve)
        assert (np.diff(steps) <= 1e-12).all() and curve[-1] == 1.0
        assert curve[32] > 0.4


def test_the_published_order_of_cache_policies() -> None:
    """Where a token's experts barely fit, counts beat recency; with more room recency wins, as published."""
    demand = sim.one_by_one(sim.demand_of(drifting_trace(289, 4, 64, 8)))
    lru, lfu, bound = (
        [sim.replay(demand, sim.POLICIES[name], slots).hit_rate for slots in HELD]
        for name in ("lru", "lfu", "belady")
    )
    assert lfu[0] > lru[0] and all(a > b for a, b in zip(lru[1:], lfu[1:], strict=True))
    assert all(best > max(pair) for best, *pair in zip(bound, lru, lfu, strict=True))
    for rates, policy in ((lru, "lru"), (lfu, "lfu")):
        assert rates == pytest.approx(COLIBRI[policy], abs=0.06)
