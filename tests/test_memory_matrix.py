"""Memory formulas against the engine: generated models of every architecture, real models at full size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from dry_loads import Bytes, Load, measure
from made_models import hparams, make
from sparse_model import write_sparse

from planner.constants import CELL_STEP
from planner.memory.compute_buffer import compute_bytes, compute_items
from planner.memory.kv_cache import kv_bytes, nextn_kv_bytes, state_bytes
from planner.memory.weights import context_bytes, loaded_tensors, tied_copy_bytes, weight_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory, from_text
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.workload import Workload
from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"
MIB = 2**20
SPECS = {arch: SynthSpec(arch) for arch in ARCHITECTURES} | {
    "qwen35moe-nextn": SynthSpec("qwen35moe", n_nextn=1),
    "glm4moe-nextn": SynthSpec("glm4moe", n_nextn=1),
    "deepseek2-nextn": SynthSpec("deepseek2", n_nextn=1),
    "gemma4-fused": SynthSpec("gemma4", n_expert=8, fused_gate_up=True, n_layers=6),
    "qwen3moe-fused": SynthSpec("qwen3moe", fused_gate_up=False, n_layers=3, n_used=4),
    "llama-tied": SynthSpec("llama", tied=True, n_vocab=4096),
    "gemma3-window": SynthSpec("gemma3", n_layers=12, window=300),
}
WORKLOADS = {
    "plain": Workload(),
    "three-q8": Workload(n_ctx=10000, n_seq=3, type_k="q8_0", type_v="q8_0"),
    "no-flash": Workload(n_ctx=300, n_ubatch=64, flash_attn=False),
    "wide": Workload(n_ctx=8192, n_seq=2, n_ubatch=2048),
    "mixed-kv": Workload(n_ctx=5000, n_seq=2, n_ubatch=32, type_k="q8_0", type_v="f16"),
}
FULL_SIZE = (
    "Qwen3.6-35B-A3B-q4_K",
    "Qwen3.6-27B-q4_K",
    "Qwen3-30B-A3B-Q4_K_M",
    "gpt-oss-120b-MXFP4",
    "gemma-4-26B-A4B-Q4_K_M",
    "GLM-4.5-q4_K",
    "DeepSeek-V3.1-Terminus-q4_K",
    "Nemotron-3-Nano-30B-A3B-Q4_K_M",
    "Llama-3.1-70B-Q4_K_M",
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    for name, spec in SPECS.items():
        write(folder / f"{name}.gguf", spec)
    return folder


@pytest.fixture(scope="module")
def said(generated: Path) -> Mapping[tuple[str, str, bool], Bytes]:
    """What the engine says of every model, workload and way to keep sliding caches."""
    keys = [(model, work, full) for model in SPECS for work in workloads_of(model) for full in (False, True)]
    loads = [Load(generated / f"{model}.gguf", WORKLOADS[work], full) for model, work, full in keys]
    return dict(zip(keys, measure(loads), strict=True))


@pytest.mark.parametrize("model", SPECS)
def test_weights_and_caches_equal_the_engine_and_compute_is_bounded(
    model: str, generated: Path, said: Mapping[tuple[str, str, bool], Bytes]
) -> None:
    inventory = read_model(generated / f"{model}.gguf").inventory
    for name, workload in workloads_of(model).items():
        for full in (False, True):
            check(inventory, workload, said[model, name, full], swa_full=full)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_real_models_at_full_size(name: str, tmp_path: Path) -> None:
    path = INPUTS / f"{name}.inventory.yaml"
    inventory = from_text(path.read_text(), str(path))
    sparse = write_sparse(tmp_path / "model.gguf", inventory)
    longest = inventory.number("context_length")
    workloads = [
        WORKLOADS["plain"],
        Workload(n_ctx=32768, n_seq=4, n_ubatch=1024, type_k="q8_0", type_v="q8_0"),
        Workload(n_ctx=longest),
        Workload(n_ctx=longest, n_seq=2, n_ubatch=2048, type_k="q8_0", type_v="q8_0"),
    ]
    for workload, bytes_ in zip(workloads, measure([Load(sparse, w) for w in workloads]), strict=True):
        items = compute_items(structure_of(inventory), workload)
        if 0.9 < items.masks / items.logits < 1.2:  # whether logits fit where masks lay is not foretold
            assert bytes_.compute <= items.total
            continue
        check(inventory, workload, bytes_)
        # At real sizes the estimate of the compute buffer is close to the engine's number.
        assert 0.99 < compute_bytes(structure_of(inventory), workload) / bytes_.compute < 1.11


@pytest.mark.parametrize("name", ["gpt-oss-120b-MXFP4", "Qwen3.6-35B-A3B-q4_K", "Llama-3.1-70B-Q4_K_M"])
def test_older_builds_need_no_more(name: str, vulkan_engine: Path, tmp_path: Path) -> None:
    """They give the masks' memory back before the logits are made; the plan has room for both."""
    path = INPUTS / f"{name}.inventory.yaml"
    inventory = from_text(path.read_text(), str(path))
    sparse, longest = write_sparse(tmp_path / "model.gguf", inventory), inventory.number("context_length")
    workloads = [Workload(n_ctx=n_ctx, n_ubatch=1024) for n_ctx in (4096, 32768, longest)]
    said = measure([Load(sparse, w) for w in workloads], str(vulkan_engine))
    for workload, engine in zip(workloads, said, strict=True):
        items = compute_items(structure_of(inventory), workload)
        assert (
            context_bytes(
                kv_bytes(structure_of(inventory), workload), state_bytes(structure_of(inventory), workload)
            )
            == engine.context
        )
        inner, head = items.residual + items.stage_bytes + items.masks, items.logits + items.head
        assert engine.compute <= items.total
        assert 0.8 < engine.compute / (max(inner, head) + items.inputs) < 1.03


