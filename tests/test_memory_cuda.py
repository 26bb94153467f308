"""Formulas against dry loads of 18 real models on an H200 (llama.cpp b11434, all layers on CUDA0).

The numbers were read from llama_get_memory_breakdown; `experts_on_host` overrides routed experts to the CPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from planner.memory.compute_buffer import compute_bytes, converts_caches, host_bytes, staging_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.model.heads import is_latent
from planner.model.inventory import Inventory, from_text
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.model.tensor_roles import Role, part_of
from planner.workload import Workload

ROOT = Path(__file__).parent
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """One dry load."""

    model: str
    workload: Workload
    experts_on_host: bool
    context: int
    compute: int
    host_compute: int

    def __str__(self) -> str:
        work = self.workload
        return f"{self.model}-{work.n_ctx}x{work.n_seq}-{work.n_ubatch}-{work.type_k}-{self.experts_on_host}"


def measured() -> Iterator[Measured]:
    with (ROOT / "data" / "memory_h200_b11434.csv").open() as file:
        for row in csv.DictReader(file):
            work = {key: int(row[key]) for key in ("n_ctx", "n_seq", "n_ubatch")}
            types = {
                "type_k": row["kv_type"],
                "type_v": row["kv_type"],
                "flash_attn": row["flash_attn"] == "true",
            }
            yield Measured(
                row["model"],
                Workload.model_validate({**work, **types}),
                row["experts_on_host"] == "true",
                *(int(row[key]) for key in ("context", "compute", "host_compute")),
            )


def long_ones() -> Iterator[Measured]:
    """Contexts up to the training length, with caches of two types."""
    with (ROOT / "data" / "memory_h200_long_b11434.csv").open() as file:
        for row in csv.DictReader(file):
            work = {key: int(row[key]) for key in ("n_ctx", "n_seq", "n_ubatch")}
            types = {"type_k": row["kv_type"], "type_v": row["kv_type"]}
            sizes = (int(row[key]) for key in ("context", "compute", "host_compute"))
            yield Measured(row["model"], Workload.model_validate({**work, **types}), False, *sizes)


@cache
def read(name: str) -> Inventory:
    path = ROOT.parent / "plans" / "inputs" / f"{name}.inventory.yaml"
    return from_text(path.read_text(), str(path))


@pytest.mark.parametrize("load", list(measured()), ids=str)
def test_a_real_gpu(load: Measured) -> None:
    model, work = read(load.model), load.workload
    context = sum(kv_bytes(structure_of(model), work)) + sum(state_bytes(structure_of(model), work))
    # CUDA pads quantised rows that are no multiple of 512 values: once a tensor, 512 bytes.
    padded = 512 * layers_of(model).n_main if work.type_k == "q8_0" else 0
    assert 0 <= load.context - context <= padded * (is_latent(model) or any(layers_of(model).recurrent))
    host = (
        [t.size_bytes for t in model.tensors if part_of(t).role is Role.EXPERTS]
        if load.experts_on_host
        else []
    )
    staged = staging_bytes(host, work, hybrid=any(layers_of(model).recurrent))
    estimate = compute_bytes(structure_of(model), work, staged_bytes=staged)
    assert load.compute <= 1.03 * estimate + 4 * MIB
    assert estimate <= 2 * load.compute + 4 * MIB
    if not load.experts_on_host:
        assert estimate <= 1.11 * load.compute
        assert load.host_compute <= 1.5 * host_bytes(structure_of(model), work)


@pytest.mark.parametrize("load", list(long_ones()), ids=str)
def test_long_contexts_of_a_real_gpu(load: Measured) -> None:
    """Attention's kernels convert a quantised cache of one layer to f16; masks lie before the logits."""
    model, work = read(load.model), load.workload
    estimate = compute_bytes(structure_of(model), work, converts=converts_caches("CUDA0"))
    assert load.compute <= 1.01 * estimate + MIB
    assert estimate <= 1.17 * load.compute
    assert 0.97 * load.host_compute <= host_bytes(structure_of(model), work) <= 1.03 * load.host_compute + MIB
    assert converts_caches("RPC0[10.0.0.2:50052]")  # behind which may be such a GPU
    plain = work.model_copy(update={"type_k": "f16", "type_v": "f16"})
    assert compute_bytes(structure_of(model), plain, converts=True) == compute_bytes(
        structure_of(model), plain
    )
