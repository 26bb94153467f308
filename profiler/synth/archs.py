"""Transformer architectures for generated models, each as the engine's own metadata and tensor names."""

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
        _gemma_layer(b, il)
    finish(b)


def gemma3n(b: Builder) -> None:
    """Gemma 3n: alternating updates, low-rank branches, per-layer embeddings, tied output."""
    s, streams, rank, lookup = b.spec, 4, 64, 256  # fixed in the engine
    start(b, scaled=True)
    b.set(attention__sliding_window=s.window or 512, rope__freq_base_swa=10000.0)
    for name in ("altup_proj", "altup_unembd_proj"):
        b.weight(name, "attention", s.n_embd, s.n_embd, streams - 1)
    b.weight("per_layer_token_embd", "embedding", lookup * s.n_layers, s.n_vocab)
    b.weight("per_layer_model_proj", "attention", s.n_embd, lookup * s.n_layers)
    b.norm("per_layer_proj_norm", lookup)
    for il in range(s.n_layers):
        p = f"blk.{il}"
        _gemma_layer(b, il)
        _layer_lookup(b, il, lookup)
        b.small(f"{p}.altup_correct_coef.weight", streams, streams)
        b.norm(f"{p}.altup_correct_scale")
        b.small(f"{p}.altup_predict_coef.weight", streams, streams * streams)
        b.small(f"{p}.altup_router.weight", s.n_embd, streams)
        b.norm(f"{p}.altup_router_norm")
        b.weight(f"{p}.laurel_l", "attention", s.n_embd, rank)
        b.weight(f"{p}.laurel_r", "attention", rank, s.n_embd)
        b.norm(f"{p}.laurel_post_norm")
    finish(b)


def gemma4(b: Builder) -> None:
    """Gemma 4: every other layer slides, the last two share earlier KV; per-layer embeddings, or experts."""
    s = b.spec
    lookup = 0 if b.moe else 64
    start(b, scaled=True)
    b.set(
        attention__sliding_window=s.window or 512,
        attention__sliding_window_pattern=[il % 2 == 0 for il in range(s.n_layers)],
        attention__key_length_swa=s.head_dim,
        attention__value_length_swa=s.head_dim,
        attention__shared_kv_layers=2 if s.n_layers >= 6 and s.n_layers % 2 == 0 else 0,
        embedding_length_per_layer_input=lookup,
        rope__freq_base_swa=10000.0,
        rope__dimension_count_swa=s.head_dim,
    )
    if b.moe:
        expert_counts(b)
    if lookup:
        b.weight("per_layer_token_embd", "embedding", lookup * s.n_layers, s.n_vocab)
        b.weight("per_layer_model_proj", "attention", s.n_embd, lookup * s.n_layers)
        b.norm("per_layer_proj_norm", lookup)
    b.small("rope_freqs.weight", s.head_dim // 2, fill="ones")
    for il in range(s.n_layers):
        p = f"blk.{il}"
        _gemma_layer(b, il)
        b.small(f"{p}.layer_output_scale.weight", 1, fill="ones")
        if b.moe:
            b.small(f"{p}.ffn_gate_inp.scale", s.n_embd, fill="ones")
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                b.norm(f"{p}.{name}")
            experts(b, il, norm="")
        if lookup:
            _layer_lookup(b, il, lookup)
    finish(b)


def _gemma_layer(b: Builder, il: int) -> None:
    """Attention and FFN, each with a norm before and after."""
    attention(b, il, qk_norm=True)
    b.norm(f"blk.{il}.post_attention_norm")
    dense_ffn(b, il)
    b.norm(f"blk.{il}.post_ffw_norm")


def _layer_lookup(b: Builder, il: int, lookup: int) -> None:
    """How a layer mixes in its own embedding of the token."""
    b.weight(f"blk.{il}.inp_gate", "attention", b.spec.n_embd, lookup)
    b.weight(f"blk.{il}.proj", "attention", lookup, b.spec.n_embd)
    b.norm(f"blk.{il}.post_norm")


def gpt_oss(b: Builder) -> None:
    """gpt-oss: biases everywhere, attention sinks, every other layer slides."""
    s = b.spec
    start(b)
    expert_counts(b)
    b.set(attention__sliding_window=s.window or 128)
    for il in range(s.n_layers):
        p = f"blk.{il}"
        attention(b, il, bias=True)
        b.bias(f"{p}.attn_output", s.n_embd)
        b.small(f"{p}.attn_sinks.weight", s.n_head)
        b.norm(f"{p}.post_attention_norm")
        experts(b, il, norm="")
        b.bias(f"{p}.ffn_gate_inp", b.n_expert)
    finish(b)


def glm4moe(b: Builder) -> None:
    """GLM-4.5 to 4.7: a dense layer first, then routed with a shared expert; selection bias; NextN."""
    s = b.spec
    start(b)
    expert_counts(b)
    b.set(expert_shared_count=s.n_shared or 0, leading_dense_block_count=s.n_dense or 0)
    b.set(expert_weights_norm=True, expert_weights_scale=1.0, expert_gating_func=2)
    for il in range(b.n_all):
        attention(b, il, qk_norm=True, bias=True)
        _dense_or_routed(b, il, norm="post_attention_norm")
        if il >= s.n_layers:
            nextn(b, il)
    finish(b)


def _dense_or_routed(b: Builder, il: int, *, norm: str = "ffn_norm") -> None:
    """A dense FFN on the leading layers, experts with their shared expert after them."""
    s = b.spec
    if il < (s.n_dense or 0):
        dense_ffn(b, il, norm=norm)
        return
    experts(b, il, norm=norm)
    if s.n_shared:
        shared_expert(b, il, inner=s.n_ff_exp * s.n_shared)


def llama4(b: Builder) -> None:
    """Llama 4: every second layer routed with a shared expert, chunked attention on three of four."""
    s = b.spec
    start(b)
    expert_counts(b)
    b.set(interleave_moe_layer_step=2)
    for il in range(s.n_layers):
        attention(b, il)
        if il % 2:
            experts(b, il)
            shared_expert(b, il, inner=s.n_ff_exp)
        else:
            dense_ffn(b, il)
    finish(b)


def deepseek2(b: Builder) -> None:
    """DeepSeek V2/V3/R1, Kimi K2, GLM-4.7-Flash: latent attention, expert groups, leading dense layers."""
    s = b.spec
    start(b)
    latent = latent_sizes(b)
    expert_counts(b)
    b.set(
        attention__q_lora_rank=128,
        expert_shared_count=s.n_shared or 0,
        leading_dense_block_count=s.n_dense or 0,
        expert_weights_scale=1.0,
        expert_weights_norm=True,
        expert_gating_func=2,
    )
    if s.n_group:
        b.set(expert_group_count=s.n_group, expert_group_used_count=s.n_group_used or 1)
    for il in range(b.n_all):
        latent_attention(b, il, latent, q_rank=128)
        _dense_or_routed(b, il)
        if il >= s.n_layers:
            nextn(b, il)
    finish(b)
