"""Roles by name, shape and expert axis."""

from __future__ import annotations

import pytest

from planner.model.inventory import Tensor
from planner.model.tensor_roles import Role, part_of


def role(name: str, shape: tuple[int, ...] = (64, 64)) -> Role:
    tensor = Tensor(name=name, type="f32", shape=shape, size_bytes=4, shard=0, offset=0)
    return part_of(tensor).role


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("token_embd.weight position_embd.weight token_types.weight", Role.EMBEDDING),
        ("output.weight output_norm.weight output_norm.bias altup_unembd_proj.weight", Role.OUTPUT),
        (
            "blk.0.attn_q.weight blk.7.attn_kv_a_mqa.weight blk.1.attn_k.bias blk.3.attn_sinks.weight",
            Role.ATTENTION,
        ),
        (
            "blk.2.indexer.k_proj.weight blk.2.indexer_compressor_kv.weight blk.0.attn_k_b.weight",
            Role.ATTENTION,
        ),
        ("blk.0.attn_norm.weight blk.0.post_ffw_norm_1.weight blk.0.pre_ffw_norm_2.weight", Role.NORM),
        (
            "blk.0.ssm_a blk.0.ssm_dt.bias blk.0.ssm_conv1d.weight blk.0.ssm_ba.weight blk.0.ssm_norm.weight",
            Role.STATE,
        ),
        ("blk.0.ssm_in.weight blk.0.ssm_out.weight blk.0.shortconv.in_proj.weight", Role.MIXER),
        ("blk.0.time_mix_receptance.weight blk.0.time_mix_output.weight", Role.MIXER),
        (
            "blk.0.time_mix_w0.weight blk.0.time_mix_lerp_fused.weight blk.0.channel_mix_lerp_k.weight",
            Role.STATE,
        ),
        (
            "blk.0.channel_mix_key.weight blk.0.ffn_gate.weight blk.0.ffn_down.bias blk.0.ffn_up.weight",
            Role.FFN,
        ),
        (
            "blk.0.ffn_gate_inp.weight blk.0.ffn_gate_inp.bias blk.0.exp_probs_b.bias blk.0.exp_probs_b",
            Role.ROUTER,
        ),
        (
            "blk.0.ffn_up_shexp.weight blk.0.ffn_gate_inp_shexp.weight blk.0.ffn_latent_down.weight",
            Role.SHARED,
        ),
        (
            "blk.0.laurel_l.weight blk.0.altup_router.weight blk.0.inp_gate.weight blk.0.hc_attn_fn.weight",
            Role.EXTRA,
        ),
        ("blk.9.nextn.eh_proj.weight blk.9.nextn.shared_head_head.weight", Role.NEXTN),
        ("vision_model.x.weight mm_projector.0.weight model.vision_tower.x mmproj.x", Role.FOREIGN),
        ("v.blk.0.attn_q.weight mm.0.weight a.conv1d.0.weight masked_embd_ordering.weight", Role.FOREIGN),
        ("blk.0.ffn_mystery.weight something.weight", Role.UNKNOWN),
    ],
)
def test_names(names: str, expected: Role) -> None:
    assert {name: role(name) for name in names.split()} == dict.fromkeys(names.split(), expected)


@pytest.mark.parametrize(
    "stem", ["gate_exps", "up_exps", "down_exps", "gate_up_exps", "up_gate_exps", "up_chexps", "down_chexps"]
)
def test_expert_weights_are_known_by_name_and_by_their_third_axis(stem: str) -> None:
    name = f"blk.3.ffn_{stem}.weight"
    part = part_of(Tensor(name=name, type="f32", shape=(64, 32, 8), size_bytes=4, shard=0, offset=0))
    assert (part.role, part.layer, part.experts) == (Role.EXPERTS, 3, 8)
    assert role(name, (64, 32)) is Role.UNKNOWN


def test_latent_projections_read_like_experts_but_are_used_by_every_token() -> None:
    for stem in ("ffn_routed_up", "ffn_routed_down", "ffn_latent_up"):
        assert role(f"blk.0.{stem}.weight", (64, 16)) is Role.SHARED


@pytest.mark.parametrize("suffix", ["bias", "scale", "input_scale"])
def test_small_tensors_of_experts_are_a_class_of_their_own(suffix: str) -> None:
    assert role(f"blk.0.ffn_gate_exps.{suffix}", (32, 8)) is Role.EXPERT_SMALL


def test_experts_that_were_never_merged() -> None:
    assert role("blk.0.ffn_gate.7.weight", (64, 32)) is Role.EXPERTS


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("per_layer_token_embd.weight", (160, 320_000_000), Role.LOOKUP),
        ("blk.1.engram_embd.weight", (256, 384_000_000), Role.LOOKUP),
        ("blk.1.ngram_table.weight", (256, 2_000_000), Role.LOOKUP),
        ("blk.1.ngram_table.weight", (256, 2_000), Role.UNKNOWN),
        ("token_embd.weight", (2048, 2_000_000), Role.EMBEDDING),
        ("output.weight", (2048, 2_000_000), Role.OUTPUT),
    ],
)
def test_tables_are_known_by_name_or_by_their_rows(name: str, shape: tuple[int, ...], expected: Role) -> None:
    assert role(name, shape) is expected
