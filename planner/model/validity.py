"""Would stock llama.cpp load a file with this table? What it refuses is not planned, whoever asks.

Keys that every architecture reads, tensors without which the engine does not load one (asked of the engine,
planner.model.required_tensors), and widths that contradict what the file says of them. Of architectures and
kinds of layers that the engine was not asked about: tensors that belong together, and what a layer lacks that
all others of its kind have. A NextN block that is promised and not there is loaded all the same, unless it is
to draft (planner.model.nextn).

A table written by hand, of no file (without `header_digest`), need not name norms, biases and keys. It must
name every layer up to `block_count`, each with all its projections and experts, and the embedding: what it
does not name would not be planned.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.errors import InputError
from planner.model.heads import kv_heads, unstated_heads
from planner.model.inventory import Inventory, Tensor, by_name
from planner.model.layers import layers_of, shared_kv, stems_by_layer
from planner.model.nextn import drafts_alone
from planner.model.required_tensors import GLOBAL, knows, missing, missing_keys, required_of
from planner.model.sliding_window import sliding_layers
from planner.model.tensor_roles import Role, parts_of
from planner.model.width_rules import READ_EXPERT_WIDTHS
from planner.model.widths import shape_faults
from planner.quoting import short
from planner.remember import remembered

_NEEDED = ("block_count", "context_length", "embedding_length")  # every architecture reads them
_MAY_BE_0 = frozenset({"context_length"})
_WIDTHS_OF_EXPERTS = "expert_feed_forward_length"
_USE_NONE = frozenset({"hunyuan-dense", "hunyuan_vl"})  # whatever their files say of experts used
_PER_LAYER = (  # one, or one a layer
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "expert_used_count",
    _WIDTHS_OF_EXPERTS,
)
_EXCERPT = frozenset({Role.EXPERTS, Role.EXPERT_SMALL, Role.ROUTER, Role.SHARED, Role.LOOKUP})
# Tensors of which one is no use without the other, within a layer.
_PAIRS = (
    ("ffn_up", "ffn_down"),
    ("ffn_gate", "ffn_down"),
    ("ffn_up_exps", "ffn_down_exps"),
    ("ffn_gate_exps", "ffn_down_exps"),
    ("ffn_gate_up_exps", "ffn_down_exps"),
    ("attn_q_a", "attn_q_b"),
)
_WIDE = frozenset({Role.ATTENTION, Role.STATE, Role.MIXER, Role.ROUTER, Role.SHARED, Role.EXPERTS, Role.FFN})
_ALONE = re.compile(r"blk\.\d+\.(exp_probs_b\w*|ssm_dt)\.bias")  # biases that are of no weight
_SIDE = re.compile(r"(\.bias|(\.weight)?\.(input_)?scale)$")
_ALIKE = 3  # layers of a kind, at least, of which one may be told to lack something


@dataclass(eq=False)
class NotLoadable(InputError):
    """A model that stock llama.cpp refuses to load."""

    path: str
    whys: tuple[str, ...]

    def message(self) -> str:
        more = f" (and {len(self.whys) - 1} more)" if len(self.whys) > 1 else ""
        return f"{self.path}: stock llama.cpp would not load it: {self.whys[0]}{more}"


def check_loadable(inventory: Inventory, path: str, told: tuple[str, ...] = ()) -> None:
    """NotLoadable for what the file itself (`told`) or its table is refused for."""
    if whys := (*told, *load_faults(inventory)):
        raise NotLoadable(path, whys)


@remembered
def load_faults(inventory: Inventory) -> tuple[str, ...]:
    """Why stock llama.cpp would refuse a file of this table, a sentence each; empty: nothing is known."""
    if _is_excerpt(inventory):
        return ()
    found = (
        *_keys(inventory),
        *_global_tensors(inventory),
        *_layers(inventory),
        *_widths(inventory),
        *shape_faults(inventory),
    )
    return tuple(dict.fromkeys(found))


def _is_excerpt(inventory: Inventory) -> bool:
    """Whether it is a part of a table on purpose, or a file without layers, which other sentences refuse."""
    parts = parts_of(inventory)
    experts = not inventory.header_digest and all(part.role in _EXCERPT for part in parts.values())
    return experts or not stems_by_layer(inventory)


def _keys(inventory: Inventory) -> Iterator[str]:
    """Keys that are missing from a file, zero, or of a wrong length."""
    hparams, whole, arch = inventory.hparams, bool(inventory.header_digest), inventory.architecture
    for key in _NEEDED:
        if key not in hparams and whole:
            yield f"{arch}.{key} is missing"
        elif key in hparams and key not in _MAY_BE_0 and not inventory.number(key):
            yield f"{arch}.{key} is 0"
    count = inventory.number("block_count")
    for key in _PER_LAYER:
        value = hparams.get(key)
        unread = key == _WIDTHS_OF_EXPERTS and required_of(arch) and arch not in READ_EXPERT_WIDTHS
        if isinstance(value, tuple) and len(value) != count and not unread:
            yield f"{arch}.{key} has {len(value)} values for {count} layers"
    if not whole:
        return
    most, there = max(inventory.per_layer("expert_used_count", 1)), inventory.number("expert_count")
    if most > there and arch not in _USE_NONE:
        yield f"{arch}.expert_used_count is {most}, of {there} experts"
    for key in missing_keys(inventory):
        yield f"{arch}.{key} is missing"
    attends = any(layers_of(inventory).attention)
    if attends and not inventory.number("attention.head_count"):
        yield f"{arch}.attention.head_count is missing or 0, and layers attend"
    routed = [t for t in inventory.tensors if parts_of(inventory)[t.name].role is Role.EXPERTS]
    used = inventory.per_layer("expert_used_count", count)
    for tensor in routed if isinstance(hparams.get("expert_used_count"), tuple) else ():
        layer = parts_of(inventory)[tensor.name].layer
        if layer is not None and layer < count and not used[layer]:
            yield f"{arch}.expert_used_count is 0 for layer {layer}, which holds experts"
            break
    if any(len(t.shape) == 3 for t in routed):
        for key in ("expert_count", "expert_used_count"):
            if not inventory.number(key):
                yield f"{arch}.{key} is missing or 0, and {short(routed[0].name)} holds experts"


def _global_tensors(inventory: Inventory) -> Iterator[str]:
    tensors = by_name(inventory)
    table = tensors.get("token_embd.weight")
    if table is None:  # some take it from the head, a draft from its target
        if "token_embd.weight" in required_of(inventory.architecture).get(GLOBAL, {}):
            yield "tensor token_embd.weight is missing"
        return
    width, rows = inventory.number("embedding_length"), inventory.number("vocab_size")
    if width and table.shape[0] != width:
        yield f"tensor token_embd.weight is {table.shape[0]} wide, embedding_length says {width}"
    if rows and len(table.shape) > 1 and table.shape[1] != rows:
        yield f"tensor token_embd.weight has {table.shape[1]} rows, the vocabulary {rows} tokens"


def _layers(inventory: Inventory) -> Iterator[str]:
    """Layers without tensors, or without those that belong to what they have or that all alike have."""
    layers, stems = layers_of(inventory), stems_by_layer(inventory)
    count = inventory.number("block_count", layers.n_all)
    lacking = () if drafts_alone(inventory) else (n for n in range(layers.n_main) if n not in stems)
    yield from (f"no tensor of layer {n}, of {count}" for n in lacking)
    beyond = [n for n in stems if n >= count > 0]
    if beyond:
        yield f"tensors of layer {min(beyond)}, block_count is {count}"
    for n in range(layers.n_main):
        names = stems.get(n, frozenset())
        if knows(inventory, n):
            continue
        for one, other in _PAIRS:
            if one in names and other not in names:
                yield f"tensor blk.{n}.{other}.weight is missing, blk.{n}.{one}.weight is there"
        if "ffn_down_exps" in names and not names & {"ffn_gate_inp", "ffn_gate_tid2eid"}:
            yield f"tensor blk.{n}.ffn_gate_inp.weight is missing, blk.{n}.ffn_down_exps.weight is there"
    yield from (f"tensor {name} is missing" for name in missing(inventory))
    yield from _without_weight(inventory)
    yield from _unlike(inventory, stems)
    first = min((n for n, names in stems.items() if any(s.startswith("nextn.") for s in names)), default=-1)
    counted = inventory.number("nextn_predict_layers", 0 if inventory.header_digest else layers.n_nextn)
    if first >= 0 and not counted:
        yield f"tensors of a NextN/MTP block in layer {first}, nextn_predict_layers does not count it"


def _without_weight(inventory: Inventory) -> Iterator[str]:
    """Biases and scales of projections that are not there themselves."""
    tensors, parts, n_main = by_name(inventory), parts_of(inventory), layers_of(inventory).n_main
    for name in tensors:
        weight = _SIDE.sub(".weight", name)
        lone = weight != name and weight not in tensors and not _ALONE.fullmatch(name)
        if lone and parts[name].role in _WIDE and (parts[name].layer or 0) < n_main:
            yield f"tensor {weight} is missing, {name} is there"


def _unlike(inventory: Inventory, stems: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """What a layer lacks that nine of ten layers of its kind have."""
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    layers = layers_of(inventory)
    slides, readers = sliding_layers(inventory, layers.n_main), shared_kv(inventory, layers)
    for n in range(layers.n_main):
        names = stems.get(n, frozenset())
        routed = any(name.endswith("_exps") or name == "ffn_gate_inp" for name in names)
        if knows(inventory, n):
            continue
        kinds[layers.attention[n], layers.recurrent[n], slides[n], n in readers, routed].append(n)
    for alike in kinds.values():
        if len(alike) < _ALIKE:
            continue
        have = Counter(name for n in alike for name in stems.get(n, ()))
        usual = {name for name, times in have.items() if times < len(alike) and 10 * times >= 9 * len(alike)}
        if len(alike) < 10:
            usual = {name for name, times in have.items() if times == len(alike) - 1}
        for n in alike:
            for name in sorted(usual - stems.get(n, frozenset())):
                if _matters(inventory, alike, name):
                    yield f"tensor blk.{n}.{name}.weight is missing, which the other layers of its kind have"


def _matters(inventory: Inventory, alike: list[int], name: str) -> bool:
    """Whether it is a weight that computes; biases and scales are often there in part."""
    tensors, parts = by_name(inventory), parts_of(inventory)
    found = next((t for n in alike if (t := tensors.get(f"blk.{n}.{name}.weight"))), None)
    return found is not None and len(found.shape) > 1 and parts[found.name].role in _WIDE


def _widths(inventory: Inventory) -> Iterator[str]:
    """Projections of keys and values, and experts, whose shapes contradict the hyperparameters."""
    if heads_fault := unstated_heads(inventory):
        yield heads_fault
    layers, tensors = layers_of(inventory), by_name(inventory)
    slides = sliding_layers(inventory, layers.n_main)
    experts = inventory.number("expert_count")
    heads = kv_heads(inventory, layers.n_main)
    for n in range(layers.n_main):
        if layers.attention[n] and not layers.recurrent[n]:
            for what in ("key", "value"):
                found = tensors.get(f"blk.{n}.attn_{what[0]}.weight")
                if why := _width_fault(inventory, found, what, heads[n], slides[n]):
                    yield why
        down = tensors.get(f"blk.{n}.ffn_down_exps.weight")
        if down is not None and experts and len(down.shape) == 3 and down.shape[2] != experts:
            yield f"tensor {down.name} holds {down.shape[2]} experts, expert_count says {experts}"


def _width_fault(inventory: Inventory, tensor: Tensor | None, what: str, heads: int, slides: bool) -> str:
    stated = inventory.hparams.get(f"attention.{what}_length")
    local = inventory.hparams.get(f"attention.{what}_length_swa")
    if tensor is None or len(tensor.shape) != 2 or not isinstance(stated, int):
        return ""
    possible = {heads * width for width in (local if slides and isinstance(local, int) else stated, stated)}
    if tensor.shape[1] in possible or inventory.number("attention.key_length_mla"):
        return ""
    return (
        f"tensor {tensor.name} has {tensor.shape[1]} rows, {heads} heads with {what}s of "
        f"{max(possible) // max(heads, 1)} say {max(possible)}"
    )
