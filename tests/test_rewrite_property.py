"""Any small model, any plan, any options: the way there and back gives the same bytes."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from gguf_bytes import ARR, STR, U8, U32, T, arch, gguf, kv, save
from hand_plans import hand_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import FileProblem
from planner.model.ggml_types import BY_NAME, TYPES, tensor_bytes
from planner.model.gguf.reader import read_model
from planner.model.units import Unit
from rewriter.rewrite import RewriteOptions, carry_out, decide, rewrite
from rewriter.undo import decide_undo
from rewriter.verify import verify

KINDS = {kind.name: number for number, kind in TYPES.items()}
EXPERTS = 4


def tensor(name: str, shape: tuple[int, ...], kind: str, dice: random.Random) -> T:
    if kind not in BY_NAME or shape[0] % BY_NAME[kind].block:
        kind = "f16"
    return T(name, shape, KINDS[kind], dice.randbytes(tensor_bytes(kind, shape)))


def model_bytes(dice: random.Random, layers: int, alignment: int, opaque: bool, tail: bool) -> bytes:
    kinds = ["f32", "q4_K", "q8_0", "mxfp4", "iq1_m", "nvfp4"]
    tensors = [tensor("token_embd.weight", (256, dice.randint(1, 5)), dice.choice(kinds), dice)]
    for n in range(layers):
        p = f"blk.{n}."
        tensors += [
            tensor(p + "attn_norm.weight", (dice.randint(1, 40),), "f32", dice),
            tensor(p + "attn_q.weight", (256, dice.randint(1, 4)), dice.choice(kinds), dice),
            tensor(p + "ffn_gate_inp.weight", (256, EXPERTS), "f32", dice),
            tensor(
                p + "ffn_gate_up_exps.weight", (256, dice.randint(1, 3), EXPERTS), dice.choice(kinds), dice
            ),
            tensor(p + "ffn_down_exps.bias", (dice.randint(1, 9), EXPERTS), "f32", dice),
            tensor(p + "exp_probs_b.bias", (EXPERTS,), "f32", dice),
        ]
    dice.shuffle(tensors)
    if opaque:
        odd = T("output.weight", (256, 2), 999, dice.randbytes(dice.randint(1, 300)))
        tensors.insert(dice.randint(0, len(tensors)), odd)
    kvs = [arch("qwen3moe"), kv("x", ARR, (STR, ["a"] * dice.randint(0, 3))), kv("y", U8, 1)]
    if alignment != 32:
        kvs.insert(dice.randint(0, 3), kv("general.alignment", U32, alignment))
    return gguf(kvs, tensors, alignment=alignment, tail=tail)


def site_of(dice: random.Random, unit: Unit) -> str:
    choices = ["cpu", "gpu:CUDA0", "gpu:CUDA1"]
    divided = ["cache:CUDA0:250000", f"stripe:CUDA1:{dice.randint(1, EXPERTS)}"]
    return dice.choice([*choices, *divided] if unit.experts else choices)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    layers=st.integers(0, 3),
    source_alignment=st.sampled_from([8, 32, 128]),
    options=st.builds(
        RewriteOptions,
        alignment=st.sampled_from([0, 8, 32, 64, 512]),
        shard_by_device=st.booleans(),
        shard_bytes=st.sampled_from([0, 0, 700, 3000, 9000]),
    ),
    opaque=st.booleans(),
    tail=st.booleans(),
)
def test_there_and_back(
    seed: int, layers: int, source_alignment: int, options: RewriteOptions, opaque: bool, tail: bool
) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = read_model(save(folder, model_bytes(dice, layers, source_alignment, opaque, tail)))
        orders = {
            n: tuple(dice.sample(range(EXPERTS), EXPERTS)) for n in range(layers) if dice.random() < 0.7
        }
        plan = hand_plan(source, lambda unit: site_of(dice, unit), orders)
        report = rewrite(source, plan, folder / "o.gguf", options)
        made = read_model(report.files[-1])
        assert made.paths == report.files
        for shard in made.headers if options.shard_bytes else ():
            assert shard.size_bytes <= options.shard_bytes or len(shard.header.infos) == 1
        assert made.inventory.table_digest() == source.inventory.table_digest()
        other = hand_plan(source, lambda unit: site_of(dice, unit), {})
        again = rewrite(made, other, folder / "again.gguf", RewriteOptions())
        direct = rewrite(source, other, folder / "direct.gguf", RewriteOptions())
        assert again.files[0].read_bytes() == direct.files[0].read_bytes()
        back = carry_out(made, None, decide_undo(made, "back.gguf"), folder / "back.gguf", RewriteOptions())
        assert back.files[0].read_bytes() == source.paths[0].read_bytes()
        assert len(verify(source, back.files, None).tensors) == len(source.inventory.tensors)


def test_a_model_without_tensors_is_refused(tmp_path: Path) -> None:
    source = read_model(save(tmp_path, gguf([arch("qwen3moe")])))
    with pytest.raises(FileProblem, match="holds no tensors"):
        decide(source, hand_plan(source), "o.gguf", RewriteOptions(shard_by_device=True), "plan")
