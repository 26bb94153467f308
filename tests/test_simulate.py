"""The cache simulator against plain-Python oracles, Belady's bound, inclusion, and its cost models."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import local_trace, trace_of

from planner.routing import cache_curve
from planner.routing import cache_simulation as sim
from planner.routing import trace as traces
from planner.routing.cache_curve import CacheTooSmall, NothingToFit, Prefetch, TimeModel
from planner.routing.found import StepCost

E, K = 6, 2


ids = st.permutations(range(E)).map(lambda order: order[:K])
steps = st.lists(st.lists(ids, min_size=2, max_size=2), min_size=1, max_size=12)


def lru_oracle(requests: list[list[int]], slots: int) -> list[int]:
    """Hits of each request of an LRU that loads all of a request; the best rank is the last used."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        hits.append(sum(i in held for i in request))
        for i in reversed(request):
            held.pop(i, None)
            held[i] = None
        while len(held) > slots:
            held.popitem(last=False)
    return hits


@settings(max_examples=80, derandomize=True, deadline=None)
@given(steps, st.integers(K, E))
def test_lru_of_each_layer_is_the_textbook_lru(grid: list[list[list[int]]], slots: int) -> None:
    demand = sim.demand_of(trace_of(grid))
    layers = [lru_oracle([step[la] for step in grid], slots) for la in range(2)]
    run = sim.replay(demand, sim.POLICIES["lru"], slots)
    assert run.hits.tolist() == [sum(pair) for pair in zip(*layers, strict=True)]
    assert run.asked.tolist() == [2 * K] * len(grid)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(steps, st.integers(K, 2 * E))
def test_a_shared_lru_is_the_textbook_lru(grid: list[list[list[int]]], slots: int) -> None:
    demand = sim.demand_of(trace_of(grid), per_layer=False)
    requests = [[la * E + i for i in ids] for step in grid for la, ids in enumerate(step)]
    assert sim.replay(demand, sim.POLICIES["lru"], slots).hits.sum() == sum(lru_oracle(requests, slots))


def best_possible(requests: list[frozenset[int]], slots: int) -> int:
    """Most hits of any cache with free preload and free choice, by dynamic programming over contents."""
    contents = [frozenset(c) for c in combinations(range(E), slots)]
    value = dict.fromkeys(contents, 0)
    for request in reversed(requests):
        after = value
        value = {}
        for content in contents:
            # What is held afterwards comes from what was held or asked for.
            reachable = [after[c] for c in contents if c <= content | request]
            value[content] = len(content & request) + max(reachable)
    return max(value.values())


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(ids, min_size=1, max_size=10), st.integers(1, 4))
def test_belady_is_optimal(requests: list[list[int]], slots: int) -> None:
    demand = sim.demand_of(trace_of([[r] for r in requests]))
    got = sim.replay(demand, sim.POLICIES["belady"], slots).hits.sum()
    assert got == best_possible([frozenset(r) for r in requests], slots)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(steps, st.integers(1, E), st.booleans(), st.booleans(), st.integers(0, 3))
def test_no_policy_passes_belady(
    grid: list[list[list[int]]], slots: int, shared: bool, serial: bool, after: int
) -> None:
    demand = sim.demand_of(trace_of(grid), per_layer=not shared)
    demand = sim.one_by_one(demand) if serial else demand
    banks = demand.ids.shape[1]
    hot = np.broadcast_to(np.arange(demand.n_items), (banks, demand.n_items))
    after = min(after, len(grid) - 1)
    bound = sim.replay(demand, sim.POLICIES["belady"], slots, after=after)
    assert len(bound.hits) == len(grid) - after
    for policy, warm in product(sim.POLICIES.values(), (None, hot)):
        run = sim.replay(demand, policy, slots, warm, after)
        assert run.asked.tolist() == bound.asked.tolist()
        assert run.hits.sum() <= bound.hits.sum(), policy.name


@settings(max_examples=40, derandomize=True, deadline=None)
@given(steps)
def test_a_larger_lru_hits_whenever_a_smaller_does(grid: list[list[list[int]]]) -> None:
    demand = sim.demand_of(trace_of(grid))
    runs = [sim.replay(demand, sim.POLICIES["lru"], slots).hits for slots in range(K, E + 1)]
    assert all((small <= large).all() for small, large in pairwise(runs))


@pytest.mark.parametrize("name", [n for n in sim.POLICIES if n != "static"])
def test_a_cache_of_everything_misses_each_expert_once(name: str) -> None:
    trace = local_trace(40, 3, 16, 4, 0.5)
    run = sim.replay(sim.demand_of(trace), sim.POLICIES[name], 16)
    touched = sum(len(np.unique(trace.ids[trace.layer == la])) for la in range(3))
    # Belady starts full; "again" loads an expert only when it comes back soon.
    expected = {"belady": 0}.get(name, touched)
    assert run.misses.sum() == expected or (name == "lru-again" and run.misses.sum() >= expected)


def test_static_serves_its_set_and_nothing_else() -> None:
    grid = [[[0, 1]], [[2, 3]], [[1, 2]]]
    run = sim.replay(sim.demand_of(trace_of(grid)), sim.POLICIES["static"], 2, np.array([[1, 2, 0, 3, 4, 5]]))
    assert run.hits.tolist() == [1, 1, 2]


def test_decay_forgets_what_counts_remember() -> None:
    old, new = [[[0, 1]]] * 40, [[[2, 3]], [[4, 5]]] * 20
    demand = sim.demand_of(trace_of(old + new))
    forever = sim.replay(demand, sim.POLICIES["lfu"], 4).hits[40:].sum()
    fading = sim.replay(demand, sim.Policy("x", "frequent", half_life=2), 4).hits[40:].sum()
    assert forever == 0 and fading > 60


