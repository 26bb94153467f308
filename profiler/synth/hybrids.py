"""Hybrid and recurrent architectures for generated models, as the engine's own metadata and tensor names."""

from __future__ import annotations

from profiler.synth.build import (
    Builder,
    attention,
    dense_ffn,
    expert_counts,
    experts,
    finish,
    latent_attention,
    latent_sizes,
    nextn,
    shared_expert,
    start,
)


def qwen35(b: Builder, *, joint: bool = False) -> None:
    """Qwen3.5/3.6: three gated-delta-net layers, then one of gated attention; MoE as qwen35moe."""
    s = b.spec
    start(b)
    if not joint:
        b.set(rope__dimension_sections=[s.head_dim // 8, s.head_dim // 8, s.head_dim // 8, 0])
    b.set(full_attention_interval=4)
    state = delta_net_sizes(b)
    if b.moe:
        expert_counts(b)
        b.set(expert_shared_feed_forward_length=s.n_ff_exp)
    for il in range(b.n_all):
        if il < s.n_layers and (il + 1) % 4:
            delta_net(b, il, state, joint=joint)
        else:
            attention(b, il, qk_norm=True, gate=2)
        b.norm(f"blk.{il}.post_attention_norm")
        if b.moe:
            experts(b, il, norm="")
            shared_expert(b, il, inner=s.n_ff_exp, gated=True)
        else:
            dense_ffn(b, il, norm="")
        if il >= s.n_layers:
            nextn(b, il)
    finish(b)


def delta_net_sizes(b: Builder) -> tuple[int, int, int]:
    """Metadata of the gated delta net; (state, k heads, v heads)."""
    state, k_heads, v_heads = 64, 2, 4
    b.set(
        ssm__conv_kernel=4,
        ssm__state_size=state,
        ssm__group_count=k_heads,
        ssm__time_step_rank=v_heads,
        ssm__inner_size=state * v_heads,
    )
    return state, k_heads, v_heads


def delta_net(b: Builder, il: int, sizes: tuple[int, int, int], *, joint: bool = False) -> None:
    """One gated-delta-net mixer; `joint` packs beta and alpha into ssm_ba (Qwen3-Next)."""
    p, n, (state, k_heads, v_heads) = f"blk.{il}", b.spec.n_embd, sizes
    key, value = state * k_heads, state * v_heads
    b.norm(f"{p}.attn_norm")
    b.weight(f"{p}.attn_qkv", "recurrent", n, 2 * key + value)
    b.weight(f"{p}.attn_gate", "recurrent", n, value)
    b.small(f"{p}.ssm_conv1d.weight", 4, 2 * key + value)
    b.small(f"{p}.ssm_dt.bias", v_heads, fill="step")
    b.small(f"{p}.ssm_a", v_heads, fill="decay")
    if joint:
        b.weight(f"{p}.ssm_ba", "recurrent", n, 2 * v_heads)
    else:
        b.weight(f"{p}.ssm_beta", "recurrent", n, v_heads)
        b.weight(f"{p}.ssm_alpha", "recurrent", n, v_heads)
    b.norm(f"{p}.ssm_norm", state)
    b.closing(f"{p}.ssm_out", "recurrent", value, n)


def qwen3next(b: Builder) -> None:
    """Qwen3-Next: as Qwen3.5-MoE, with beta and alpha in one projection."""
    qwen35(b, joint=True)


def _every_fourth(b: Builder) -> list[bool]:
    """Which layers attend: every fourth; the others are recurrent, told by their KV head count of 0."""
    attends = [il % 4 == 3 for il in range(b.spec.n_layers)]
    b.set(attention__head_count_kv=[b.spec.n_head_kv if here else 0 for here in attends])
    return attends


def mamba_sizes(b: Builder, *, state: int = 128, groups: int = 1, rank: int = 0) -> tuple[int, int, int]:
    """Metadata of Mamba mixers; (state, groups, heads or rank of the time step)."""
    inner = 2 * b.spec.n_embd
    rank = rank or inner // 64
    b.set(ssm__conv_kernel=4, ssm__inner_size=inner, ssm__state_size=state, ssm__time_step_rank=rank)
    b.set(ssm__group_count=groups)
    return state, groups, rank


def mamba2_mixer(b: Builder, il: int, sizes: tuple[int, int, int], *, norm: bool = True) -> None:
    """One Mamba-2 mixer; `norm`: with its leading norm."""
    p, n, (state, groups, heads) = f"blk.{il}", b.spec.n_embd, sizes
    inner = 2 * n
    conv = inner + 2 * groups * state
    if norm:
        b.norm(f"{p}.attn_norm")
    b.weight(f"{p}.ssm_in", "recurrent", n, inner + conv + heads)
    b.small(f"{p}.ssm_conv1d.weight", 4, conv)
    b.bias(f"{p}.ssm_conv1d", conv)
    b.small(f"{p}.ssm_dt.bias", heads, fill="step")
    b.small(f"{p}.ssm_a", 1, heads, fill="decay")
    b.small(f"{p}.ssm_d", 1, heads, fill="ones")
    b.small(f"{p}.ssm_norm.weight", inner // groups, groups, fill="ones")
    b.closing(f"{p}.ssm_out", "recurrent", inner, n)


def mamba2(b: Builder) -> None:
    """Mamba-2: no attention, no FFN."""
    start(b, rope=False)
    b.set(attention__head_count=0, attention__head_count_kv=0, feed_forward_length=0)
    sizes = mamba_sizes(b)
    for il in range(b.spec.n_layers):
        mamba2_mixer(b, il, sizes)
    finish(b)


def falcon_h1(b: Builder) -> None:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    start(b)
    sizes = mamba_sizes(b)
    for il in range(b.spec.n_layers):
        attention(b, il)
        mamba2_mixer(b, il, sizes, norm=False)
        b.small(f"blk.{il}.ffn_norm", b.spec.n_embd, fill="ones")
        dense_ffn(b, il, norm="")
    finish(b)


def granite_hybrid(b: Builder) -> None:
    """Granite 4: Mamba-2 layers and attention, dense or routed FFN with a shared expert."""
    s = b.spec
    start(b)
    attends = _every_fourth(b)
    sizes = mamba_sizes(b)
    if b.moe:
        b.set(
            expert_count=b.n_expert, expert_used_count=s.n_used, expert_shared_feed_forward_length=s.n_ff_exp
        )
    for il in range(s.n_layers):
        if attends[il]:
            attention(b, il)
        else:
            mamba2_mixer(b, il, sizes)
        if b.moe:
            experts(b, il, size=s.n_ff)
            shared_expert(b, il, inner=s.n_ff_exp)
        else:
            dense_ffn(b, il)
    finish(b)


def nemotron_h(b: Builder) -> None:
    """Nemotron-H: a layer is Mamba-2, FFN or attention alone; experts without gate, as nemotron_h_moe."""
    s = b.spec
    start(b)
    kinds = [("mamba", "ffn", "attention", "ffn")[il % 4] for il in range(s.n_layers)]
    b.set(
        attention__head_count_kv=[s.n_head_kv if kind == "attention" else 0 for kind in kinds],
        feed_forward_length=[s.n_ff if kind == "ffn" else 0 for kind in kinds],
        attention__layer_norm_epsilon=1e-5,
    )
    sizes = mamba_sizes(b, groups=2)
    if b.moe:
        expert_counts(b)
        b.set(expert_shared_count=1, expert_shared_feed_forward_length=s.n_ff_exp)
        b.set(expert_weights_norm=True, expert_weights_scale=1.0)
    for il, kind in enumerate(kinds):
        if kind == "mamba":
            mamba2_mixer(b, il, sizes)
        elif kind == "attention":
            attention(b, il)
        elif b.moe:
            experts(b, il, norm="attn_norm", gate=False)
            shared_expert(b, il, inner=s.n_ff_exp, gate=False)
        else:
            dense_ffn(b, il, norm="attn_norm", gate=False)
    finish(b)


def jamba(b: Builder) -> None:
    """Jamba: Mamba-1 and attention without positions; every second layer routed."""
    s = b.spec
    start(b, rope=False)
    attends = _every_fourth(b)
    state, _, rank = mamba_sizes(b, state=16, rank=s.n_embd // 8)
    b.set(expert_count=b.n_expert, expert_used_count=s.n_used)
    for il in range(s.n_layers):
        if attends[il]:
            attention(b, il)
        else:
            _mamba1(b, il, state, rank)
        if il % 2:
            experts(b, il, size=s.n_ff)
        else:
            dense_ffn(b, il)
    finish(b)


def _mamba1(b: Builder, il: int, state: int, rank: int) -> None:
    p, n, inner = f"blk.{il}", b.spec.n_embd, 2 * b.spec.n_embd
    b.norm(f"{p}.attn_norm")
    b.weight(f"{p}.ssm_in", "recurrent", n, 2 * inner)
    b.small(f"{p}.ssm_conv1d.weight", 4, inner)
    b.bias(f"{p}.ssm_conv1d", inner)
    b.weight(f"{p}.ssm_x", "recurrent", inner, rank + 2 * state)
    b.norm(f"{p}.ssm_dt_norm", rank)
    b.weight(f"{p}.ssm_dt", "recurrent", rank, inner)
    b.small(f"{p}.ssm_dt.bias", inner, fill="step")
    b.norm(f"{p}.ssm_b_norm", state)
    b.norm(f"{p}.ssm_c_norm", state)
    b.small(f"{p}.ssm_a", state, inner, fill="decay")
    b.small(f"{p}.ssm_d", inner, fill="ones")
    b.closing(f"{p}.ssm_out", "recurrent", inner, n)


def lfm2(b: Builder) -> None:
    """LFM2: short convolutions and attention, tied output; experts after the dense layers as lfm2moe."""
    s, taps = b.spec, 3
    start(b)
    attends = _every_fourth(b)
    b.set(shortconv__l_cache=taps)
    if b.moe:
        expert_counts(b)
        b.set(leading_dense_block_count=s.n_dense or 0, expert_gating_func=2)
    for il in range(s.n_layers):
        p = f"blk.{il}"
        if attends[il]:
            attention(b, il, qk_norm=True)
        else:
            b.norm(f"{p}.attn_norm")
            b.small(f"{p}.shortconv.conv.weight", taps, s.n_embd)
            b.weight(f"{p}.shortconv.in_proj", "recurrent", s.n_embd, 3 * s.n_embd)
            b.closing(f"{p}.shortconv.out_proj", "recurrent", s.n_embd, s.n_embd)
        if b.moe and il >= (s.n_dense or 0):
            experts(b, il)
        else:
            dense_ffn(b, il)
    finish(b, norm="token_embd_norm")


def kimi_linear(b: Builder) -> None:
    """Kimi Linear: three delta-attention layers, then one of latent attention; routed after a dense layer."""
    s = b.spec
    start(b)
    latent = latent_sizes(b)
    attends = [il % 4 == 3 for il in range(s.n_layers)]
    b.set(attention__head_count_kv=[1 if here else 0 for here in attends])
    expert_counts(b)
    b.set(kda__head_dim=s.head_dim, ssm__conv_kernel=4, expert_shared_count=s.n_shared or 0)
    b.set(leading_dense_block_count=s.n_dense or 0, expert_weights_scale=1.0, expert_gating_func=2)
    for il in range(s.n_layers):
        if attends[il]:
            latent_attention(b, il, latent, q_rank=0)
        else:
            _delta_attention(b, il)
        if il < (s.n_dense or 0):
            dense_ffn(b, il)
        else:
            experts(b, il)
            shared_expert(b, il, inner=s.n_ff_exp * (s.n_shared or 1))
    finish(b)


def _delta_attention(b: Builder, il: int) -> None:
    """One KDA mixer."""
    p, n, size = f"blk.{il}", b.spec.n_embd, b.spec.head_dim
    inner = size * b.spec.n_head
    b.norm(f"{p}.attn_norm")
    for name in "qkv":
        b.weight(f"{p}.attn_{name}", "recurrent", n, inner)
        b.small(f"{p}.ssm_conv1d_{name}.weight", 4, 1, inner)
    for name in ("ssm_f", "ssm_g"):
        b.weight(f"{p}.{name}_a", "recurrent", n, size)
        b.weight(f"{p}.{name}_b", "recurrent", size, inner)
    b.weight(f"{p}.ssm_beta", "recurrent", n, b.spec.n_head)
    b.small(f"{p}.ssm_a", 1, b.spec.n_head, fill="decay")
    b.small(f"{p}.ssm_dt.bias", inner, fill="step")
    b.norm(f"{p}.ssm_norm", size)
    b.closing(f"{p}.attn_output", "recurrent", inner, n)


def rwkv7(b: Builder) -> None:
    """RWKV-7: time mixing and channel mixing, no attention."""
    s, rank = b.spec, 32
    start(b, rope=False)
    b.set(
        attention__head_count=0,
        attention__head_count_kv=0,
        attention__layer_norm_epsilon=1e-5,
        attention__decay_lora_rank=rank,
        attention__iclr_lora_rank=rank,
        attention__value_residual_mix_lora_rank=rank,
        attention__gate_lora_rank=rank,
        wkv__head_size=64,
        token_shift_count=2,
    )
    _norm_with_bias(b, "token_embd_norm")
    for il in range(s.n_layers):
        _time_mix(b, il, rank)
        p = f"blk.{il}"
        b.small(f"{p}.channel_mix_lerp_k.weight", s.n_embd, gain=1.0)
        b.weight(f"{p}.channel_mix_key", "ffn", s.n_embd, s.n_ff)
        b.closing(f"{p}.channel_mix_value", "ffn", s.n_ff, s.n_embd)
    _norm_with_bias(b, "output_norm")
    b.weight("output", "output", s.n_embd, s.n_vocab)


def _norm_with_bias(b: Builder, name: str) -> None:
    b.norm(name)
    b.small(f"{name}.bias", b.spec.n_embd, fill="zeros")


def _time_mix(b: Builder, il: int, rank: int) -> None:
    p, n = f"blk.{il}", b.spec.n_embd
    _norm_with_bias(b, f"{p}.attn_norm")
    _norm_with_bias(b, f"{p}.attn_norm_2")
    for name in "wav":
        b.small(f"{p}.time_mix_{name}0.weight", n)
    for name in "wavg":
        b.weight(f"{p}.time_mix_{name}1", "recurrent", n, rank)
        b.weight(f"{p}.time_mix_{name}2", "recurrent", rank, n)
    b.small(f"{p}.time_mix_lerp_fused.weight", n, 1, 1, 6)
    for name in ("k_k", "k_a", "r_k"):
        b.small(f"{p}.time_mix_{name}.weight", n)
    for name in ("key", "value", "receptance"):
        b.weight(f"{p}.time_mix_{name}", "recurrent", n, n)
    _norm_with_bias(b, f"{p}.time_mix_ln")
    b.closing(f"{p}.time_mix_output", "recurrent", n, n)
