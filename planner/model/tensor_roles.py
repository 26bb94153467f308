"""What one tensor is for, told by its own name, shape and expert axis; never by what reads it.

The names are those of llama.cpp's tensor table, which all its architectures share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from planner.block_names import within_block
from planner.model.inventory import Inventory, Tensor
from planner.remember import remembered


class Role(StrEnum):
    """The part a tensor plays."""

    EMBEDDING = "embedding"  # looked up on the host: token_embd, position_embd, token_types
    LOOKUP = "lookup"  # per-layer and n-gram tables, host only
    OUTPUT = "output"  # output head, final norm, whatever the engine keeps with them
    NORM = "norm"  # of a layer, not of a recurrent mixer
    ATTENTION = "attention"  # projections, biases, sinks, indexer of an attention
    STATE = "state"  # T0: small tensors that the fused recurrent operator reads beside the state
    MIXER = "mixer"  # T1: projections of a recurrent mixer
    ROUTER = "router"  # router and its biases
    SHARED = "shared"  # shared experts, their gate, latent projections around the experts
    EXPERT_SMALL = "expert-small"  # per-expert biases and scales
    EXPERTS = "experts"  # routed expert weights
    FFN = "ffn"  # dense feed-forward weights
    EXTRA = "extra"  # small per-layer modules that stay with the layer: altup, laurel, hyper-connections
    NEXTN = "nextn"  # speculative head
    FOREIGN = "foreign"  # vision, audio and unused tensors
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor's role, its layer (None: global) and the number of experts in it (0: none)."""

    role: Role
    layer: int | None
    experts: int = 0


_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]+)\.(.+)")
# Scales are spelt beside the weight's stem, and by some converters behind its whole name.
_SUFFIX = re.compile(r"(?:\.weight(?=\.(?:input_)?scale$))?\.(weight|bias|scale|input_scale|lora_a|lora_b)$")
_SCALED = "nvfp4"  # its blocks have scales of 8 bits; one more for the whole tensor lies beside it
_FOREIGN = re.compile(
    r"(model\.)?(v|a|mm|s|visual|(vision|audio|mm|multi_modal)_?\w*|resampler|projector|clip|masked_embd_\w+)(\.|$)"
)
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up|up_gate)_(ch)?exps")
_EXPERT_ALONE = re.compile(r"ffn_(gate|up|down)\.([0-9]+)")  # before experts were merged into one tensor
_ONE_EXPERT = re.compile(rf"{_EXPERT_ALONE.pattern}\.weight")
_BY_EXPERT = re.compile(r"ffn_gate_inp\.(weight|bias)|exp_probs_b\w*(\.\w+)?")
_TABLE_ROWS = 1 << 20  # no projection has a million rows more than it has columns

_EMBEDDING = frozenset({"token_embd", "position_embd", "token_types"})
_OUTPUT = re.compile(
    r"output(_norm|_res_score|_hc_(fn|base|scale|norm|down|up))?|cls(\.output|\.norm)?|dense_[23]"
    r"|(dec|enc)\.output_norm|altup_(unembd_)?proj|nextn\.post_projection"
    r"|fc|d2t|markov_w[12]|conf_proj|selector_(predecessor|successor|hidden)"
)
# Global names that the engine loads with layer 0.
_FIRST_LAYER = {
    "token_embd_norm": Role.NORM,
    "rope_freqs": Role.EXTRA,
    "rope_factors_long": Role.EXTRA,
    "rope_factors_short": Role.EXTRA,
    "per_layer_model_proj": Role.EXTRA,
    "per_layer_proj_norm": Role.EXTRA,
    "hrm.z_l_init": Role.EXTRA,
    "nextn.pre_projection": Role.EXTRA,
}

_PATTERNS: tuple[tuple[Role, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        (Role.NEXTN, r"nextn\..+"),
        (Role.ROUTER, r"ffn_gate_inp|exp_probs_b(_vl)?|ffn_gate_tid2eid"),
        (
            Role.SHARED,
            r"ffn_(gate|up|down|gate_up|gate_inp)_shexp|ffn_latent_(down|up)|ffn_routed_(down|up|norm)",
        ),
        (
            Role.STATE,
            r"ssm_(a|d|dt|norm|ba|alpha|beta|conv1d|dt_norm|b_norm|c_norm|conv1d_[qkv]|f_a|f_b)|shortconv\.conv"
            r"|time_mix_(w[0-2]|a[0-2]|v[0-2]|g[12]|k_k|k_a|r_k|ln|lerp_\w+|first|decay|decay_w[12])"
            r"|channel_mix_lerp_\w+",
        ),
        (
            Role.MIXER,
            r"ssm_(in|out|x|g|g_a|g_b)|shortconv\.(in_proj|out_proj)|time_mix_(key|value|receptance|output|gate)",
        ),
        (
            Role.NORM,
            r"(attn|ffn|layer_output|post_attention|post_ffw)_norm(_[12]|_exps)?|pre_ffw_norm_2|layer_output_scale"
            r"|ffn_sub_norm|(pre|post)_norm|attn_post_norm|ffn_post_norm",
        ),
        (
            Role.EXTRA,
            r"altup_\w+|laurel_\w+|inp_gate|proj|hc_(attn|ffn)_\w+|ple_\w+|(attn|ffn)_res_score"
            r"|(attn|ffn)_conv_(base|proj)|rope_(freqs|factors_long|factors_short)",
        ),
        (
            Role.ATTENTION,
            r"attn_(q|k|v|qkv|kv|output|gate|q_norm|k_norm|sinks|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b|q_a_norm|kv_a_norm"
            r"|sub_norm|output_norm|output_a|output_b|rot_embd|compressor_\w+|rel_b|o)|indexer[._]\w+"
            r"|vis_attn_(qkv|output)|cross_attn_\w+",
        ),
        (
            Role.FFN,
            r"ffn_(gate|up|down|gate_up)|ffn\.act(\.scales)?|vis_(gate|up|down)|channel_mix_(key|value|receptance)",
        ),
    )
)


