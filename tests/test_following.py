"""Plans whose slots follow the text: curves from a trace, plans that take them where they pay, and check."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from planning_models import machine, moe, plan, twins

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.explain import sentences
from planner.cost.hybrid_slots import Lanes, Routed, expected_ns, on_demand_ns, served, step_ns, widths
from planner.model.routed_layers import moe_shape
from planner.plan.adaptation import STAYS, Adaptation, Policy
from planner.plan.known import Known
from planner.plan.load_spec import load_spec
from planner.plan.plan import FollowedLayer, Following, Plan, from_text, to_text
from planner.routing import trace as traces
from planner.routing.coverage import curves, hot_order
from planner.routing.following import followings, steps_of
from planner.routing.residency import follow
from profiler.routed import stream
from profiler.routed.codes import chosen_by_code
from profiler.routed.presets import PRESETS
from runtime.load.dry_run import from_json, to_json
from runtime.session.hybrid import settings

LAYERS = 8
LANES = Lanes(gpu_ns=50_000, pair_ns=45_000, upload_ns=100_000, guests=2, sync_ns=30_000)


def traced(preset: str, layers: int = LAYERS, steps: int = 500) -> traces.Trace:
    """A stream of a preset, token by token, with a prompt before it."""
    habits = PRESETS[preset].habits
    chosen = chosen_by_code(habits, layers)[:, stream.codes_of(habits, steps, 3)]
    rows = [
        (0, token >= 40, token - 40 if token >= 40 else 0, layer, tuple(map(int, chosen[layer, token])))
        for token in range(steps)
        for layer in range(layers)
        if token >= 40 or layer < layers - 1 or token == 39
    ]
    return traces.make("", habits.n_expert, ["text"], rows)


def known(preset: str) -> Known:
    trace = traced(preset)
    heat = traces.heat_of(trace)
    return Known(
        curves=curves(heat),
        orders=hot_order(heat),
        following=followings(trace, moe_shape(moe()).expert_bytes),
    )


@pytest.fixture(scope="module")
def shifting() -> Known:
    return known("shifting")


def test_passes_of_the_model_are_told_apart() -> None:
    trace = traced("shifting", layers=2, steps=60)
    steps, layers = steps_of(trace)
    assert layers == [0, 1] and [ids.shape for ids in steps] == [(2, 40, 8), *[(2, 1, 8)] * 20]
    assert (steps[0][1, 1:] == -1).all() and (steps[0][0] >= 0).all()
    rows = np.flatnonzero((trace.step == 7) & trace.decode)
    assert [ids.tolist() for ids in steps[8][:, 0]] == trace.ids[rows].tolist()


def test_more_slots_serve_more(shifting: Known) -> None:
    assert len(shifting.following) == 2
    for way in shifting.following:
        assert [each.layer for each in way.layers] == list(range(LAYERS))
        for each in way.layers:
            assert list(each.hit_ppm) == sorted(each.hit_ppm) and each.hit_ppm[0] > 0
            assert any(each.admitted_ppm)
            assert served(each, 0, 128) == (0.0, 0.0) and served(each, 128, 128) == (1.0, 0.0)
            k, hit = each.slots[3], each.hit_ppm[3]
            assert served(each, k, 128)[0] == pytest.approx(hit / 1e6)
            assert hit / 1e6 < served(each, k + 1, 128)[0] < each.hit_ppm[4] / 1e6
    fast, slow = (sum(sum(layer.admitted_ppm) for layer in way.layers) for way in shifting.following)
    assert slow < fast


def times(routed: Routed) -> dict[int, int]:
    return {slots.k: slots.step_ns for slots in widths(routed, LANES, range(64))}


def test_experts_on_their_way_take_the_bus() -> None:
    assert step_ns(replace(LANES, busy_ns=100_000), 4) > step_ns(LANES, 4)
    layer = FollowedLayer(layer=0, slots=(32,), hit_ppm=(900_000,), admitted_ppm=(500_000,))
    flat = tuple(k / 64 for k in range(65))
    stays, follows = (times(Routed(64, 8, 1, 512, flat, known)) for known in (None, layer))
    assert follows[32] < stays[32]
    assert times(Routed(64, 8, 4, 512, flat, layer)) == times(Routed(64, 8, 4, 512, flat))


def test_who_gets_a_slot_on_demand_is_brought_in_any_case() -> None:
    lanes = replace(LANES, upload_ns=60_000)
    assert step_ns(lanes, 1, 1) > step_ns(lanes, 1)  # the CPU would be done sooner
    assert step_ns(lanes, 3, 1) == step_ns(lanes, 3)  # the bus brings one of three anyhow
    assert on_demand_ns(lanes, 8, 2.0, 3, 0.0) == expected_ns(lanes, 8, 2.0)
    assert on_demand_ns(lanes, 8, 2.0, 3, 0.3) <= expected_ns(lanes, 8, 2.0)
    assert (
        on_demand_ns(lanes, 8, 2.0, 1, 0.6) > on_demand_ns(lanes, 8, 2.0, 1, 0.3) > expected_ns(lanes, 8, 2.0)
    )
    assert on_demand_ns(lanes, 8, 0.2, 3, 0.1) > expected_ns(lanes, 8, 0.2)  # in steps that miss few


def test_a_plan_of_before_follows_as_before(shifting: Known) -> None:
    (way, *_) = shifting.following
    before = way.model_copy(update={"least_misses": None})
    made = plan(moe(), "1500", known=replace(shifting, following=(before,)), hybrid=True)
    assert made.following is not None and "least_misses" not in to_text(made)
    text = settings(load_spec(made), "CUDA0", load_spec(made).residents, "HYBRID0").text().decode()
    assert "policy lfu\n" in text and "least_misses" not in text
    assert problems(made, shifting) == []


def test_a_plan_follows_where_that_pays(shifting: Known) -> None:
    model = moe()
    without = plan(model, "1500", known=replace(shifting, following=()), hybrid=True)
    made = plan(model, "1500", known=shifting, hybrid=True)
    assert made.following is not None and without.following is None
    assert made.predicted.tpot_ns < without.predicted.tpot_ns
    assert from_text(to_text(made), "x") == made
    assert problems(made, shifting) == [] == problems(without, shifting)
    told = [line for line in sentences(made) if "follow the text" in line]
    assert len(told) == 1 and "% of the choices" in told[0]
    spec = load_spec(made)
    assert spec.adaptation == made.following.adaptation and from_json(to_json(spec)) == spec
    assert load_spec(without).adaptation == STAYS
    text = settings(spec, "CUDA0", spec.residents, "HYBRID0").text().decode()
    assert "policy lfu\n" in text and f"upload_bytes {made.following.upload_bytes}\n" in text
    assert f"least_misses {made.following.least_misses}\n" in text
    assert "policy" not in settings(load_spec(without), "CUDA0", spec.residents, "HYBRID0").text().decode()


def test_no_plan_stands_on_a_plain_sum_of_floats(shifting: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 adds them up more exactly than 3.11 does: `math.fsum` is the same in both."""
    adds, found = builtins.sum, set()

    def recorded(values: Iterable[Any], /, start: Any = 0) -> Any:
        total = adds(values, start)
        if isinstance(total, float):
            found.add(sys._getframe(1).f_globals["__name__"])
        return total

    monkeypatch.setattr(builtins, "sum", recorded)
    for given in (shifting, replace(shifting, following=()), Known()):
        plan(moe(), "1500", known=given, hybrid=True, stripes=True)
    plan(moe(), "700", on=twins(1024))
    assert not found


