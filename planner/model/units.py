"""Units: the tensors that must move together, and the edges of the graph between them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from planner.errors import InputError
from planner.model.inventory import Inventory, Tensor
from planner.model.layers import ENCODERS, KNOWN, Layers, layers_of, shared_kv
from planner.model.nextn import drafts_alone
from planner.model.tensor_roles import Part, Role, parts_of
from planner.quoting import short
from planner.remember import remembered


class Kind(StrEnum):
    """What a unit is; decides where it may live."""

    EMBEDDING = "embedding"  # token_embd: looked up on the host, one row a token
    LOOKUP = "lookup"  # per-layer and n-gram tables: host only
    ATTENTION = "attention"  # with the layer's norms; bound to the layer device, owns KV
    RECURRENT = "recurrent"  # T0 and T1 of a recurrent mixer and the norms; bound, owns state
    ROUTER = "router"  # router, its biases, shared experts; bound
    FFN = "ffn"  # dense gate/up/down weights: the layer device or the CPU
    EXPERTS = "experts"  # routed gate/up/down, with biases and scales: as FFN, or a cache, slots, a stripe
    LAYER = "layer"  # a whole layer of an unknown architecture; bound
    OUTPUT = "output"  # output head and final norm
    NEXTN = "nextn"  # a NextN/MTP block: only loaded on request
    FOREIGN = "foreign"  # vision and other tensors the text engine does not load


BOUND = frozenset({Kind.ATTENTION, Kind.RECURRENT, Kind.ROUTER, Kind.LAYER})


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that must move together."""

    name: str  # token_embd, blk.3.attention, blk.3.experts, output
    kind: Kind
    layer: int | None
    tensors: tuple[str, ...]  # in file order
    size_bytes: int
    active_bytes: int  # read for one decoded token: experts times used share, one row of a table
    # Output only: the file has no output.weight, so the engine reads token_embd.weight a second time into
    # the output device. Not part of size_bytes, which add up to the file; part of active_bytes.
    tied_bytes: int = 0
    experts: int = 0  # routed experts of this layer, counted from the tensors
    used: int = 0  # of them per token


def movable(unit: Unit) -> tuple[str, ...]:
    """The tensors that leave the layer device with their unit: of the head the matrix, never the norm.

    Biases and scales go with their experts: the engine adds them where they lie, between two products.
    """
    if unit.kind is not Kind.OUTPUT:
        return unit.tensors
    return tuple(name for name in unit.tensors if name == "output.weight")


def divisible(unit: Unit) -> tuple[str, ...]:
    """The tensors of a unit that slots, stripes or a cache hold a part of: experts, not biases and scales."""
    return tuple(name for name in movable(unit) if name.endswith(".weight"))


@dataclass(frozen=True, slots=True)
class UnitTable:
    """All units of a model in graph order; their bytes add up to the file."""

    units: tuple[Unit, ...]
    edges: tuple[tuple[int, int], ...]  # indices into units, source before target: the chain, then long edges
    unknown: tuple[str, ...]  # what was not recognised: the architecture, tensor names


@dataclass(eq=False)
class ExpertMismatch(InputError):
    """A layer whose expert tensors do not agree on the number of experts."""

    model: str
    layer: int
    counts: Mapping[str, int]

    def message(self) -> str:
        found = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{self.model}: layer {self.layer}: number of experts differs: {found}"


Group = tuple[Kind, int | None]
Parts = tuple[tuple[Tensor, Part], ...]

_PLACE = {
    Kind.EMBEDDING: 0,
    Kind.LOOKUP: 1,
    Kind.RECURRENT: 2,
    Kind.ATTENTION: 3,
    Kind.ROUTER: 4,
    Kind.FFN: 5,
    Kind.EXPERTS: 6,
    Kind.LAYER: 7,
    Kind.OUTPUT: 8,
    Kind.NEXTN: 9,
    Kind.FOREIGN: 10,
}
_GLOBAL = {
    Role.EMBEDDING: Kind.EMBEDDING,
    Role.LOOKUP: Kind.LOOKUP,
    Role.FOREIGN: Kind.FOREIGN,
    Role.OUTPUT: Kind.OUTPUT,
    Role.UNKNOWN: Kind.OUTPUT,  # counted where memory is scarcest
}
_NAMES = {Kind.EMBEDDING: "token_embd", Kind.OUTPUT: "output", Kind.FOREIGN: "foreign"}
# Tensors of a router whose last axis counts experts.
_BY_EXPERT = re.compile(r"\.(ffn_gate_inp\.(weight|bias)|exp_probs_b(\.(weight|bias))?)$")
_IN_ROUTER = frozenset({Role.ROUTER, Role.SHARED})


def is_table(unit: str) -> bool:
    """Whether a unit of this name is a per-layer or n-gram table."""
    return unit.rpartition(".")[2] == Kind.LOOKUP.value


