"""The largest context: with all that runs beside the model at that context, and no step larger."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import machine, moe, plan, real, with_nextn

from atsplan import main
from planner.machine.budgets import budgets_for, parse_budget
from planner.memory.reserves import Extras
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.largest_context import Keep, fits, largest_context, with_context
from planner.passes.make_plan import make_plan
from planner.plan.engine_settings import EngineSettings
from planner.plan.plan import Plan
from planner.plan.request import ExtraModels, Request
from planner.solver.clock import Clock
from planner.workload import Workload

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"
MIB = 2**20
STEP = 256


def asked(model: Inventory, budget: str, beside: ExtraModels | None, work: Workload, lowest: int = 0) -> Plan:
    profile = machine()
    budgets = budgets_for(profile, parse_budget(budget))
    request = Request(budgets, work, lowest_ctx=lowest, extra_models=beside, no_cpu=True)
    return make_plan(model, profile, request, clock=Clock(20))


@pytest.mark.parametrize("accept", [None, 900_000])
@pytest.mark.parametrize("drafter", ["nextn", "model"])
def test_reserves_follow_the_context(drafter: str, accept: int | None) -> None:
    """What a draft's cache takes at the training length must not be taken at the context that is found."""
    model, draft = with_nextn(), real("Qwen3.5-0.8B-q8_0") if drafter == "model" else None
    work = Workload(n_ctx=131_072, mtp=draft is None)
    beside = ExtraModels(Extras(draft=draft), "CUDA0", accept)
    made = asked(model, "4600", beside, work, lowest=1024)
    n_ctx = made.workload.n_ctx
    assert 1024 < n_ctx < 131_072 and n_ctx % STEP == 0
    if accept is not None:
        # The small model here is slower than the large one, which drafts nothing then.
        assert made.speculation is not None and (made.speculation.tokens > 0) == (draft is None)
    kv = {r.name: r.size_bytes for r in made.constraints.reserves}.get("draft KV", 0)
    again = asked(model, "4600", beside, with_context(work, n_ctx))
    assert kv == {r.name: r.size_bytes for r in again.constraints.reserves}.get("draft KV", 0)
    settings = EngineSettings(speculation=made.speculation)
    budgets = budgets_for(machine(), parse_budget("4600"))
    case = Case(structure_of(model), machine(), Request(budgets, work, extra_models=beside, no_cpu=True))
    assert fits(case, settings, with_context(work, n_ctx))
    assert not fits(case, settings, with_context(work, n_ctx + STEP))


def test_room_for_the_caches_counts_keys_and_values_of_attention_too() -> None:
    """A state of nothing must not hide the KV cache of the same layer."""
    model, profile = real("Llama-3.1-70B-Q4_K_M"), machine()
    budgets = budgets_for(profile, {"CUDA0": 23_209 * MIB})
    request = Request(budgets, Workload(n_ctx=131_072), lowest_ctx=1024)
    found, keep = largest_context(Case(structure_of(model), profile, request), EngineSettings())
    assert keep is Keep.CACHE and found == 50_944  # of 320 KiB a cell, beside every layer's attention


def solved(model: str, *words: str) -> Result:
    return CliRunner().invoke(main, ["solve", str(INPUTS / f"{model}.inventory.yaml"), *words])


@pytest.mark.parametrize(("model", "leaves"), [("GLM-4.7-Flash-q4_K", True), ("Qwen3-30B-A3B-Q4_K_M", False)])
def test_what_is_said_of_the_context_is_true_of_the_plan(model: str, leaves: bool) -> None:
    found = solved(model, "--machine", "rtx4060-8gb-ddr5", "--ctx", "max", "--json")
    assert found.exit_code == 0, found.output
    made = Plan.model_validate_json(found.stdout)
    (host,) = [use for use in made.devices if use.kind == "cpu"]
    (line,) = [text for text in found.stderr.splitlines() if "the largest with" in text]
    assert Keep.CACHE.value in line and ("to the CPU" in line) == (host.kv_bytes >= MIB) == leaves


def test_slots_lengthen_the_largest_context() -> None:
    """A slot may be as long as the training; two hold twice as much."""
    words = ("--machine", "rtx4090-ddr5", "--ctx", "max", "--json")
    one, two = (
        Plan.model_validate_json(solved("gpt-oss-20b-MXFP4", *words, *more).stdout)
        for more in ((), ("--workload", "seqs=2"))
    )
    assert one.workload.n_ctx == 131_072 and two.workload.n_ctx == 2 * 131_072
    assert plan(moe(), "8000").workload.n_ctx == 4096