@pytest.mark.parametrize("build", ["vulkan_engine", "node_engine"])
def test_other_builds_agree(build: str, generated: Path, request: pytest.FixtureRequest) -> None:
    engine, work = str(request.getfixturevalue(build)), WORKLOADS["three-q8"]
    loads = [Load(generated / f"{arch}.gguf", work) for arch in ARCHITECTURES]
    for load, said in zip(loads, measure(loads, engine), strict=True):
        inventory = read_model(load.path).inventory
        assert (
            weight_bytes(loaded_tensors(structure_of(inventory)))
            + tied_copy_bytes(inventory, head_on_host=True)
            == said.model
        )
        assert (
            context_bytes(kv_bytes(structure_of(inventory), work), state_bytes(structure_of(inventory), work))
            == said.context
        )


@pytest.mark.parametrize("model", ["qwen35", "nemotron_h", "lfm2", "qwen3next", "granitehybrid"])
def test_state_that_speculation_may_take_back(model: str, generated: Path) -> None:
    inventory = read_model(generated / f"{model}.gguf").inventory
    work = Workload(n_seq=2)
    kv = kv_bytes(structure_of(inventory), work)
    for depth, said in zip((0, 4), _rolled(generated / f"{model}.gguf", work), strict=True):
        assert context_bytes(kv, state_bytes(structure_of(inventory), work, rollback=depth)) == said.context


def test_a_sequence_has_the_cells_that_the_engine_gives_it(generated: Path) -> None:
    """The whole is rounded up before it is divided, and each part again."""
    path = generated / "qwen3moe-fused.gguf"
    shapes = ((600, 3), (770, 3), (1281, 5), (1030, 4), (4096, 8), (700, 256))
    works = [Workload(n_ctx=n_ctx, n_seq=n_seq) for n_ctx, n_seq in ((CELL_STEP, 1), *shapes)]
    one, *others = (said.context for said in measure([Load(path, work) for work in works]))
    for work, context in zip(works[1:], others, strict=True):
        assert context * CELL_STEP == one * work.cells_each * work.n_seq, work


def _rolled(path: Path, work: Workload) -> list[Bytes]:
    return measure([Load(path, work, rollback=depth) for depth in (0, 4)])


@pytest.mark.parametrize("model", ["deepseek2", "kimi-linear"])
def test_a_latent_attention_without_flash_copies_its_values(model: str, generated: Path) -> None:
    path = generated / f"{model}.gguf"
    small = {"n_ctx": 20000, "n_ubatch": 8, "flash_attn": False}
    works = [Workload(**small), Workload(**small, n_seq=4, type_k="f32", type_v="f32")]
    for work, said in zip(works, measure([Load(path, work) for work in works]), strict=True):
        assert said.compute <= compute_bytes(structure_of(read_model(path).inventory), work) * 1.01 + MIB
        assert said.compute > 5 * MIB


