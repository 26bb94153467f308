"""Units, layers and edges on small tables; see test_inputs for real ones."""

from __future__ import annotations

import pytest
from small_tables import attention, dense, ends, experts, table

from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.model.tensor_roles import missing_partners
from planner.model.units import BOUND, ExpertMismatch, Kind, Unit, UnitTable, divisible, movable, units_of
from planner.workload import Workload


def named(units: UnitTable) -> dict[str, Unit]:
    return {unit.name: unit for unit in units.units}


def moe(extra: str = "", **hparams: int) -> Inventory:
    text = "\n".join(
        [ends(), attention(0), dense(0), attention(1), experts(1, 8), attention(2), experts(2, 8), extra]
    )
    return table("qwen3moe", text, **{"block_count": 3, "expert_used_count": 2, **hparams})


def test_dense_leading_layers_are_no_expert_layers() -> None:
    units = named(units_of(moe()))
    assert list(units) == [
        "token_embd",
        "blk.0.attention",
        "blk.0.ffn",
        "blk.1.attention",
        "blk.1.router",
        "blk.1.experts",
        "blk.2.attention",
        "blk.2.router",
        "blk.2.experts",
        "output",
    ]
    assert (units["blk.1.experts"].experts, units["blk.1.experts"].used) == (8, 2)
    assert units["blk.0.ffn"].experts == 0


def test_the_units_add_up_to_the_file_and_share_no_tensor() -> None:
    model = moe("v.patch_embd.weight 4x4\nblk.1.ffn_odd.weight 3x3\nmystery.weight 5")
    table_ = units_of(model)
    names = [name for unit in table_.units for name in unit.tensors]
    assert sorted(names) == sorted(t.name for t in model.tensors)
    assert sum(unit.size_bytes for unit in table_.units) == model.size_bytes


def test_what_is_read_per_token() -> None:
    units = named(units_of(moe()))
    assert units["blk.1.experts"].active_bytes == units["blk.1.experts"].size_bytes * 2 // 8
    assert units["token_embd"].active_bytes == 64 * 4
    assert units["blk.0.ffn"].active_bytes == units["blk.0.ffn"].size_bytes


def test_experts_in_tensors_of_their_own_are_counted_by_their_tensors() -> None:
    rows = [f"blk.0.ffn_{n}.{e}.weight 64x32" for e in range(4) for n in ("gate", "up", "down")]
    text = "\n".join([ends(), attention(0), "blk.0.ffn_gate_inp.weight 64x4", *rows])
    unit = named(units_of(table("llama", text, block_count=1, expert_count=4, expert_used_count=2)))[
        "blk.0.experts"
    ]
    assert (unit.experts, unit.used, len(unit.tensors)) == (4, 2, 12)
    assert unit.active_bytes * 2 == unit.size_bytes


def test_a_tied_head_is_counted_beside_the_file() -> None:
    whole = named(units_of(table("llama", f"{ends()}\n{attention(0)}\n{dense(0)}")))["output"]
    tied = named(units_of(table("llama", f"{ends(tied=True)}\n{attention(0)}\n{dense(0)}")))["output"]
    assert (whole.tied_bytes, tied.tied_bytes) == (0, 64 * 100 * 4)
    assert tied.size_bytes == 64 * 4
    assert tied.active_bytes == whole.active_bytes


def test_biases_and_scales_go_with_their_experts_and_selection_biases_with_the_router() -> None:
    extra = "\n".join(
        [f"blk.1.ffn_{n}_exps.bias 32x8" for n in ("gate", "up")]
        + [
            "blk.1.exp_probs_b 8",
            "blk.2.exp_probs_b.bias 8",
            "blk.1.ffn_down_exps.scale 8",
            "blk.1.attn_sinks.weight 4",
        ]
    )
    units = named(units_of(moe(extra)))
    small = {"blk.1.ffn_gate_exps.bias", "blk.1.ffn_up_exps.bias", "blk.1.ffn_down_exps.scale"}
    assert (
        small < set(movable(units["blk.1.experts"])) and "blk.1.exp_probs_b" in units["blk.1.router"].tensors
    )
    assert "blk.2.exp_probs_b.bias" in units["blk.2.router"].tensors
    assert "blk.1.attn_sinks.weight" in units["blk.1.attention"].tensors
    assert set(divisible(units["blk.1.experts"])) == set(units["blk.1.experts"].tensors) - small
    alone = table("qwen3moe", f"{attention(0)}\nblk.0.ffn_gate_exps.bias 32x8\n{ends()}", block_count=1)
    assert "blk.0.ffn_gate_exps.bias" in named(units_of(alone))["blk.0.router"].tensors


