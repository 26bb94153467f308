"""Layers that read another layer's KV cache: what the engine does when they lie elsewhere, and its price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_models import findings, machine, plan, problem_of, sites, twins
from twin_devices import Ask, ask

from planner.check.consistency import check_agreement
from planner.memory.kv_cache import kv_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.plan.load_spec import LoadSpec, load_spec, plan_layer_devices
from planner.plan.request import Pin, Request
from planner.solver.evaluate import evaluate
from planner.solver.solve import solve_cp
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

MIB = 2**20
WORK = Workload(n_ctx=8192, depth=0, n_ubatch=64, n_batch=64, prompt=16, gen=16)
SHORT = WORK.model_copy(update={"n_ctx": 2048})
OVERRIDE = ((r"^blk\.0\.attn_norm\.weight$", "TWIN0"),)  # keeps the engine from pipelining


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers; the last two read the caches of the two before them."""
    path = tmp_path_factory.mktemp("sharing") / "model.gguf"
    return write(path, SynthSpec("gemma4", n_vocab=1024, n_layers=8))


def inventory(model: Path) -> Inventory:
    return read_model(model).inventory


def spec(split: tuple[int, ...]) -> LoadSpec:
    return LoadSpec(("TWIN0", "TWIN1"), split, 9, OVERRIDE, SHORT, use_extra_bufts=False, threads=1)


def test_the_engine_copies_a_cache_to_readers_elsewhere(model: Path) -> None:
    together, apart = spec((4, 5)), spec((6, 3))
    asked = [Ask(model, each, tuple(range(3, 9)), (20, 21)) for each in (together, apart)]
    near, away = ask(asked, n_devices=2)
    kv = kv_bytes(structure_of(inventory(model)), SHORT)
    assert kv[6:] == (0, 0) and kv[4] > 0
    assert near.logits == away.logits and near.splits_decode == away.splits_decode
    assert away.memory["TWIN1"].context == 0  # no cache of its own
    grown = away.memory["TWIN1"].compute - near.memory["TWIN1"].compute
    assert 0.6 * (kv[4] + kv[5]) <= grown <= 1.05 * (kv[4] + kv[5]) + MIB


def pinned(model: Path, first: int) -> tuple[Pin, ...]:
    """Layers from `first` on and the head on the second device, the others on the first."""
    names = {u.split(".")[1] for u in (t.name for t in inventory(model).tensors) if u.startswith("blk.")}
    homes = {n: "TWIN0" if int(n) < first else "TWIN1" for n in sorted(names, key=int)}
    return (*(Pin(f"blk.{n}.*", home) for n, home in homes.items()), Pin("output*", "TWIN1"))


def test_plans_count_and_price_the_copies(model: Path) -> None:
    made = {
        first: plan(
            inventory(model),
            "TWIN0=900,TWIN1=900",
            on=twins(2048),
            workload=WORK,
            pins=pinned(model, first),
        )
        for first in (4, 6)
    }
    kv = kv_bytes(structure_of(inventory(model)), WORK)
    for each in made.values():
        assert findings(each, inventory(model), twins(2048)) == []
        check_agreement(each, inventory(model), "plan.yaml")
    used = {n: next(u for u in p.devices if u.name == "TWIN1") for n, p in made.items()}
    assert used[6].kv_bytes == 0 and used[4].kv_bytes == kv[4] + kv[5]
    assert used[6].compute_bytes - used[4].compute_bytes == kv[4] + kv[5]
    assert made[6].predicted.tpot_ns > made[4].predicted.tpot_ns  # splits are as many
    assert made[6].predicted.splits == made[4].predicted.splits
    (found,) = ask([Ask(model, replace(load_spec(made[6]), overrides=OVERRIDE))], n_devices=2)
    assert found.memory["TWIN1"].compute <= used[6].compute_bytes * 1.03 + 4 * MIB


def test_a_deep_context_keeps_readers_with_their_cache(model: Path) -> None:
    """Both ways to cut the model in two fit; the cheaper one does not cut through shared caches."""
    deep = WORK.model_copy(update={"n_ctx": 65536, "depth": 60000})
    profile = twins(4096)
    whole = plan(inventory(model), "TWIN0=2000,TWIN1=2000", on=profile, workload=deep)
    part = sum(use.used_bytes for use in whole.devices if use.kind == "gpu") * 6 // (10 * MIB)
    made = plan(inventory(model), f"TWIN0={part},TWIN1={part}", on=profile, workload=deep)
    homes = plan_layer_devices(made)
    assert {"TWIN0", "TWIN1"} <= set(homes), homes
    assert homes[4] == homes[6] and homes[5] == homes[7]


@pytest.mark.parametrize("budget", ["200", "600", "1400"])
def test_real_models_are_solved_and_checked(budget: str, tmp_path: Path) -> None:
    path = write(tmp_path / "n.gguf", SynthSpec("gemma3n", n_layers=24, n_vocab=4096))
    profile, whole = machine(), inventory(path)
    work = Workload(n_ctx=8192, depth=640)
    made = plan(whole, budget, on=profile, workload=work)
    assert findings(made, whole, profile) == []
    assert made.predicted.gap_ppm < 20_000 and sites(made)
    for stock in made.baselines:
        if stock.feasible:
            theirs = made.workload.gen * stock.tpot_ns + stock.prefill_ns
            assert made.predicted.objective_ns <= theirs * 1.02


def test_the_search_agrees_with_cp_sat(model: Path) -> None:
    from planner.solver.solve import solve

    profile = machine()
    budgets = {"CUDA0": 420 * MIB, "CPU": 2**34}
    problem = problem_of(inventory(model), profile, Request(budgets, WORK))
    assert any(o.away for _, _, o in problem.all_options())
    found, exact = solve(problem), solve_cp(problem)
    assert found.solution is not None and evaluate(problem, found.solution).feasible
    assert (found.status, found.objective_ns) == ("optimal", exact.objective_ns)


def test_readers_need_kernels_for_the_types_of_what_they_read(model: Path) -> None:
    odd = WORK.model_copy(update={"type_k": "q5_1", "type_v": "q5_1"})
    made = plan(inventory(model), "900", on=machine(), workload=odd)
    assert set(plan_layer_devices(made)[:8]) == {"CPU"}
