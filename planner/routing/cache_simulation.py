"""Replay of a demand trace against expert caches: every policy by its keys, all layers at once.

A planning step demands a set of experts in each layer; what is resident before counts as a hit, the
rest is loaded. A policy is a key for each expert (the resident one with the lowest key leaves), and a
rule of admission. Keys are whole numbers and never equal, so that results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.routing.trace import PAD, Trace

Ints = NDArray[np.int64]

HALF_LIFE = 16  # planning steps; what one engine uses
FAR = np.int64(1) << 62
_TICK = 30  # bits of the order of use below the frequency in a key
_SCALE = 1 << 14  # resolution of logarithmic frequencies


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What is asked of the caches, event by event: (events, banks, ids), -1 where fewer are asked.

    Per-layer caches: an event is a step, a bank a layer. One cache for all layers: an event is a layer of
    a step, the one bank holds every expert of every layer.
    """

    ids: Ints
    n_items: int  # experts of a bank
    steps: Ints  # the step of each event
    step_length: int  # events of a step

    @property
    def n_steps(self) -> int:
        return int(self.steps[-1]) + 1 if len(self.steps) else 0


@dataclass(frozen=True, slots=True)
class Policy:
    """How a cache decides."""

    name: str
    key: Literal["recent", "frequent", "next", "fixed"]
    half_life: float = 0.0  # steps, for frequent; 0: counts never fade
    admit: Literal["always", "better", "again", "never"] = "always"
    protect: int = 0  # steps in which what was used cannot be evicted while something else can


POLICIES: Mapping[str, Policy] = {
    "lru": Policy("lru", "recent"),
    "lfu": Policy("lfu", "frequent"),
    "lfu-decay": Policy("lfu-decay", "frequent", half_life=HALF_LIFE),
    "lfu-protect": Policy("lfu-protect", "frequent", half_life=HALF_LIFE, protect=2),
    "lfu-admit": Policy("lfu-admit", "frequent", half_life=HALF_LIFE, admit="better"),
    "lru-again": Policy("lru-again", "recent", admit="again"),
    "static": Policy("static", "fixed", admit="never"),
    "belady": Policy("belady", "next", admit="better"),
}
AGAIN_WITHIN = 8  # steps: "again" admits what was asked for so recently before


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Hits and demanded experts of each planning step."""

    policy: str
    slots: int  # per bank
    hits: Ints
    asked: Ints

    @property
    def hit_rate(self) -> float:
        return float(self.hits.sum() / max(1, self.asked.sum()))

    @property
    def misses(self) -> Ints:
        return self.asked - self.hits


def demand_of(trace: Trace, per_layer: bool = True) -> Demand:
    """The decode steps of a trace, of all its sources in turn; tokens of one step ask together."""
    rows = np.flatnonzero(trace.decode)
    layers = np.unique(trace.layer[rows])
    place = np.searchsorted(layers, trace.layer[rows])
    step = decode_steps(trace)[rows]
    n_steps = int(step.max(initial=-1)) + 1
    flat = step * len(layers) + place
    ids = _union(flat, trace.ids[rows].astype(np.int64), n_steps * len(layers), trace.n_expert)
    grid = ids.reshape(n_steps, len(layers), -1)
    if per_layer:
        return Demand(grid, trace.n_expert, np.arange(n_steps), 1)
    offset = (np.arange(len(layers)) * trace.n_expert)[None, :, None]
    single = np.where(grid >= 0, grid + offset, PAD).reshape(n_steps * len(layers), 1, -1)
    each = np.repeat(np.arange(n_steps), len(layers))
    return Demand(single, trace.n_expert * len(layers), each, len(layers))


def decode_steps(trace: Trace) -> Ints:
    """Number of each row's decode step, counted through all sources; -1 for prefill."""
    made = np.full(len(trace.decode), -1, dtype=np.int64)
    key = trace.source.astype(np.int64) << 32 | trace.step
    made[trace.decode] = np.unique(key[trace.decode], return_inverse=True)[1]
    return made


def one_by_one(demand: Demand) -> Demand:
    """The same demand with the ids of an event asked one after the other, as some simulators replay."""
    events, banks, width = demand.ids.shape
    ids = demand.ids.transpose(0, 2, 1).reshape(events * width, banks, 1)
    return Demand(ids, demand.n_items, np.repeat(demand.steps, width), demand.step_length * width)