def looked_up(unit: str) -> bool:
    """Whether single rows of a unit of this name are read, and nothing is computed with it."""
    return is_table(unit) or unit == _NAMES[Kind.EMBEDDING]


@remembered
def units_of(inventory: Inventory) -> UnitTable:
    """Group the tensors of a model into units, in the order the graph runs them.

    The sizes add up to the file. An architecture that is not known gives one bound unit a layer.
    Raises ExpertMismatch where a layer's tensors, or they and `expert_count`, disagree.
    """
    layers = layers_of(inventory)
    known = inventory.architecture in KNOWN
    roles = parts_of(inventory)
    parts = tuple((t, roles[t.name]) for t in inventory.tensors)
    experts = _experts_by_layer(inventory, parts)
    bound = {n: _bound_kind(layers, n) for n in range(layers.n_main)}
    groups: dict[Group, list[tuple[Tensor, Part]]] = defaultdict(list)
    routed = {part.layer for _, part in parts if part.role is Role.EXPERTS}
    for tensor, part in parts:
        alone = part.role is Role.EXPERT_SMALL and part.layer not in routed
        groups[_group(replace(part, role=Role.ROUTER) if alone else part, layers, bound, known)].append(
            (tensor, part)
        )
    groups.setdefault((Kind.OUTPUT, None), [])
    units = tuple(
        _unit(inventory, kind, layer, tuple(groups[kind, layer]), experts)
        for kind, layer in sorted(groups, key=lambda group: _order(group, layers))
    )
    return UnitTable(units, _edges(inventory, layers, units), _unknown(inventory, layers, parts, known))


def _bound_kind(layers: Layers, layer: int) -> Kind:
    """The unit that holds the norms of a layer."""
    if layers.attention[layer]:
        return Kind.ATTENTION
    return Kind.RECURRENT if layers.recurrent[layer] else Kind.ROUTER


def _group(part: Part, layers: Layers, bound: Mapping[int, Kind], known: bool) -> Group:
    if part.layer is None:
        return _GLOBAL[part.role], None
    if part.role is Role.LOOKUP:
        return Kind.LOOKUP, part.layer
    if part.layer >= layers.n_main or part.role is Role.NEXTN:
        return Kind.NEXTN, part.layer
    if not known:
        return Kind.LAYER, part.layer
    return _kind_in_layer(part.role, bound[part.layer], layers.recurrent[part.layer]), part.layer


def _kind_in_layer(role: Role, norms: Kind, recurrent: bool) -> Kind:
    if role in (Role.EXPERTS, Role.EXPERT_SMALL):
        return Kind.EXPERTS
    if role is Role.FFN:
        return Kind.FFN
    if role in _IN_ROUTER:
        return Kind.ROUTER
    if role in (Role.STATE, Role.MIXER) and recurrent:
        return Kind.RECURRENT
    return norms  # attention, norms, extras, and what is not recognised


def _order(key: Group, layers: Layers) -> tuple[int, int]:
    kind, layer = key
    if layer is not None:
        return layer, _PLACE[kind]
    return (-1 if kind in (Kind.EMBEDDING, Kind.LOOKUP) else layers.n_main), _PLACE[kind]


def _unit(
    inventory: Inventory, kind: Kind, layer: int | None, members: Parts, experts: Mapping[int, int]
) -> Unit:
    name = _NAMES.get(kind, kind.value) if layer is None else f"blk.{layer}.{kind.value}"
    count = experts.get(layer, 0) if layer is not None and kind is not Kind.RECURRENT else 0
    used = inventory.per_layer("expert_used_count", layer + 1, count)[layer] if layer is not None else 0
    used = min(used, count) or count
    tied = _tied_bytes(inventory) if kind is Kind.OUTPUT else 0
    active = sum(active_bytes(kind, tensor, part, used, count) for tensor, part in members) + tied
    size = sum(tensor.size_bytes for tensor, _ in members)
    if not any(part.role is Role.EXPERTS for _, part in members):
        count = used = 0
    return Unit(name, kind, layer, tuple(t.name for t, _ in members), size, active, tied, count, used)


