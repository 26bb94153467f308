"""How many slots a layer keeps for experts of one step: measured, priced, chosen, told to the device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from engines import ROOT
from planning_models import machine, moe, plan, real

from benchmarks.predict.slots import model_of, served
from planner.check.reprice import reprice
from planner.constants import CPU
from planner.cost.hybrid_slots import (
    AHEAD_NS,
    JOINED_NS,
    Lanes,
    Routed,
    expected_ns,
    flat,
    lanes_of,
    step_ns,
    widths,
)
from planner.cost.pins import parse_pin
from planner.cost.unit_time import Prices
from planner.machine.profile import Profile, from_text
from planner.model.structure import structure_of
from planner.model.units import Kind, units_of
from planner.plan.known import Known
from planner.plan.load_spec import load_spec
from planner.site import GUESTS, SiteKind
from planner.workload import Workload
from runtime.load.dry_run import from_json, to_json
from runtime.session.hybrid import settings

RESULTS = ROOT / "benchmarks" / "results"
CELLS = RESULTS / "h200-2026-12-01-cells.profile.yaml"
AHEAD = Lanes(
    gpu_ns=27_000, pair_ns=23_000, upload_ns=56_000, guests=0, sync_ns=26_000, beside_ns=25_000,
    pair_start_ns=30_000, upload_start_ns=6_000, ahead_ns=18_000, joined_ns=5_000,
)  # fmt: skip


def profile() -> Profile:
    return from_text(CELLS.read_text(), str(CELLS))


def measured_us(name: str, share: float) -> float:
    """Microseconds of a layer that slots without guests take more, side by side in one process."""
    found = json.loads((RESULTS / f"h200-2026-12-01-tried-{name}.json").read_text())
    (cell,) = (each for each in found["cells"] if each["share"] == share)
    none, two = (
        next(row["phase_ms"][0] for row in cell["contenders"] if row["name"] == f"A+{guests}")
        for guests in (0, GUESTS)
    )
    return float(none - two) * 1e3 / int(found["layers"])


def predicted_us(preset: str, share: float, layers: int, ahead_ns: int, joined_ns: int) -> float:
    """The same by the price of slots, from a profile of that day and the preset's routing."""
    inventory, on = model_of(preset), profile()
    prices = Prices(structure_of(inventory), on, Workload(n_ctx=1280, depth=544))
    units = [u for u in units_of(inventory).units if u.kind is Kind.EXPERTS][:layers]
    places, total = round(share * units[0].experts), 0.0
    for unit in units:
        for guests, sign in ((0, 1), (GUESTS, -1)):
            lanes = lanes_of(prices, unit, on.device("CUDA0"), on.device(CPU), guests)
            if not guests:
                lanes = replace(lanes, ahead_ns=ahead_ns, joined_ns=joined_ns)
            missing = unit.used * (1.0 - hits(preset, layers)[unit.layer or 0][places - guests])
            total += sign * expected_ns(lanes, unit.used, missing)
    return total / 1e3 / layers


@cache
def hits(preset: str, layers: int) -> tuple[tuple[float, ...], ...]:
    return served(preset, layers)


@pytest.mark.parametrize(
    ("name", "preset", "share"),
    [("hold-strong", "strong", 0.75), ("hold", "qwen3-30b", 0.5), ("hold", "qwen3-30b", 0.25)],
)
def test_slots_without_guests_are_priced_as_they_were_measured(name: str, preset: str, share: float) -> None:
    """Within 2 us a layer, of differences from -4 to 15; without the two costs further off each time."""
    seen = measured_us(name, share)
    told, plain = (predicted_us(preset, share, 16, *costs) for costs in ((AHEAD_NS, JOINED_NS), (0, 0)))
    page = (ROOT / "docs" / "findings-hybrid.md").read_text(encoding="utf-8")
    assert f"| {seen:.1f} µs | {told:.1f} µs | {plain:.1f} µs |" in page
    assert told == pytest.approx(seen, abs=2.0)
    assert abs(plain - seen) > abs(told - seen) + 1.0


def test_a_layer_that_misses_nothing_is_done_sooner_and_one_that_does_later() -> None:
    waits = replace(AHEAD, ahead_ns=0, joined_ns=0)
    assert step_ns(waits, 0) - step_ns(AHEAD, 0) == 18_000
    assert all(step_ns(AHEAD, misses) - step_ns(waits, misses) == 5_000 for misses in range(1, 9))


