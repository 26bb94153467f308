"""Every shipped inventory is planned to a proven optimum, and never below a stock rule."""

from __future__ import annotations

import pytest
from planning_models import INPUTS, machine, plan, real

from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.site import ON_CPU

NAMES = sorted(path.name.removesuffix(".inventory.yaml") for path in INPUTS.glob("*.inventory.yaml"))
TIGHT = {"rtx4060-8gb-ddr5": "7000", "rtx4090-ddr5": "22000"}


def fastest_stock(made: Plan) -> int:
    requests = [made.workload.gen * b.tpot_ns + b.prefill_ns for b in made.baselines if b.feasible]
    return min(requests)


@pytest.mark.parametrize("name", NAMES)
def test_planned_and_proven(name: str) -> None:
    model = real(name)
    host = "rtx4060-8gb-ddr5" if model.size_bytes < 20 * 2**30 else "rtx4090-ddr5"
    made = plan(model, TIGHT[host], on=machine(host), page=True)
    p = made.predicted
    assert p.status in ("optimal", "baseline") and p.objective_ns <= fastest_stock(made)
    assert p.gap_ppm == 0
    gpu = made.devices[0]
    assert gpu.kind == "cpu" or gpu.used_bytes <= gpu.budget_bytes
    assert sum(placed.size_bytes for placed in made.units) == model.size_bytes


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B-Q4_K_M", "gpt-oss-20b-MXFP4", "Qwen3.6-27B-q4_K"])
def test_what_fits_whole_is_left_alone(name: str) -> None:
    made = plan(real(name), "24000")
    assert made.overrides == () and len(made.layers) == 1 and made.layers[0].device == "CUDA0"
    assert {p.unit for p in made.units if p.site == ON_CPU} == {"token_embd"}


def test_stripes_of_a_large_model_are_proven_too() -> None:
    model = real("Kimi-K2-Thinking-q4_K")
    curves = {layer: tuple((k / 384) ** (0.12 + 0.003 * layer) for k in range(385)) for layer in range(1, 61)}
    made = plan(model, "22000", page=True, known=Known(curves=curves))
    assert made.predicted.gap_ppm == 0 or made.predicted.status == "baseline"
    assert made.predicted.objective_ns <= fastest_stock(made)
