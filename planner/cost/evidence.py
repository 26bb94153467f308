"""What a predicted time stands on: each part of it with the figure it comes from, and how that is known.

A figure is what a mistake would have in common: the rate of one device's memory, its timed operators, copies
over the bus. Parts add up to the predicted time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.constants import CPU, PPM
from planner.cost.build_problem import Priced
from planner.cost.hybrid_slots import main_type, measured
from planner.cost.unit_time import Operator, Prices
from planner.machine import op_time
from planner.machine.host_memory import HostMemory
from planner.model.units import Kind, Unit
from planner.site import ON_CPU, Site, SiteKind
from planner.site import sites as sites_of
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Solution

MEASURED, INTERPOLATED, SCALED, ASSUMED = "measured", "interpolated", "scaled", "assumed"
_WORDS: Mapping[str, str] = {"measured": MEASURED, "between": INTERPOLATED, "scaled": SCALED}
TIMED, MEMORY, ARITHMETIC, SMALL = "timed", "memory", "arithmetic", "small"
ATTENTION = "attention"  # arithmetic of a GPU's attention: other kernels than those that rates are of
SHARED, SLOTS = "divided", "slots"
COPIES, MAPPED, CHANGES, MIXED, TOKEN = "copies", "mapped copies", "changes", "mixed graph", "token"


_TOLD = 0.15**2 * PPM  # variance of a logarithm, in millionths, below which runs told a figure


@dataclass(frozen=True, slots=True)
class Part:
    """Nanoseconds that rest on one figure, with what they are spent on."""

    figure: str  # kind, and the device where it is one's own: "memory CUDA0"
    basis: str  # MEASURED, INTERPOLATED, SCALED or ASSUMED
    ns: int
    what: str = ""  # the operator
    spread_ppm: int = 0  # of its measurements


def of_token(priced: Priced, solution: Solution, found: Evaluation) -> tuple[Part, ...]:
    """The parts of the time of one token."""
    prices, units = priced.prices, {unit.name: unit for unit in priced.model.units}
    alike: dict[object, tuple[Part, ...]] = {}  # units that take the same time have the same parts
    times: Counter[object] = Counter()
    for decision, option in zip(priced.problem.decisions, solution.chosen(priced.problem), strict=True):
        for name, site, ns in zip(decision.units, sites_of(option.sites), _times(option.parts), strict=False):
            unit = units[name]
            key = name if site.divided else (prices.likeness(unit), site, ns)
            if key not in alike:
                alike[key] = _joined(_unit(prices, unit, site, ns))
            times[key] += 1
    parts = _multiplied(alike, times)
    own = sum(part.ns for part in parts)
    token = priced.problem.decode_ns
    parts += _between(prices, found.splits, found.decode_ns - own - found.mixed_ns - token)
    parts += [Part(MIXED, _fitted(prices), found.mixed_ns), Part(TOKEN, _fitted(prices), token)]
    return _joined(parts)


def of_prompt(priced: Priced, solution: Solution, found: Evaluation) -> tuple[Part, ...]:
    """The parts of the time of the prompt."""
    prices, units = priced.prices, {unit.name: unit for unit in priced.model.units}
    alike: dict[object, tuple[Part, ...]] = {}
    times: Counter[object] = Counter()
    names = [d.device for d in priced.problem.devices]
    first = next((d.device for d in priced.problem.devices if d.kind == "gpu"), "")
    streams = priced.copies
    for decision, option in zip(priced.problem.decisions, solution.chosen(priced.problem), strict=True):
        home = names[option.entry]
        for name, site in zip(decision.units, sites_of(option.sites), strict=True):
            unit = units[name]
            host = site == ON_CPU and decision.layer and unit.kind is not Kind.OUTPUT
            through = (first if home == CPU else home) if host and streams else ""
            # Experts that a prompt touches are counted layer by layer, so what is copied differs by more.
            total = prices.on_host(unit, CPU, through).prefill_ns if through else 0
            key = prices.likeness(unit), site.device, through, total
            if key not in alike:
                alike[key] = _joined(_prompt(prices, unit, site, through, total))
            times[key] += 1
    parts = _multiplied(alike, times)
    own = sum(part.ns for part in parts)
    return _joined([*parts, Part(CHANGES, _fitted(prices), found.prefill_ns - own)])


def _multiplied(alike: Mapping[object, tuple[Part, ...]], times: Mapping[object, int]) -> list[Part]:
    """The parts of all units, of those that are alike together."""
    return [
        Part(part.figure, part.basis, part.ns * times[key], part.what, part.spread_ppm)
        for key, parts in alike.items()
        for part in parts
    ]


def _times(parts: Sequence[int]) -> Iterator[int]:
    yield from parts
    while True:  # tables have no time of their own in a problem
        yield -1


def _unit(prices: Prices, unit: Unit, site: Site, ns: int) -> Iterator[Part]:
    """One unit at decode; `ns` -1: what its device takes."""
    device = site.device
    priced = prices.on(unit, device).decode_ns
    total = priced if ns < 0 else ns
    if site.divided:
        basis = _slots_basis(prices, unit, device) if site.kind is SiteKind.HYBRID else ""
        figure = f"{SLOTS if basis else SHARED} {device}"
        yield Part(figure, basis or _basis_of(prices, unit, device), total, f"{unit.name} divided")
        return
    found = [
        part
        for op, count in prices.token_operators(unit, device)
        for part in _operator(prices, op, device, count)
    ]
    yield from _filled(found, total)


def _prompt(prices: Prices, unit: Unit, site: Site, through: str, total: int) -> Iterator[Part]:
    """One unit at the prompt, copied to `through` in `total` where that is a device."""
    device = through or site.device
    found = [
        part
        for op, count in prices.prompt_operators(unit, device)
        for part in _operator(prices, op, device, count)
    ]
    if not through:
        yield from _filled(found, prices.on(unit, device).prefill_ns)
        return
    here = prices.on(unit, device).prefill_ns
    yield from _filled(found, min(here, total))
    mapped = prices.host_memory is not HostMemory.PINNED
    known = any(
        li.target == through and li.source == CPU and li.mapped_bytes_per_s for li in prices.profile.links
    )
    basis = MEASURED if prices.profile.measured and (known or not mapped) else ASSUMED
    yield Part(MAPPED if mapped else COPIES, basis, max(total - here, 0))


def _operator(prices: Prices, op: Operator, device: str, count: int) -> Iterator[Part]:
    ns = op.time.ns * op.count * count
    if not ns:
        return
    small = prices.profile.device(device).op_overhead_ns * op.count * count
    if op.case is None:
        yield Part(f"{SMALL} {device}", _small(prices), ns)
        return
    what = f"{op.case.label} on {device}"
    if op.time.basis in _WORDS:
        yield Part(f"{TIMED} {device}", _WORDS[op.time.basis], ns, what, op.time.spread_ppm)
        return
    kind = ARITHMETIC if op_time.computes(prices.profile, op.case, device) else MEMORY
    if kind == ARITHMETIC and op.case.op == "FLASH_ATTN_EXT" and device != CPU:
        kind = ATTENTION
    yield Part(f"{SMALL} {device}", _small(prices), min(small, ns))
    yield Part(f"{kind} {device}", _rate(prices, f"{kind} {device}"), max(ns - small, 0), what)


def _slots_basis(prices: Prices, unit: Unit, device: str) -> str:
    """Slots are measured by their type, scaled from another, or put together from what CPU and bus take."""
    kind = main_type(unit, prices.tensors)
    found = measured(prices.profile, device, kind)
    return ASSUMED if found is None else MEASURED if found.type == kind else SCALED


def _basis_of(prices: Prices, unit: Unit, device: str) -> str:
    times = prices.on(unit, device)
    return MEASURED if 2 * times.measured_ns > times.decode_ns else ASSUMED


def _fitted(prices: Prices) -> str:
    """Figures of whole graphs are measured where whole models ran."""
    return MEASURED if prices.calibration.runs else ASSUMED


def _rate(prices: Prices, figure: str) -> str:
    """A rate is measured where runs of whole models tell it, assumed elsewhere."""
    known = any(one.figure == figure and one.covariance[-1] < _TOLD for one in prices.profile.doubts or ())
    return MEASURED if known else ASSUMED


def _small(prices: Prices) -> str:
    return MEASURED if prices.profile.measured or prices.calibration.runs else ASSUMED


def _filled(parts: Sequence[Part], total: int) -> Iterator[Part]:
    """The parts in proportion, so that they add up to `total`: scales, tokens of a step."""
    own, begun, given = sum(part.ns for part in parts), 0, 0
    for part in parts:
        begun += part.ns
        share = total * begun // max(own, 1) - given
        given += share
        yield Part(part.figure, part.basis, share, part.what, part.spread_ppm)
    if not parts and total:
        yield Part(TOKEN, ASSUMED, total)


def _between(prices: Prices, splits: int, ns: int) -> Iterator[Part]:
    """Changes of device: the scheduler's part and the copies."""
    changes = min(max(splits - 1, 0) * prices.calibration.split_ns, max(ns, 0))
    yield Part(CHANGES, _fitted(prices), changes)
    yield Part(COPIES, MEASURED if prices.profile.measured else ASSUMED, ns - changes)


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts of one operator and figure are one, most first; nothing is lost."""
    times: dict[tuple[str, str, str, int], int] = defaultdict(int)
    for part in parts:
        times[part.figure, part.basis, part.what, part.spread_ppm] += part.ns
    made = [
        Part(figure, basis, ns, what, spread) for (figure, basis, what, spread), ns in times.items() if ns
    ]
    return tuple(sorted(made, key=lambda p: (-p.ns, p.figure, p.what)))


def by_basis(parts: Iterable[Part]) -> dict[str, int]:
    """Share of the time on each basis, in millionths that add up to one."""
    times = dict.fromkeys((MEASURED, INTERPOLATED, SCALED, ASSUMED), 0)
    for part in parts:
        times[part.basis] += part.ns
    return {basis: share for basis, share in _shared(times, PPM).items() if times[basis]}


def in_words(basis_ppm: Mapping[str, int]) -> str:
    """Such shares as percentages that add up to 100: `61 % measured, 39 % scaled`."""
    return ", ".join(f"{share or '<1'} % {basis}" for basis, share in _shared(basis_ppm, 100).items())


def _shared(amounts: Mapping[str, int], whole: int) -> dict[str, int]:
    """`whole` in proportion to amounts, what rounding leaves to the largest remainders."""
    total = sum(amounts.values())
    if total <= 0:
        return dict.fromkeys(amounts, 0)
    found = {name: amount * whole // total for name, amount in amounts.items()}
    left = whole - sum(found.values())
    for name in sorted(amounts, key=lambda name: (-(amounts[name] * whole % total), name))[:left]:
        found[name] += 1
    return found


def unmeasured(parts: Iterable[Part]) -> tuple[tuple[str, int], ...]:
    """Operators that no measurement of their own shape stands behind, and their nanoseconds, most first."""
    times: dict[str, int] = defaultdict(int)
    for part in parts:
        if part.what and part.basis in (SCALED, ASSUMED):
            times[part.what] += part.ns
    return tuple(sorted(times.items(), key=lambda item: (-item[1], item[0])))