def _union(cell: Ints, ids: Ints, n_cells: int, n_expert: int) -> Ints:
    """Different ids of each cell, in the order of their first rank; (cells, most of any cell)."""
    rank = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    valid = ids >= 0
    key = (np.repeat(cell, ids.shape[1]).reshape(ids.shape) * n_expert + ids)[valid]
    order = np.lexsort((rank[valid], key))
    unique, first = np.unique(key[order], return_index=True)
    where, what, best = unique // n_expert, unique % n_expert, rank[valid][order][first]
    order = np.lexsort((what, best, where))
    where, what = where[order], what[order]
    starts = np.searchsorted(where, np.arange(n_cells))
    column = np.arange(len(where)) - starts[where]
    made = np.full((n_cells, int(column.max(initial=0)) + 1), PAD, dtype=np.int64)
    made[where, column] = what
    return made


def replay(demand: Demand, policy: Policy, slots: int, hot: Ints | None = None, after: int = 0) -> Replay:
    """Run a policy with `slots` per bank; the first `after` steps warm it up and are not counted.

    `hot` (banks, slots or more) fills the cache before the first step, best first. Belady's bound sees
    the counted steps only and fills itself with what they ask for first, so that no policy can pass it.
    """
    if policy.key == "next":
        demand, after = later(demand, after), 0
    cache = _Cache(demand, policy, min(slots, demand.n_items), hot)
    for event in range(len(demand.ids)):
        cache.ask(event)
    step = demand.steps
    asked = (demand.ids >= 0).sum(axis=(1, 2))
    hits = np.bincount(step, weights=cache.hits, minlength=demand.n_steps).astype(np.int64)
    total = np.bincount(step, weights=asked, minlength=demand.n_steps).astype(np.int64)
    return Replay(policy.name, cache.slots, hits[after:], total[after:])


def later(demand: Demand, after: int) -> Demand:
    """The demand from a step on."""
    keep = demand.steps >= after
    return Demand(demand.ids[keep], demand.n_items, demand.steps[keep] - after, demand.step_length)


