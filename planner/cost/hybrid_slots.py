"""Experts with slots in device memory and the others beside them: what a step of such a layer takes.

The device computes the choices that have a slot; at the same time the CPU computes some of the others
and the bus brings the rest into guest slots, divided so that the later of the two ends first. The number
of misses differs from step to step, and a maximum of lanes is not the maximum of their means: the time is
an expectation over the distribution of misses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from planner.constants import CPU, PPM
from planner.cost.unit_time import Prices
from planner.machine.op_time import NS_PER_S
from planner.machine.profile import Device, Profile, SlotCosts
from planner.model.inventory import Tensor
from planner.model.units import Unit, divisible
from planner.plan.plan import FollowedLayer

# Read-back of the choice and the input, rewritten ids, rows sent back: 28 to 40 us a layer on an H200 with 16
# cores (docs/findings-hybrid.md). A profile that measured it says its own.
SYNC_NS = 40_000
# Without guests the device begins with what is resident before the host knows the choices: a layer that
# misses nothing is done so much sooner, one that misses something so much later, since its rows are added
# afterwards. From slots with and without guests side by side on H200s (docs/findings-hybrid.md); a profile
# that measured it says its own.
AHEAD_NS = 18_000
JOINED_NS = 5_000
# Choices of a ubatch for each expert from which on all experts are brought ahead of their layer: kEnough of
# runtime/hybrid/native/prefetch.cpp.
AHEAD = 4


@dataclass(frozen=True, slots=True)
class Lanes:
    """Nanoseconds of one layer's lanes, for one expert chosen by one token unless said otherwise."""

    gpu_ns: int  # the layer's experts on the device, all choices of a step
    pair_ns: int  # the CPU computes one missing expert, the bus idle
    upload_ns: int  # the bus brings one missing expert
    guests: int  # how many the bus may bring in a step
    sync_ns: int = SYNC_NS  # once a layer and step
    ahead_ns: int = 0  # less of it where nothing is missed and the device began before the host knew that
    joined_ns: int = 0  # more where it began so, and something is missed
    busy_ns: int = 0  # of the bus, with experts for later steps
    beside_ns: int = 0  # `pair_ns` while the bus reads host memory too; 0: the same
    pair_start_ns: int = 0  # once a step that the CPU has a part in
    upload_start_ns: int = 0  # once a step that the bus has a part in


def lanes_of(prices: Prices, unit: Unit, device: Device, host: Device, guests: int) -> Lanes:
    """What the lanes take for a unit of experts: as measured together where the profile has it.

    Else put together from what CPU and bus take apart. The bus is served first: while it brings experts, it
    takes its part of the host memory that the CPU reads.
    """
    gpu_ns, tokens = prices.on(unit, device.name).decode_ns, prices.step_tokens
    each = prices.divisible_bytes(unit) // unit.experts
    chosen = max(min(unit.experts, unit.used * tokens), 1)
    found = measured(prices.profile, device.name, main_type(unit, prices.tensors))
    if found is not None:
        lanes = _scaled(found, each, gpu_ns, guests, unit.used * tokens / chosen)
    else:
        pair_ns = prices.on(unit, host.name).decode_ns // chosen
        upload_ns = prices.stream_ns(host.name, device.name, each)
        taken = each * NS_PER_S // max(upload_ns, 1)
        beside_ns = pair_ns + pair_ns * taken // host.bandwidth_bytes_per_s
        lanes = Lanes(gpu_ns, pair_ns, upload_ns, guests, beside_ns=beside_ns)
    return _begun_ahead(lanes, found) if not guests and tokens == 1 else lanes


def _begun_ahead(lanes: Lanes, found: SlotCosts | None) -> Lanes:
    """The same where the device does not wait for the choices: single tokens, and no guests."""
    ahead_ns = found.ahead_ns if found and found.ahead_ns is not None else AHEAD_NS
    joined_ns = found.joined_ns if found and found.joined_ns is not None else JOINED_NS
    return replace(lanes, ahead_ns=min(ahead_ns, lanes.sync_ns), joined_ns=joined_ns)


def measured(profile: Profile, device: str, type_: str) -> SlotCosts | None:
    """What was measured of a device's slots, of experts of that type if there are any."""
    here = [costs for costs in profile.slots or () if costs.device == device]
    return next((costs for costs in here if costs.type == type_), here[0] if here else None)


