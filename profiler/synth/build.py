"""Specification of a generated model, and the builder that architectures describe themselves with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]
Role = Literal["embedding", "output", "attention", "recurrent", "ffn", "experts", "shared", "small"]
ROLES: tuple[Role, ...] = ("embedding", "output", "attention", "recurrent", "ffn", "experts", "shared")
Fill = Literal["random", "router", "ones", "zeros", "decay", "step"]


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A model to generate; None and 0 leave a size to the architecture."""

    arch: str = "llama"
    n_layers: int = 4  # main layers; NextN blocks come on top
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 512
    n_expert: int | None = None  # None: the architecture's own habit, 0: dense
    n_used: int = 2
    n_ff_exp: int = 256
    n_shared: int | None = None
    n_vocab: int = 512
    n_ctx_train: int = 4096
    type: str = "q8_0"
    types: Mapping[str, str] = field(default_factory=dict)  # role -> type, over `type`
    seed: int = 1
    skew: float = 0.0  # deviation of the experts' constant logits, in deviations of what a token adds
    coverage: float = 0.0  # instead of `skew`: share of choices on the hottest half of the experts
    fused_gate_up: bool = False
    expert_bias: bool = False
    exp_probs_b: bool | None = None
    n_group: int = 0  # expert groups; 0: the architecture's own habit
    n_group_used: int = 0
    n_dense: int | None = None  # leading dense layers of a MoE model
    tied: bool = False  # no output.weight: the head reads token_embd
    n_nextn: int = 0
    window: int = 0  # sliding window; 0: the architecture's own habit
    alignment: int = 32
    shard_tensors: int = 0  # tensors per file of a split model; 0: one file
    name: str = ""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write; `gain` scales the usual deviation 1/sqrt(ne0)."""

    name: str
    shape: tuple[int, ...]  # ggml order: ne0 first
    role: Role
    fill: Fill = "random"
    gain: float = 1.0


@dataclass(slots=True)
class Builder:
    """Collects metadata and tensors of one model, in the engine's names."""

    spec: SynthSpec
    kv: dict[str, Value] = field(default_factory=dict)  # with the architecture's prefix
    tensors: list[TensorPlan] = field(default_factory=list)

    def set(self, **values: Value) -> None:
        """Metadata under the architecture's prefix; `__` in a name stands for a dot."""
        for key, value in values.items():
            self.kv[f"{self.spec.arch}.{key.replace('__', '.')}"] = value

    def weight(self, name: str, role: Role, *shape: int, gain: float = 1.0) -> None:
        """A matrix of the type chosen for its role."""
        self.tensors.append(TensorPlan(f"{name}.weight", shape, role, gain=gain))

    def closing(self, name: str, role: Role, *shape: int) -> None:
        """A matrix that writes into the residual stream: smaller, so that deep models stay calm."""
        self.weight(name, role, *shape, gain=0.5 / self.n_all**0.5)

    def small(self, name: str, *shape: int, fill: Fill = "random", gain: float = 1.0) -> None:
        """A tensor the engine keeps in f32; the name is whole."""
        self.tensors.append(TensorPlan(name, shape, "small", fill, gain))

    def norm(self, name: str, size: int | None = None) -> None:
        """A norm's weight, all ones."""
        self.small(f"{name}.weight", size or self.spec.n_embd, fill="ones")

    def bias(self, name: str, *shape: int) -> None:
        """A small random bias."""
        self.small(f"{name}.bias", *shape, gain=0.05)

    @property
    def n_all(self) -> int:
        """Blocks in the file: main layers and NextN."""
        return self.spec.n_layers + self.spec.n_nextn

    @property
    def moe(self) -> bool:
        return self.n_expert > 0

    @property
    def n_expert(self) -> int:
        """Experts of a routed layer, 0 for a dense model."""
        return 0 if self.spec.n_expert is None else self.spec.n_expert


def start(b: Builder, *, rope: bool = True, scaled: bool = False) -> None:
    """Common metadata and the embedding; `scaled`: the engine multiplies it by sqrt(n_embd)."""
    s = b.spec
    b.set(
        block_count=b.n_all,
        context_length=s.n_ctx_train,
        embedding_length=s.n_embd,
        feed_forward_length=s.n_ff,
        attention__head_count=s.n_head,
        attention__head_count_kv=s.n_head_kv,
        attention__key_length=s.head_dim,
        attention__value_length=s.head_dim,
        attention__layer_norm_rms_epsilon=1e-6,
        vocab_size=s.n_vocab,
    )
    if rope:
        b.set(rope__dimension_count=s.head_dim, rope__freq_base=10000.0)
    if s.n_nextn:
        b.set(nextn_predict_layers=s.n_nextn)
    # A head that reads the embedding wants rows of length 1, the residual stream elements of size 1.
    gain = 1.0 if scaled or s.tied else s.n_embd**0.5
    b.weight("token_embd", "embedding", s.n_embd, s.n_vocab, gain=gain)


def finish(b: Builder, norm: str = "output_norm") -> None:
    """Final norm and output head."""
    b.norm(norm)
    if not b.spec.tied:
        b.weight("output", "output", b.spec.n_embd, b.spec.n_vocab)


