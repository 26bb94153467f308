"""Shapes against metadata: what the engine makes is never refused, what it refuses for its shapes is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dry_loads import Bytes, Load, attempt, measure
from made_models import ALL, hparams, make
from planning_models import real
from sparse_model import write_sparse

from planner.memory.compute_buffer import compute_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Hparam, Inventory
from planner.model.structure import structure_of
from planner.model.validity import load_faults
from planner.model.widths import shape_faults
from planner.workload import Workload
from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

WORK = Workload(n_ctx=1024)
TABLES = (
    "GLM-4.7-Flash-q4_K",
    "Mixtral-8x7B-Q4_K_M",
    "Nemotron-3-Nano-30B-A3B-Q4_K_M",
    "Qwen3.5-0.8B-q8_0",
    "gpt-oss-20b-MXFP4",
)


def changed(inventory: Inventory, **keys: Hparam) -> Inventory:
    """A whole file's table with other metadata."""
    told = {**inventory.hparams, **{key.replace("__", "."): one for key, one in keys.items()}}
    return inventory.model_copy(update={"hparams": told, "header_digest": "sha256:" + "0" * 64})


def test_nothing_that_the_engine_makes_is_refused(tmp_path: Path) -> None:
    make(tmp_path, ALL)
    for arch in ALL:
        saved = read_model(tmp_path / f"{arch}.gguf").inventory
        given = saved.model_copy(update={"hparams": hparams(arch)})
        assert not list(shape_faults(saved)) and not list(shape_faults(given)), arch


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nor_what_is_generated(arch: str, tmp_path: Path) -> None:
    assert not list(shape_faults(read_model(write(tmp_path / "m.gguf", SynthSpec(arch))).inventory))


