"""Expert caches under batches that check drafted tokens: the replay, and plans that keep clear of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from made_traces import local_trace, trace_of
from planning_models import moe

from atsplan import main
from planner.constants import PPM
from planner.cost.hybrid_slots import Lanes, Routed, flat, grid, widths
from planner.cost.layer_options import serves
from planner.model.inventory import to_text as inventory_text
from planner.model.structure import structure_of
from planner.model.units import Kind
from planner.plan.plan import CachePoint, FollowedLayer
from planner.routing import cache_simulation as sim
from planner.routing import trace as traces
from planner.routing.verify_batches import verified

COUNTED = [[[n % 6, (n + 1) % 6]] for n in range(7)]  # one layer, the experts of a token tell its place


def batches(drafts: int, share: float, text: traces.Trace) -> list[set[int]]:
    """The experts that each batch asks of the first layer."""
    demand = sim.demand_of(verified(text, drafts, round(share * PPM)).trace)
    return [set(ids[ids >= 0].tolist()) for ids in demand.ids[:, 0]]


def test_a_batch_asks_for_the_experts_of_all_its_tokens() -> None:
    text = trace_of(COUNTED)
    assert batches(2, 1.0, text) == [{0, 1, 2, 3}, {3, 4, 5, 0}, {0, 1}]
    assert verified(text, 2, PPM).tokens.tolist() == [3, 3, 1]
    # What is always wrong is asked for all the same, and again when it is the text's turn.
    assert batches(1, 0.0, text)[:3] == [{0, 1, 2}, {1, 2, 3}, {2, 3, 4}]
    assert verified(text, 1, 0).tokens.tolist() == [1] * 7


@pytest.mark.parametrize(("drafts", "share"), [(1, 0.7), (3, 0.7), (7, 0.7), (4, 0.15), (5, 0.93)])
def test_steps_bring_as_many_tokens_as_the_rate_says(drafts: int, share: float) -> None:
    found = verified(local_trace(3000, 1, 16, 2, 0.5), drafts, round(share * PPM))
    assert found.tokens.sum() == 3000 and found.tokens.min() >= 1 and found.tokens.max() <= 1 + drafts
    wanted = sum(share**n for n in range(drafts + 1))
    assert found.tokens.mean() == pytest.approx(wanted, rel=0.02)


def test_texts_are_not_mixed_and_prompts_left_out() -> None:
    rows = [(s, True, n, 0, (s,)) for s in range(2) for n in range(3)]
    text = traces.make("", 4, ["a", "b"], [(0, False, 0, 0, (3,)), *rows])
    assert batches(7, 1.0, text) == [{0}, {1}]
    assert verified(traces.make("", 4, ["a"], []), 3, PPM).tokens.size == 0


def test_without_room_for_a_batch_drafts_bring_more_experts_a_token() -> None:
    text = local_trace(2000, 1, 16, 2, 0.6)
    checked = verified(text, 3, 700_000)

    def a_token(slots: int) -> tuple[float, float]:
        runs = [sim.replay(sim.demand_of(t), sim.POLICIES["lru"], slots) for t in (text, checked.trace)]
        return runs[0].misses.sum() / 2000, runs[1].misses.sum() / 2000

    alone, drafting = a_token(2)
    assert drafting > 1.25 * alone
    roomy, batched = a_token(12)
    assert batched < 1.1 * roomy


def test_the_command_shows_both(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(traces.to_text(local_trace(800, 2, 16, 2, 0.7)))
    words = ["simulate", str(path), "--policy", "lru", "--slots", "2", "--slots", "12", "--drafts", "3"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "a step with drafts brings 2.53 tokens" in done.output and "drafts thrash the slots" in done.output
    said = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["drafts"]
    few, many = said
    assert (few["slots"], many["slots"]) == (2, 12)
    assert few["checked"] > 1.25 * few["alone"] and few["beyond"] > 0.5
    assert many["checked"] < 1.25 * many["alone"] and many["beyond"] == 0


def test_a_plan_keeps_no_cache_that_a_batch_would_overrun() -> None:
    """The engine asks its cache only for batches whose experts it could hold (section 7 of its facts)."""
    unit = next(u for u in structure_of(moe(16)).units if u.kind is Kind.EXPERTS)
    for drafted in range(8):
        wanted = min(unit.used * (1 + drafted), unit.experts)
        held = [n for n in range(1, unit.experts + 1) if serves(_point(n, unit.experts), unit, 1 + drafted)]
        assert held == list(range(wanted, unit.experts + 1))


@pytest.mark.parametrize("drafts", [None, 1, 5, 40])
def test_the_advice_on_a_cache_holds_a_batch(drafts: int | None, tmp_path: Path) -> None:
    model = moe(2)
    path, table = tmp_path / "trace.csv", tmp_path / "moe.inventory.yaml"
    table.write_text(inventory_text(model))
    path.write_text(traces.to_text(local_trace(60, 2, 128, 8, 0.7)))
    words = [
        "simulate",
        str(path),
        "--model",
        str(table),
        "--budget",
        "2000",
        "--policy",
        "lru",
        "--slots",
        "9",
    ]
    words += ["--json", *(("--drafts", str(drafts)) if drafts else ())]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    curve = json.loads(done.stdout)["cache"]["curve"]
    least = min(point["slots"] for point in curve)
    assert least >= min(8 * (1 + (drafts or 0)), 128) and (drafts or least < 8 * (1 + 5))


def test_what_follows_the_text_is_known_of_steps_of_one_token_only() -> None:
    lanes = Lanes(gpu_ns=10, pair_ns=1000, upload_ns=1000, guests=2)
    served = tuple(range(1, 32))
    hits = tuple(round(PPM * (n / 32) ** 0.5) for n in served)
    good = FollowedLayer(layer=0, slots=served, hit_ppm=hits, admitted_ppm=(0,) * 31)
    for tokens, same in ((1, False), (2, True), (4, True)):
        alone, followed = (
            [s.step_ns for s in widths(Routed(32, 2, tokens, 64, flat(32), known), lanes, grid(32, 8))]
            for known in (None, good)
        )
        assert (alone == followed) is same


def _point(slots: int, experts: int) -> CachePoint:
    return CachePoint(share_ppm=-(-slots * PPM // experts), hit_ppm=1)


def test_slots_of_a_plan_are_priced_for_the_experts_of_a_batch() -> None:
    lanes = Lanes(gpu_ns=10, pair_ns=1000, upload_ns=1000, guests=2)
    one, four = (
        {s.k: s.step_ns for s in widths(Routed(32, 2, n, 64, flat(32)), lanes, grid(32, 8))} for n in (1, 4)
    )
    assert all(one[k] < four[k] < 4 * one[k] for k in four)
    assert np.all(np.diff(list(four.values())) < 0)
