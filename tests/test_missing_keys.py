"""Metadata that files leave out: the engine's defaults, key by key, and contexts of speculative blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from dry_loads import Bytes, Load, attempt
from made_models import CONTEXTS, NEXTN, hparams, make
from planning_models import plan
from sparse_model import write_sparse

from planner.memory.compute_buffer import compute_bytes
from planner.memory.kv_cache import kv_bytes, nextn_kv_bytes, state_bytes
from planner.memory.weights import context_bytes, loaded_tensors, tied_copy_bytes, weight_bytes
from planner.model.gguf.reader import read_model
from planner.model.heads import unstated_heads
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.model.validity import load_faults
from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

MIB = 2**20
WORK = CONTEXTS[1][0]
DEADLY = frozenset({"expert_count", "expert_used_count"})  # the engine dies of their absence, always
ODD = ("glm-dsa", "deepseek32", "dots3note", "hy_v4", "minimax-m3", "minimax-01", "plamo3", "gemma2", "afmoe")
SPECS = {arch: SynthSpec(arch) for arch in ARCHITECTURES} | {
    "gemma3": SynthSpec("gemma3", n_layers=12, window=300),
    "gemma4": SynthSpec("gemma4", n_layers=8),
    "qwen35moe-nextn": SynthSpec("qwen35moe", n_nextn=1),
}


def without(inventory: Inventory, key: str) -> Inventory:
    kept = {name: one for name, one in inventory.hparams.items() if name != key}
    return inventory.model_copy(update={"hparams": kept})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Inventory]:
    """Small models with all their metadata, without weights."""
    folder = tmp_path_factory.mktemp("keys")
    found = {n: read_model(write(folder / f"{n}.gguf", spec)).inventory for n, spec in SPECS.items()}
    make(folder, ODD)
    for arch in ODD:
        read = read_model(folder / f"{arch}.gguf").inventory
        found[f"made {arch}"] = read.model_copy(update={"hparams": hparams(arch)})
    return found


@pytest.mark.parametrize("name", [*SPECS, *(f"made {arch}" for arch in ODD)])
def test_the_engine_fills_in_what_a_file_does_not_say(
    name: str, whole: Mapping[str, Inventory], tmp_path: Path
) -> None:
    """Without one key the engine refuses the file, or takes the bytes that are counted."""
    keys = sorted(whole[name].hparams.keys() - DEADLY)
    lacking = [whole[name], *(without(whole[name], key) for key in keys)]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", each), WORK) for n, each in enumerate(lacking)]
    said = attempt(loads)
    assert isinstance(said[0], Bytes), said[0]
    for key, model, engine in zip(("", *keys), lacking, said, strict=True):
        if isinstance(engine, str):
            assert "key not found" not in engine or load_faults(model), f"without {key}"
        else:
            assert load_faults(model) == (), f"without {key}"
            counted = context_bytes(
                kv_bytes(structure_of(model), WORK), state_bytes(structure_of(model), WORK)
            )
            weights = weight_bytes(loaded_tensors(structure_of(model))) + tied_copy_bytes(
                model, head_on_host=True
            )
            assert (weights, counted) == (engine.model, engine.context), f"without {key}"
            assert engine.compute <= compute_bytes(structure_of(model), WORK) * 1.03 + MIB, f"without {key}"


def made(folder: Path, name: str) -> tuple[Inventory, list[list[int]]]:
    said = make(folder, [name])[name]
    read = read_model(folder / f"{name}.gguf").inventory
    return read.model_copy(update={"hparams": hparams(name)}), said


def test_later_models_share_indexers_without_saying_so(tmp_path: Path) -> None:
    """GLM 5.2 and newer, told by the length of their training context, of 12 layers."""
    model, said = made(tmp_path, "glm-dsa+late")
    for (work, full), (_, context, _) in zip(CONTEXTS, said, strict=True):
        assert sum(kv_bytes(structure_of(model), work, swa_full=full)) == context
    early = model.model_copy(update={"hparams": {**model.hparams, "context_length": 1 << 17}})
    assert sum(kv_bytes(structure_of(early), WORK)) > sum(kv_bytes(structure_of(model), WORK))
    listed = tuple(n in (0, 1, 2, 6, 10) for n in range(12))
    stated = model.model_copy(update={"hparams": {**model.hparams, "attention.indexer.types": listed}})
    assert kv_bytes(structure_of(stated), WORK) == kv_bytes(structure_of(model), WORK)


@pytest.mark.parametrize("arch", NEXTN)
def test_the_caches_of_a_speculative_block(arch: str, tmp_path: Path) -> None:
    """Sliding where the pattern lists it, without an indexer where the head is dense."""
    model, said = made(tmp_path, f"{arch}+nextn")
    for n, (work, full) in enumerate(CONTEXTS):
        main = context_bytes(
            kv_bytes(structure_of(model), work, swa_full=full), state_bytes(structure_of(model), work)
        )
        assert main == said[n][1]
        if not full:
            assert sum(nextn_kv_bytes(structure_of(model), work)) == said[n + len(CONTEXTS)][1]


def test_step_has_three_speculative_blocks_that_slide() -> None:
    """The engine's own dry load of the real shape says 18 MiB of 3 blocks at 1536 cells."""
    slides = tuple(n % 4 != 0 for n in range(45)) + (True,) * 3
    shape = {
        "block_count": 48,
        "nextn_predict_layers": 3,
        "embedding_length": 4096,
        "attention.head_count": tuple(64 if n % 4 == 0 else 96 for n in range(48)),
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": slides,
    }
    model = Inventory(
        name="step", architecture="step35", header_digest="", hparams=shape, shards=(), tensors=()
    )
    work = WORK.model_copy(
        update={"n_ctx": 35072, "n_seq": 1, "n_batch": 2048, "n_ubatch": 1024, "mtp": True}
    )
    assert nextn_kv_bytes(structure_of(model), work) == (6 * MIB,) * 3


@pytest.mark.parametrize(
    "spec",
    [
        SynthSpec("llama", n_embd=640, n_head_kv=4, head_dim=128),
        SynthSpec("gpt-oss", n_embd=576, n_head=16, head_dim=64),
    ],
    ids=lambda spec: spec.arch,
)
def test_heads_that_only_shapes_tell_are_counted_by_them_and_said(spec: SynthSpec, tmp_path: Path) -> None:
    whole = read_model(write(tmp_path / "model.gguf", spec)).inventory
    silent = without(without(whole, "attention.key_length"), "attention.value_length")
    assert kv_bytes(structure_of(silent), WORK) == kv_bytes(structure_of(whole), WORK)
    (said,) = attempt([Load(write_sparse(tmp_path / "silent.gguf", silent), WORK)])
    assert isinstance(said, str)  # the engine does not load it
    assert unstated_heads(whole) == ""
    width = spec.n_embd // spec.n_head
    assert f"{spec.head_dim} by the shape of its attn_k, {width} to llama.cpp" in unstated_heads(silent)
    made = plan(silent, "2000", workload=WORK)
    assert unstated_heads(silent) in made.notes
