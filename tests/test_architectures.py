"""Every architecture the engine can make and save: tensors recognised, caches equal to the byte.

Weights are compared in test_memory_matrix, on files: here the engine makes shared tensors once a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from made_models import ALL, CONTEXTS, hparams, make

from planner.memory.compute_buffer import compute_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.memory.weights import context_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.layers import KNOWN, layers_of
from planner.model.structure import structure_of
from planner.model.units import units_of

MIB = 2**20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, list[list[int]]]]:
    folder = tmp_path_factory.mktemp("made")
    return folder, make(folder, ALL)


def read(folder: Path, arch: str) -> Inventory:
    """The saved tensors with the metadata the model was made from."""
    return read_model(folder / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})


@pytest.mark.parametrize("arch", ALL)
def test_everything_is_recognised_and_counted(
    arch: str, made: tuple[Path, Mapping[str, list[list[int]]]]
) -> None:
    model = read(made[0], arch)
    assert arch in KNOWN
    table = units_of(model)
    assert table.unknown == ()
    assert sum(unit.size_bytes for unit in table.units) == model.size_bytes
    layers = layers_of(model)
    assert all(a or r for a, r in zip(layers.attention, layers.recurrent, strict=True)) or "nemotron" in arch
    for (workload, swa_full), (_, context, compute) in zip(CONTEXTS, made[1][arch], strict=True):
        kv = kv_bytes(structure_of(model), workload, swa_full=swa_full)
        assert context_bytes(kv, state_bytes(structure_of(model), workload)) == context
        estimate = compute_bytes(structure_of(model), workload, swa_full=swa_full)
        # Tiny models, rare mixers: the order of magnitude; real sizes are held to a tenth elsewhere.
        assert compute / 2 - MIB <= estimate <= 2 * compute + 2 * MIB