def test_check_finds_curves_that_were_changed(shifting: Known) -> None:
    made = plan(moe(), "1500", known=shifting, hybrid=True)
    assert made.following is not None
    better = tuple(
        each.model_copy(update={"hit_ppm": tuple(min(hit + 90_000, 10**6) for hit in each.hit_ppm)})
        for each in made.following.layers
    )
    told = made.following.model_copy(update={"layers": better})
    assert problems(made.model_copy(update={"following": told}), shifting)
    assert problems(made.model_copy(update={"following": None}), shifting)


def test_a_plan_stays_where_nothing_is_to_be_followed() -> None:
    layers = tuple(
        FollowedLayer(layer=n, slots=(32, 64), hit_ppm=(250_000, 500_000), admitted_ppm=(10**6, 10**6))
        for n in range(LAYERS)
    )
    useless = Following(policy=Policy.LFU, half_life=32, upload_bytes=1 << 20, layers=layers)
    made = plan(moe(), "1500", known=Known(following=(useless,)), hybrid=True)
    assert made.following is None
    assert any("do not pay" in note for note in made.notes)


def problems(made: Plan, given: Known) -> list[str]:
    inputs = Inputs(moe(), machine(), replace(given, following=()))
    return [str(one) for one in check_plan(made, to_text(made), "plan.yaml", inputs, CheckOptions())]


def test_only_slots_follow(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(traces.to_text(traced("shifting", layers=1, steps=60)))
    model = Path(__file__).parent / "data/tiny-moe.gguf"
    words = ["solve", str(model), "--machine", "rtx4090-ddr5", "--follow", str(path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "--hybrid" in done.stderr


def test_simulate_follows_like_the_device(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    trace = traced("shifting", layers=2, steps=240)
    path.write_text(traces.to_text(trace))
    words = ["simulate", str(path), "--slots", "32", "--upload", "1", "--half-life", "32", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    rates = {run["policy"]: run["hit_rate"] for run in json.loads(done.stdout)["runs"]}
    assert rates["static"] + 0.1 < min(rates["slots-lru"], rates["slots-lfu"]) < rates["belady"]
    steps, _ = steps_of(traces.select(trace, trace.decode))
    hot = traces.heat_of(traces.select(trace, trace.decode & (trace.step < 100))).total()
    seeds = [np.argsort(-np.array(row), kind="stable")[:32].tolist() for row in hot.values()]
    how = Adaptation(Policy.LFU, 32, upload_bytes=1000, least_misses=2)
    assert follow(steps[100:], how, seeds, 128, [1000] * 2).rate() == pytest.approx(
        rates["slots-lfu"], abs=1e-6
    )
    refused = CliRunner().invoke(main, [*words[:-1], "--shared"])
    assert refused.exit_code == 2 and "--upload" in refused.stderr