def attention(b: Builder, il: int, *, qk_norm: bool = False, bias: bool = False, gate: int = 1) -> None:
    """Grouped-query attention with its leading norm; `gate` 2 doubles the query rows for a gate."""
    s, p = b.spec, f"blk.{il}"
    q, kv = s.head_dim * s.n_head, s.head_dim * s.n_head_kv
    b.norm(f"{p}.attn_norm")
    for name, rows in (("attn_q", q * gate), ("attn_k", kv), ("attn_v", kv)):
        b.weight(f"{p}.{name}", "attention", s.n_embd, rows)
        if bias:
            b.bias(f"{p}.{name}", rows)
    b.closing(f"{p}.attn_output", "attention", q, s.n_embd)
    if qk_norm:
        b.norm(f"{p}.attn_q_norm", s.head_dim)
        b.norm(f"{p}.attn_k_norm", s.head_dim)


def dense_ffn(b: Builder, il: int, *, norm: str = "ffn_norm", gate: bool = True) -> None:
    """A dense gated FFN with its norm (`norm` empty: none)."""
    s, p = b.spec, f"blk.{il}"
    if norm:
        b.norm(f"{p}.{norm}")
    if gate:
        b.weight(f"{p}.ffn_gate", "ffn", s.n_embd, s.n_ff)
    b.weight(f"{p}.ffn_up", "ffn", s.n_embd, s.n_ff)
    b.closing(f"{p}.ffn_down", "ffn", s.n_ff, s.n_embd)


def experts(b: Builder, il: int, *, norm: str = "ffn_norm", gate: bool = True, size: int = 0) -> None:
    """Router and routed experts with their norm; fused gate_up, biases and selection bias as specified."""
    s, p, n = b.spec, f"blk.{il}", b.n_expert
    width, inner = s.n_embd, size or s.n_ff_exp
    if norm:
        b.norm(f"{p}.{norm}")
    b.small(f"{p}.ffn_gate_inp.weight", s.n_embd, n, fill="router")
    if s.exp_probs_b:
        b.small(f"{p}.exp_probs_b.bias", n, gain=0.05)
    if s.fused_gate_up:
        inputs = [("ffn_gate_up_exps", 2 * inner)]
    else:
        inputs = [("ffn_gate_exps", inner)] * gate + [("ffn_up_exps", inner)]
    for name, rows in inputs:
        b.weight(f"{p}.{name}", "experts", width, rows, n)
        if s.expert_bias:
            b.bias(f"{p}.{name}", rows, n)
    b.closing(f"{p}.ffn_down_exps", "experts", inner, width, n)
    if s.expert_bias:
        b.bias(f"{p}.ffn_down_exps", width, n)


def shared_expert(b: Builder, il: int, *, inner: int, gated: bool = False, gate: bool = True) -> None:
    """The expert every token uses; `gated` adds its own scalar router."""
    s, p = b.spec, f"blk.{il}"
    if gated:
        b.small(f"{p}.ffn_gate_inp_shexp.weight", s.n_embd)
    if gate:
        b.weight(f"{p}.ffn_gate_shexp", "shared", s.n_embd, inner)
    b.weight(f"{p}.ffn_up_shexp", "shared", s.n_embd, inner)
    b.closing(f"{p}.ffn_down_shexp", "shared", inner, s.n_embd)


def nextn(b: Builder, il: int) -> None:
    """The projections of a NextN/MTP block, beside its own attention and FFN."""
    n, p = b.spec.n_embd, f"blk.{il}.nextn"
    b.weight(f"{p}.eh_proj", "attention", 2 * n, n)
    b.norm(f"{p}.enorm")
    b.norm(f"{p}.hnorm")
    b.norm(f"{p}.shared_head_norm")


def expert_counts(b: Builder) -> None:
    """Metadata of routed experts."""
    s = b.spec
    b.set(expert_count=b.n_expert, expert_used_count=s.n_used, expert_feed_forward_length=s.n_ff_exp)


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention (MLA)."""

    rank: int = 128  # of the compressed KV: what the cache holds
    rope: int = 32  # positions, shared by all heads
    plain: int = 64  # the rest of a key
    value: int = 64


def latent_sizes(b: Builder) -> Latent:
    """Metadata of latent attention; over the metadata of `start`."""
    latent = Latent()
    b.set(
        attention__head_count_kv=1,
        attention__key_length=latent.rank + latent.rope,
        attention__value_length=latent.rank,
        attention__key_length_mla=latent.plain + latent.rope,
        attention__value_length_mla=latent.value,
        attention__kv_lora_rank=latent.rank,
        rope__dimension_count=latent.rope,
    )
    return latent


def latent_attention(b: Builder, il: int, latent: Latent, *, q_rank: int) -> None:
    """Latent attention with its leading norm; `q_rank` 0: queries are not compressed."""
    p, n, heads = f"blk.{il}", b.spec.n_embd, b.spec.n_head
    query = heads * (latent.plain + latent.rope)
    b.norm(f"{p}.attn_norm")
    if q_rank:
        b.weight(f"{p}.attn_q_a", "attention", n, q_rank)
        b.norm(f"{p}.attn_q_a_norm", q_rank)
        b.weight(f"{p}.attn_q_b", "attention", q_rank, query)
    else:
        b.weight(f"{p}.attn_q", "attention", n, query)
    b.weight(f"{p}.attn_kv_a_mqa", "attention", n, latent.rank + latent.rope)
    b.norm(f"{p}.attn_kv_a_norm", latent.rank)
    b.weight(f"{p}.attn_k_b", "attention", latent.plain, latent.rank, heads)
    b.weight(f"{p}.attn_v_b", "attention", latent.rank, latent.value, heads)
    b.closing(f"{p}.attn_output", "attention", heads * latent.value, n)
