"""Models of the library with their NextN blocks: what the blocks take, and only where they draft."""

from __future__ import annotations

import math

import pytest
from planning_models import machine, plan, real

from planner.constants import MIB
from planner.machine.budgets import budgets_for, parse_budget
from planner.memory.kv_cache import nextn_kv_bytes
from planner.memory.reserves import Extras
from planner.model.layers import layers_of
from planner.model.nextn import nextn_fault
from planner.model.structure import structure_of
from planner.passes.make_plan import make_plan
from planner.plan.plan import Plan
from planner.plan.request import ExtraModels, Request
from planner.solver.clock import Clock
from planner.workload import Workload

DENSE, MOE = "Qwen3.6-27B-q4_K", "Qwen3.6-35B-A3B-q4_K"
LATENT = "DeepSeek-V3.1-Terminus-q4_K"


def drafted(name: str, accept: float, workload: Workload | None = None) -> Plan:
    """A plan on 24 GB that chooses how much its NextN block drafts."""
    profile = machine()
    work = (workload or Workload()).model_copy(update={"mtp": True})
    extra = ExtraModels(Extras(), "CUDA0", round(accept * 10**6))
    request = Request(budgets_for(profile, parse_budget("23000")), work, extra_models=extra)
    return make_plan(real(name), profile, request, clock=Clock(10))


@pytest.mark.parametrize("name", [DENSE, MOE, LATENT])
def test_the_block_is_whole_and_counted_inside_the_layers(name: str) -> None:
    model, plain = real(f"{name}+nextn"), real(name)
    assert nextn_fault(model) == "" and nextn_fault(plain) == "holds no NextN/MTP block"
    with_block, without = layers_of(model), layers_of(plain)
    assert (with_block.n_main, with_block.n_all) == (without.n_main, without.n_all + 1)
    assert model.tensors[: len(plain.tensors)] == plain.tensors


def test_a_latent_block_has_the_published_parameters_and_cache() -> None:
    """11.5e9 parameters without embedding and head (README_WEIGHTS of DeepSeek-V3), 576 values a cell."""
    model = real(f"{LATENT}+nextn")
    block = [t for t in model.tensors if t.name.startswith("blk.61.")]
    assert sum(math.prod(t.shape) for t in block) == pytest.approx(11.5e9, rel=0.01)
    assert nextn_kv_bytes(structure_of(model), Workload(n_ctx=4096)) == (4096 * 576 * 2,)
    assert not any("embed_tokens" in t.name or "shared_head_head" in t.name for t in block)


def test_its_cache_is_the_published_one() -> None:
    """544 MiB at 262144 cells of q8_0 (llama.cpp issue 23472)."""
    work = Workload(n_ctx=262_144, type_k="q8_0", type_v="q8_0")
    assert nextn_kv_bytes(structure_of(real(f"{DENSE}+nextn")), work) == (544 * MIB,)


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_without_drafts_it_takes_nothing(name: str) -> None:
    """The engine skips the block, and a plan that decides against drafts is that of the model without it."""
    idle, plain = drafted(f"{name}+nextn", 0.0), plan(real(name), "23000")
    assert idle.speculation is not None and idle.speculation.tokens == 0
    assert not idle.workload.mtp and idle.constraints.reserves == ()
    assert idle.devices == plain.devices and idle.predicted.tpot_ns == plain.predicted.tpot_ns


def test_drafting_takes_weights_cache_compute_and_copies_of_state() -> None:
    """Each on a line of its own, so that none can be counted twice."""
    made, plain = drafted(f"{DENSE}+nextn", 0.8), plan(real(DENSE), "23000")
    assert made.speculation is not None and made.speculation.tokens > 0 and made.workload.mtp
    lines = {r.name: r.size_bytes for r in made.constraints.reserves}
    assert {"MTP compute", "MTP state"} <= set(lines)
    assert lines["MTP state"] == made.speculation.tokens * sum(d.state_bytes for d in plain.devices)
    kv = sum(d.kv_bytes for d in made.devices) - sum(d.kv_bytes for d in plain.devices)
    assert kv == nextn_kv_bytes(structure_of(real(f"{DENSE}+nextn")), made.workload)[0]
    block = sum(t.size_bytes for t in real(f"{DENSE}+nextn").tensors if t.name.startswith("blk.64."))
    weights = [sum(d.weights_bytes for d in each.devices) for each in (made, plain)]
    assert block <= weights[0] - weights[1] < block + MIB  # aligned
    assert made.predicted.tpot_ns < plain.predicted.tpot_ns