@pytest.mark.parametrize("spelt", ["scale", "weight.scale", "input_scale", "weight.input_scale"])
def test_scales_stay_with_what_they_scale_however_they_are_spelt(spelt: str) -> None:
    model = moe(f"blk.1.ffn_down_exps.{spelt} 8\nblk.1.attn_q.{spelt} 1\nblk.0.ffn_up.{spelt} 1")
    found = units_of(model)
    assert found.unknown == () and missing_partners(model) == ()
    units = named(found)
    assert f"blk.1.ffn_down_exps.{spelt}" in units["blk.1.experts"].tensors
    assert f"blk.1.attn_q.{spelt}" in units["blk.1.attention"].tensors
    assert f"blk.0.ffn_up.{spelt}" in units["blk.0.ffn"].tensors


def test_missing_partners_are_named() -> None:
    model = moe("blk.1.ffn_odd.scale 1\nblk.1.ffn_down_exps.weight.scale 8")
    nv = tuple(
        t.model_copy(update={"type": "nvfp4"}) if t.name.endswith("_exps.weight") else t
        for t in model.tensors
    )
    said = missing_partners(model.model_copy(update={"tensors": nv}))
    assert "blk.1.ffn_odd.scale scales blk.1.ffn_odd.weight, which is not there" in said
    assert "blk.2.ffn_down_exps.weight is nvfp4 and has no blk.2.ffn_down_exps.scale" in said
    assert not any(text.startswith("blk.1.ffn_down_exps.weight is") for text in said)


def test_fused_classic_and_chunked_experts_by_layer() -> None:
    router, fused = "blk.3.ffn_gate_inp.weight 64x8", "blk.3.ffn_gate_up_exps.weight 64x64x8"
    down = "blk.3.ffn_down_exps.weight 32x64x8"
    chunks = "\n".join(f"blk.1.ffn_{n}_chexps.weight 64x8x4" for n in ("gate", "up", "down"))
    model = moe("\n".join([attention(3), router, fused, down, chunks]), block_count=4)
    units = named(units_of(model))
    assert units["blk.3.experts"].tensors == ("blk.3.ffn_gate_up_exps.weight", "blk.3.ffn_down_exps.weight")
    assert units["blk.3.experts"].experts == units["blk.1.experts"].experts == 8
    assert sum("_chexps" in name for name in units["blk.1.experts"].tensors) == 3


@pytest.mark.parametrize("odd", ["blk.1.exp_probs_b.bias", "blk.1.exp_probs_b", "blk.1.ffn_gate_inp.bias"])
def test_a_router_that_disagrees_with_its_experts_is_refused_by_name(odd: str) -> None:
    assert odd in named(units_of(moe(f"{odd} 8")))["blk.1.router"].tensors
    with pytest.raises(ExpertMismatch, match=rf"layer 1: .*{odd} 6"):
        units_of(moe(f"{odd} 6"))


def test_one_scale_for_all_experts_is_no_disagreement() -> None:
    assert named(units_of(moe("blk.1.ffn_up_exps.scale 1")))["blk.1.experts"].experts == 8


@pytest.mark.parametrize("changed", ["blk.1.ffn_up_exps.weight 64x32x6", "blk.1.ffn_gate_inp.weight 64x6"])
def test_a_layer_that_disagrees_on_its_experts_is_refused_by_name(changed: str) -> None:
    name = changed.split()[0]
    text = "\n".join([ends(), attention(0), dense(0), attention(1), experts(1, 8)])
    lines = [changed if line.startswith(name) else line for line in text.split("\n")]
    with pytest.raises(ExpertMismatch, match=rf"layer 1: .*{name} 6"):
        units_of(table("qwen3moe", "\n".join(lines), block_count=2))


