"""Experts in slots beside CPU and bus: the time of a layer against enumeration, and plans that use it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planning_models import machine, moe, plan, real, sites

from commands.shared.inputs import known_of_heat
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.findings import Finding
from planner.cost.hybrid_slots import Lanes, Routed, binomial, expected_ns, flat, step_ns, widths
from planner.cost.pins import parse_pin
from planner.machine.host_memory import HostMemory
from planner.model.inventory import Inventory
from planner.plan.load_spec import HYBRID_RING_BYTES
from planner.plan.plan import DeviceUse, Plan, from_text, to_text
from planner.site import Site, SiteKind
from planner.workload import Workload

LANES = Lanes(gpu_ns=50_000, pair_ns=45_000, upload_ns=100_000, guests=2, sync_ns=30_000)
HEAT = Path(__file__).parents[1] / "plans/inputs/Qwen3-30B-A3B.heat.csv"


def test_misses_are_divided_so_that_the_later_lane_ends_first() -> None:
    """Against every way to divide them; what is brought is computed after the last upload."""
    lanes = replace(LANES, beside_ns=60_000, pair_start_ns=7_000, upload_start_ns=9_000)
    for misses in range(9):
        ways = []
        for brought in range(min(misses, lanes.guests) + 1):
            each = lanes.beside_ns if brought else lanes.pair_ns
            cpu = (misses > brought) * lanes.pair_start_ns + each * (misses - brought)
            bus = lanes.upload_start_ns + lanes.upload_ns * brought + lanes.gpu_ns if brought else 0
            ways.append(max(lanes.gpu_ns, cpu, bus))
        assert step_ns(lanes, misses) == min(ways) + lanes.sync_ns
    without = replace(LANES, guests=0)
    assert step_ns(without, 4) == 4 * LANES.pair_ns + LANES.sync_ns
    assert step_ns(LANES, 8) < step_ns(without, 8)


@pytest.mark.parametrize(("n", "p"), [(8, 0.3), (4, 0.0), (3, 1.0), (10, 0.77)])
def test_the_distribution_is_binomial(n: int, p: float) -> None:
    wanted = [math.comb(n, m) * p**m * (1 - p) ** (n - m) for m in range(n + 1)]
    assert binomial(n, p) == pytest.approx(wanted)


def test_the_expectation_is_that_of_a_maximum_and_not_the_maximum_of_means() -> None:
    """Against every way in which eight choices hit or miss, one by one."""
    missing = 0.125
    total = 0.0
    for way in itertools.product((False, True), repeat=8):
        chance = math.prod(missing if miss else 1 - missing for miss in way)
        total += chance * step_ns(LANES, sum(way))
    assert expected_ns(LANES, 8, 8 * missing) == round(total)
    assert expected_ns(LANES, 8, 8 * missing) > step_ns(LANES, 1)


def test_more_slots_never_cost_time_and_all_slots_cost_none_but_the_wait() -> None:
    curve = tuple(min(1.0, (k / 64) ** 0.5) for k in range(65))
    found = list(widths(Routed(64, 8, 1, 512, curve), LANES, range(1, 64)))
    times = [slots.step_ns for slots in found]
    assert [slots.k for slots in found] == list(range(1, 64)) and times == sorted(times, reverse=True)
    assert times[-1] >= LANES.gpu_ns + LANES.sync_ns


def test_steps_of_several_tokens_have_a_place_for_each_choice_of_a_token() -> None:
    """With fewer the device computes nothing of a layer (route.cpp, slots_work)."""
    one, two = (Routed(64, 8, tokens, 512, flat(64)) for tokens in (1, 2))
    assert min(s.k for s in widths(one, LANES, range(65))) == 1
    assert min(s.k for s in widths(two, LANES, range(65))) == 8 - LANES.guests


def test_flat_routing_sampled() -> None:
    """Sixteen slots of 64, eight distinct experts a token: the mean of many drawn tokens."""
    draw = np.random.default_rng(3)
    drawn = [step_ns(LANES, int((draw.permutation(64)[:8] >= 16).sum())) for _ in range(20_000)]
    (slots,) = widths(Routed(64, 8, 1, 512, flat(64)), LANES, [16])
    assert slots.step_ns == pytest.approx(np.mean(drawn), rel=0.02)


def test_a_plan_with_slots_is_faster_and_repeats_itself() -> None:
    model = real("Qwen3-30B-A3B-Q4_K_M")
    known = known_of_heat(HEAT, model, Workload())
    plain, made = (plan(model, "9000", known=known, stripes=False, hybrid=hybrid) for hybrid in (False, True))
    slotted = [p for p in made.units if p.site.kind is SiteKind.HYBRID]
    assert len(slotted) > 30 and not any(p.site.divided for p in plain.units)
    assert made.predicted.tpot_ns < 0.6 * plain.predicted.tpot_ns
    assert made.constraints.hybrid and plain.constraints.hybrid is None
    assert {e.layer for e in made.experts} == {int(p.unit.split(".")[1]) for p in slotted}
    assert len({p.site.amount for p in slotted}) > 1  # layers differ in skew, and so in slots
    assert from_text(to_text(made), "x") == made


def test_slots_and_guests_are_in_the_budget() -> None:
    made = plan(moe(), "1500", hybrid=True, pins=(parse_pin("blk.*.experts=hybrid"),))
    experts = [p for p in made.units if p.unit.endswith("experts")]
    assert {p.site.kind for p in experts} == {SiteKind.HYBRID}
    gpu, host = made.devices
    slots = sum((p.site.amount + 2) * p.size_bytes // 128 for p in experts)
    rest = sum(p.size_bytes for p in made.units if p.site.kind is SiteKind.GPU)
    assert abs(gpu.weights_bytes - slots - rest) < 2**20
    assert host.weights_bytes >= sum(p.size_bytes for p in experts)
    assert gpu.compute_bytes >= max(p.size_bytes for p in experts)  # where prompts bring the others
    assert gpu.used_bytes <= 1500 * 2**20


def test_what_mapped_experts_are_brought_through_is_in_the_host_s_budget() -> None:
    def host(memory: HostMemory, **asked: Any) -> DeviceUse:
        made = plan(moe(), "1500", host_memory=memory, **asked)
        return next(use for use in made.devices if use.name == "CPU")

    asked = {"hybrid": True, "pins": (parse_pin("blk.*.experts=hybrid"),)}
    pinned, mapped = host(HostMemory.PINNED, **asked), host(HostMemory.MAPPED, **asked)
    assert mapped.weights_bytes == pinned.weights_bytes
    assert mapped.compute_bytes - pinned.compute_bytes == HYBRID_RING_BYTES
    without_slots = {host(memory).compute_bytes for memory in HostMemory}
    assert len(without_slots) == 1


def test_check_derives_a_plan_with_slots_again() -> None:
    model = moe()
    made = plan(model, "1500", hybrid=True)
    assert any(Site.parse(s).kind is SiteKind.HYBRID for s in sites(made).values())
    assert found(made, model) == []
    units = [
        p.model_copy(update={"site": replace(p.site, amount=p.site.amount + 1)}) if p.site.divided else p
        for p in made.units
    ]
    assert found(made.model_copy(update={"units": tuple(units)}), model)


def found(made: Plan, model: Inventory) -> list[Finding]:
    inputs = Inputs(model, machine())
    return check_plan(made, to_text(made), "plan.yaml", inputs, CheckOptions())


@pytest.mark.parametrize("budget", ["1200", "2000", "3000", "9000"])
def test_slots_are_taken_only_where_they_win(budget: str) -> None:
    model = real("Qwen3-30B-A3B-Q4_K_M") if budget == "9000" else moe()
    without, allowed = (plan(model, budget, hybrid=h) for h in (False, True))
    assert allowed.predicted.objective_ns <= without.predicted.objective_ns
    whole = plan(moe(), "20000", hybrid=True)
    assert not any(p.site.divided for p in whole.units)


def test_slots_beat_a_plan_whose_prompt_is_doubted_too() -> None:
    """The plan without slots leaves prompts to the CPU, where that may be slower than predicted; slots copy
    them to the GPU, and were taken for that alone though predicted slower.
    """
    model, server = real("Qwen3-Next-80B-A3B-Q4_K_M"), machine("rtx3060-12gb-epyc")
    without, allowed = (plan(model, "11000", on=server, stripes=False, hybrid=h) for h in (False, True))
    assert not without.op_offload
    assert allowed.predicted.objective_ns <= without.predicted.objective_ns
