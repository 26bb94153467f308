"""Make plans/inputs/*.inventory.yaml from collected tensor tables and model configurations.

    python benchmarks/inputs/make_inputs.py DATA [MODEL…]

DATA holds tables (`name,ne,type,bytes`) and Hugging Face `config.json` copies in the folders that
SOURCES names. The hyperparameters get the keys that llama.cpp's converter would write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.inputs.tensor_tables import Row, inventory_of, read_table
from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Hparam, Inventory, to_text

INPUTS = Path(__file__).resolve().parent.parent.parent / "plans" / "inputs"
PUBLISHED = Path(__file__).parent / "published_configs.json"  # of models whose config.json was not collected
Config = Mapping[str, Any]
Hparams = dict[str, Hparam]


@dataclass(frozen=True, slots=True)
class Source:
    """Where an inventory comes from."""

    name: str
    architecture: str
    table: str
    config: str  # file in DATA/hf_configs, or an entry of published_configs.json
    hparams: Callable[[Config], Hparams]
    note: str  # for README.md beside the inventories
    nextn: bool = (
        False  # the table lacks the NextN/MTP block that the configuration has: it is made from that
    )


def common(c: Config) -> Hparams:
    """Keys that every decoder has."""
    found: Hparams = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(c.get("rms_norm_eps", 1e-5)),
        "vocab_size": c["vocab_size"],
    }
    if "intermediate_size" in c:
        found["feed_forward_length"] = c["intermediate_size"]
    if "head_dim" in c:
        found["attention.key_length"] = found["attention.value_length"] = c["head_dim"]
    if "rope_theta" in c:
        found["rope.freq_base"] = float(c["rope_theta"])
    return found


def llama(c: Config) -> Hparams:
    """Llama and Mixtral."""
    found = common(c)
    found["rope.dimension_count"] = c["hidden_size"] // c["num_attention_heads"]
    if "num_local_experts" in c:
        found |= {
            "expert_count": c["num_local_experts"],
            "expert_used_count": c["num_experts_per_tok"],
        }
    return found


def experts(c: Config) -> Hparams:
    """Qwen-style routed and shared experts."""
    found: Hparams = {
        "expert_count": c["num_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
    }
    if c.get("shared_expert_intermediate_size"):
        found["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    return found


def qwen(c: Config) -> Hparams:
    """Qwen3, dense or with experts."""
    return common(c) | (experts(c) if "num_experts" in c else {})


def qwen_hybrid(c: Config) -> Hparams:
    """Qwen3-Next, Qwen3.5 and later: gated delta net with full attention every n-th layer."""
    found = common(c) | (experts(c) if "num_experts" in c else {})
    rope = c.get("rope_parameters", {})
    share = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    found |= {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
        "full_attention_interval": c["full_attention_interval"],
        "rope.dimension_count": int(c["head_dim"] * share),
    }
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = (*rope["mrope_section"], 0)
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    return found


def gpt_oss(c: Config) -> Hparams:
    """GPT-OSS: attention sinks, every other layer slides."""
    return common(c) | {
        "expert_count": c["num_local_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["intermediate_size"],
        "attention.sliding_window": c["sliding_window"],
        "rope.dimension_count": c["head_dim"],
    }


def gemma4(c: Config) -> Hparams:
    """Gemma 4: heads of two widths, sliding and full layers, one dense and one expert branch."""
    slides = tuple(kind == "sliding_attention" for kind in c["layer_types"])
    few, many = c["num_global_key_value_heads"], c["num_key_value_heads"]
    rope = c["rope_parameters"]
    found = common({k: v for k, v in c.items() if k not in ("head_dim", "rope_theta")})
    return found | {
        "attention.head_count_kv": tuple(many if s else few for s in slides),
        "attention.key_length": c["global_head_dim"],
        "attention.value_length": c["global_head_dim"],
        "attention.key_length_swa": c["head_dim"],
        "attention.value_length_swa": c["head_dim"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": c["num_kv_shared_layers"],
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "expert_count": c["num_experts"],
        "expert_used_count": c["top_k_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "rope.dimension_count": c["global_head_dim"],
        "rope.dimension_count_swa": c["head_dim"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def nemotron(c: Config) -> Hparams:
    """Nemotron 3: each layer is a Mamba-2 mixer, an attention, or experts."""
    pattern = c["hybrid_override_pattern"]
    heads, ff = c["num_key_value_heads"], c["moe_intermediate_size"]
    return common(c) | {
        "attention.head_count_kv": tuple(heads if kind == "*" else 0 for kind in pattern),
        "feed_forward_length": tuple(ff if kind == "E" else 0 for kind in pattern),
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "ssm.group_count": c["n_groups"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": ff,
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_group_count": c["n_group"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "rope.dimension_count": c["head_dim"],
    }


def routed(c: Config) -> Hparams:
    """DeepSeek-style routed and shared experts after leading dense layers."""
    return {
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2 if c["scoring_func"] == "sigmoid" else 1,
        "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"],
    }


def deepseek(c: Config) -> Hparams:
    """DeepSeek V3 and its kin: latent attention (MLA)."""
    latent = c["kv_lora_rank"]
    return (
        common(c)
        | routed(c)
        | {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": c["q_lora_rank"],
            "attention.kv_lora_rank": latent,
            "attention.key_length": latent + c["qk_rope_head_dim"],
            "attention.value_length": latent,
            "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "attention.value_length_mla": c["v_head_dim"],
            "rope.dimension_count": c["qk_rope_head_dim"],
        }
    )


def glm4(c: Config) -> Hparams:
    """GLM-4.5: experts after dense layers, one NextN block counted inside block_count."""
    found = common(c) | routed(c)
    return found | {
        "block_count": c["num_hidden_layers"] + c["num_nextn_predict_layers"],
        "nextn_predict_layers": c["num_nextn_predict_layers"],
        "rope.dimension_count": c["head_dim"] // 2,
    }


MAPS = "thireus_maps"
FLASH_NEXT = "Qwen3.8-Flash-Next-IQ2_XS-experts-only"
FLASH_NEXT_TYPES = {773324800: "iq2_s", 668467200: "iq2_xxs", 602931200: "iq1_m"}  # bytes of a layer
TIED = "Output tied to the embedding."
FROM_TYPES = "Sizes from type and shape."
HEADING = """# Inventories of real models