def active_bytes(kind: Kind, tensor: Tensor, part: Part, used: int, experts: int) -> int:
    """Bytes of a tensor that one decoded token reads, when it uses `used` of the layer's `experts`."""
    if kind in (Kind.NEXTN, Kind.FOREIGN):
        return 0
    if part.role in (Role.EMBEDDING, Role.LOOKUP):
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        return -(-tensor.size_bytes // max(rows, 1))
    if part.role in (Role.EXPERTS, Role.EXPERT_SMALL):
        among = part.experts if part.experts > 1 else max(experts, 1)  # one a tensor before they were merged
        return -(-tensor.size_bytes * min(used, among) // among)
    return tensor.size_bytes


def _tied_bytes(inventory: Inventory) -> int:
    sizes = {t.name: t.size_bytes for t in inventory.tensors}
    return (
        0
        if "output.weight" in sizes or inventory.architecture in ENCODERS
        else sizes.get("token_embd.weight", 0)
    )


def _experts_by_layer(inventory: Inventory, parts: Parts) -> Mapping[int, int]:
    """Number of routed experts of each layer that has some, from the shapes; all must agree."""
    seen: dict[int, dict[str, int]] = defaultdict(dict)
    alone: dict[int, int] = defaultdict(int)
    for tensor, part in parts:
        if part.layer is None or "_chexps" in tensor.name:  # chunks are counted in groups of experts
            continue
        if part.role is Role.EXPERTS and part.experts == 1 and len(tensor.shape) < 3:
            alone[part.layer] += tensor.name.split(".")[2] == "ffn_down"
        elif part.role is Role.EXPERTS or (part.role is Role.EXPERT_SMALL and part.experts > 1):
            seen[part.layer][tensor.name] = part.experts  # a single scale serves the whole tensor
        elif _BY_EXPERT.search(tensor.name):
            seen[part.layer][tensor.name] = tensor.shape[-1]
    for layer, count in alone.items():
        seen[layer][f"blk.{layer}.ffn_down.*"] = count
    return {layer: _agreed(inventory, layer, counts) for layer, counts in seen.items()}


def _agreed(inventory: Inventory, layer: int, counts: Mapping[str, int]) -> int:
    stated = inventory.per_layer("expert_count", layer + 1)[layer]
    all_counts = {**counts, "expert_count": stated} if stated else dict(counts)
    if len(set(all_counts.values())) > 1:
        raise ExpertMismatch(inventory.name, layer, all_counts)
    return next(iter(counts.values()))


def import_late() -> None:
    """Import what else the first model to be analysed imports, for a process of which others are copies."""
    import networkx  # noqa: F401


def _edges(inventory: Inventory, layers: Layers, units: tuple[Unit, ...]) -> tuple[tuple[int, int], ...]:
    """The chain through all units that decode runs, then the long edges: residual streams and the like."""
    import networkx as nx

    running = [n for n, unit in enumerate(units) if unit.kind not in (Kind.NEXTN, Kind.FOREIGN)]
    chain = tuple(pairwise(running))
    home = {unit.layer: n for n, unit in enumerate(units) if unit.kind in BOUND and unit.layer is not None}
    graph = nx.DiGraph(chain)
    long = sorted(edge for edge in _long_edges(inventory, layers, home, running) if not graph.has_edge(*edge))
    graph.add_edges_from(long)
    assert not graph or nx.is_directed_acyclic_graph(graph)
    return chain + tuple(dict.fromkeys(long))


def _long_edges(
    inventory: Inventory, layers: Layers, home: Mapping[int, int], running: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Values that skip units: `home` is the last bound unit of a layer, which holds the residual stream."""
    ordered = sorted(home.items())
    for (_, source), (_, target) in pairwise(ordered):
        yield source, target
    if ordered and running:
        yield ordered[-1][1], max(running)
    first = home.get(0)
    per_layer_inputs = (
        inventory.number("embedding_length_per_layer_input") or "rwkv7" in inventory.architecture
    )
    if first is not None and per_layer_inputs:
        yield from ((first, target) for layer, target in ordered if layer > 0)
    for reader, owner in shared_kv(inventory, layers).items():
        if owner in home and reader in home:
            yield home[owner], home[reader]


_COMPUTING = frozenset({Role.ATTENTION, Role.STATE, Role.MIXER, Role.FFN, Role.EXPERTS, Role.SHARED})


_SKIPS_LAYERS = frozenset({"deci"})  # pruned layers may be empty


def foreign_note(units: Iterable[Unit]) -> str:
    """A warning of tensors of other modalities in the same file; "" without them."""
    names = [short(name) for unit in units if unit.kind is Kind.FOREIGN for name in unit.tensors]
    if not names:
        return ""
    who = f"1 tensor ({names[0]}) is" if len(names) == 1 else f"{len(names)} tensors ({names[0]} first) are"
    return f"{who} not of the text model: stock llama.cpp refuses such a file"


def _unknown(inventory: Inventory, layers: Layers, parts: Parts, known: bool) -> tuple[str, ...]:
    """What could not be placed by knowledge; an expected part that is absent is such a thing, no damage."""
    architecture = () if known else (f"architecture {inventory.architecture}",)
    names = tuple(t.name for t, part in parts if part.role is Role.UNKNOWN)
    beyond = tuple(t.name for t, part in parts if part.layer is not None and part.layer >= layers.n_all)
    held = {part.layer for _, part in parts}
    computing = {part.layer for _, part in parts if part.role in _COMPUTING}
    odd = tuple(f"layout of blk.{n}" for n in range(layers.n_main) if n in held and n not in computing)
    absent = tuple(
        f"no tensors of blk.{n}"
        for n in range(layers.n_main)
        if n not in held and inventory.architecture not in _SKIPS_LAYERS and not drafts_alone(inventory)
    )
    return architecture + names + beyond + odd + absent