def test_the_stated_number_of_experts_must_be_the_real_one() -> None:
    with pytest.raises(ExpertMismatch, match="expert_count 64"):
        units_of(moe(expert_count=64))
    assert named(units_of(moe(expert_count=8)))["blk.1.experts"].experts == 8


def test_pruned_models_may_state_a_number_per_layer() -> None:
    text = "\n".join([ends(), attention(0), experts(0, 8), attention(1), experts(1, 6)])
    units = named(units_of(table("qwen3moe", text, block_count=2, expert_count=(8, 6), expert_used_count=2)))
    assert (units["blk.0.experts"].experts, units["blk.1.experts"].experts) == (8, 6)


def test_an_unknown_architecture_is_planned_by_layers_and_says_so() -> None:
    text = "\n".join([ends(), attention(0), dense(0), attention(1), experts(1, 8)])
    made = units_of(table("frobnicate", text, block_count=2))
    assert made.unknown[0] == "architecture frobnicate"
    assert [u.kind for u in made.units] == [Kind.EMBEDDING, Kind.LAYER, Kind.LAYER, Kind.OUTPUT]
    assert Kind.LAYER in BOUND


def test_unknown_tensors_stay_with_their_layer_and_are_listed() -> None:
    made = units_of(moe("blk.1.ffn_odd.weight 3x3\nblk.9.attn_q.weight 4x4"))
    assert made.unknown == ("blk.1.ffn_odd.weight", "blk.9.attn_q.weight")
    assert "blk.1.ffn_odd.weight" in named(made)["blk.1.attention"].tensors


def test_a_layer_without_the_parts_we_expect_is_a_layout_we_do_not_know() -> None:
    text = "\n".join(
        [ends(), attention(0), dense(0), "blk.1.attn_norm.weight 64", "blk.1.novel_mixer.weight 64x64"]
    )
    made = units_of(table("llama", text, block_count=2))
    assert made.unknown == ("blk.1.novel_mixer.weight", "layout of blk.1")
    # No dense name in a layer of experts is nothing odd.
    assert units_of(moe()).unknown == ()


def test_foreign_tensors_are_a_unit_that_decoding_never_reads() -> None:
    units = named(units_of(moe("v.blk.0.attn_q.weight 8x8\nmm.0.weight 8x8")))
    assert units["foreign"].tensors == ("v.blk.0.attn_q.weight", "mm.0.weight")
    assert units["foreign"].active_bytes == 0


def test_nextn_blocks_are_counted_inside_block_count() -> None:
    text = "\n".join(
        [ends(), *(attention(n) + "\n" + dense(n) for n in range(3)), "blk.2.nextn.eh_proj.weight 128x64"]
    )
    model = table("qwen35", text, block_count=3, nextn_predict_layers=1)
    layers = layers_of(model)
    assert (layers.n_main, layers.n_nextn, layers.n_all) == (2, 1, 3)
    unit = named(units_of(model))["blk.2.nextn"]
    assert len(unit.tensors) == 10
    assert unit.active_bytes == 0
    assert len(kv_bytes(structure_of(model), Workload())) == 2


def test_nextn_blocks_that_the_file_left_out_still_count() -> None:
    model = table("qwen35", f"{ends()}\n{attention(0)}\n{dense(0)}", block_count=2, nextn_predict_layers=1)
    assert (layers_of(model).n_main, layers_of(model).n_nextn) == (1, 1)


def test_a_convolution_of_no_width_keeps_no_state() -> None:
    mixer = "\n".join(f"blk.0.shortconv.{n}.weight 64x64" for n in ("in_proj", "conv", "out_proj"))
    model = table("lfm2", f"{ends()}\n{mixer}", block_count=1, shortconv__l_cache=0, embedding_length=64)
    assert state_bytes(structure_of(model), Workload()) == (0,)


