"""Models that the engine itself makes from metadata: the shape oracle for every architecture it knows.

llama_model_init_from_user creates all tensors an architecture may have, optional ones included. As a
program this reads a list of architectures from stdin, makes each, says what contexts of it take, and
saves it, all in one child process; the parent reads the saved files.
"""

from __future__ import annotations

import ctypes as c
import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.model.inventory import Hparam
from planner.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
CONTEXTS = (
    (Workload(n_ctx=1024, n_ubatch=64), False),
    (Workload(n_ctx=3000, n_seq=3, n_ubatch=64), False),
    (Workload(n_ctx=3000, n_seq=3, n_ubatch=64, type_k="f32", type_v="f32"), True),
)
_LATENT = """
deepseek2 deepseek32 glm-dsa dots3note bailingmoe3 kimi-k3 glm5-next mistral4 hy_v4
"""  # latent attention
_EXPERTS = """
llama4 cohere2moe grok qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp phimoe dbrx olmoe arctic
deepseek deepseek2 deepseek32 dots3note deepseek4 glm4moe glm-dsa exaone-moe bailingmoe bailingmoe2
bailingmoe3 dots1 afmoe ernie4_5-moe hunyuan-moe hy_v3 hy_v4 gpt-oss lfm2moe smallthinker grovemoe
minimax-01 minimax-m2 minimax-m3 mimo2 kimi-k3 glm5-next mistral4 mellum laguna nemotron_h_moe granitemoe
jamba
"""  # with routed experts
_BY_HEADS = """
plamo2 jamba nemotron_h nemotron_h_moe granitehybrid lfm2 lfm2moe bailingmoe3 kimi-k3 glm5-next
"""  # the second layer has no key-value heads and is recurrent
_PLAIN = """
llama deci falcon gpt2 gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2vl qwen3 qwen3vl
phi2 phi3 plamo plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma4 starcoder2
mamba mamba2 falcon-h1 xverse command-r cohere2 olmo olmo2 openelm chatglm glm4 jais jais2 nemotron exaone
exaone4 rwkv6 rwkv7 arwkv7 granite granite_swa chameleon arcee ernie4_5 hunyuan-dense hunyuan_vl smollm3
seed_oss cogvlm pangu-embedded mistral3 paddleocr maincoder talkie muse-glimmer spark2_5 qwen35
"""  # all others
LATENT, EXPERTS, BY_HEADS = (frozenset(text.split()) for text in (_LATENT, _EXPERTS, _BY_HEADS))
ALL = tuple(sorted({*_PLAIN.split(), *EXPERTS, *BY_HEADS}))
_LAYERS = {"llama4": 4, "gemma4": 5, "deepseek4": 4, "nemotron_h": 3, "nemotron_h_moe": 3}
_ALTERNATING = frozenset({"cohere2moe", "mimo2", "granite_swa", "dots3note", "muse-glimmer", "spark2_5"})


# Architectures whose speculative block has a context of its own; NAME+nextn is one with such a block,
# NAME+late one with the context of newer models, which changes defaults.
_NEXTN = """
cohere2moe deepseek2 deepseek32 glm-dsa glm4moe hy_v3 qwen35 qwen35moe qwen3next qwen4exp
"""
NEXTN = tuple(_NEXTN.split())


def hparams(name: str) -> dict[str, Hparam]:
    """Metadata of a small model, without the architecture's prefix; keys that it does not read do no harm."""
    arch, _, variant = name.partition("+")
    found = _hparams(arch)
    if not variant:
        return found
    if variant == "late":
        return {**found, "block_count": 12, "context_length": 1 << 20}
    longer: dict[str, Hparam] = {
        key: (*one, one[-1]) for key, one in found.items() if isinstance(one, tuple) and key in _PER_LAYER
    }
    return {**found, **longer, "block_count": int(str(found["block_count"])) + 1, "nextn_predict_layers": 1}


_PER_LAYER = frozenset(
    {"attention.sliding_window_pattern", "attention.compress_ratios", "attention.head_count_kv"}
)


