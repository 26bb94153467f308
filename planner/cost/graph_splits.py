"""Pieces of the graph of one token: the engine's scheduler, followed on a sketch of the graph.

The engine makes a backend of every entry of the device list, repeats included, and one of the CPU last. It
works through five passes (`ggml_backend_sched_split_graph`): operators with weights or a cache go to the
first backend of that memory, norms of a layer to the last backend of the layer's device (`graph_get_cb`);
what is free follows its neighbours, first those of other backends than the last, downwards, then upwards;
and an operator whose sources lie where an earlier backend of the same memory reads them moves there. Hence
a device that is listed twice gets a piece for the first norm after every change, and a CPU that is listed
holds what would else follow the next GPU.

The sketch has what such passes can tell apart: for every layer its norms, one operator for the weights
of each place, and the sums between them, in the order in which the engine builds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from planner.block_names import block_of
from planner.constants import CPU
from planner.cost.build_problem import Model
from planner.model.units import BOUND, Kind, Unit
from planner.plan.load_spec import device_list
from planner.site import Site, SiteKind

_WEIGHTED_FIRST = frozenset({"llama4"})  # the router's weights are applied before the experts


class _Bond(Enum):
    """What ties an operator to a backend."""

    DATA = auto()  # weights or a cache
    NORM = auto()
    FREE = auto()


@dataclass(slots=True, eq=False)
class _Node:
    """One operator; `at` is its backend, once known."""

    bond: _Bond
    device: str
    sources: tuple[_Node, ...]
    at: int = -1


def graph_splits(model: Model, layer_devices: Sequence[str], sites: Mapping[str, Site]) -> int:
    """How many pieces the engine makes of the graph of a token.

    `layer_devices`: of each layer, NextN blocks included, and of the output head; `sites`: of each unit.
    """
    listed = device_list(layer_devices, ())
    backends = [*(device for device, _ in listed), CPU]
    nodes = _Sketch(model, layer_devices, sites).nodes
    _assign(nodes, backends)
    cached = sum(site.kind is SiteKind.CACHE for site in sites.values())
    return 1 + sum(a.at != b.at for a, b in pairwise(nodes)) + cached


def clears_state(model: Model, layer: int) -> bool:
    """Whether the engine clears a layer's state for new sequences by operators of their own."""
    layers, stems = model.layers, model.structure.stems.get(layer, frozenset())
    return layers.recurrent[layer] and not layers.attention[layer] and not stems & {"ssm_ba", "ssm_beta"}


def projects_ahead(model: Model) -> bool:
    """Whether inputs of all layers are projected before the first, where the output head is."""
    return "altup_proj.weight" in model.structure.tensors


def _assign(nodes: list[_Node], backends: Sequence[str]) -> None:
    """The scheduler's passes: what is tied, what follows its neighbours, what may move forward."""
    last = len(backends) - 1
    ends = {device: n for n, device in enumerate(backends)}
    for node in nodes:
        if node.bond is not _Bond.FREE:
            node.at = backends.index(node.device) if node.bond is _Bond.DATA else ends[node.device]
    for beyond in (last, -1):  # not from the last backend, then from any
        _follow(nodes, beyond)
        _follow(reversed(nodes), beyond)
    for node in nodes:
        here = backends[node.at]
        if all(backends[source.at] == here for source in node.sources):
            node.at = backends.index(here)


def _follow(nodes: Iterable[_Node], beyond: int) -> None:
    """Free operators take the backend of the one before, unless that is `beyond`."""
    near = -1
    for node in nodes:
        if node.at >= 0:
            near = -1 if node.at == beyond else node.at
        elif near >= 0:
            node.at = near


class _Sketch:
    """The operators of one token in the engine's order."""

    def __init__(self, model: Model, layer_devices: Sequence[str], sites: Mapping[str, Site]) -> None:
        self.nodes: list[_Node] = []
        self.model, self.sites = model, sites
        self.expanded = 0  # operators that the graph has when a layer begins; the rest is added when needed
        head = layer_devices[-1]
        row = self._data(CPU)
        if projects_ahead(model):
            row = self._data(head, row)
        self.expanded = len(self.nodes)
        for name, units in model.groups:
            if (layer := block_of(name)) is not None and layer < model.layers.n_main:
                row = self._layer(layer, layer_devices[layer], units, row)
        self._head(head, row)

    def _add(self, bond: _Bond, device: str, *sources: _Node) -> _Node:
        self.nodes.append(_Node(bond, device, sources))
        return self.nodes[-1]

    def _data(self, device: str, *sources: _Node) -> _Node:
        return self._add(_Bond.DATA, device, *sources)

    def _sum(self, *sources: _Node) -> _Node:
        return self._add(_Bond.FREE, "", *sources)

    def _normed(self, device: str, source: _Node) -> _Node:
        """A norm, and the product with its weights."""
        return self._data(device, self._add(_Bond.NORM, device, source))

    def _layer(self, layer: int, device: str, units: Sequence[Unit], row: _Node) -> _Node:
        """A mixer, a feed-forward part, or both; answers its output."""
        stems = self.model.structure.stems.get(layer, frozenset())
        if clears_state(self.model, layer):  # before all that is not in the graph yet
            self.nodes.insert(self.expanded, _Node(_Bond.DATA, device, ()))
        if any(u.kind in BOUND - {Kind.ROUTER} for u in units):
            row = self._mixer(layer, device, row)
        rest = [u for u in units if u.kind in (Kind.FFN, Kind.EXPERTS)]
        return self._inner(device, rest, stems, row) if rest else row

    def _mixer(self, layer: int, device: str, row: _Node) -> _Node:
        mixed = self._data(device, self._normed(device, row))  # up to the cache or the state
        self.expanded = len(self.nodes)
        if self.model.layers.recurrent[layer] and self.model.layers.attention[layer]:
            mixed = self._data(device, self._normed(device, row), mixed)
            self.expanded = len(self.nodes)
        return self._sum(self._data(device, mixed), row)

    def _inner(self, device: str, units: Sequence[Unit], stems: frozenset[str], row: _Node) -> _Node:
        units = sorted(units, key=lambda u: u.kind is not Kind.EXPERTS)
        parts = [self._part(device, unit, stems, self._normed(device, row)) for unit in units]
        if len(parts) > 1:  # side by side, each with norms of its own
            parts = [self._normed(device, part) for part in reversed(parts)]
        found = parts[0] if len(parts) == 1 else self._sum(*parts)
        if "post_ffw_norm" in stems:
            found = self._data(device, self._sum(found))
        return self._sum(found, row)

    def _part(self, device: str, unit: Unit, stems: frozenset[str], normed: _Node) -> _Node:
        site = self.sites[unit.name]
        there = CPU if site.kind is SiteKind.CPU else device
        if unit.kind is not Kind.EXPERTS:
            return self._data(there, normed)
        chosen = self._sum(self._data(device, normed))
        if self.model.inventory.architecture in _WEIGHTED_FIRST:
            found = self._data(there, self._sum(normed, chosen))
        else:
            found = self._sum(self._data(there, normed), chosen)
        self.expanded = len(self.nodes)
        found = self._sum(found)
        if any(stem.endswith("_shexp") for stem in stems):
            found = self._sum(found, self._data(device, normed))
        return found

    def _head(self, device: str, row: _Node) -> None:
        site = next((self.sites[u.name] for u in self.model.units if u.kind is Kind.OUTPUT), None)
        normed = self._data(device, self._sum(row))
        self._data(CPU if site and site.kind is SiteKind.CPU else device, normed)