Tensor tables with names, shapes, types and sizes; no weights. Written by `benchmarks/inputs/make_inputs.py`.
Totals are those of the tensors; a real file adds its header.
"""
NO_MTP = "Text model alone: the MTP block and the vision projector are files of their own, not in the table."
DUMP = "Tensor table of a real GGUF file."
DERIVED = "Derived from the model's configuration and llama.cpp's quantisation rules; no file was read."

WITHOUT_NEXTN = (
    "The table lacks the MTP block; here it is made as the model's README_WEIGHTS describes it: one more "
    "layer with the shapes and types of the last, and a projection of token and hidden state."
)
OF_LAST = (
    "Without the MTP block, which the published weights have; here it is made as theirs is built: one more "
    "layer of full attention with the shapes and types of the last, and a projection of token and hidden "
    "state."
)

WITH_NEXTN = (
    "The MTP block is a file of its own upstream; here it is made from the configuration: one more layer of "
    "full attention with the shapes and types of the last, and a projection of token and hidden state."
)

SOURCES = (
    Source("Qwen3.6-35B-A3B-q4_K", "qwen35moe", f"{MAPS}/Qwen3.6-35B-A3B.q4_K.csv",
           "nvidia--Qwen3.6-35B-A3B_config.stripped.json", qwen_hybrid, f"{DUMP} {NO_MTP}"),
    Source("Qwen3.6-27B-q4_K", "qwen35", f"{MAPS}/Qwen3.6-27B.q4_K.csv",
           "nvidia--Qwen3.6-27B_config.stripped.json", qwen_hybrid, f"{DUMP} {NO_MTP}"),
    Source("Qwen3.6-35B-A3B-q4_K+nextn", "qwen35moe", f"{MAPS}/Qwen3.6-35B-A3B.q4_K.csv",
           "nvidia--Qwen3.6-35B-A3B_config.stripped.json", qwen_hybrid, f"{DUMP} {WITH_NEXTN}", nextn=True),
    Source("Qwen3.6-27B-q4_K+nextn", "qwen35", f"{MAPS}/Qwen3.6-27B.q4_K.csv",
           "nvidia--Qwen3.6-27B_config.stripped.json", qwen_hybrid, f"{DUMP} {WITH_NEXTN}", nextn=True),
    Source("Qwen3.5-397B-A17B-q4_K", "qwen35moe", f"{MAPS}/Qwen3.5-397B-A17B.q4_K.csv",
           "Qwen--Qwen3.5-397B-A17B_config.json", qwen_hybrid, f"{DUMP} {NO_MTP}"),
    Source("Qwen3.5-0.8B-q8_0", "qwen35", f"{MAPS}/Qwen3.5-0.8B.q8_0.csv", "Qwen3.5-0.8B", qwen_hybrid,
           f"{DUMP} {NO_MTP} {TIED}"),
    Source("Qwen3-30B-A3B-Q4_K_M", "qwen3moe", "derived/Qwen3-30B-A3B.Q4_K_M.csv",
           "Qwen--Qwen3-30B-A3B_config.json", qwen,
           f"{DERIVED} The total equals the published file's 18550716416 bytes."),
    Source("Qwen3-235B-A22B-UD-Q4_K_S", "qwen3moe", "gguf_dumps/Qwen3-235B-A22B.unsloth-Q4_K_S.csv",
           "Qwen--Qwen3-235B-A22B_config.json", qwen, f"{DUMP} {FROM_TYPES}"),
    Source("Qwen3-Next-80B-A3B-Q4_K_M", "qwen3next", "derived/Qwen3-Next-80B-A3B.Q4_K_M.csv",
           "Qwen3-Next-80B-A3B", qwen_hybrid, f"{DERIVED} Without the MTP block."),
    Source("Qwen3-Next-80B-A3B-Q4_K_M+nextn", "qwen3next", "derived/Qwen3-Next-80B-A3B.Q4_K_M.csv",
           "Qwen3-Next-80B-A3B", qwen_hybrid, f"{DERIVED} {OF_LAST}", nextn=True),
    Source("Qwen3-4B-Instruct-2507-q4_K", "qwen3", f"{MAPS}/Qwen3-4B-Instruct-2507.q4_K.csv",
           "Qwen3-4B-Instruct-2507", qwen, f"{DUMP} {TIED}"),
    Source("gpt-oss-20b-MXFP4", "gpt-oss", "derived/gpt-oss-20b.MXFP4.csv",
           "openai--gpt-oss-20b_config.json", gpt_oss, DERIVED),
    Source("gpt-oss-120b-MXFP4", "gpt-oss", "derived/gpt-oss-120b.MXFP4.csv",
           "openai--gpt-oss-120b_config.json", gpt_oss, DERIVED),
    Source("GLM-4.7-Flash-q4_K", "deepseek2", f"{MAPS}/GLM-4.7-Flash.q4_K.csv", "GLM-4.7-Flash", deepseek,
           f"{DUMP} Without the MTP block."),
    Source("GLM-4.7-Flash-q4_K+nextn", "deepseek2", f"{MAPS}/GLM-4.7-Flash.q4_K.csv", "GLM-4.7-Flash",
           deepseek, f"{DUMP} {OF_LAST}", nextn=True),
    Source("GLM-4.5-q4_K", "glm4moe", f"{MAPS}/GLM-4.5.q4_K.csv", "GLM-4.5", glm4,
           f"{DUMP} With its NextN block."),
    Source("gemma-4-26B-A4B-Q4_K_M", "gemma4", "derived/Gemma-4-26B-A4B.Q4_K_M.csv",
           "google--gemma-4-26B-A4B_config.json", gemma4, f"{DERIVED} Without the vision projector. {TIED}"),
    Source("Llama-3.1-70B-Q4_K_M", "llama", "derived/Llama-3.1-70B.Q4_K_M.csv",
           "meta-llama--Meta-Llama-3.1-70B_config.json", llama, DERIVED),
    Source("Mixtral-8x7B-Q4_K_M", "llama", "derived/Mixtral-8x7B.Q4_K_M_current-rules.csv",
           "mistralai--Mixtral-8x7B-v0.1_config.json", llama, f"{DERIVED} Experts merged into one tensor."),
    Source("Nemotron-3-Nano-30B-A3B-Q4_K_M", "nemotron_h_moe",
           "derived/NVIDIA-Nemotron-3-Nano-30B-A3B.Q4_K_M.csv",
           "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json", nemotron, DERIVED),
    Source("Kimi-K2-Thinking-q4_K", "deepseek2", f"{MAPS}/Kimi-K2-Thinking.q4_K.csv",
           "moonshotai--Kimi-K2-Instruct_config.json", deepseek, f"{DUMP} Same shape as Kimi-K2-Instruct."),
    Source("DeepSeek-V3.1-Terminus-q4_K", "deepseek2", f"{MAPS}/DeepSeek-V3.1-Terminus.q4_K.csv",
           "deepseek-ai--DeepSeek-V3_config.json", deepseek,
           f"{DUMP} Same shape as DeepSeek-V3 and R1. Without the MTP block."),
    Source("DeepSeek-V3.1-Terminus-q4_K+nextn", "deepseek2", f"{MAPS}/DeepSeek-V3.1-Terminus.q4_K.csv",
           "deepseek-ai--DeepSeek-V3_config.json", deepseek,
           f"{DUMP} Same shape as DeepSeek-V3 and R1. {WITHOUT_NEXTN}", nextn=True),
    Source(FLASH_NEXT, "qwen4exp", "gguf_dumps/Qwen3.8-Flash-Next.qwen4exp.expert_bytes.json", "", common,
           "Routed experts and the n-gram table alone, from published bytes per layer; attention, mixers, "
           "shared experts, embedding and head are not known and take memory on top."),
)  # fmt: skip


def experts_alone(path: Path) -> Inventory:
    """Qwen3.8-Flash-Next: routed experts and n-gram table, from published bytes per layer.

    One choice of types explains all three sizes that occur, with gate and up alike and the same type for
    down, whose rows of 640 values only fit small blocks.
    """
    known = json.loads(path.read_text())
    layers, count, width, inner = (known[k] for k in ("n_layers", "n_experts", "n_embd", "n_ff_exp"))
    lines = ["name,ne,type", "per_layer_token_embd.weight,160x320000000,iq4_nl"]
    for layer, size in enumerate(known["expert_bytes_by_layer"]):
        wide = FLASH_NEXT_TYPES[size]
        lines += [f"blk.{layer}.ffn_{n}_exps.weight,{width}x{inner}x{count},{wide}" for n in ("gate", "up")]
        lines.append(f"blk.{layer}.ffn_down_exps.weight,{inner}x{width}x{count},q2_0")
    hparams: Hparams = {
        "block_count": layers,
        "embedding_length": width,
        "expert_count": count,
        "expert_used_count": known["top_k"],
        "expert_feed_forward_length": inner,
    }
    model = inventory_of(FLASH_NEXT, "qwen4exp", hparams, read_table("\n".join(lines), str(path)))
    assert sum(t.size_bytes for t in model.tensors[1:]) == known["total_expert_bytes"]
    return model


def make(source: Source, data: Path) -> Inventory:
    """The inventory of one source."""
    path = data / source.table
    if source.name == FLASH_NEXT:
        return experts_alone(path)
    config = _config(source.config, data)
    hparams, rows = source.hparams(config), read_table(path.read_text(), str(path))
    if source.nextn:
        hparams, rows = with_nextn(config, hparams, rows)
    return inventory_of(source.name, source.architecture, hparams, rows)


def with_nextn(config: Config, hparams: Hparams, rows: tuple[Row, ...]) -> tuple[Hparams, tuple[Row, ...]]:
    """The table with the NextN block that a configuration of Qwen3.5 and later, or DeepSeek-V3, counts.

    Published weights name them mtp.fc (2 widths to one), two norms before it, one layer of full attention
    and a norm; embedding and head are those of the model (mtp_use_dedicated_embeddings: false). By the
    README_WEIGHTS of DeepSeek-V3 its block is the same: eh_proj, enorm, hnorm, a layer built as the others,
    embedding and head shared with the model. So are those of Qwen3-Next (weights named as Qwen3.5's;
    its configuration does not count them) and of GLM-4.7-Flash (layer 47, named as DeepSeek's).
    """
    assert config.get("mtp_num_hidden_layers", config.get("num_nextn_predict_layers")) == 1
    assert not config.get("mtp_use_dedicated_embeddings")
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    assert (last + 1) % config.get("full_attention_interval", 1) == 0
    block = [replace(row, name=row.name.replace(f"blk.{last}.", f"blk.{last + 1}."))
             for row in rows if row.name.startswith(f"blk.{last}.")]  # fmt: skip
    kind = next(row.type for row in block if row.name.endswith(("attn_q.weight", "attn_q_a.weight")))
    own = f"blk.{last + 1}.nextn"
    norms = [Row(f"{own}.{name}.weight", "f32", (width,), 4 * width)
             for name in ("enorm", "hnorm", "shared_head_norm")]  # fmt: skip
    joined = Row(f"{own}.eh_proj.weight", kind, (2 * width, width), tensor_bytes(kind, (2 * width, width)))
    counted = {**hparams, "block_count": last + 2, "nextn_predict_layers": 1}
    return counted, (*rows, *block, joined, *norms)


def _config(name: str, data: Path) -> Config:
    if not name.endswith(".json"):
        published: Config = json.loads(PUBLISHED.read_text())[name]
        return published
    config: Config = json.loads((data / "hf_configs" / name).read_text())
    text: Config = config.get("text_config", config)
    return text


BESIDE = """\
NextN/MTP blocks: those of DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, Qwen3.6 and Qwen3-Next are here. The published
configuration of Kimi-K2 counts none (0), and those of gpt-oss, Gemma 4, Llama 3.1, Mixtral, Qwen3 and
Nemotron-3-Nano name none.

Also here: `library.yaml` says which models are planned on which machines (`make plans`), `*.profile.yaml`
are those machines as the plans saw them (all assumed, but for h200, which was measured), and
`Qwen3-30B-A3B.heat.csv` is real routing of 75 773 decoded tokens (github.com/doramirdor/mbolt, MIT).
"""


def notes() -> str:
    """The page beside the inventories: where each comes from and what it lacks."""
    rows = [f"| {s.name} | {s.architecture} | {s.note} |" for s in sorted(SOURCES, key=lambda s: s.name)]
    return "\n".join([HEADING, "| inventory | architecture | origin |", "|---|---|---|", *rows, "", BESIDE])


def main(arguments: list[str]) -> int:
    """Write the inventories named on the command line, or all; returns the exit code."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    data, wanted = Path(arguments[0]), set(arguments[1:])
    INPUTS.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        if not wanted or source.name in wanted:
            inventory = make(source, data)
            (INPUTS / f"{source.name}.inventory.yaml").write_text(to_text(inventory))
            print(f"{source.name}: {len(inventory.tensors)} tensors, {inventory.size_bytes} bytes")
    (INPUTS / "README.md").write_text(notes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