def _hparams(arch: str) -> dict[str, Hparam]:
    n_layers = _LAYERS.get(arch, 2)
    width, heads, inner = (512, 8, 1024) if arch == "deepseek4" else (256, 2, 384)
    if arch in LATENT:
        width, heads, inner = 128, 1, 192
    head = width // heads
    found: dict[str, Hparam] = {
        **_COMMON,
        "vocab_size": 10240 if arch == "chameleon" else 128,
        "embedding_length": width,
        "block_count": n_layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.q_lora_rank": 512,
        "attention.indexer.head_count": heads if arch == "minimax-m3" else 64,
        "attention.indexer.key_length": 128,
        "attention.sliding_window_pattern": 2,
        "rope.dimension_sections": (head // 4,) * 4,
        "ssm.inner_size": 256 if arch.startswith("qwen") else 2 * width,
        "ssm.time_step_rank": heads,
        "ssm.group_count": 0 if arch == "plamo2" else 2,
        "wkv.head_size": head,
    }
    for part in (_expert_keys(arch, inner), _mixer_keys(arch, n_layers, heads, inner), _latent_keys(arch)):
        found |= part
    return found | _odd_keys(arch, n_layers, width, head)


_COMMON: dict[str, Hparam] = {
    "context_length": 256,
    "leading_dense_block_count": 1,
    "full_attention_interval": 2,
    "use_parallel_residual": False,
    "logit_scale": 1.0,
    "residual_scale": 3.5,
    "time_mix_extra_dim": 64,
    "time_decay_extra_dim": 128,
    "rescale_every_n_layers": 0,
    "attention.max_alibi_bias": 8.0,
    "attention.clamp_kqv": 1.0,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.kv_lora_rank": 512,
    "attention.sliding_window": 32,
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 16,
    "attention.gate_lora_rank": 16,
    "attention.indexer.top_k": 131072,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "kda.head_dim": 128,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "shortconv.l_cache": 3,
    "token_shift_count": 2,
    "attn_res.block_size": 12,
    "attn_res_block_size": 12,
    "attention.res_block_size": 12,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
}


def _expert_keys(arch: str, inner: int) -> dict[str, Hparam]:
    if arch not in EXPERTS:
        return {}
    return {
        "expert_count": 2,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": inner // 2,
        "expert_chunk_feed_forward_length": inner,
        "expert_gating_func": 4 if arch == "deepseek4" else 2,
        "expert_group_scale": 1.0,
        "experts_per_group": 1,
        "interleave_moe_layer_step": 2,
        "moe_every_n_layers": 1,
        "moe_latent_size": inner,
        "expert_latent_length": inner,
    }


def _mixer_keys(arch: str, n_layers: int, heads: int, inner: int) -> dict[str, Hparam]:
    found: dict[str, Hparam] = {}
    if arch.startswith("nemotron_h"):
        found["feed_forward_length"] = tuple(0 if n <= 1 else inner for n in range(n_layers))
    if arch in BY_HEADS:
        per_layer = tuple(0 if n == 1 else heads for n in range(n_layers))
        found["attention.head_count_kv"] = per_layer
        if arch != "glm5-next":
            found["attention.head_count"] = per_layer
    if arch == "arwkv7":
        found["token_shift_count"] = 1
    return found


def _latent_keys(arch: str) -> dict[str, Hparam]:
    if arch not in LATENT:
        return {}
    rope = 0 if arch == "glm5-next" else 64
    return {
        "attention.key_length": 512 + rope,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "rope.dimension_count": rope,
    }


def _odd_keys(arch: str, n_layers: int, width: int, head: int) -> dict[str, Hparam]:
    found: dict[str, Hparam] = {}
    if arch in _ALTERNATING:
        found["attention.sliding_window_pattern"] = tuple(n % 2 for n in range(n_layers))
    if arch in ("dots3note", "hy_v4"):
        found["attention.indexer.types"] = tuple(1 - n % 2 for n in range(n_layers))
    if arch in ("deepseek4", "hy_v4", "qwen4exp", "glm5-next"):
        found |= {
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.magnitude": 2.0,
            "hyper_connection.low_rank": 8,
            "swiglu_clamp_exp": 10.0,
        }
    return (
        found | _SPECIAL.get(arch, {}) | ({"rope.dimension_count": head // 2} if arch == "deepseek4" else {})
    )


_PLE: dict[str, Hparam] = {
    "ple.layers": (0,),
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 0,
    "ple.layer_multipliers": (1, 3, 5),
    "ple.head_offsets": (0, 128, 256, 384),
    "ple.head_vocab_sizes": (128, 128, 128, 128),
}
_SPECIAL: Mapping[str, dict[str, Hparam]] = {
    "dots3note": {
        "attention.kv_lora_rank_swa": 512,
        "attention.key_length_swa": 576,
        "attention.value_length_swa": 512,
        "attention.key_length_mla_swa": 192,
        "attention.value_length_mla_swa": 128,
        "rope.freq_base_swa": 1e4,
    },
    "deepseek4": {
        "attention.q_lora_rank": 64,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.output_group_count": 8,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": (0, 0, 4, 128),
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
    },
    "gemma4": {
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": 128,
        "attention.value_length_swa": 128,
        "attention.sliding_window_pattern": (True, True, True, True, False),
        "embedding_length_per_layer_input": 128,
        "rope.freq_base_swa": 1e4,
    },
    "qwen4exp": {"attention.compress_ratios": (4, 4), "embedding_length_per_layer_input": 64, **_PLE},
    "glm5-next": {"attention.compress_ratios": (4, 4), "embedding_length_per_layer_input": 32, **_PLE},
    "minimax-m3": {"rope.dimension_count": 64},
    "laguna": {"embedding_length": 160, "attention.head_count": 2},
    "bailingmoe3": {
        "rope.dimension_sections": (8, 12, 12, 0),
        "swiglu_clamp_exp": (0.0, 4.0),
        "swiglu_clamp_shexp": (0.0, 5.0),
    },
}


def make(
    folder: Path, architectures: Iterable[str], changed: Mapping[str, Hparam] | None = None
) -> Mapping[str, list[list[int]]]:
    """Save each architecture's model as `folder`/ARCH.gguf; [model, context, compute] of each context.

    `changed`: metadata in place of the small model's own.
    """
    from engines import python  # not in the child, which needs no pytest

    names = list(architectures)
    for arch in names:
        (folder / f"{arch}.meta").write_bytes(_header(arch, {**hparams(arch), **(changed or {})}))
    asked = python(__file__, folder, given=json.dumps(names), limit_s=300)
    assert asked.returncode == 0, asked.stdout[-200:] + asked.stderr[-2000:]
    answers: dict[str, list[list[int]]] = {}
    for line in asked.stdout.splitlines():
        answers |= json.loads(line)
    return answers


def _header(arch: str, keys: Mapping[str, Hparam]) -> bytes:
    """A GGUF file of metadata alone."""
    from sparse_model import string, value

    prefix = arch.partition("+")[0]
    values = {f"{prefix}.{key}": one for key, one in keys.items()}
    pairs = [string(key) + _wide(key, one) for key, one in values.items()]
    tokens = tuple(f"tok_{n}" for n in range(int(str(keys["vocab_size"]))))
    general: dict[str, Hparam] = {
        "general.architecture": prefix,
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": (0.0,) * len(tokens),
    }
    pairs += [string(key) + value(one) for key, one in general.items()]
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)
    return data.ljust(-(-len(data) // 32) * 32, b"\0")


def _wide(key: str, one: Hparam) -> bytes:
    """The n-gram tables are arrays of 64-bit numbers."""
    from sparse_model import value

    if isinstance(one, tuple) and key.endswith(("multipliers", "offsets", "vocab_sizes")):
        return struct.pack(f"<IIQ{len(one)}Q", 9, 10, len(one), *(int(v) for v in one))
    return value(one)


class _InitParams(c.Structure):
    _fields_ = (("no_alloc", c.c_bool), ("ctx", c.c_void_p))


_SET_DATA = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)


def _answers(folder: Path, names: list[str]) -> Iterator[dict[str, list[list[int]]]]:
    from runtime.engine.libllama import Engine

    engine = Engine.find()
    lib, params = engine.lib, engine.model_params()
    leave = _SET_DATA(lambda _tensor, _data: None)  # nothing is computed with these weights
    params.use_extra_bufts = False
    lib.gguf_init_from_file.restype = lib.llama_model_init_from_user.restype = c.c_void_p
    lib.gguf_init_from_file.argtypes = [c.c_char_p, _InitParams]
    lib.llama_model_init_from_user.argtypes = [c.c_void_p, _SET_DATA, c.c_void_p, type(params)]
    lib.llama_model_save_to_file.argtypes = [c.c_void_p, c.c_char_p]
    for arch in names:
        said: list[str] = []
        params.load_mtp = mtp = arch.endswith("+nextn")
        with engine.log(lambda _level, text, said=said: said.append(text)):  # type: ignore[misc]
            meta = lib.gguf_init_from_file(str(folder / f"{arch}.meta").encode(), _InitParams(True, None))
            model = lib.llama_model_init_from_user(meta, leave, None, params)
            assert model, f"{arch}: {''.join(said[-3:])}"
            found = [_context(engine, model, work, full) for work, full in CONTEXTS]
            if mtp:
                found += [_context(engine, model, work, full, mtp=True) for work, full in CONTEXTS]
            lib.llama_model_save_to_file(model, str(folder / f"{arch}.gguf").encode())
            lib.llama_model_free(model)
        yield {arch: found}


def _context(engine: Any, model: int, work: Workload, swa_full: bool, *, mtp: bool = False) -> list[int]:
    from planner.plan.load_spec import LoadSpec
    from runtime.load import load_params
    from runtime.load.dry_run import Breakdown, breakdown

    spec, kept = LoadSpec((), (), 0, (), work, use_extra_bufts=False), load_params.Kept()
    params = load_params.context_params(engine, spec, kept)
    params.swa_full, params.ctx_type = swa_full, int(mtp)
    with load_params.context(engine, model, params) as context:
        total = sum(breakdown(engine, context).values(), start=Breakdown(0, 0, 0))
    return [total.model, total.context, total.compute]


if __name__ == "__main__":
    for answer in _answers(Path(sys.argv[1]), json.load(sys.stdin)):
        print(json.dumps(answer), flush=True)
