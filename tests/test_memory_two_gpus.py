"""Formulas against dry loads of six real models on two H200s (llama.cpp b11434).

Layers in halves; `full`: everything on the GPUs, `experts`: those of ten layers overridden to the CPU,
`ngl`: the first four layers on the CPU, `one`: everything on CUDA0. Bytes from llama_get_memory_breakdown.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from planner.memory.compute_buffer import PIPELINE_COPIES, compute_bytes, host_bytes, staging_bytes
from planner.model.inventory import Inventory, from_text
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.model.tensor_roles import Role, part_of
from planner.workload import Workload

ROOT = Path(__file__).parent
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """One device of one dry load."""

    model: str
    workload: Workload
    placement: str
    device: str
    compute: int

    def __str__(self) -> str:
        return f"{self.model}-{self.workload.n_ctx}-{self.workload.n_ubatch}-{self.placement}-{self.device}"


def measured() -> Iterator[Measured]:
    with (ROOT / "data" / "memory_h200x2_b11434.csv").open() as file:
        for row in csv.DictReader(file):
            n_ctx, n_ubatch = int(row["n_ctx"]), int(row["n_ubatch"])
            work = Workload(n_ctx=n_ctx, n_ubatch=n_ubatch, n_batch=max(2048, n_ubatch))
            yield Measured(row["model"], work, row["placement"], row["device"], int(row["compute"]))


@cache
def read(name: str) -> Inventory:
    path = ROOT.parent / "plans" / "inputs" / f"{name}.inventory.yaml"
    return from_text(path.read_text(), str(path))


def on_host(model: Inventory, placement: str) -> list[int]:
    """Sizes of the tensors that prompts copy to a GPU."""
    last = {"experts": 9, "ngl": 3}.get(placement, -1)
    parts = [(t.size_bytes, part_of(t)) for t in model.tensors]
    here = [(size, part) for size, part in parts if part.layer is not None and part.layer <= last]
    return [size for size, part in here if placement == "ngl" or part.role is Role.EXPERTS]


GPUS = [load for load in measured() if load.device != "CPU"]
HOSTS = [load for load in measured() if load.device == "CPU" and load.placement != "ngl"]  # no layer there


@pytest.mark.parametrize("load", GPUS, ids=str)
def test_copies_are_counted_where_the_engine_keeps_them(load: Measured) -> None:
    model, work = read(load.model), load.workload
    # An override of nothing keeps the engine from pipelining: the dense model's `experts` are none.
    copies = PIPELINE_COPIES if load.placement == "full" else 1
    staged = staging_bytes(on_host(model, load.placement), work, hybrid=any(layers_of(model).recurrent))
    estimate = compute_bytes(structure_of(model), work, staged_bytes=staged, copies=copies)
    assert load.compute <= 1.03 * estimate + 4 * MIB
    if load.placement == "one":
        assert estimate <= 1.11 * load.compute


@pytest.mark.parametrize("load", HOSTS, ids=str)
def test_so_does_the_host(load: Measured) -> None:
    copies = PIPELINE_COPIES if load.placement == "full" else 1
    estimate = host_bytes(structure_of(read(load.model)), load.workload, copies=copies)
    assert load.compute <= 1.03 * estimate + 4 * MIB
    assert estimate <= 2 * load.compute + 4 * MIB