def staged_ppm(prices: Prices, unit: Unit, device: str) -> int:
    """How much longer a prompt's copies take that run ahead under computation than copies alone."""
    found = measured(prices.profile, device, main_type(unit, prices.tensors))
    if found is None or not found.staged_bytes_per_s:
        return PPM
    alone = prices.stream_ns(CPU, device, found.expert_bytes)
    return max(found.expert_bytes * NS_PER_S * PPM // (found.staged_bytes_per_s * max(alone, 1)), PPM)


def main_type(unit: Unit, tensors: Mapping[str, Tensor]) -> str:
    """The type that most bytes of a unit's experts have."""
    sizes: dict[str, int] = {}
    for tensor in (tensors[name] for name in divisible(unit)):
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size_bytes
    return max(sorted(sizes), key=lambda kind: sizes[kind], default="")


def _scaled(found: SlotCosts, each: int, gpu_ns: int, guests: int, pairs: float) -> Lanes:
    """Measured costs for experts of `each` bytes, each wanted by so many tokens of a step."""

    def of_bytes(ns: int) -> int:
        return max(ns * each // found.expert_bytes, 1)

    return Lanes(
        gpu_ns=gpu_ns,
        pair_ns=round(of_bytes(found.pair_ns) * pairs),
        upload_ns=of_bytes(found.upload_ns),
        guests=guests,
        sync_ns=found.sync_ns,
        beside_ns=round(of_bytes(found.beside_ns) * pairs),
        pair_start_ns=found.pair_start_ns,
        upload_start_ns=found.upload_start_ns,
    )


@dataclass(frozen=True, slots=True)
class Slots:
    """One number of slots for a layer."""

    k: int
    guests: int
    step_ns: int  # expected, one step
    cold_prefill_ppm: int  # of the bytes that a ubatch reads: those without a slot


def step_ns(lanes: Lanes, misses: int, comes: int = 0) -> int:
    """One step with so many distinct missing experts, divided between CPU and bus as well as it goes.

    The device computes what has a slot and what was brought in one product, so after the last upload. `comes`
    of them get slots, in which the bus brings them in any case.
    """
    ways = []
    if not comes:
        ways.append(max(lanes.gpu_ns, _cpu_ns(lanes, misses, lanes.pair_ns), lanes.busy_ns))
    for brought in range(max(comes, 1), min(misses, lanes.guests + comes) + 1):
        bus = lanes.busy_ns + lanes.upload_start_ns + brought * lanes.upload_ns
        cpu = _cpu_ns(lanes, misses - brought, lanes.beside_ns or lanes.pair_ns)
        ways.append(max(bus + lanes.gpu_ns, cpu))
    return min(ways) + lanes.sync_ns + (lanes.joined_ns if misses else -lanes.ahead_ns)


def _cpu_ns(lanes: Lanes, pairs: int, each_ns: int) -> int:
    return lanes.pair_start_ns + pairs * each_ns if pairs else 0


def expected_ns(lanes: Lanes, chosen: int, missing: float) -> int:
    """The expectation of `step_ns` when `missing` of `chosen` distinct experts have no slot on average.

    Each choice misses independently with the same probability: binomial.
    """
    steps = _steps(lanes, chosen)
    odds = binomial(chosen, missing / max(chosen, 1))
    return round(math.fsum(p * steps[m] for m, p in enumerate(odds)))


@lru_cache(maxsize=1 << 10)
def _steps(lanes: Lanes, most: int) -> tuple[int, ...]:
    """`step_ns` of 0 … `most` misses: all numbers of slots of a layer ask for the same."""
    return tuple(step_ns(lanes, misses) for misses in range(most + 1))


def on_demand_ns(lanes: Lanes, chosen: int, missing: float, least: int, admitted: float) -> int:
    """The same where `admitted` experts a step get slots: one in a step, first in steps that miss `least`."""
    odds = binomial(chosen, missing / max(chosen, 1))
    many, few = math.fsum(odds[least:]), math.fsum(odds[1:least])
    share = min(admitted / max(many, 1e-12), 1.0)
    rest = min(max(admitted - many, 0.0) / max(few, 1e-12), 1.0)
    found = 0.0
    for misses, p in enumerate(odds):
        comes = share if misses >= least else rest if misses else 0.0
        found += p * (1.0 - comes) * step_ns(lanes, misses)
        found += p * comes * step_ns(lanes, misses, 1) if comes else 0.0
    return round(found)


def binomial(n: int, p: float) -> tuple[float, ...]:
    """Probabilities of 0 … n successes; by multiplication alone, so that every machine rounds alike."""
    p = min(max(p, 0.0), 1.0)
    found = [1.0]
    for _ in range(n):
        found = [
            (found[m] if m < len(found) else 0.0) * (1.0 - p) + (found[m - 1] * p if m else 0.0)
            for m in range(len(found) + 1)
        ]
    return tuple(found)


@dataclass(frozen=True)
class Routed:
    """The experts of a layer, and what is known of their choices.

    `curve[k]` is the share of choices that the k hottest of `n` serve on tokens not seen before; `followed`
    says what slots serve whose experts change with the text, in steps of one token (of several nothing is
    known): on demand in steps with `least_misses`, else at any time.
    """

    n: int
    used: int  # by a token
    tokens: int  # of a step
    ubatch: int
    curve: Sequence[float]
    followed: FollowedLayer | None = None
    least_misses: int = 0

    @cached_property
    def touched(self) -> tuple[float, ...]:
        """How likely a step chooses the hottest expert, the next, and so on."""
        return tuple(_touched(self.used * share, self.tokens) for share in self._shares)

    @cached_property
    def in_prompt(self) -> tuple[float, ...]:
        """The same of a ubatch."""
        return tuple(_touched(self.used * share, self.ubatch) for share in self._shares)

    @property
    def _shares(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.curve)]

    @property
    def follows(self) -> FollowedLayer | None:
        """What slots serve that follow the text, if they do in such steps."""
        return self.followed if self.tokens == 1 else None

    def admits(self, k: int, guests: int) -> bool:
        """Whether k slots can be had beside guests.

        Kernels for several tokens need a place of its own for each choice of a token, or all go to the CPU.
        """
        fits = 0 < k < self.n and len(self.curve) == self.n + 1
        return fits and (self.tokens == 1 or k + guests >= self.used)


def grid(n: int, steps: int) -> tuple[int, ...]:
    """Up to `steps` numbers of slots, evenly spaced, of a layer of `n` experts."""
    return tuple(dict.fromkeys(round(n * step / steps) for step in range(1, steps)))


def widths(routed: Routed, lanes: Lanes, ks: Iterable[int]) -> Iterator[Slots]:
    """Those of some numbers of slots that a layer can have, with what its steps take."""
    return (_slots(routed, lanes, k) for k in ks if routed.admits(k, lanes.guests))


def _slots(routed: Routed, lanes: Lanes, k: int) -> Slots:
    cold = math.fsum(routed.in_prompt[k:]) / max(math.fsum(routed.in_prompt), 1e-12)
    chosen = min(routed.n, routed.used * routed.tokens)
    if routed.follows is None:
        ns = expected_ns(lanes, chosen, math.fsum(routed.touched[k:]))
        return Slots(k, lanes.guests, ns, round(cold * PPM))
    lanes = replace(lanes, ahead_ns=0, joined_ns=0)  # the device knows no slots that change
    hit, admitted = served(routed.follows, k, routed.n)
    missing = chosen * (1.0 - hit)
    if routed.least_misses:
        ns = on_demand_ns(lanes, chosen, missing, routed.least_misses, admitted)
    else:
        ns = expected_ns(replace(lanes, busy_ns=round(lanes.upload_ns * admitted)), chosen, missing)
    return Slots(k, lanes.guests, ns, round(cold * PPM))


def served(layer: FollowedLayer, k: int, n: int) -> tuple[float, float]:
    """Share of choices that k of n slots serve, and experts that take a slot in a step, between what was
    replayed.
    """
    points = [
        (0, 0, 0),
        *zip(layer.slots, layer.hit_ppm, layer.admitted_ppm, strict=True),
        (n, PPM, 0),
    ]
    for (a, hit, came), (b, more, then) in itertools.pairwise(points):
        if a <= k <= b and a < b:
            part = (k - a) / (b - a)
            return (hit + (more - hit) * part) / PPM, (came + (then - came) * part) / PPM
    return 1.0, 0.0


@lru_cache(maxsize=1 << 14)
def _touched(rate: float, tokens: int) -> float:
    """The probability that one of `tokens` chooses an expert that a token chooses with probability `rate`."""
    missed, by_one = 1.0, 1.0 - min(rate, 1.0)
    for _ in range(tokens):
        missed *= by_one
    return 1.0 - missed


def flat(n: int) -> tuple[float, ...]:
    """The curve of routing about which nothing is known."""
    return tuple(k / n for k in range(n + 1))
