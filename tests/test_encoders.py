"""Models without a cache: encoders give vectors, not logits, and are read a batch at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from dry_loads import Bytes, Load, attempt
from made_models import CONTEXTS, hparams, make
from planning_models import INPUTS, MIB, machine, plan, sites
from sparse_model import write_sparse

from atsplan import main
from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.memory.compute_buffer import compute_bytes, output_bytes
from planner.memory.kv_cache import kv_bytes
from planner.memory.weights import loaded_tensors, tied_copy_bytes, weight_bytes
from planner.model.ggml_types import tensor_bytes
from planner.model.gguf.reader import read_model
from planner.model.inventory import Hparam, Inventory, to_text
from planner.model.structure import structure_of
from planner.workload import Workload

WIDTH, INNER, LAYERS, HEADS, WORDS, LONGEST = 1024, 4096, 24, 16, 250_002, 8192


def row(name: str, *shape: int, kind: str = "f32") -> Row:
    return Row(name, kind, shape, tensor_bytes(kind, shape))


def bge_m3() -> Inventory:
    """The shape of BGE-M3, an encoder of 8192 positions."""
    rows = [
        row("token_embd.weight", WIDTH, WORDS, kind="f16"),
        row("position_embd.weight", WIDTH, LONGEST),
        row("token_types.weight", WIDTH),
        row("token_embd_norm.weight", WIDTH),
        row("token_embd_norm.bias", WIDTH),
    ]
    for n in range(LAYERS):
        for name, wide in (("attn_q", WIDTH), ("attn_k", WIDTH), ("attn_v", WIDTH), ("attn_output", WIDTH)):
            rows += [
                row(f"blk.{n}.{name}.weight", WIDTH, wide, kind="f16"),
                row(f"blk.{n}.{name}.bias", wide),
            ]
        rows += [row(f"blk.{n}.ffn_up.weight", WIDTH, INNER, kind="f16"), row(f"blk.{n}.ffn_up.bias", INNER)]
        rows += [
            row(f"blk.{n}.ffn_down.weight", INNER, WIDTH, kind="f16"),
            row(f"blk.{n}.ffn_down.bias", WIDTH),
        ]
        for norm in ("attn_output_norm", "layer_output_norm"):
            rows += [row(f"blk.{n}.{norm}.{part}", WIDTH) for part in ("weight", "bias")]
    keys: dict[str, Hparam] = {
        "block_count": LAYERS,
        "context_length": LONGEST,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "pooling_type": 2,
        "vocab_size": WORDS,
    }
    return inventory_of("bge-m3", "bert", keys, rows)


def test_an_encoder_keeps_no_cache_and_makes_no_logits(tmp_path: Path) -> None:
    model = bge_m3()
    path = write_sparse(tmp_path / "model.gguf", model, token_type_count=1)
    works = [
        Workload(n_ctx=LONGEST),
        Workload(n_ctx=LONGEST, n_ubatch=2048, n_seq=4),
        Workload(n_ctx=LONGEST, n_ubatch=LONGEST, n_batch=LONGEST),
        Workload(n_ctx=LONGEST, flash_attn=False),
    ]
    for work, said in zip(works, attempt([Load(path, work) for work in works]), strict=True):
        assert isinstance(said, Bytes), said
        assert said.model == weight_bytes(loaded_tensors(structure_of(model)))
        assert sum(kv_bytes(structure_of(model), work)) == said.context == 0
        assert said.compute <= compute_bytes(structure_of(model), work) <= 1.15 * said.compute
    assert tied_copy_bytes(model, head_on_host=False) == 0
    assert output_bytes(structure_of(model), works[0]) == 4 * WIDTH


def mixture() -> Inventory:
    """The shape of nomic-embed-text-v2-moe at four layers: every second one routes, without gates."""
    wide, inner, experts = 768, 3072, 8
    rows = [row("token_embd.weight", wide, 32_000, kind="f16"), row("token_types.weight", wide)]
    rows += [row("token_embd_norm.weight", wide), row("token_embd_norm.bias", wide)]
    for n in range(4):
        products = {"attn_qkv": (wide, 3 * wide), "attn_output": (wide, wide)}
        if n % 2 == 0:
            products |= {"ffn_up": (wide, inner), "ffn_down": (inner, wide)}
        for name, shape in products.items():
            rows += [row(f"blk.{n}.{name}.weight", *shape, kind="f16"), row(f"blk.{n}.{name}.bias", shape[1])]
        if n % 2:
            rows += [
                row(f"blk.{n}.ffn_gate_inp.weight", wide, experts),
                row(f"blk.{n}.ffn_up_exps.weight", wide, inner, experts, kind="f16"),
                row(f"blk.{n}.ffn_down_exps.weight", inner, wide, experts, kind="f16"),
            ]
        for norm in ("attn_output_norm", "layer_output_norm"):
            rows += [row(f"blk.{n}.{norm}.{part}", wide) for part in ("weight", "bias")]
    keys: dict[str, Hparam] = {
        "block_count": 4,
        "context_length": 2048,
        "embedding_length": wide,
        "feed_forward_length": inner,
        "attention.head_count": 12,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "pooling_type": 1,
        "vocab_size": 32_000,
        "expert_count": experts,
        "expert_used_count": 2,
        "moe_every_n_layers": 2,
    }
    return inventory_of("nomic", "nomic-bert-moe", keys, rows)


def test_an_encoder_with_experts(tmp_path: Path) -> None:
    """Without gates the activation is made in place, and lives until the last product is there."""
    model = mixture()
    path = write_sparse(tmp_path / "model.gguf", model, token_type_count=1)
    works = [
        Workload(n_ctx=2048, n_ubatch=n, flash_attn=flash) for n in (512, 2048) for flash in (True, False)
    ]
    for work, said in zip(works, attempt([Load(path, work) for work in works]), strict=True):
        assert isinstance(said, Bytes), said
        assert sum(kv_bytes(structure_of(model), work)) == said.context == 0
        assert said.compute <= compute_bytes(structure_of(model), work) <= 1.1 * said.compute


@pytest.mark.parametrize("arch", ["dream", "eurobert", "gemma-embedding", "llada", "modern-bert", "neo-bert"])
def test_others_without_a_cache(arch: str, tmp_path: Path) -> None:
    said = make(tmp_path, [arch])[arch]
    read = read_model(tmp_path / f"{arch}.gguf").inventory
    model = read.model_copy(update={"hparams": hparams(arch)})
    for (work, _), (_, context, compute) in zip(CONTEXTS, said, strict=True):
        assert sum(kv_bytes(structure_of(model), work)) == context == 0
        assert compute <= 1.03 * compute_bytes(structure_of(model), work) <= 1.15 * compute


def test_it_fits_whole_where_weights_and_a_batch_fit() -> None:
    made = plan(bge_m3(), "1500", on=machine("rtx4060-8gb-ddr5"), workload=Workload(n_ctx=LONGEST))
    assert {site for unit, site in sites(made).items() if unit.startswith("blk.")} == {"gpu:CUDA0"}
    gpu = next(use for use in made.devices if use.name == "CUDA0")
    assert gpu.memory.kv == 0 and gpu.memory.compute < 20 * MIB
    assert not any("KV cache is not counted" in note for note in made.notes)


def test_nothing_is_drafted_for_an_encoder_nor_by_one(tmp_path: Path) -> None:
    encoder, decoder = tmp_path / "encoder.yaml", INPUTS / "Qwen3.5-0.8B-q8_0.inventory.yaml"
    encoder.write_text(to_text(bge_m3()))
    for words in (
        (encoder, "--ngram", "--draft-accept", "0.7"),
        (encoder, "--draft", decoder),
        (INPUTS / "Qwen3.6-27B-q4_K.inventory.yaml", "--draft", encoder),
    ):
        done = CliRunner().invoke(main, ["solve", "--machine", "rtx5090-ddr5", *map(str, words)])
        assert done.exit_code == 2 and "is a bert model: it" in done.stderr, done.output
