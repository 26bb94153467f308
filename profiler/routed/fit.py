"""Finds the habits whose streams show the figures asked for, by simulation: deterministic, seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import exp, log
from typing import TYPE_CHECKING, Any

from profiler.routed.codes import Habits, UnfitRouting, chosen_by_code
from profiler.routed.stream import codes_of
from profiler.routed.trace_figures import Figures, measure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Point = NDArray[np.float64]

TOKENS, LAYERS = 8192, 3  # of a simulation
NEAR = 0.03  # what a generated trace may differ from what was asked
# What may be varied, with bounds; all on a logarithmic scale.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "topic": (0.02, 3.0),
    "passage": (0.02, 4.0),
    "passage_tokens": (1.2, 200.0),
    "topic_tokens": (32, 1024),
    "drift": (0.02, 0.95),
}


def simulate(
    habits: Habits, asked: Figures, tokens: int = TOKENS, layers: int = LAYERS, seed: int = 1
) -> Figures:
    """The asked figures of a stream through the routers, without an engine."""
    stream = codes_of(habits, tokens, seed)
    chosen = chosen_by_code(habits, layers)[:, stream]
    return measure(chosen, habits.n_expert, asked, habits.topic_of(stream))


def gap(asked: Figures, found: Figures) -> float:
    """The largest difference between two sets of figures of one kind."""
    there = found.flat()
    return max((abs(there[name] - value) for name, value in asked.flat().items()), default=0.0)


def fit(start: Habits, asked: Figures, free: tuple[str, ...], evaluations: int = 80) -> Habits:
    """Habits near `start` that show what is `asked`; varies the fields named in `free`.

    The static coverage of `start` is set from the asked one where it has none. Raises UnfitRouting when
    nothing within NEAR was found: the message names the worst figure.
    """
    if asked.static and not start.static:
        start = replace(start, static=tuple(sorted(asked.static.items())))

    def habits_at(point: Point) -> Habits:
        changed: dict[str, Any] = {name: _value(name, x) for name, x in zip(free, point, strict=True)}
        return replace(start, **changed)

    def loss(point: Point) -> float:
        found = simulate(habits_at(point), asked).flat()
        return sum((found[name] - value) ** 2 for name, value in asked.flat().items())

    if free:
        first = [log(getattr(start, name) or BOUNDS[name][0]) for name in free]
        start = habits_at(_descend(loss, first, evaluations))
    found = simulate(start, asked)
    if gap(asked, found) > NEAR:
        there = found.flat()
        worst = max(asked.flat().items(), key=lambda pair: abs(there[pair[0]] - pair[1]))
        raise UnfitRouting(f"{worst[0]} {worst[1]:.2f}", f"the nearest found is {there[worst[0]]:.2f}")
    return start


def _value(name: str, x: float) -> float | int:
    low, high = BOUNDS[name]
    value = min(max(exp(x), low), high)
    return round(value) if name == "topic_tokens" else float(f"{value:.3g}")


def _descend(loss: Callable[[Point], float], first: list[float], evaluations: int) -> Point:
    """The simplex method of Nelder and Mead (1965)."""
    import numpy as np

    n = len(first)
    points = [np.array(first)] + [np.array(first) + 0.5 * row for row in np.eye(n)]
    values = [loss(point) for point in points]
    spent = n + 1
    while spent < evaluations:
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        away = centre - points[-1]
        tried = [(loss(centre + away), centre + away)]
        if tried[0][0] < values[0]:
            tried.append((loss(centre + 2 * away), centre + 2 * away))
        elif tried[0][0] >= values[-2]:
            tried.append((loss(centre - 0.5 * away), centre - 0.5 * away))
        spent += len(tried)
        best, where = min(tried, key=lambda pair: pair[0])
        if best < values[-1]:
            points[-1], values[-1] = where, best
        else:
            points = [points[0]] + [(point + points[0]) / 2 for point in points[1:]]
            values = [values[0]] + [loss(point) for point in points[1:]]
            spent += n
    return points[int(np.argmin(values))]