@remembered
def parts_of(inventory: Inventory) -> Mapping[str, Part]:
    """The role of each tensor of a model, by its name."""
    return MappingProxyType({tensor.name: part_of(tensor) for tensor in inventory.tensors})


@remembered
def missing_partners(inventory: Inventory) -> tuple[str, ...]:
    """Scales without their weights, and weights without the scale that their type needs, a sentence each."""
    names, found = {t.name for t in inventory.tensors}, []
    for tensor in inventory.tensors:
        suffix = _SUFFIX.search(tensor.name)
        stem = tensor.name[: suffix.start()] if suffix else tensor.name
        if suffix and suffix[1] in ("scale", "input_scale") and f"{stem}.weight" not in names:
            found.append(f"{tensor.name} scales {stem}.weight, which is not there")
        scales = {f"{stem}.scale", f"{stem}.weight.scale"}
        if suffix and suffix[1] == "weight" and tensor.type == _SCALED and not scales & names:
            found.append(f"{tensor.name} is {_SCALED} and has no {stem}.scale")
    return tuple(found)


def part_of(tensor: Tensor) -> Part:
    """The role of a tensor.

    A per-expert tensor is one by name and by a third axis that counts experts; the same name with
    another shape is unknown, never guessed.
    """
    block = _BLOCK.fullmatch(tensor.name)
    if block is None:
        return _global_part(tensor)
    layer, rest = int(block[1]), block[2]
    suffix = _SUFFIX.search(rest)
    stem = rest[: suffix.start()] if suffix else rest
    if _EXPERTS.fullmatch(stem):
        return _expert_part(tensor, layer, suffix[1] if suffix else "weight")
    if _EXPERT_ALONE.fullmatch(stem):
        return Part(Role.EXPERTS, layer, 1)
    if _is_table(tensor, stem):
        return Part(Role.LOOKUP, layer)
    return Part(_role_in_layer(stem), layer)


def is_single_expert(name: str) -> bool:
    """Whether a weight is that of one expert, as files had them before experts were merged."""
    block = within_block(name)
    return bool(block and _ONE_EXPERT.fullmatch(block[1]))


def is_chunked(name: str) -> bool:
    """Whether a tensor has a slice for each run of neighbouring experts, not for each expert."""
    return "_chexps" in name


def counts_experts(name: str) -> bool:
    """Whether a router's tensor has an entry for each expert, whatever its shape says."""
    block = within_block(name)
    return bool(block and _BY_EXPERT.fullmatch(block[1]))


def _global_part(tensor: Tensor) -> Part:
    suffix = _SUFFIX.search(tensor.name)
    stem = tensor.name[: suffix.start()] if suffix else tensor.name
    if _FOREIGN.match(tensor.name):
        return Part(Role.FOREIGN, None)
    if stem in _EMBEDDING:
        return Part(Role.EMBEDDING, None)
    if _OUTPUT.fullmatch(stem):
        return Part(Role.OUTPUT, None)
    if stem in _FIRST_LAYER:
        return Part(_FIRST_LAYER[stem], 0)
    if _is_table(tensor, stem):
        return Part(Role.LOOKUP, None)
    return Part(Role.UNKNOWN, None)


def _expert_part(tensor: Tensor, layer: int, suffix: str) -> Part:
    if suffix == "weight" and len(tensor.shape) == 3:
        return Part(Role.EXPERTS, layer, tensor.shape[2])
    if suffix != "weight":
        return Part(Role.EXPERT_SMALL, layer, tensor.shape[-1] if tensor.shape else 0)
    return Part(Role.UNKNOWN, layer)


def _is_table(tensor: Tensor, stem: str) -> bool:
    if stem.endswith("_embd") and stem != "attn_rot_embd":
        return True
    known = _role_in_layer(stem) is not Role.UNKNOWN
    return not known and len(tensor.shape) == 2 and tensor.shape[1] >= _TABLE_ROWS + tensor.shape[0]


@lru_cache(maxsize=4096)
def _role_in_layer(stem: str) -> Role:
    for role, pattern in _PATTERNS:
        if pattern.fullmatch(stem):
            return role
    return Role.UNKNOWN