@pytest.mark.parametrize("model", ["qwen35moe-nextn", "glm4moe-nextn", "deepseek2-nextn"])
def test_the_context_of_a_nextn_head(model: str, generated: Path) -> None:
    inventory = read_model(generated / f"{model}.gguf").inventory
    work = Workload(n_ctx=12000, mtp=True)
    with_head, own = measure(
        [Load(generated / f"{model}.gguf", work), Load(generated / f"{model}.gguf", work, nextn=True)]
    )
    assert with_head.model == own.model == weight_bytes(loaded_tensors(structure_of(inventory), mtp=True))
    assert with_head.context == context_bytes(
        kv_bytes(structure_of(inventory), work), state_bytes(structure_of(inventory), work)
    )
    assert own.context == sum(nextn_kv_bytes(structure_of(inventory), work))
    blocks = range(layers_of(inventory).n_main, layers_of(inventory).n_all)
    assert (
        0
        <= compute_bytes(structure_of(inventory), work, layers=blocks) * 1.01 + MIB - own.compute
        <= 16 * MIB
    )


def test_reads_the_file_as_it_was_planned_from_the_table(tmp_path: Path) -> None:
    path = INPUTS / "Nemotron-3-Nano-30B-A3B-Q4_K_M.inventory.yaml"
    inventory = from_text(path.read_text(), str(path))
    again = read_model(write_sparse(tmp_path / "model.gguf", inventory)).inventory
    assert [(t.name, t.type, t.shape, t.size_bytes) for t in again.tensors] == [
        (t.name, t.type, t.shape, t.size_bytes) for t in inventory.tensors
    ]
    work = Workload()
    assert kv_bytes(structure_of(again), work) == kv_bytes(structure_of(inventory), work)
    assert state_bytes(structure_of(again), work) == state_bytes(structure_of(inventory), work)


def test_the_logits_term_follows_the_vocabulary_and_the_batch() -> None:
    path = INPUTS / "Qwen3.6-35B-A3B-q4_K.inventory.yaml"
    inventory = from_text(path.read_text(), str(path))
    for n_ubatch in (512, 2048, 8192):
        work = Workload(n_ctx=8192, n_batch=8192, n_ubatch=n_ubatch)
        with_head = compute_bytes(structure_of(inventory), work)
        assert with_head > 248320 * n_ubatch * 4 > compute_bytes(structure_of(inventory), work, head=False)


def workloads_of(model: str) -> Mapping[str, Workload]:
    """A latent attention takes one type for keys and values."""
    latent = model.startswith(("deepseek2", "kimi"))
    return {name: work for name, work in WORKLOADS.items() if not (latent and work.type_k != work.type_v)}


def check(inventory: Inventory, workload: Workload, engine: Bytes, *, swa_full: bool = False) -> None:
    weights = weight_bytes(loaded_tensors(structure_of(inventory))) + tied_copy_bytes(
        inventory, head_on_host=True
    )
    assert weights == engine.model
    kv = kv_bytes(structure_of(inventory), workload, swa_full=swa_full)
    assert context_bytes(kv, state_bytes(structure_of(inventory), workload)) == engine.context
    estimate = compute_bytes(structure_of(inventory), workload, swa_full=swa_full)
    assert engine.compute <= estimate * 1.01 + MIB
    assert estimate * 0.7 - 16 * MIB <= engine.compute


@pytest.mark.parametrize("arch", ["grok", "minimax-m3", "minimax-01", "deepseek32", "hy_v4", "llama4"])
def test_what_grows_with_cells_or_batch_is_seen_in_long_ones(arch: str, tmp_path: Path) -> None:
    """Scores of an indexer, of an attention without flash kernels, of every token with every other."""
    make(tmp_path, [arch])
    model = read_model(tmp_path / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})
    path = write_sparse(tmp_path / "model.gguf", model)
    works = [Workload(n_ctx=65536), Workload(n_ctx=8192, n_ubatch=2048)]
    for work, said in zip(works, measure([Load(path, work) for work in works]), strict=True):
        estimate = compute_bytes(structure_of(model), work)
        assert said.compute <= estimate * 1.01 + MIB <= 1.5 * said.compute + 16 * MIB
