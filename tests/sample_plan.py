"""A small, complete plan for tests that need no model."""

from __future__ import annotations

from planner.plan.plan import (
    Baseline,
    Constraints,
    DeviceUse,
    LayerRange,
    MachineRef,
    ModelRef,
    Override,
    Placement,
    Plan,
    Prediction,
)
from planner.workload import Workload

MIB = 2**20


def sample_plan() -> Plan:
    """Two layers, experts of the second one on the CPU."""
    return Plan(
        command="atsplan solve tiny.gguf --machine none --budget 10",
        version="0.1.0",
        model=ModelRef(
            name="tiny", architecture="qwen3moe", table_digest="sha256:1", tensors=8, size_bytes=9 * MIB
        ),
        machine=MachineRef(name="none", profile_digest="sha256:2", measured=False, engine=""),
        workload=Workload(),
        constraints=Constraints(budgets={"CUDA0": 10 * MIB, "CPU": 2**16 * MIB}),
        devices=(
            DeviceUse(
                name="CUDA0",
                kind="gpu",
                budget_bytes=10 * MIB,
                weights_bytes=3 * MIB,
                kv_bytes=MIB,
                state_bytes=0,
                compute_bytes=2 * MIB,
            ),
            DeviceUse(
                name="CPU",
                kind="cpu",
                budget_bytes=2**16 * MIB,
                weights_bytes=3 * MIB,
                kv_bytes=0,
                state_bytes=0,
                compute_bytes=MIB,
            ),
        ),
        layers=(LayerRange(first=0, last=2, device="CUDA0"),),
        predicted=Prediction(
            tpot_ns=2_000_000,
            prefill_ns=9_000_000,
            error_ppm=100_000,
            splits=3,
            objective_ns=2_000_000,
            bound_ns=2_000_000,
            gap_ppm=0,
            status="optimal",
        ),
        baselines=(
            Baseline(
                name="ngl", setting="-ngl 1", feasible=True, tpot_ns=3_000_000, prefill_ns=9, vram_bytes=5
            ),
        ),
        units=(
            Placement(unit="blk.0.experts", site="gpu:CUDA0", size_bytes=3 * MIB, time_ns=5, why="fits"),
            Placement(unit="blk.1.experts", site="cpu", size_bytes=3 * MIB, time_ns=9, why="least harm"),
        ),
        overrides=(Override(pattern=r"^blk\.1\.ffn_up_exps\.weight$", buffer="CPU", tensors=1),),
    )
