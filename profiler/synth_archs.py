"""Transformer architectures for generated models, each as the engine's own metadata and tensor names."""

from __future__ import annotations

from profiler.synth_build import Builder, attention, dense_ffn, experts, finish, nextn, shared_expert, start


def expert_counts(b: Builder) -> None:
    """Metadata of routed experts."""
    s = b.spec
    b.set(expert_count=b.n_expert, expert_used_count=s.n_used, expert_feed_forward_length=s.n_ff_exp)


def llama(b: Builder) -> None:
    """Llama, and Mixtral when it has experts."""
    start(b)
    if b.moe:
        b.set(expert_count=b.n_expert, expert_used_count=b.spec.n_used)
    for il in range(b.spec.n_layers):
        attention(b, il)
        if b.moe:
            experts(b, il, size=b.spec.n_ff)
        else:
            dense_ffn(b, il)
    finish(b)


def qwen2(b: Builder) -> None:
    """Qwen2: biases on q, k and v."""
    start(b)
    for il in range(b.spec.n_layers):
        attention(b, il, bias=True)
        dense_ffn(b, il)
    finish(b)


def qwen3(b: Builder) -> None:
    """Qwen3: norms on q and k."""
    start(b)
    for il in range(b.spec.n_layers):
        attention(b, il, qk_norm=True)
        dense_ffn(b, il)
    finish(b)


def qwen3moe(b: Builder) -> None:
    """Qwen3-MoE: every layer routed."""
    start(b)
    expert_counts(b)
    for il in range(b.spec.n_layers):
        attention(b, il, qk_norm=True)
        experts(b, il)
    finish(b)


def gemma3(b: Builder) -> None:
    """Gemma 3: norms after attention and FFN, sliding windows on five of six layers, tied output."""
    start(b, scaled=True)
    b.set(attention__sliding_window=b.spec.window or 512, rope__freq_base_swa=10000.0)
    for il in range(b.spec.n_layers):
        attention(b, il, qk_norm=True)
        b.norm(f"blk.{il}.post_attention_norm")
        dense_ffn(b, il)
        b.norm(f"blk.{il}.post_ffw_norm")
    finish(b, tied=True)


def qwen35(b: Builder) -> None:
    """Qwen3.5/3.6: three gated-delta-net layers, then one of gated attention; MoE as qwen35moe."""
    s = b.spec
    start(b)
    b.set(rope__dimension_sections=[s.head_dim // 8, s.head_dim // 8, s.head_dim // 8, 0])
    b.set(full_attention_interval=4)
    state = delta_net_sizes(b)
    if b.moe:
        expert_counts(b)
        b.set(expert_shared_feed_forward_length=s.n_ff_exp)
    for il in range(b.n_all):
        if il < s.n_layers and (il + 1) % 4:
            delta_net(b, il, state)
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
