"""The placement problem in integers: bytes and nanoseconds, devices by index, no names to interpret.

A decision is one layer of the model (or its output head); an option is one complete way to place it:
the layer device and the site of each unit that may live elsewhere. Decisions stand in graph order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """One device and what it may hold."""

    device: str
    kind: str  # cpu, gpu, igpu, rpc
    capacity_bytes: int
    pool: int = -1  # index into Problem.pools; -1: memory of its own

    @property
    def host(self) -> bool:
        """Whether the CPU computes here."""
        return self.kind == "cpu"


@dataclass(frozen=True, slots=True)
class Pool:
    """One memory that several devices draw on; their sum must fit."""

    name: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """Memory paid once as soon as any chosen option asks for it: compute buffer, context, staging."""

    name: str
    device: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a decision."""

    entry: int  # the layer device: computes the first operators, owns KV and state
    exit: int  # the device that computes the last operators
    sites: tuple[Hashable, ...]  # one per unit of the decision: a label, only ever compared
    decode_ns: int  # one token, changes of device inside the decision included
    prefill_ns: int  # the whole prompt
    memory: tuple[int, ...]  # bytes per device: weights, KV, state
    shares: tuple[int, ...] = ()  # indices into Problem.shares, ascending
    splits: int = 0  # changes of device inside
    away: bool = False  # reads a KV cache that lies on another device
    parts: tuple[int, ...] = ()  # of decode_ns, by unit; the rest are changes of device

    @property
    def key(self) -> tuple[int, tuple[Hashable, ...], bool]:
        """What tells it from the other options of its decision, whatever its price."""
        return self.entry, self.sites, self.away

    @property
    def whole(self) -> bool:
        """Whether the whole layer sits on its layer device."""
        return self.entry == self.exit and self.splits == 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What is placed as one: a layer, or the output head."""

    name: str
    units: tuple[str, ...]
    options: tuple[Option, ...]
    layer: bool = True  # the engine gives it a layer device; False: input tables, always on the host


@dataclass(frozen=True, slots=True)
class Edge:
    """Data that one decision hands to a later one; costs by (exit device, entry device)."""

    source: int
    target: int
    decode_ns: Matrix
    prefill_ns: Matrix


@dataclass(frozen=True, slots=True)
class Mixed:
    """A cost charged once when some of these decisions touch the host CPU and some another device."""

    name: str
    decisions: tuple[int, ...]
    decode_ns: int
    prefill_ns: int
    layers_only: bool = False  # only the layer device counts, not where other units are computed


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose one option per decision: least `decode_weight * decode + prefill_weight * prefill`."""

    devices: tuple[Capacity, ...]
    decisions: tuple[Decision, ...]
    edges: tuple[Edge, ...] = ()
    pools: tuple[Pool, ...] = ()
    shares: tuple[Share, ...] = ()
    exclusive: tuple[tuple[int, ...], ...] = ()  # groups of shares of which at most one may be in use
    mixed: tuple[Mixed, ...] = ()
    decode_weight: int = 1  # tokens generated
    prefill_weight: int = 1
    decode_ns: int = 0  # what every placement pays: embedding, sampling
    prefill_ns: int = 0
    max_runs: int = 0  # engine limit on runs of equal layer device; 0: none
    host_leads: bool = False  # the CPU may be the layer device of the first layers only
    contiguous: bool = False  # each device holds at most one run of decisions

    def price(self, decode_ns: int, prefill_ns: int) -> int:
        """The objective of a pair of times."""
        return self.decode_weight * decode_ns + self.prefill_weight * prefill_ns

    def longest(self) -> int:
        """An objective that no placement exceeds."""
        most: dict[int, int] = {}  # decisions alike have the same options
        for decision in self.decisions:
            if id(decision.options) not in most:
                prices = (self.price(o.decode_ns, o.prefill_ns) for o in decision.options)
                most[id(decision.options)] = max(prices, default=0)
        options = sum(most[id(decision.options)] for decision in self.decisions)
        edges = sum(self.price(_largest(e.decode_ns), _largest(e.prefill_ns)) for e in self.edges)
        mixed = sum(self.price(m.decode_ns, m.prefill_ns) for m in self.mixed)
        return self.price(self.decode_ns, self.prefill_ns) + options + edges + mixed

    def _touched(self, mixed: Mixed, option: Option) -> tuple[int, ...]:
        return (option.entry,) if mixed.layers_only else (option.entry, option.exit)

    def on_host(self, mixed: Mixed, option: Option) -> bool:
        """Whether an option counts as on the host CPU for a mixed cost."""
        return any(self.devices[d].host for d in self._touched(mixed, option))

    def off_host(self, mixed: Mixed, option: Option) -> bool:
        """Whether an option counts as on another device than the CPU for a mixed cost."""
        return any(not self.devices[d].host for d in self._touched(mixed, option))

    def all_options(self) -> Iterator[tuple[int, int, Option]]:
        """All options with their decision's index and their own."""
        for i, decision in enumerate(self.decisions):
            for j, option in enumerate(decision.options):
                yield i, j, option


def _largest(matrix: Matrix) -> int:
    return max((max(row, default=0) for row in matrix), default=0)


@dataclass(frozen=True, slots=True)
class Solution:
    """The option chosen for each decision."""

    choices: tuple[int, ...]

    def chosen(self, problem: Problem) -> tuple[Option, ...]:
        """The chosen options in order."""
        return tuple(d.options[c] for d, c in zip(problem.decisions, self.choices, strict=True))