@pytest.mark.parametrize("name", TABLES)
def test_one_key_twice_or_half_as_large(name: str, tmp_path: Path) -> None:
    """The table is refused where the engine refuses or dies of it, and nowhere else."""
    model = real(name)
    counts = {k: v for k, v in model.hparams.items() if isinstance(v, int) and not isinstance(v, bool)}
    cases = [(key, new) for key, old in counts.items() for new in {2 * old, old // 2} - {old}]
    tables = [changed(model, **{key: new}) for key, new in cases]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", each), WORK) for n, each in enumerate(tables)]
    for case, table, said in zip(cases, tables, attempt(loads), strict=True):
        assert bool(load_faults(table)) == (not isinstance(said, Bytes)), (case, said, load_faults(table))


def test_heads_of_a_latent_attention_are_not_guessed() -> None:
    """Without its keys the cache was counted a tenth as large, or twice; the engine dies of such files."""
    model = real("DeepSeek-V3.1-Terminus-q4_K")
    for key in ("attention.key_length", "attention.key_length_mla", "attention.value_length_mla"):
        less = {name: one for name, one in model.hparams.items() if name != key}
        (said, *_) = load_faults(model.model_copy(update={"hparams": less}))
        assert key in said


def one_changed(model: Inventory) -> list[tuple[str, Hparam | None, Inventory]]:
    """The model with each count twice, half as large, 0 and unsaid, each list shorter, longer and twice."""
    found: list[tuple[str, Hparam | None, Inventory]] = []
    for key, old in model.hparams.items():
        news: list[Hparam | None] = []
        if isinstance(old, int) and not isinstance(old, bool):
            news = [*sorted({2 * old, old // 2, 0} - {old}), None]
        elif isinstance(old, tuple):
            news = [old[:-1], (*old, old[-1]), tuple(2 * int(one) for one in old), None]
        left = {name: one for name, one in model.hparams.items() if name != key}
        for new in news:
            told = left if new is None else {**left, key: new}
            found.append((key, new, model.model_copy(update={"hparams": told})))
    return found


# Not seen from widths: by feed-forward widths of 0 this architecture tells its recurrent layers.
LEFT = {("nemotron_h_moe", "feed_forward_length", 0), ("nemotron_h_moe", "feed_forward_length", None)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_any_key_of_a_generated_model_changed(arch: str, tmp_path: Path) -> None:
    """A file is refused where the engine refuses or dies of it, and nowhere else."""
    cases = one_changed(read_model(write(tmp_path / "m.gguf", SynthSpec(arch))).inventory)
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", one), WORK) for n, (*_, one) in enumerate(cases)]
    for (key, new, _), load, said in zip(cases, loads, attempt(loads), strict=True):
        file = read_model(load.path)
        refused = (*file.refused, *load_faults(file.inventory))
        expected = not isinstance(said, Bytes) and (arch, key, new) not in LEFT
        assert bool(refused) == expected, (key, new, said, refused)


@pytest.mark.parametrize("width", [128, 256, 1024])
def test_values_of_a_latent_attention_are_as_wide_as_its_keys_say(width: int, tmp_path: Path) -> None:
    model = changed(real("DeepSeek-V3.1-Terminus-q4_K"), attention__value_length=width)
    works = [Workload(), Workload(n_ctx=32768, n_ubatch=2048)]
    path = write_sparse(tmp_path / "m.gguf", model)
    for work, said in zip(works, measure([Load(path, work) for work in works]), strict=True):
        structure = structure_of(model)
        assert sum(kv_bytes(structure, work)) == said.context
        assert said.compute <= compute_bytes(structure, work) * 1.01 <= 1.05 * said.compute


LISTS = ("attention.sliding_window_pattern", "attention.compress_ratios", "attention.head_count_kv")


def test_one_value_where_the_engine_reads_a_list(tmp_path: Path) -> None:
    """Patterns, ratios and heads that architectures read as lists only; those that read both are let be."""
    make(tmp_path, ALL)
    cases: list[tuple[str, str, Inventory]] = []
    for arch in ALL:
        whole = read_model(tmp_path / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})
        told = {key: one[0] for key in LISTS if isinstance(one := whole.hparams.get(key), tuple)}
        cases += [(arch, key, changed(whole, **{key: one})) for key, one in told.items()]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", each), WORK) for n, (*_, each) in enumerate(cases)]
    for (arch, key, table), said in zip(cases, attempt(loads), strict=True):
        if arch not in {"gemma4", "qwen4exp"}:  # refused for other things that made files lack
            assert bool(load_faults(table)) == (not isinstance(said, Bytes)), (arch, key, said)
    gemma = changed(real("gemma-4-26B-A4B-Q4_K_M"), attention__sliding_window_pattern=6)
    (said,) = attempt([Load(write_sparse(tmp_path / "gemma.gguf", gemma), WORK)])
    assert "array key not found" in str(said) and "reads a list" in load_faults(gemma)[0]


ZEROS = ("Mixtral-8x7B-Q4_K_M", "GLM-4.7-Flash-q4_K", "Qwen3.6-35B-A3B-q4_K", "gpt-oss-20b-MXFP4")
ASKED = {
    *("feed_forward_length", "expert_feed_forward_length", "attention.head_count_kv", "ssm.conv_kernel"),
    *("attention.kv_lora_rank", "attention.q_lora_rank", "ssm.inner_size", "ssm.state_size"),
    *("full_attention_interval", "expert_shared_feed_forward_length"),
}


@pytest.mark.parametrize("name", ZEROS)
def test_widths_of_nothing_and_parts_that_do_not_go_together(name: str, tmp_path: Path) -> None:
    """The engine's own answer to a width of 0, heads rotated in part or too far, groups and sections."""
    model = real(name)
    head = model.number("attention.key_length") or model.number("embedding_length") // model.number(
        "attention.head_count"
    )
    cases: list[tuple[str, Hparam]] = [(key, 0) for key in sorted(ASKED & set(model.hparams))]
    cases += [("rope.dimension_count", n) for n in (0, head // 2, 2 * head)]
    cases += [("expert_group_count", n) for n in (3, model.number("expert_count"))]
    cases += [("expert_gating_func", n) for n in (0, 4, 5)] if "expert_gating_func" in model.hparams else []
    cases += [("rope.dimension_sections", (1, 1, 1)), ("rope.dimension_sections", (1, 1, 1, 0))]
    more = {"expert_group_count": {"expert_group_used_count": 1}}
    tables = [changed(model, **{key: new, **more.get(key, {})}) for key, new in cases]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", each), WORK) for n, each in enumerate(tables)]
    for case, table, said in zip(cases, tables, attempt(loads), strict=True):
        assert bool(load_faults(table)) == (not isinstance(said, Bytes)), (case, said, load_faults(table))


DENSE = {
    "cohere2": "cohere2moe",
    "ernie4_5": "ernie4_5-moe",
    "exaone": "exaone-moe",
    "granite": "granitemoe",
    "lfm2": "lfm2moe",
    "nemotron_h": "nemotron_h_moe",
    "qwen2": "qwen2moe",
    "qwen3": "qwen3moe",
    "qwen35": "qwen35moe",
    "qwen3vl": "qwen3vlmoe",
}


def test_experts_under_the_name_of_a_dense_architecture(tmp_path: Path) -> None:
    """Refused where the engine looks for dense layers, and loaded where it reads both."""
    make(tmp_path, DENSE.values())
    tables = []
    for dense, mixture in DENSE.items():
        whole = read_model(tmp_path / f"{mixture}.gguf").inventory
        told = changed(whole.model_copy(update={"hparams": hparams(mixture)}))
        tables.append(told.model_copy(update={"architecture": dense}))
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", each), WORK) for n, each in enumerate(tables)]
    for table, said in zip(tables, attempt(loads), strict=True):
        assert bool(load_faults(table)) == (not isinstance(said, Bytes)), (table.architecture, said)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2", "lfm2moe"])
def test_lists_of_switches_are_counts_of_one_and_none(arch: str, tmp_path: Path) -> None:
    model = read_model(write(tmp_path / "m.gguf", SynthSpec(arch))).inventory
    n = model.number("block_count")
    switches = ((True,) * n, (False,) * n, (True,) * (n - 1) + (False,))
    keys = ("expert_feed_forward_length", "feed_forward_length", "attention.head_count", "expert_used_count")
    cases = [(key, each, changed(model, **{key: each})) for key in keys for each in switches]
    loads = [Load(write_sparse(tmp_path / f"{i}.gguf", one), WORK) for i, (*_, one) in enumerate(cases)]
    for (key, each, _), load, said in zip(cases, loads, attempt(loads), strict=True):
        file = read_model(load.path)
        refused = (*file.refused, *load_faults(file.inventory))
        assert bool(refused) == (not isinstance(said, Bytes)), (key, each, said, refused)


@pytest.mark.parametrize("arch", ["cogvlm", "qwen", "kimi-k3", "llama4", "dbrx", "granitemoe", "olmoe"])
def test_no_key_that_an_architecture_does_not_read_is_held_against_it(arch: str, tmp_path: Path) -> None:
    make(tmp_path, [arch])
    whole = read_model(tmp_path / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})
    cases = [one for one in one_changed(changed(whole)) if not isinstance(one[1], tuple)]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", one), WORK) for n, (*_, one) in enumerate(cases)]
    loaded = [
        (key, new, load_faults(table))
        for (key, new, table), said in zip(cases, attempt(loads), strict=True)
        if isinstance(said, Bytes)
    ]
    assert loaded and not [one for one in loaded if one[2]]


def engine_made(tmp_path: Path) -> list[tuple[str, Inventory]]:
    """Every model that the engine makes from metadata, as a whole file's table with that metadata."""
    make(tmp_path, ALL)
    found = []
    for arch in sorted(set(ALL) - {"qwen4exp"}):  # whose lists are written in another type here
        saved = read_model(tmp_path / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})
        found.append((arch, changed(saved)))
    return found


def test_lists_of_a_wrong_length_are_wrong_where_they_are_read(tmp_path: Path) -> None:
    """Widths of experts, which half of all architectures do not read, and experts that a token uses."""
    cases = []
    for arch, model in engine_made(tmp_path):
        width = model.number("expert_feed_forward_length", 1)
        cases.append((arch, changed(model, expert_feed_forward_length=(width,))))
        used = (model.number("expert_used_count", 1),) * model.number("block_count")
        cases.append((arch, changed(model, expert_used_count=used)))
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", one), WORK) for n, (_, one) in enumerate(cases)]
    loaded = 0
    for (arch, table), said in zip(cases, attempt(loads), strict=True):
        loaded += isinstance(said, Bytes)
        assert bool(load_faults(table)) == (not isinstance(said, Bytes)), (arch, said, load_faults(table))
    assert loaded > 100


def test_a_window_of_nothing_is_what_the_engine_takes_it_for(tmp_path: Path) -> None:
    """None at all in nine architectures; in others layers slide, and see the batch at hand alone."""
    work, sliding = Workload(n_ctx=8192, n_ubatch=512), 0
    models = [model for _, model in engine_made(tmp_path) if "attention.sliding_window" in model.hparams]
    for arch in ("gemma3n", "gemma4"):
        generated = write(tmp_path / "generated.gguf", SynthSpec(arch, n_layers=6))
        models.append(changed(read_model(generated).inventory))
    tables = [changed(model, attention__sliding_window=0) for model in models]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", one), work) for n, one in enumerate(tables)]
    for model, table, said in zip(models, tables, attempt(loads), strict=True):
        assert bool(load_faults(table)) == (not isinstance(said, Bytes)), (model.architecture, said)
        if isinstance(said, Bytes):
            structure = structure_of(table)
            held = sum(kv_bytes(structure, work)) + sum(state_bytes(structure, work))
            assert held == said.context, model.architecture
            sliding += held < sum(kv_bytes(structure_of(model), work)) + sum(state_bytes(structure, work))
    assert sliding >= 12


# Of what a compressor of keys pools the width of its tensors was not asked.
POOLED = ("deepseek4", "attention.compress_ratios", (0, 0, 8, 256))
OF_SOME = (
    "swa|hyper_connection|clamp_|indexer|head_count_kv|value_length|gating|compress|lora|token_shift"
    "|interleave"
)


@pytest.mark.parametrize(
    "arch", ["arwkv7", "bailingmoe3", "deepseek4", "dots1", "dots3note", "ernie4_5-moe", "glm5-next", "hy_v4"]
)
def test_keys_that_few_architectures_read(arch: str, tmp_path: Path) -> None:
    """Windows of latent attentions, streams, limits of experts, indexers, gates."""
    make(tmp_path, [arch])
    whole = read_model(tmp_path / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})
    cases = [one for one in one_changed(changed(whole)) if re.search(OF_SOME, one[0]) and one[1] != ()]
    loads = [Load(write_sparse(tmp_path / f"{n}.gguf", one), WORK) for n, (*_, one) in enumerate(cases)]
    refused = 0
    for (key, new, _), load, said in zip(cases, loads, attempt(loads), strict=True):
        file = read_model(load.path)
        whys = (*file.refused, *load_faults(file.inventory))
        if (arch, key, new) not in (POOLED, ("glm5-next", "attention.head_count_kv", None)):
            assert bool(whys) == (not isinstance(said, Bytes)), (key, new, said, whys)
        refused += bool(whys)
    assert refused