def test_a_layer_may_attend_and_be_recurrent() -> None:
    mixer = "\n".join(
        ["blk.0.ssm_in.weight 64x300", "blk.0.ssm_out.weight 128x64", "blk.0.ssm_conv1d.weight 4x160"]
    )
    model = table(
        "falcon-h1",
        "\n".join([ends(), attention(0), mixer, dense(0)]),
        block_count=1,
        embedding_length=64,
        attention__head_count=4,
        ssm__conv_kernel=4,
        ssm__inner_size=128,
        ssm__state_size=16,
        ssm__group_count=1,
    )
    units = named(units_of(model))
    assert list(units) == ["token_embd", "blk.0.recurrent", "blk.0.attention", "blk.0.ffn", "output"]
    assert kv_bytes(structure_of(model), Workload())[0] > 0
    assert state_bytes(structure_of(model), Workload())[0] == 4 * (3 * (128 + 2 * 16) + 16 * 128)


def test_projections_of_a_delta_net_belong_to_the_mixer_whatever_their_name() -> None:
    names = ("attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta")
    mixer = "\n".join(f"blk.0.{name}.weight 64x64" for name in names)
    model = table(
        "qwen35", "\n".join([ends(), mixer, dense(0), "blk.0.ssm_a 8", "blk.0.ssm_dt.bias 8"]), block_count=1
    )
    units = named(units_of(model))
    assert len(units["blk.0.recurrent"].tensors) == 7
    assert "blk.0.attention" not in units
    assert kv_bytes(structure_of(model), Workload()) == (0,)


def test_norms_of_a_layer_without_a_mixer_stay_bound() -> None:
    text = "\n".join(
        [ends(), "blk.0.attn_norm.weight 64", "blk.0.ffn_up.weight 64x128", "blk.0.ffn_down.weight 128x64"]
    )
    units = named(units_of(table("nemotron_h", text, block_count=1)))
    assert units["blk.0.router"].tensors == ("blk.0.attn_norm.weight",)
    assert units["blk.0.router"].kind in BOUND


def test_edges_are_the_chain_then_the_residual_stream() -> None:
    made = units_of(moe())
    names = [unit.name for unit in made.units]
    assert made.edges[: len(names) - 1] == tuple((n, n + 1) for n in range(len(names) - 1))
    long = {(names[a], names[b]) for a, b in made.edges[len(names) - 1 :]}
    assert long == {
        ("blk.0.attention", "blk.1.router"),
        ("blk.1.router", "blk.2.router"),
        ("blk.2.router", "output"),
    }
    assert all(source < target for source, target in made.edges)


def test_layers_that_share_a_cache_have_none_and_an_edge_from_its_owner() -> None:
    text = "\n".join([ends(), *(attention(n) + "\n" + dense(n) for n in range(4))])
    model = table(
        "gemma4",
        text,
        block_count=4,
        embedding_length=64,
        attention__head_count=4,
        attention__shared_kv_layers=1,
        attention__sliding_window=8,
        attention__sliding_window_pattern=(True, False, True, False),
    )
    made = units_of(model)
    names = [unit.name for unit in made.units]
    assert ("blk.2.attention", "blk.3.attention") in {(names[a], names[b]) for a, b in made.edges}
    assert [size > 0 for size in kv_bytes(structure_of(model), Workload())] == [True, True, True, False]


def test_layers_of_different_size_are_counted_one_by_one() -> None:
    text = "\n".join([ends(), attention(0), dense(0, inner=512), dense(1, inner=64), attention(2), dense(2)])
    model = table(
        "deci",
        text + "\nblk.1.ffn_norm.weight 64",
        block_count=3,
        embedding_length=64,
        attention__head_count=(4, 0, 4),
        attention__head_count_kv=(4, 0, 1),
    )
    first, second, third = kv_bytes(structure_of(model), Workload(n_ctx=256))
    assert (first, second, third) == (256 * 2 * 64 * 2, 0, 256 * 2 * 16 * 2)
    units = named(units_of(model))
    assert units["blk.0.ffn"].size_bytes == 8 * units["blk.1.ffn"].size_bytes