def test_admission_keeps_passers_by_out() -> None:
    grid = [[[0, 1]] if i % 2 else [[2 + i % 4, 3 + i % 4]] for i in range(40)]
    demand = sim.demand_of(trace_of(grid))
    admitting = sim.replay(demand, sim.POLICIES["lfu-admit"], 2).hits.sum()
    assert admitting > sim.replay(demand, sim.POLICIES["lru"], 2).hits.sum() == 0


def test_what_was_used_just_now_is_protected() -> None:
    grid = [[[0, 1]]] * 5 + [[[2, 3]], [[4, 5]], [[2, 3]]]
    demand = sim.demand_of(trace_of(grid))
    assert sim.replay(demand, sim.POLICIES["lfu-decay"], 4).hits[-1] == 0
    assert sim.replay(demand, sim.POLICIES["lfu-protect"], 4).hits[-1] == 2


def test_locality_orders_the_policies() -> None:
    """With strong reuse LRU comes near the bound and passes a static set; without it, static wins."""
    sticky, loose = (sim.demand_of(local_trace(150, 4, 32, 4, stick)) for stick in (0.85, 0.0))
    hot = {
        name: np.argsort(
            -np.array([np.bincount(d.ids[:, b][d.ids[:, b] >= 0], minlength=32) for b in range(4)]), axis=1
        )
        for name, d in (("sticky", sticky), ("loose", loose))
    }
    lru, static = sim.POLICIES["lru"], sim.POLICIES["static"]
    assert sim.replay(sticky, lru, 8).hit_rate > sim.replay(sticky, static, 8, hot["sticky"]).hit_rate + 0.1
    assert sim.replay(loose, lru, 8).hit_rate < sim.replay(loose, static, 8, hot["loose"]).hit_rate


def test_tokens_of_one_step_ask_together() -> None:
    rows = [
        (0, True, 0, 0, (1, 2)),
        (0, True, 0, 0, (2, 3)),
        (0, True, 1, 0, (3, 1)),
        (0, False, 0, 0, (5, 0)),
    ]
    demand = sim.demand_of(traces.make("", E, ["a"], rows))
    assert demand.ids.tolist() == [[[1, 2, 3]], [[3, 1, -1]]]


def test_the_asked_size_replays_without_a_loop_over_ids() -> None:
    """200 steps x 48 layers x 10 ids of 512: the work is one numpy pass a step, or a layer of a step."""
    trace = local_trace(20, 48, 512, 10, 0.5)
    assert sim.demand_of(trace).ids.shape == (20, 48, 10)
    assert sim.demand_of(trace, per_layer=False).ids.shape == (960, 1, 10)


MODEL = TimeModel(fixed_ns=10_000_000, per_miss_ns=1_000_000, error_ns=0, samples=0)


def test_the_line_is_found_in_a_ledger() -> None:
    ledger = [StepCost(i, m, round((7.5 + 0.25 * m) * 1e6)) for i, m in enumerate([9, 3, 5, 8, 1, 4])]
    ledger[0] = StepCost(0, 2, 10**9)  # the first step warms up
    found = cache_curve.fit(ledger)
    assert (found.fixed_ns, found.per_miss_ns, found.samples) == (7_500_000, 250_000, 5)
    assert found.error_ns <= 1


@pytest.mark.parametrize("misses", [[3, 3, 3, 3, 3], [1, 2]])
def test_a_ledger_that_says_nothing_is_refused(misses: list[int]) -> None:
    with pytest.raises(NothingToFit):
        cache_curve.fit([StepCost(i, m, 10**6) for i, m in enumerate(misses)])


@pytest.mark.parametrize("recall", [0.0, 0.5, 1.0])
def test_prefetch_over_a_busy_serial_link_never_pays(recall: float) -> None:
    run = sim.replay(sim.demand_of(local_trace(60, 4, 32, 4, 0.5)), sim.POLICIES["lru"], 8)
    for width in (1, 4, 16):
        result = cache_curve.prefetched(run, MODEL, Prefetch(recall, width, spare=0.0))
        assert result.gain <= 1e-12
        assert result.right + result.wasted == pytest.approx(width)


def test_prefetch_pays_where_the_link_idles() -> None:
    run = sim.replay(sim.demand_of(local_trace(60, 4, 32, 4, 0.5)), sim.POLICIES["lru"], 8)
    result = cache_curve.prefetched(run, MODEL, Prefetch(recall=0.8, width=8, spare=0.9))
    assert result.gain > 0.05
    assert result.plain_ns - result.ahead_ns == pytest.approx(result.right * MODEL.per_miss_ns)


def test_the_smallest_cache_that_does_nearly_as_well() -> None:
    demand = sim.demand_of(local_trace(80, 4, 32, 4, 0.5), per_layer=False)
    best, curve = cache_curve.advise(demand, expert_bytes=1000, n_used=4, budget_bytes=500_000, points=16)
    assert [entry.slots for entry in curve] == sorted({max(4, round(128 * (i + 1) / 16)) for i in range(16)})
    rates = [entry.hit_rate for entry in curve]
    assert rates == sorted(rates)
    assert best.hit_rate >= cache_curve.ENOUGH * rates[-1]
    assert all(e.hit_rate < cache_curve.ENOUGH * rates[-1] for e in curve if e.slots < best.slots)
    with pytest.raises(CacheTooSmall):
        cache_curve.advise(demand, expert_bytes=1000, n_used=4, budget_bytes=3999)
