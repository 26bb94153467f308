"""A byte-level mixture of experts in PyTorch with exactly the mathematics of llama.cpp's `qwen3moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; about 1.9 million weights."""

    vocab: int = 258  # 256 bytes, the end of text, and one merge that valid UTF-8 never uses
    layers: int = 4
    embd: int = 128
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    experts: int = 16
    used: int = 4
    ff: int = 64
    ctx: int = 256
    rope_base: float = 10000.0
    eps: float = 1e-6


class RmsNorm(nn.Module):  # type: ignore[misc]  # torch is not installed where this is checked
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):  # type: ignore[misc]  # torch is not installed where this is checked
    """Grouped-query attention with normed queries and keys, NeoX rotation."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q = nn.Linear(s.embd, s.heads * s.head_dim, bias=False)
        self.k = nn.Linear(s.embd, s.heads_kv * s.head_dim, bias=False)
        self.v = nn.Linear(s.embd, s.heads_kv * s.head_dim, bias=False)
        self.o = nn.Linear(s.heads * s.head_dim, s.embd, bias=False)
        self.q_norm, self.k_norm = RmsNorm(s.head_dim, s.eps), RmsNorm(s.head_dim, s.eps)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self._rotate(self.q_norm(self.q(x).view(b, t, self.s.heads, -1)))
        k = self._rotate(self.k_norm(self.k(x).view(b, t, self.s.heads_kv, -1)))
        v = self.v(x).view(b, t, self.s.heads_kv, -1)
        repeat = self.s.heads // self.s.heads_kv
        k, v = (y.repeat_interleave(repeat, dim=2) for y in (k, v))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(b, t, -1))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.s.head_dim // 2
        freq = self.s.rope_base ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[1])[:, None] * freq
        cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Experts(nn.Module):  # type: ignore[misc]  # torch is not installed where this is checked
    """Top-k of a soft-max router with weights normed over the chosen; keeps what it chose."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.router = nn.Linear(s.embd, s.experts, bias=False)
        scale = s.embd**-0.5
        self.gate = nn.Parameter(torch.randn(s.experts, s.ff, s.embd) * scale)
        self.up = nn.Parameter(torch.randn(s.experts, s.ff, s.embd) * scale)
        self.down = nn.Parameter(torch.randn(s.experts, s.embd, s.ff) * s.ff**-0.5 * 0.5)
        self.chosen = torch.empty(0, s.used, dtype=torch.long)
        self.imbalance = torch.tensor(0.0)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.s.embd)
        probs = self.router(flat).softmax(-1)
        weights, chosen = probs.topk(self.s.used, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        self.chosen = chosen.detach()
        share = F.one_hot(chosen, self.s.experts).float().sum(1).mean(0) / self.s.used
        self.imbalance = self.s.experts * (share * probs.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)  # the choices of an expert side by side
        token = order // self.s.used
        sizes = torch.bincount(chosen.flatten(), minlength=self.s.experts).tolist()
        parts = zip(
            flat[token].split(sizes), *(w.unbind() for w in (self.gate, self.up, self.down)), strict=True
        )
        made = torch.cat([(F.silu(h @ gate.T) * (h @ up.T)) @ down.T for h, gate, up, down in parts])
        out = torch.zeros_like(flat).index_add(0, token, made * weights.flatten()[order, None])
        return out.view_as(x)


class Block(nn.Module):  # type: ignore[misc]  # torch is not installed where this is checked
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = RmsNorm(s.embd, s.eps), RmsNorm(s.embd, s.eps)
        self.attn, self.moe = Attention(s), Experts(s)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        out: Tensor = x + self.moe(self.ffn_norm(x))
        return out


class TinyMoe(nn.Module):  # type: ignore[misc]  # torch is not installed where this is checked
    """Logits (batch, time, vocab) of tokens (batch, time)."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embd = nn.Embedding(s.vocab, s.embd)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = RmsNorm(s.embd, s.eps)
        self.head = nn.Linear(s.embd, s.vocab, bias=False)
        nn.init.normal_(self.embd.weight, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embd(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def experts(self) -> list[Any]:
        """The expert layers, first to last."""
        return [block.moe for block in self.blocks]