def test_the_device_begins_ahead_with_single_tokens_and_no_guests_only() -> None:
    model, on = moe(), machine()
    unit = next(u for u in units_of(model).units if u.kind is Kind.EXPERTS)
    at = Prices(structure_of(model), on, Workload(n_ctx=256))
    several = Prices(structure_of(model), on, Workload(n_ctx=256, n_seq=4))
    gpu, host = on.device("CUDA0"), on.device(CPU)
    assert [lanes_of(at, unit, gpu, host, n).ahead_ns for n in range(3)] == [AHEAD_NS, 0, 0]
    assert lanes_of(several, unit, gpu, host, 0).ahead_ns == 0


def brute_force(n: int, used: int, lanes: dict[int, Lanes], memory: int) -> int:
    """The least time of a step over every way to divide so many places between slots and guests."""
    routed = Routed(n, used, 1, 64, flat(n))
    found = [
        slots.step_ns
        for guests, each in lanes.items()
        if 0 < memory - guests < n
        for slots in widths(routed, each, [memory - guests])
    ]
    return min(found)


@pytest.mark.parametrize("link", [10**9, 25 * 10**9])
def test_a_plan_has_the_guests_that_its_bus_is_good_for(link: int) -> None:
    """A bus that brings nothing in time gets no two places; a good one has them where much is missed."""
    on = machine()
    links = tuple(each.model_copy(update={"bandwidth_bytes_per_s": link}) for each in on.links)
    there = on.model_copy(update={"links": links})
    made = plan(real("Qwen3-30B-A3B-Q4_K_M"), "9000", on=there, hybrid=True, stripes=False, pins=HYBRID)
    sites = [p.site for p in made.units if p.site.kind is SiteKind.HYBRID]
    assert {site.guests for site in sites} <= ({0, 1} if link == 10**9 else {1, GUESTS})
    assert link == 10**9 or min(site.amount for site in sites if site.guests == GUESTS) < 64


HYBRID = (parse_pin("blk.*.experts=hybrid"),)


def test_of_the_same_memory_no_division_is_faster() -> None:
    model, on = moe(), machine()
    made = plan(model, "1500", on=on, hybrid=True, pins=HYBRID)
    prices = Prices(structure_of(model), on, made.workload)
    units = {u.name: u for u in units_of(model).units}
    for placed in made.units:
        if placed.site.kind is SiteKind.HYBRID:
            unit = units[placed.unit]
            gpu, host = on.device("CUDA0"), on.device(CPU)
            lanes = {n: lanes_of(prices, unit, gpu, host, n) for n in range(GUESTS + 1)}
            places = placed.site.amount + placed.site.guests
            assert placed.time_ns == brute_force(unit.experts, unit.used, lanes, places)


@pytest.mark.parametrize(
    "site", ["hybrid:CUDA0:5", "hybrid:CUDA0:5+0", "hybrid:CUDA0:7+1", "hybrid:CUDA0:3+4"]
)
def test_any_number_can_be_asked_for_and_is_priced_and_told(site: str) -> None:
    """Also numbers that no solve would try; the bytes of slots and guests are in the budget."""
    model = moe()
    made, fewer = (
        plan(model, "1500", hybrid=True, pins=(parse_pin(f"blk.*.experts={each}"),))
        for each in (site, "hybrid:CUDA0:1+0")
    )
    slotted = [p for p in made.units if p.unit.endswith(".experts")]
    assert {str(p.site) for p in slotted} == {site}
    unit = next(u for u in units_of(model).units if u.kind is Kind.EXPERTS)
    each = sum(t.size_bytes for t in model.tensors if t.name in unit.tensors) // unit.experts
    more = slotted[0].site.amount + slotted[0].site.guests - 1
    gpu, least = (next(use for use in p.devices if use.name == "CUDA0") for p in (made, fewer))
    assert gpu.weights_bytes - least.weights_bytes == more * each * len(slotted)
    free = made.model_copy(update={"constraints": made.constraints.model_copy(update={"pins": ()})})
    for either in (made, free):  # without the pin too: a solve need not try the number
        assert reprice(either, model, machine(), Known()).plan.predicted == made.predicted
    spec = load_spec(made)
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    told = settings(spec, "CUDA0", spec.residents, "HYBRID0").text().decode().splitlines()
    lines = [line.split() for line in told if line.startswith("resident ")]
    wanted = [] if slotted[0].site.guests == GUESTS else [str(slotted[0].site.guests)]
    assert len(lines) == len(slotted) and all(words[4:] == wanted for words in lines)
    assert "guests 2" in told
