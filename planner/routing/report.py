"""What heat says: coverage on sources not seen, lift against whole layers, transfer, and a verdict."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.routing import coverage
from planner.routing.coverage import Floats, Sources
from planner.routing.expert_counts import Heat, Phase, only

RESIDENT = (0.0625, 0.125, 0.25, 0.5)  # shares of experts that the report looks at
LEAST_SAVING = 0.05  # of the bytes that would otherwise be read cold; below it, skew is not worth a plan
MAX_TRANSFER = 16  # sources; more would be a table nobody reads
_REPLICATES = 2000


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer; coverage at the asked residency."""

    layer: int
    choices: int  # routed choices seen
    touched: int  # experts chosen at least once
    entropy_bits: float
    gini: float
    in_sample: float  # coverage of the hot set on what it was chosen on
    expected: float  # on tokens not seen


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean coverage over layers with a 95 % interval; `low == high == value` with a single source."""

    resident: float  # share of experts held
    in_sample: float
    value: float
    low: float
    high: float

    @property
    def lift(self) -> float:
        """Against whole layers on the device, which serve their own share of the choices."""
        return self.value / self.resident

    @property
    def saving(self) -> float:
        """Share of cold bytes saved against whole layers, by the low end of the interval."""
        return 1.0 - (1.0 - self.low) / (1.0 - self.resident)


@dataclass(frozen=True, slots=True)
class Report:
    """All of it; `transfer[i][j]`: chosen on source i, judged on source j (empty for many sources)."""

    resident: float
    sources: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    curve: tuple[float, ...]  # mean expected coverage by number of hot experts
    intervals: tuple[Interval, ...]
    transfer: tuple[tuple[float, ...], ...]
    phases: tuple[tuple[str, str, float, float], ...]  # chosen on, judged on, coverage, own coverage
    verdict: str
    exploitable: bool


def report(heat: Heat, resident: float = 0.25, n_group: int = 1) -> Report:
    """Judge heat at a share of resident experts (0 < resident < 1)."""
    sources = coverage.sources_of(heat)
    curves = coverage.curves(heat, n_group)
    levels = sorted({*RESIDENT, resident})
    intervals = _intervals(sources, curves, levels, n_group)
    asked = next(i for i in intervals if i.resident == resident)
    exploitable = asked.saving >= LEAST_SAVING
    return Report(
        resident,
        sources.names,
        tuple(_layer(sources, curves, index, resident) for index in range(len(sources.layers))),
        coverage.mean_curve(curves),
        intervals,
        _transfer(sources, _held(heat.n_expert, resident)) if len(sources.names) <= MAX_TRANSFER else (),
        _phases(heat, _held(heat.n_expert, resident)),
        _verdict(asked, len(sources.names), exploitable),
        exploitable,
    )


def _held(n_expert: int, resident: float) -> int:
    return max(1, min(n_expert, round(resident * n_expert)))


def _layer(
    sources: Sources, curves: dict[int, tuple[float, ...]], index: int, resident: float
) -> LayerReport:
    counts = sources.counts[:, index].sum(axis=0)
    layer = sources.layers[index]
    n = len(counts)
    k = _held(n, resident)
    ascending = np.sort(counts)
    total = float(counts.sum())
    shares = counts[counts > 0] / total
    gini = float((2 * np.arange(1, n + 1) - n - 1) @ ascending / (n * total))
    return LayerReport(
        layer,
        int(total),
        int((counts > 0).sum()),
        float(-(shares * np.log2(shares)).sum()),
        gini,
        float(ascending[n - k :].sum() / total),
        curves[layer][k],
    )


def _intervals(
    sources: Sources, curves: dict[int, tuple[float, ...]], levels: Sequence[float], n_group: int
) -> tuple[Interval, ...]:
    """One interval a level of residency; each source is judged once, by what the others chose."""
    mean = coverage.mean_curve(curves)
    pooled = np.sort(sources.counts.sum(axis=0), axis=1)[:, ::-1]
    own = (np.cumsum(pooled, axis=1) / pooled.sum(axis=1, keepdims=True)).mean(axis=0)
    each = _by_source(sources, n_group) if len(sources.names) > 1 else None
    weight = [float(trust) for trust in sources.trust.mean(axis=1)]
    made = []
    for level in levels:
        k = _held(sources.counts.shape[2], level)
        low = high = mean[k]
        if each is not None:
            low, high = _bootstrap([float(v) for v in each[:, k]], weight)
        made.append(Interval(level, float(own[k - 1]), mean[k], min(low, mean[k]), max(high, mean[k])))
    return tuple(made)


def _by_source(sources: Sources, n_group: int) -> Floats:
    """Held-out coverage of each source, mean of its layers; (sources, experts + 1)."""
    each = np.zeros((len(sources.names), sources.counts.shape[2] + 1))
    for orders, _, judges in coverage.folds(sources, n_group):
        for index in judges:
            seen = sources.counts[index].sum(axis=1) > 0
            each[index] = coverage.cumulative(sources.counts[index], orders)[seen].mean(axis=0)
    return each


def _bootstrap(each: Sequence[float], weight: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the weighted mean, sources drawn with replacement (percentiles)."""
    rng = random.Random(1)
    places = range(len(each))
    means = []
    for _ in range(_REPLICATES):
        drawn = rng.choices(places, k=len(each))
        total = math.fsum(weight[i] for i in drawn)
        means.append(math.fsum(weight[i] * each[i] for i in drawn) / max(total, 1e-12))
    means.sort()
    return means[_REPLICATES // 40], means[-1 - _REPLICATES // 40]


def _transfer(sources: Sources, k: int) -> tuple[tuple[float, ...], ...]:
    """Mean coverage of each source's own hot set on every source."""
    rows = []
    for counts in sources.counts:
        orders = np.argsort(-counts, axis=1, kind="stable")
        rows.append(tuple(_mean_at(coverage.cumulative(c, orders), c, k) for c in sources.counts))
    return tuple(rows)


def _mean_at(curve: Floats, counts: Floats, k: int) -> float:
    return float(curve[counts.sum(axis=1) > 0, k].mean())


def _phases(heat: Heat, k: int) -> tuple[tuple[str, str, float, float], ...]:
    """Whether what is hot while reading is hot while writing, and the other way round."""
    found = {p.phase for p in heat.parts}
    if not {Phase.PREFILL, Phase.DECODE} <= found:
        return ()
    rows = []
    for one, two in ((Phase.PREFILL, Phase.DECODE), (Phase.DECODE, Phase.PREFILL)):
        chosen, judged = coverage.hot_order(only(heat, one)), only(heat, two)
        across = coverage.judge(judged, chosen)
        own = coverage.judge(judged, coverage.hot_order(judged))
        shared = [la for la in across if la in own]
        rows.append(
            (
                str(one),
                str(two),
                float(np.mean([across[la][k] for la in shared])),
                float(np.mean([own[la][k] for la in shared])),
            )
        )
    return tuple(rows)


def _verdict(asked: Interval, n_sources: int, exploitable: bool) -> str:
    at = f"{asked.resident:.0%} of the experts"
    basis = "judged on sources not seen" if n_sources > 1 else "from a single source, discounted"
    if exploitable:
        return f"{at} serve {asked.value:.0%} of the choices (lift {asked.lift:.2f}), {basis}: worth using"
    return (
        f"no exploitable skew: {at} serve {asked.value:.0%} of the choices (lift {asked.lift:.2f}), {basis}; "
        f"whole layers do as well with fewer splits"
    )
