"""The tensors and keys without which stock llama.cpp does not load a model, by architecture.

The table beside this file is made by asking the engine (`python tests/required_tensors.py`): a line is an
architecture, a kind of layer and names; `?` after a name: only of some models. Keys have a line of their own.
The engine also loads some of what it cannot compute.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from planner.block_names import within_block
from planner.model.inventory import Inventory, by_name
from planner.model.layers import Layers, layers_of, shared_kv, stems_by_layer

PATH = Path(__file__).with_suffix(".txt")
GLOBAL, NEXTN = "global", "nextn"  # the kinds of tensors outside layers, and of speculative blocks
KEYS = "keys"  # below the architecture's name

Names = Mapping[str, bool]  # name within its layer, with suffix -> whether every such layer needs it

# Never a matter of hyperparameters. Others may be (ranks, shared experts, tables by layer, norms of heads):
# they are missed only where other layers of the model have them.
_ALWAYS = re.compile(
    r"attn_(norm|q|k|v|qkv|output|kv_a_mqa|kv_a_norm)|ffn_(norm|gate|up|down|gate_inp)(_exps)?"
    r"|ssm_\w+|shortconv\.\w+|(time|channel)_mix_\w+|post_attention_norm|post_ffw_norm|exp_probs_b|output_norm|token_embd"
)
_MIXERS = {
    (False, False): "none",
    (True, False): "attention",
    (False, True): "recurrent",
    (True, True): "both",
}
# Of which a layer has all or none.
_FAMILIES = tuple(
    map(
        re.compile,
        (
            r"ffn_\w+_shexp\.",
            r"attn_q_(a|b|a_norm)\.",
            r"attn_(k|v)_b\.",
            r"nextn\.",
            r"per_layer_",
            r"indexer",
        ),
    )
)
# What some architectures have in layers that their files list, and these in every one.
_INDEXED = frozenset({"deepseek32"})
_MATRIX = re.compile(r"attn_(q|k|v|output)\.weight|ffn_((gate|up|down)(_exps)?|gate_inp)\.weight")
_HALVES = re.compile(r"ffn_(gate|up)_exps\.")  # of what may be one tensor
_DENSE = re.compile(r"ffn_(gate|up|down|norm)\.")
_CACHED = re.compile(r"attn_(k|v|k_norm|v_norm)\.")
# One tensor in place of several: a file has either form.
_FORMS = (
    (("attn_qkv",), ("attn_q", "attn_k", "attn_v")),
    (("ffn_gate_up_exps",), ("ffn_gate_exps", "ffn_up_exps")),
    (("attn_kv_b",), ("attn_k_b", "attn_v_b")),
    (("ssm_in",), ("attn_qkv", "attn_gate")),
    (("ssm_ba",), ("ssm_beta", "ssm_alpha")),
    (("ffn_gate_tid2eid",), ("ffn_gate_inp",)),
)


def kind_of(layers: Layers, n: int, stems: Collection[str]) -> str:
    """The kind of a layer: what mixes its tokens, whether it routes them, whether it drafts."""
    if n >= layers.n_main:
        return NEXTN
    mixer = _MIXERS[layers.attention[n], layers.recurrent[n]]
    routed = any(name.endswith("_exps") or name == "ffn_gate_inp" for name in stems)
    return f"{mixer}-{'routed' if routed else 'dense'}"


def parse(text: str) -> Mapping[str, Mapping[str, Names]]:
    """Required names by architecture and kind of layer."""
    found: dict[str, dict[str, Names]] = {}
    for line in text.splitlines():
        arch, kind, *names = line.split()
        found.setdefault(arch, {})[kind] = MappingProxyType(
            {name.removesuffix("?"): not name.endswith("?") for name in names}
        )
    return MappingProxyType(found)


@cache
def required_of(architecture: str) -> Mapping[str, Names]:
    """Required names by kind of layer; empty for an architecture that was not asked about."""
    own = [line for line in PATH.read_text().splitlines() if line.partition(" ")[0] == architecture]
    return parse("\n".join(own)).get(architecture, {})


def knows(inventory: Inventory, n: int) -> bool:
    """Whether the engine was asked about layers of this kind of this architecture."""
    kind = kind_of(layers_of(inventory), n, stems_by_layer(inventory).get(n, frozenset()))
    return kind in required_of(inventory.architecture)


def missing(inventory: Inventory) -> Iterator[str]:
    """Tensors that are not there and without which the engine does not load the model.

    Of a bare table, of no file, only projections, and what it names in other layers.
    """
    needed, whole = required_of(inventory.architecture), bool(inventory.header_digest)
    there = by_name(inventory)
    for name, always in needed.get(GLOBAL, {}).items():
        if whole and name not in there and (always or _beside(name, there)):
            yield name
    layers, stems = layers_of(inventory), stems_by_layer(inventory)
    own: dict[int, set[str]] = defaultdict(set)
    for name in there:
        if part := within_block(name):
            own[part[0]].add(part[1])
    kinds = {n: kind_of(layers, n, stems.get(n, frozenset())) for n in own if n < layers.n_all}
    have = {(kinds[n], name) for n in kinds for name in own[n]}
    readers = shared_kv(inventory, layers)
    empty = {n for n, kind in kinds.items() if kind.endswith("-dense") and _says_empty(inventory, n)}
    for n, kind in sorted(kinds.items()):
        if kind == NEXTN and "nextn.eh_proj.weight" not in own[n]:
            continue  # a block without it is not loaded at all
        for name, always in needed.get(kind, {}).items():
            if (n in empty and _DENSE.match(name)) or (n in readers and _CACHED.match(name)):
                continue
            indexed = always and name.startswith("indexer.") and inventory.architecture in _INDEXED
            sure = (_sure(name, always, own[n]) or indexed) and (whole or _MATRIX.fullmatch(name))
            if name not in own[n] and (sure or (kind, name) in have) and not _other_form(name, own[n]):
                yield f"blk.{n}.{name}"


def missing_keys(inventory: Inventory) -> Iterator[str]:
    """Keys of a file that are not there and without which the engine does not load it.

    Some only beside tensors: defaults are dense layers of width 0, none of these, and queries of full rank.
    """
    keys = required_of(inventory.architecture).get(KEYS, {})
    stems = stems_by_layer(inventory)
    dense = [n for n, names in stems.items() if {"ffn_down", "ffn_up"} <= names]
    held = {
        "feed_forward_length": bool(dense),
        "leading_dense_block_count": 0 in dense,
        "attention.q_lora_rank": any("attn_q_a" in names for names in stems.values()),
    }
    for key, always in keys.items():
        if key not in inventory.hparams and (always or held.get(key, False)):
            yield key


def _says_empty(inventory: Inventory, n: int) -> bool:
    """Whether a layer is said to have no feed-forward part, as in pruned models."""
    lengths = inventory.hparams.get("feed_forward_length")
    return isinstance(lengths, tuple) and n < len(lengths) and lengths[n] == 0


def _sure(name: str, always: bool, own: Collection[str]) -> bool:
    """Whether a layer needs a tensor whatever other layers have, by what else it has."""
    if _HALVES.match(name) and any(map(_HALVES.match, own)):
        return True
    return always and (bool(_ALWAYS.fullmatch(name.rpartition(".")[0] or name)) or _beside(name, own))


def _beside(name: str, own: Collection[str]) -> bool:
    """Whether others of its family are there."""
    for family in _FAMILIES:
        if family.match(name):
            return any(family.match(each) for each in own)
    return False


def _other_form(name: str, own: Collection[str]) -> bool:
    """Whether what a tensor holds is there in another form."""
    stem, dot, suffix = name.rpartition(".")
    for forms in _FORMS:
        for mine, other in (forms, forms[::-1]):
            if stem in mine and any(f"{each}{dot}{suffix}" in own for each in other):
                return all(f"{each}{dot}{suffix}" in own for each in other)
    return False
