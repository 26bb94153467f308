"""Layers that read another layer's KV cache (Gemma 3n and 4): what it costs where they lie elsewhere.

The cache lies with the layer that writes it. A reader on another device computes there: for every token the
engine copies the filled part of keys and values to it, once for each reader, and keeps room for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.block_names import block_of
from planner.cost.ledger import Placed, spread, summed, totals
from planner.cost.unit_time import Prices, Times
from planner.machine.profile import Device
from planner.memory.kv_cache import cells_of
from planner.memory.memory import Memory
from planner.solver.problem import Option, Share

_STEP = 256  # cells by which the engine's view of a cache grows


@dataclass(frozen=True, slots=True)
class Sharing:
    """The shared caches of one problem; `owners` maps a reader's decision to that of the cache."""

    owners: Mapping[str, str]
    kv: Mapping[str, int]  # bytes by decision
    devices: tuple[Device, ...]
    prices: Prices
    first: int  # index of its first share

    @property
    def caches(self) -> tuple[str, ...]:
        """Decisions whose cache others read."""
        return tuple(dict.fromkeys(self.owners.values()))

    def shares(self) -> tuple[Share, ...]:
        """For each cache and each device: that it lies there. They take no memory."""
        pairs = [(name, i) for name in self.caches for i in range(len(self.devices))]
        return tuple(Share(f"KV of {name} lies on {self.devices[i].name}", i, 0) for name, i in pairs)

    def exclusive(self) -> tuple[tuple[int, ...], ...]:
        """A cache lies on one device."""
        return tuple(tuple(self._lies(name, i) for i in range(len(self.devices))) for name in self.caches)

    def _lies(self, name: str, device: int) -> int:
        return self.first + self.caches.index(name) * len(self.devices) + device

    def with_shares(self, name: str, options: Sequence[Placed]) -> Sequence[Placed]:
        """Options of a decision that say where the cache lies; a reader has each twice, with the cache and
        away from it.
        """
        owner = self.owners.get(name, name)
        if owner not in self.caches:
            return options
        found = [replace(each, option=self._with(owner, each.option)) for each in options]
        if owner != name and len(self.devices) > 1:
            found += [self._away(each, owner) for each in options]
        return found

    def _with(self, owner: str, option: Option) -> Option:
        return replace(option, shares=tuple(sorted((*option.shares, self._lies(owner, option.entry)))))

    def _away(self, placed: Placed, owner: str) -> Placed:
        option, n = placed.option, len(self.devices)
        times = self._copies(owner, option.entry)
        held = summed([placed.held, spread({option.entry: Memory(compute=self.kv[owner])}, n)], n)
        away = replace(
            option,
            away=True,
            decode_ns=option.decode_ns + times.decode_ns,
            prefill_ns=option.prefill_ns + times.prefill_ns,
            memory=totals(held),
        )
        return Placed(away, held)

    def _copies(self, owner: str, target: int) -> Times:
        """Keys and values copied for a token and for the prompt, from the device slowest to read."""
        work = self.prices.workload
        sources = [d for i, d in enumerate(self.devices) if i != target]

        def copied(depth: int) -> int:
            half = self.kv[owner] * self._filled_ppm(owner, depth) // (2 * 10**6)
            return 2 * max(self.prices.copy_ns(d.name, self.devices[target].name, half) for d in sources)

        batches = sum(count for _, count in self.prices.batches)
        return Times(self.prices.per_token(copied(work.depth)), batches * copied(work.prompt // 2))

    def _filled_ppm(self, owner: str, depth: int) -> int:
        cells = cells_of(self.prices.inventory, self.prices.workload)
        layer = block_of(owner) or 0
        there = cells.sliding if self.prices.structure.slides[layer] else cells.full
        return min(-(-(depth + 1) // _STEP) * _STEP, there) * 10**6 // max(there, 1)
