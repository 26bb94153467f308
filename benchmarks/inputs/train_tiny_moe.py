"""Trains tests/data/tiny-moe.gguf: a byte-level qwen3moe that has learned which expert to ask.

    python -m benchmarks.inputs.train_tiny_moe --out tests/data/tiny-moe.gguf --steps 1500
    python -m benchmarks.inputs.train_tiny_moe --out tests/data/tiny-moe-64.gguf --experts 64 --used 8 \
        --ff 32 --steps 450

The first has 16 experts, 4 for a token; the second is trained in the same way with 64, of which a token
uses 8.

Needs PyTorch (2.13 was used, CPU, one thread) and gguf. Text: the standard library of the running
Python, as code and as documentation. Beside the model goes a JSON file with PyTorch's own logits and
chosen experts for two prompts, which tests hold the engine to: logits within 0.02 (0.0017 was seen, of a
range of 11), experts to 99 % (all were the same on the CPU).
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from benchmarks.inputs.tiny_moe_model import Shape, TinyMoe
from profiler.synth.vocab import byte_letters

BATCH, SEQUENCE = 24, 192
BALANCE = 0.002  # weight of the load-balance loss: enough that no expert dies, too little to level them
PROMPTS = {
    "code": "    def read(self, size=-1):\n        if self.closed:\n            raise ValueError(\n",
    "docs": "The following table lists the methods of this class. Return the number of items in the ",
}


def texts() -> dict[str, bytes]:
    """Code and documentation of the standard library, in a fixed order."""
    code, docs = [], []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or path.name == "topics.py":
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        code.append(source)
        docs += _docstrings(source)
    docs.append("\n".join(_topics()))
    return {"code": "\n".join(code).encode(), "docs": "\n\n".join(docs).encode()}


def _docstrings(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def train(shape: Shape, steps: int, seed: int) -> tuple[TinyMoe, dict[str, bytes]]:
    """The trained model and the text it never saw (the last tenth of each kind)."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    whole = texts()
    seen = [np.frombuffer(t[: len(t) * 9 // 10], np.uint8) for t in whole.values()]
    model = TinyMoe(shape)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    began = time.monotonic()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - 0.95 * step / steps)
        tokens = _batch(seen, rng)
        loss = _loss(model, tokens) + BALANCE * sum(m.imbalance for m in model.experts())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} after {time.monotonic() - began:.0f} s", flush=True)
    return model, {name: text[len(text) * 9 // 10 :] for name, text in whole.items()}


def _batch(seen: list[Any], rng: np.random.Generator) -> Tensor:
    rows = []
    for index in range(BATCH):
        text = seen[index % len(seen)]
        start = int(rng.integers(0, len(text) - SEQUENCE - 1))
        rows.append(text[start : start + SEQUENCE + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _loss(model: TinyMoe, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def judge(model: TinyMoe, unseen: dict[str, bytes]) -> dict[str, float]:
    """Bits per byte on unseen text, with the learned router and with its rows shuffled in every layer."""
    result = {}
    learned = [m.router.weight.detach().clone() for m in model.experts()]
    with torch.no_grad():
        for name, text in unseen.items():
            rows = np.frombuffer(text[: 40 * (SEQUENCE + 1)], np.uint8).reshape(-1, SEQUENCE + 1)
            tokens = torch.from_numpy(rows.astype(np.int64))
            result[f"{name}.bits"] = _loss(model, tokens).item() / np.log(2)
            for m in model.experts():
                m.router.weight.copy_(m.router.weight[torch.randperm(model.s.experts)])
            result[f"{name}.bits_shuffled_router"] = _loss(model, tokens).item() / np.log(2)
            for m, weight in zip(model.experts(), learned, strict=True):
                m.router.weight.copy_(weight)
    return {key: round(float(value), 4) for key, value in result.items()}


def export(model: TinyMoe, path: Path) -> None:
    """GGUF, matrices in f16; the model is rounded to what the file holds."""
    s = model.s
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name(f"{path.stem}: byte-level, trained on the Python standard library")
    writer.add_license("PSF-2.0 text, MIT weights")
    for key, value in _numbers(s).items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.rope.freq_base", s.rope_base)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", s.eps)
    _vocabulary(writer)
    for name, weight in tensors(model).items():
        data = weight.detach()
        with torch.no_grad():
            if data.dim() > 1 and "gate_inp" not in name:
                weight.copy_(data.half().float())
                data = weight.half()
        writer.add_tensor(name, data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _numbers(s: Shape) -> dict[str, int]:
    return {
        "block_count": s.layers,
        "context_length": s.ctx,
        "embedding_length": s.embd,
        "feed_forward_length": s.ff * s.used,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.heads_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "expert_count": s.experts,
        "expert_used_count": s.used,
        "expert_feed_forward_length": s.ff,
    }


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    letters = byte_letters()
    never = letters[0xFE], letters[0xFF]  # the engine wants a merge, and UTF-8 has neither of these bytes
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "<|endoftext|>", "".join(never)])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges([" ".join(never)])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)


def tensors(model: TinyMoe) -> dict[str, Tensor]:
    """Weights by their GGUF names."""
    found = {"token_embd.weight": model.embd.weight}
    for index, block in enumerate(model.blocks):
        at, moe = block.attn, block.moe
        named = {
            "attn_norm": block.attn_norm, "attn_q": at.q, "attn_k": at.k, "attn_v": at.v, "attn_output": at.o,
            "attn_q_norm": at.q_norm, "attn_k_norm": at.k_norm, "ffn_norm": block.ffn_norm,
            "ffn_gate_inp": moe.router,
        }  # fmt: skip
        found |= {f"blk.{index}.{name}.weight": module.weight for name, module in named.items()}
        found |= {f"blk.{index}.ffn_{n}_exps.weight": getattr(moe, n) for n in ("gate", "up", "down")}
    return found | {"output_norm.weight": model.norm.weight, "output.weight": model.head.weight}


def reference(model: TinyMoe, judged: dict[str, float]) -> dict[str, Any]:
    """What PyTorch says about the prompts: last logits, and the experts of each layer and token."""
    prompts = {}
    for name, text in PROMPTS.items():
        with torch.no_grad():
            logits = model(torch.tensor([list(text.encode())]))[0, -1]
        prompts[name] = {
            "text": text,
            "logits": [round(v, 4) for v in logits.tolist()],
            "experts": [m.chosen.tolist() for m in model.experts()],
        }
    return {"torch": torch.__version__, "judged": judged, "prompts": prompts}


def main() -> None:
    """Train, export, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--experts", type=int, default=Shape().experts)
    parser.add_argument("--used", type=int, default=Shape().used)
    parser.add_argument("--ff", type=int, default=Shape().ff, help="Inner width of an expert.")
    args = parser.parse_args()
    model, unseen = train(Shape(experts=args.experts, used=args.used, ff=args.ff), args.steps, args.seed)
    export(model, args.out)
    judged = judge(model, unseen)
    print(json.dumps(judged, indent=2), file=sys.stderr)
    args.out.with_suffix(".json").write_text(json.dumps(reference(model, judged)) + "\n")


if __name__ == "__main__":
    main()
