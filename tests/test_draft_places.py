"""Where a draft model lies: chosen with its length; its experts may stay in host memory."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path

from engines import ROOT
from planning_models import dense, machine, moe

from planner.drafts.server_texts import acceptance_in
from planner.machine.budgets import budgets_for, parse_budget
from planner.memory.memory import Reserve
from planner.memory.reserves import Extras, reserves
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.make_plan import make_plan
from planner.passes.settings_to_try import LONGEST_DRAFT, draft_lengths, draft_ns, drafters
from planner.plan.engine_settings import EngineSettings
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, Speculation
from planner.plan.request import ExtraModels, Request
from planner.solver.clock import Clock
from planner.workload import Workload
from runtime.tools.llama_server import find_program, serving
from runtime.tools.options import options, stock

LARGE, SMALL = dense([16384] * 6), dense([256])


def request(draft: Inventory, budget: str, device: str = "") -> Request:
    extra = ExtraModels(Extras(draft=draft, draft_device=device), "CUDA0", 900_000)
    return Request(budgets_for(machine(), parse_budget(budget)), Workload(), extra_models=extra)


def planned(draft: Inventory, budget: str, device: str = "") -> tuple[Plan, Speculation]:
    made = make_plan(LARGE, machine(), request(draft, budget, device), clock=Clock(20))
    assert made.speculation is not None
    return made, made.speculation


def test_a_draft_goes_to_the_cpu_where_the_model_needs_the_gpu_more() -> None:
    made, drafts = planned(SMALL, "500")
    assert drafts.device == "CPU" and drafts.tokens
    assert {r.device for r in made.constraints.reserves} == {"CPU"}
    forced, on_gpu = planned(SMALL, "500", "CUDA0")
    assert on_gpu.device == "CUDA0" or not on_gpu.tokens
    assert made.predicted.objective_ns < forced.predicted.objective_ns
    assert planned(SMALL, "8000")[1].device == "CUDA0"


def places(draft: Inventory, device: str = "") -> list[tuple[str, bool | None]]:
    case = Case(structure_of(LARGE), machine(), request(draft, "2000", device))
    assert case.request.extra_models is not None
    return [(each.device, each.experts_on_host) for each in drafters(case, case.request.extra_models)]


def test_places_of_a_draft() -> None:
    assert places(SMALL) == [("CUDA0", None), ("CPU", None)]
    assert places(moe(2)) == [("CUDA0", None), ("CUDA0", True), ("CPU", None)]
    assert places(moe(2), "CPU") == [("CPU", None)]
    case = Case(structure_of(LARGE), machine(), request(moe(2), "2000"))
    tried = draft_lengths(case, EngineSettings())
    assert len(tried) == 1 + 3 * LONGEST_DRAFT
    assert [s.speculation.tokens for s in tried[:2] if s.speculation] == [0, 1]
    assert tried[0].reserves == ()


def lines(extras: Extras) -> dict[tuple[str, str], int]:
    found: tuple[Reserve, ...] = reserves(structure_of(LARGE), Workload(), extras, gpu="CUDA0")
    return {(r.name, r.device): r.size_bytes for r in found}


def test_experts_of_a_draft_lie_on_the_host_to_the_byte() -> None:
    draft = moe(2)
    whole, apart = lines(Extras(draft=draft)), lines(Extras(draft=draft, draft_experts_on_host=True))
    experts = sum(t.size_bytes for t in draft.tensors if "_exps" in t.name)
    assert apart["draft experts", "CPU"] == experts
    assert whole["draft", "CUDA0"] - apart["draft", "CUDA0"] == experts
    assert {k: v for k, v in whole.items() if k[0] != "draft"}.items() <= apart.items()
    profile, work = machine(), Workload()
    near, far = (draft_ns(draft, profile, work, "CUDA0", experts_on_host=each) for each in (False, True))
    assert near < far < draft_ns(draft, profile, work, "CPU")


def test_a_server_drafts_with_experts_on_the_host(computing_server: Path) -> None:
    """The exported options are taken, and the draft guesses as it does elsewhere."""
    model = str(ROOT / "tests" / "data" / "tiny-moe.gguf")
    work = Workload(n_ctx=256, n_batch=64, n_ubatch=64)
    placed = replace(
        stock(LoadSpec((), (), 0, (), work), 4),
        draft=model.replace("tiny-moe", "tiny-moe-64"),
        draft_device="CPU",
        draft_tokens=3,
        draft_experts_on_host=True,
    )
    words = [word for pair in options(placed, model) for word in pair if word]
    assert "--spec-draft-cpu-moe" in words
    log: list[str] = []
    program = find_program(str(computing_server))
    with serving(program, [*words, "-t", "1"], on_line=log.append) as server:
        asked = {"prompt": "The old man said ", "n_predict": 60, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        wanted = urllib.request.Request(server.url + "/completion", json.dumps(asked).encode(), headers)
        assert json.load(urllib.request.urlopen(wanted, timeout=60))["timings"]["draft_n"] > 0
    assert acceptance_in("\n".join(log), "log").each_ppm > 300_000