class _Cache:
    """All banks of a replay: where each item is, what each slot holds, and the key of what it holds."""

    def __init__(self, demand: Demand, policy: Policy, slots: int, hot: Ints | None) -> None:
        banks = demand.ids.shape[1]
        self.demand, self.policy, self.slots = demand, policy, slots
        self.rows = np.arange(banks)[:, None]
        self.hits = np.zeros(len(demand.ids), dtype=np.int64)
        # One more column than items: the padding id -1 reads and writes there.
        shape = (banks, demand.n_items + 1)
        self.slot_of = np.full(shape, -1, dtype=np.int64)
        self.last = np.full(shape, -(1 << 30), dtype=np.int64)
        self.heat = np.full(shape, -np.inf) if policy.key == "frequent" else None
        self.next = _next_use(demand) if policy.key == "next" else None
        self.item = np.full((banks, slots), demand.n_items, dtype=np.int64)  # n_items: empty
        self.held = np.full((banks, slots), -FAR, dtype=np.int64)  # key of the item in each slot
        if policy.key == "next":
            self._fill_with_first()
        elif hot is not None:
            self._fill(hot)

    def ask(self, event: int) -> None:
        ids = self.demand.ids[event]
        slots = self.slot_of[self.rows, ids]
        resident = slots >= 0
        self.hits[event] = np.count_nonzero(resident)
        if self.policy.admit == "never":
            return
        keys = self._keys(event, ids)
        used_bank, used_column = np.nonzero(resident)
        used = used_bank, slots[used_bank, used_column]
        missed = (ids >= 0) & ~resident
        if self.policy.admit == "again":
            missed &= self.last[self.rows, ids] >= self.demand.steps[event] - AGAIN_WITHIN
        self.last[self.rows, ids] = self.demand.steps[event]
        if self.policy.admit == "better":  # what is used now may leave at once, when others are worth more
            self.held[used] = keys[used_bank, used_column]
            self._load(event, ids, keys, missed)
        else:
            self.held[used] = FAR
            self._load(event, ids, keys, missed)
            self.held[used] = keys[used_bank, used_column]

    def _fill(self, hot: Ints) -> None:
        """Start warm, best first; untouched items leave in the opposite order."""
        width = min(self.slots, hot.shape[1])
        self.item[:, :width] = hot[:, :width]
        self.held[:, :width] = -(FAR // 2) - np.arange(width)
        np.put_along_axis(self.slot_of, self.item[:, :width], np.arange(width)[None, :], axis=1)

    def _fill_with_first(self) -> None:
        first = _first_use(self.demand) * self.demand.n_items + np.arange(self.demand.n_items)
        order = np.argsort(first, axis=1, kind="stable")
        self._fill(order)
        self.held = -np.take_along_axis(first, self.item, axis=1)

    def _keys(self, event: int, ids: Ints) -> Ints:
        """Keys of what is asked for now; better ranks count as used later."""
        width = ids.shape[1]
        order = event * width + (width - 1 - np.arange(width))[None, :]
        if self.heat is not None:
            step = int(self.demand.steps[event])
            gain = step / self.policy.half_life if self.policy.half_life else 0.0
            heat = np.logaddexp2(self.heat[self.rows, ids], gain)
            self.heat[self.rows, ids] = heat
            return np.asarray(np.round(heat * _SCALE).astype(np.int64) * (1 << _TICK) + order)
        if self.next is not None:
            return np.asarray(-self.next[event] * self.demand.n_items - ids)
        return np.broadcast_to(order, ids.shape)

    def _load(self, event: int, ids: Ints, keys: Ints, missed: NDArray[np.bool_]) -> None:
        """Put admitted misses, best key first, into the slots with the lowest keys."""
        if not self.slots or not missed.any():
            return
        width = min(ids.shape[1], self.slots)
        victims, lowest = self._victims(event, width)
        score = np.where(missed, keys, -FAR)
        best = np.argsort(-score, axis=1, kind="stable")[:, :width]
        score = score[self.rows, best]
        limit = score if self.policy.admit == "better" else np.where(score > -FAR, FAR, -FAR)
        bank, column = np.nonzero((lowest < limit) & (score > -FAR))
        slot, item = victims[bank, column], ids[bank, best[bank, column]]
        self.slot_of[bank, self.item[bank, slot]] = -1
        self.item[bank, slot] = item
        self.slot_of[bank, item] = slot
        self.held[bank, slot] = score[bank, column]

    def _victims(self, event: int, width: int) -> tuple[Ints, Ints]:
        """The slots that would go first, and their keys, lowest first; (banks, width)."""
        held = self.held
        if self.policy.protect:
            fresh = self.last[self.rows, self.item] > self.demand.steps[event] - self.policy.protect
            held = np.where(fresh & (held > -FAR), held // 2 + FAR // 2, held)
        victims = np.argpartition(held, width - 1, axis=1)[:, :width]
        lowest = held[self.rows, victims]
        order = np.argsort(lowest, axis=1)
        return victims[self.rows, order], lowest[self.rows, order]


def _next_use(demand: Demand) -> Ints:
    """The event at which each demanded id is asked for again; a number past the end when never."""
    never = len(demand.ids)
    banks = demand.ids.shape[1]
    rows = np.arange(banks)[:, None]
    coming = np.full((banks, demand.n_items + 1), never, dtype=np.int64)
    made = np.empty_like(demand.ids)
    for event in range(never - 1, -1, -1):
        ids = demand.ids[event]
        made[event] = coming[rows, ids]
        coming[rows, ids] = event
    return made


def _first_use(demand: Demand) -> Ints:
    """The first event that asks for each item; a number past the end when none does; (banks, items)."""
    never = len(demand.ids)
    banks = demand.ids.shape[1]
    first = np.full((banks, demand.n_items + 1), never, dtype=np.int64)
    for event in range(never - 1, -1, -1):
        first[np.arange(banks)[:, None], demand.ids[event]] = event
    return first[:, :-1]


def sweep(
    demand: Demand,
    policies: Sequence[Policy],
    slots: Sequence[int],
    hot: Ints | None = None,
    after: int = 0,
    on_done: Callable[[], None] = lambda: None,
) -> list[Replay]:
    """Every policy at every number of slots; `hot` is for the static one, the others start empty."""
    made = []
    for policy in policies:
        for count in slots:
            made.append(replay(demand, policy, count, hot if policy.key == "fixed" else None, after))
            on_done()
    return made
