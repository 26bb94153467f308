"""Every way to place one layer: its layer device, and where its feed-forward or expert weights live."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.constants import PPM
from planner.cost import hybrid_slots
from planner.cost.ledger import Parts, Placed, spread, summed, totals
from planner.cost.stripe_widths import STEPS, Stripe, stripe_widths
from planner.cost.unit_time import Prices, Times
from planner.machine.attention_kernels import attends
from planner.machine.host_memory import OFFLOAD_BATCH, HostMemory
from planner.machine.profile import Device
from planner.memory.buffer_parts import BufferParts
from planner.memory.memory import Memory
from planner.model.units import BOUND, Kind, Unit
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import CachePoint, FollowedLayer
from planner.plan.request import Request
from planner.site import GUESTS, ON_CPU, Site, SiteKind
from planner.solver.problem import Option

PER_DEVICE = 4  # shares of each device: in use, streams or has the head, streams, has the head
_CACHED_BATCH = 32  # tokens a step up to which the engine uses its MoE cache


@dataclass(frozen=True, slots=True)
class Spot:
    """One place for one movable unit: memory by device, times, and whether the CPU computes it."""

    site: Site
    held: Parts
    times: Times
    host: bool = False
    shares: tuple[int, ...] = ()
    splits: int = 0


@dataclass(frozen=True, slots=True)
class Choices:
    """What a layer may do beside lying on one device as a whole."""

    op_offload: bool = True  # long prompts of host weights are computed on a GPU
    stripes: bool = True
    hybrid: bool = False
    curves: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # coverage by layer
    cache: tuple[CachePoint, ...] = ()  # sizes of the engine's MoE cache
    followed: Mapping[int, FollowedLayer] = field(default_factory=dict)  # by slots that follow
    least_misses: int = 0  # of a step in which experts come to them on demand

    @classmethod
    def of(cls, request: Request, settings: EngineSettings, known: Known) -> Choices:
        """The part of what was asked, tried and known that bears on one layer.

        With slots a device of ours lies before the GPU: stripes and the engine's cache need the GPU's own.
        """
        followed = settings.following.layers if settings.following else ()
        return cls(
            settings.op_offload,
            request.stripes and not settings.slots,
            settings.slots,
            known.curves,
            () if settings.slots else known.cache,
            {each.layer: each for each in followed},
            (settings.following.least_misses or 0) if settings.following else 0,
        )


class Chooser:
    """Makes the options of each decision; layers that are alike share one list of them."""

    def __init__(
        self,
        prices: Prices,
        devices: tuple[Device, ...],
        choices: Choices,
        buffers: Mapping[str, BufferParts],
        asked: Iterable[Site] = (),
    ) -> None:
        """`asked`: sites of pins, whose numbers of slots are options too."""
        self.prices, self.devices, self.choices, self.buffers = prices, devices, choices, buffers
        self.asked = tuple(sorted({s for s in asked if s.kind is SiteKind.HYBRID}, key=str))
        self.workload = prices.workload
        self._layers: dict[object, list[Placed]] = {}
        self.cpu = next((i for i, d in enumerate(devices) if d.kind == "cpu"), -1)
        self.first_gpu = next((i for i, d in enumerate(devices) if d.kind == "gpu"), -1)

    def on_host(self, units: tuple[Unit, ...], inputs: Memory) -> list[Placed]:
        """Tables that the engine keeps on the host, and the inputs of every graph."""
        sites = (ON_CPU,) * len(units)
        if self.cpu < 0:
            nothing = self._weights({})
            return [Placed(Option(0, 0, sites, 0, 0, totals(nothing)), nothing)]
        name = self.devices[self.cpu].name
        times = sum((self.prices.on(u, name) for u in units), Times(0, 0))
        tables = sum(u.size_bytes for u in units if u.kind is Kind.LOOKUP)
        mapped = tables if self.prices.host_memory is HostMemory.MAPPED else 0
        weights = Memory(weights=sum(u.size_bytes for u in units) - mapped, tables=mapped)
        held = spread({self.cpu: weights + inputs}, len(self.devices))
        option = Option(self.cpu, self.cpu, sites, times.decode_ns, times.prefill_ns, totals(held))
        return [Placed(option, held)]

    def uses_host(self, option: Option) -> bool:
        """Whether anything of an option lies in host memory."""
        return self.cpu >= 0 and option.memory[self.cpu] > 0

    def exclusive(self) -> tuple[tuple[int, ...], ...]:
        """Shares that exclude each other: the engine is told one size, and divides it among all GPUs.

        So one GPU has the cache, and no layer of any GPU has its experts on the host beside it.
        """
        if not self.choices.cache:
            return ()
        return (tuple(range(self._cache_share(0, 0), self._cache_share(len(self.devices), 0) + 1)),)

    def layer(self, units: tuple[Unit, ...], kept: Memory, *, reads: bool = False) -> list[Placed]:
        """Options of a layer (or the output head) that keeps KV and state (`kept`) beside its weights.

        `reads`: its attention works on another layer's cache.
        """
        likeness = (kept, reads, tuple(map(self._likeness, units)))
        if likeness not in self._layers:
            self._layers[likeness] = self._layer(units, kept, reads=reads)
        return self._layers[likeness]

    def _likeness(self, unit: Unit) -> tuple[object, ...]:
        """All that the options of a unit depend on but its name."""
        layer = -1 if unit.layer is None else unit.layer
        routed = (self.choices.curves.get(layer), self.prices.distinct.get(layer)) if unit.experts else ()
        return (self.prices.likeness(unit), unit.size_bytes, unit.active_bytes, routed)

    def _layer(self, units: tuple[Unit, ...], kept: Memory, *, reads: bool) -> list[Placed]:
        found: list[Placed] = []
        for d, device in enumerate(self.devices):
            limit = device.max_alloc_bytes
            if (limit and self.buffers[device.name].largest_bytes > limit) or (
                (kept.kv or reads) and not attends(device, self.workload, self.prices.profile.timings)
            ):
                continue
            spots = [list(self._spots(unit, d)) for unit in units]
            found += [self._option(d, units, chosen, kept) for chosen in itertools.product(*spots)]
        return found

    def _too_large(self, device: Device, unit: Unit) -> bool:
        """Whether some tensor is larger than the largest buffer the device can allocate."""
        tensors = self.prices.tensors
        largest = max((tensors[name].size_bytes for name in unit.tensors), default=0)
        return bool(device.max_alloc_bytes) and largest > device.max_alloc_bytes

    def _spots(self, unit: Unit, d: int) -> Iterator[Spot]:
        """Where a unit may live when the layer device is `d`."""
        device = self.devices[d]
        if d == self.cpu:
            through = -1 if unit.kind is Kind.OUTPUT else self.first_gpu
            yield Spot(ON_CPU, self._weights({d: unit.size_bytes}), self._host_times(unit, through), True)
            return
        here = self.prices.on(unit, device.name)
        if unit.kind is Kind.OUTPUT:
            here += self._logits(device)
        able = self.prices.computes(unit, device.name)
        if able and not self._too_large(device, unit):
            yield Spot(Site.on(device.name), self._weights({d: unit.size_bytes + unit.tied_bytes}), here)
        # A tied head is the input table itself: an override would move both.
        apart = unit.kind in (Kind.FFN, Kind.EXPERTS) or (unit.kind is Kind.OUTPUT and not unit.tied_bytes)
        if apart and self.cpu >= 0:
            # Of the output head there is one row a sequence: too few.
            streams = able and device.kind == "gpu" and unit.kind is not Kind.OUTPUT
            times = self._host_times(unit, d if streams else -1)
            moved = self.prices.moved_bytes(unit)
            held = self._weights({self.cpu: moved, d: unit.size_bytes - moved})
            shares = self._no_cache() if unit.kind is Kind.EXPERTS else ()
            yield Spot(ON_CPU, held, times, True, shares)
        if able and unit.kind is Kind.EXPERTS and device.kind == "gpu" and self.cpu >= 0:
            yield from self._stripes(unit, d, here)
            yield from self._hybrid(unit, d, here)
            yield from self._cached(unit, d, here)

    def _host_times(self, unit: Unit, through: int) -> Times:
        cpu = self.devices[self.cpu].name
        streamed = through >= 0 and self.choices.op_offload
        return self.prices.on_host(unit, cpu, self.devices[through].name if streamed else None)

    def _logits(self, device: Device) -> Times:
        """The copy of the logits to the host."""
        row = 4 * self.prices.inventory.number("vocab_size")
        if self.cpu < 0:
            return Times(0, 0)
        names = device.name, self.devices[self.cpu].name
        step = self.prices.copy_ns(*names, row * self.prices.step_tokens)
        return Times(self.prices.per_token(step), self.prices.copy_ns(*names, row * self.workload.n_seq))

    def _stripes(self, unit: Unit, d: int, here: Times) -> Iterator[Spot]:
        device = self.devices[d]
        curve = self.choices.curves.get(unit.layer) if unit.layer is not None else None
        if not curve or not self.choices.stripes or not self.prices.zero_copy(device.name):
            return
        cold = self.prices.on(unit, device.name, "CUDA_Host")
        for stripe in stripe_widths(unit, self.prices, curve):
            small = unit.size_bytes - self.prices.divisible_bytes(unit)
            held = self._weights({d: stripe.device_bytes + small, self.cpu: stripe.host_bytes})
            times = _blend(here, cold, stripe)
            yield Spot(Site(SiteKind.STRIPE, device.name, stripe.k), held, times)

    def _hybrid(self, unit: Unit, d: int, here: Times) -> Iterator[Spot]:
        """Some experts in slots, the others computed by the CPU or brought by the bus meanwhile."""
        device, host = self.devices[d], self.devices[self.cpu]
        if not self.choices.hybrid or (device.memory_pool and device.memory_pool == host.memory_pool):
            return
        moved = self.prices.divisible_bytes(unit)
        each = moved // unit.experts
        copies = max(self._host_times(unit, d).prefill_ns - here.prefill_ns, 0)
        for slots in self._slots(unit, d):
            here_bytes = unit.size_bytes - moved + (slots.k + slots.guests) * each
            held = self._weights({d: here_bytes, self.cpu: moved})
            prefill = self._brought(unit, d, here.prefill_ns, copies, slots)
            times = Times(slots.step_ns, prefill, 0)
            stage = PER_DEVICE * len(self.devices) + self._n_cache() + d
            is_mapped = self.prices.host_memory is HostMemory.MAPPED
            shares = (stage, stage + len(self.devices)) if is_mapped else (stage,)  # the ring on the host
            yield Spot(Site(SiteKind.HYBRID, device.name, slots.k, slots.guests), held, times, shares=shares)

    def _slots(self, unit: Unit, d: int) -> Iterator[hybrid_slots.Slots]:
        """Numbers of slots with guests; with fewer guests and as many more slots where that is faster.

        And what pins name.
        """
        device, host = self.devices[d], self.devices[self.cpu]
        layer = -1 if unit.layer is None else unit.layer
        routed = hybrid_slots.Routed(
            unit.experts,
            unit.used,
            self.prices.step_tokens,
            self.workload.n_ubatch,
            self.choices.curves.get(layer) or hybrid_slots.flat(unit.experts),
            self.choices.followed.get(layer),
            self.choices.least_misses,
        )

        def of(guests: int, ks: Iterable[int]) -> list[hybrid_slots.Slots]:
            lanes = hybrid_slots.lanes_of(self.prices, unit, device, host, guests)
            return list(hybrid_slots.widths(routed, lanes, ks))

        usual = of(GUESTS, hybrid_slots.grid(unit.experts, STEPS))
        yield from usual
        fewer = [] if routed.follows else self._fewer_guests(usual, unit.experts, of)
        yield from fewer
        known = {(slots.k, slots.guests) for slots in (*usual, *fewer)}
        for site in self.asked:
            if site.device == device.name and (site.amount, site.guests) not in known:
                yield from of(site.guests, [site.amount])

    @staticmethod
    def _fewer_guests(
        usual: Sequence[hybrid_slots.Slots],
        n: int,
        of: Callable[[int, Iterable[int]], list[hybrid_slots.Slots]],
    ) -> list[hybrid_slots.Slots]:
        """In the memory of each number of slots, the fastest with fewer guests, if it is faster."""
        found: dict[int, hybrid_slots.Slots] = {}
        for guests in range(GUESTS):
            places = {min(slots.k + GUESTS - guests, n - 1): slots for slots in reversed(usual)}
            for slots in of(guests, places):
                before = places[slots.k]
                if slots.step_ns < found.get(before.k, before).step_ns:
                    found[before.k] = slots
        return list(found.values())

    def _brought(self, unit: Unit, d: int, here_ns: int, copies_ns: int, slots: hybrid_slots.Slots) -> int:
        """A prompt whose experts without a slot are brought: ahead of their layer, or when it has chosen.

        Ahead where a ubatch uses nearly all of them and the bus reads host memory by itself: then the
        slower of bus and computation counts, and all that has no slot is brought.
        """
        all_used = unit.used * self.workload.n_ubatch >= hybrid_slots.AHEAD * unit.experts
        if all_used and self.prices.host_memory is HostMemory.PINNED:
            slower = hybrid_slots.staged_ppm(self.prices, unit, self.devices[d].name)
            return max(here_ns, copies_ns * slower // PPM * (unit.experts - slots.k) // unit.experts)
        return here_ns + copies_ns * slots.cold_prefill_ppm // PPM

    def _n_cache(self) -> int:
        """How many shares the engine's MoE cache has."""
        return len(self.devices) * len(self.choices.cache) + 1 if self.choices.cache else 0

    def _cached(self, unit: Unit, d: int, here: Times) -> Iterator[Spot]:
        """Experts on the host behind the engine's cache: decoded on the GPU, prompts like host weights."""
        device = self.devices[d]
        if device.memory_pool and device.memory_pool == self.devices[self.cpu].memory_pool:
            return  # one memory: a cache would only copy within it
        moved = self.prices.divisible_bytes(unit)
        there = self._there(d, unit) + self._hand_over(self.cpu, d, 1)
        prefill = self._host_times(unit, d).prefill_ns + there.prefill_ns
        streaming = (PER_DEVICE * d + 1, PER_DEVICE * d + 2) if self._streams(d) else ()
        for n, point in enumerate(self.choices.cache):
            if not serves(point, unit, self.prices.step_tokens):
                continue
            slots = Memory(unit.size_bytes - moved, cache=moved * point.share_ppm // PPM)
            held = spread({d: slots, self.cpu: Memory(moved)}, len(self.devices))
            times = Times(here.decode_ns + self._misses_ns(unit, d, point), prefill, 0)
            shares = (*streaming, self._cache_share(d, n))
            site = Site(SiteKind.CACHE, device.name, point.share_ppm)
            yield Spot(site, held, times, shares=shares, splits=1)

    def _misses_ns(self, unit: Unit, d: int, point: CachePoint) -> int:
        """The router's choice read back, a new split, and every expert that is not there copied."""
        host, device = self.devices[self.cpu].name, self.devices[d].name
        copy, missing = self.prices.copy_ns, PPM - point.hit_ppm
        wanted = unit.used * self.prices.step_tokens
        missed = unit.active_bytes * self.prices.step_tokens * missing // PPM
        each = copy(host, device, 0)
        uploads = copy(host, device, missed) - each + each * wanted * missing // PPM
        waited = self.prices.calibration.split_ns + copy(device, host, 4 * wanted) + uploads
        return self.prices.per_token(waited)

    def _cache_share(self, d: int, n: int) -> int:
        """The share of the `n`-th cache size on a device."""
        return PER_DEVICE * len(self.devices) + d * len(self.choices.cache) + n

    def _no_cache(self) -> tuple[int, ...]:
        """The share of experts on the host, which the engine would cache whether planned so or not."""
        return (self._cache_share(len(self.devices), 0),) if self.choices.cache else ()

    def _option(self, d: int, units: tuple[Unit, ...], spots: tuple[Spot, ...], kept: Memory) -> Placed:
        """One combination of spots, with the changes of device inside the layer."""
        times = sum((s.times for s in spots), Times(0, 0))
        here = spread({d: kept}, len(self.devices))
        held = summed([here, *(s.held for s in spots)], len(self.devices))
        shares = {PER_DEVICE * d}
        splits = 0
        host_last = False
        for unit, spot in zip(units, spots, strict=True):
            shares |= set(spot.shares)
            if d == self.cpu:
                continue
            if spot.host:
                splits += 1
                times += self._there(d, unit)
                host_last = True
            elif host_last and unit.kind not in BOUND:
                splits += 1
                times += self._hand_over(self.cpu, d, 1)
                host_last = False
        streaming = d if splits else self.first_gpu if d == self.cpu else -1
        if streaming >= 0 and self._streams(streaming):
            shares |= {PER_DEVICE * streaming + n for n in (0, 1, 2)}
        if any(unit.kind is Kind.OUTPUT for unit in units):
            shares |= {PER_DEVICE * d + n for n in (0, 1, 3)}
        option = Option(
            entry=d,
            exit=self.cpu if host_last else d,
            sites=tuple(s.site for s in spots),
            decode_ns=times.decode_ns,
            prefill_ns=times.prefill_ns,
            memory=totals(held),
            shares=tuple(sorted(shares)),
            splits=splits + sum(s.splits for s in spots),
            parts=tuple(s.times.decode_ns for s in spots),
        )
        return Placed(option, held)

    def _streams(self, device: int) -> bool:
        long = self.workload.n_ubatch >= OFFLOAD_BATCH
        return self.choices.op_offload and long and self.devices[device].kind == "gpu"

    def _there(self, d: int, unit: Unit) -> Times:
        """From the layer device to the CPU and, for experts, one more row per expert on the way back."""
        there = self._hand_over(d, self.cpu, 1)
        if unit.used > 1:
            width = 4 * self.prices.inventory.number("embedding_length")
            names = self.devices[self.cpu].name, self.devices[d].name
            rows = self.prices.copy_ns(*names, unit.used * width) - self.prices.copy_ns(*names, width)
            there += Times(self.prices.per_token(rows * self.prices.step_tokens), 0)
        return there

    def _hand_over(self, source: int, target: int, rows: int) -> Times:
        """One change of device; a prompt long enough to be streamed stays on the GPU."""
        width = 4 * rows * self.prices.inventory.number("embedding_length")
        names = self.devices[source].name, self.devices[target].name
        decode = self.prices.per_token(self.prices.hand_over(*names, width * self.prices.step_tokens))
        prefill = sum(
            count * self.prices.hand_over(*names, width * batch)
            for batch, count in self.prices.batches
            if batch < OFFLOAD_BATCH or not self.choices.op_offload
        )
        return Times(decode, prefill)

    def _weights(self, sizes: Mapping[int, int]) -> Parts:
        """Weights by device."""
        return spread({d: Memory(size) for d, size in sizes.items()}, len(self.devices))


def serves(point: CachePoint, unit: Unit, tokens: int) -> bool:
    """Whether the engine caches a layer at this size and asks the cache for a step of this many tokens."""
    slots = unit.experts * point.share_ppm // PPM
    wanted = min(unit.used * tokens, unit.experts)
    return slots >= max(unit.used, wanted) and tokens <= _CACHED_BATCH


def _blend(hot: Times, cold: Times, stripe: Stripe) -> Times:
    """Experts read partly from the device's memory and partly across the bus."""

    def mix(near: int, far: int, cold_ppm: int) -> int:
        return near + max(far - near, 0) * cold_ppm // PPM

    return Times(
        mix(hot.decode_ns, cold.decode_ns, stripe.cold_decode_ppm),
        mix(hot.prefill_ns, cold.prefill_ns, stripe.cold_prefill_ppm),
        0,
    )
