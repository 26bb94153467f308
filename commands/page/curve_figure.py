"""Curves of a sweep: tokens/s of the plan, with its error, and of the best stock rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from commands.page.elements import Node, element, percent

_HEIGHT, _TOP, _FOOT = 240, 12, 26
_LEFT, _RIGHT = 0.11, 0.97
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Spot:
    """One solved point of a curve; rates are 0 where nothing fits."""

    x: float  # where on it: GiB, or tokens
    label: str
    key: str  # of the point among all of them
    rate: float
    low: float
    high: float
    stock: float


def curve(spots: Sequence[Spot], most: float, title: str, axis: str) -> Node:
    """The spots from left to right on one scale; what is chosen now is marked by the page's script."""
    drawing = element("svg", width="100%", height=_HEIGHT, role="img", aria_label=title, class_="curve")
    ticks = _scale(most)
    most = ticks[-1]
    for tick in ticks:
        y = _y(tick, most)
        drawing.append(element("line", x1=percent(_LEFT), x2=percent(_RIGHT), y1=y, y2=y, class_="rule"))
        label: dict[str, object] = {"x": percent(_LEFT - 0.01), "y": y, "class_": "axis middle"}
        drawing.append(element("text", f"{tick:g}", text_anchor="end", **label))
    _band(drawing, spots, most)
    for start, end in itertools.pairwise(spots):
        if start.stock and end.stock:
            drawing.append(_line(spots, start, end, start.stock, end.stock, most, "stock"))
        if start.rate and end.rate:
            drawing.append(_line(spots, start, end, start.rate, end.rate, most, "mine"))
    shown = max(1, -(-len(spots) // 6))
    for index, spot in enumerate(spots):
        x = percent(_x(spots, spot))
        if index % shown == 0:
            label = {"x": x, "y": _HEIGHT - 8, "text_anchor": "middle", "class_": "axis"}
            drawing.append(element("text", spot.label, **label))
        drawing.append(_dot(spot, x, most))
    legend = element(
        "ul",
        element("li", _sample("mine"), "plan"),
        element("li", _sample("error"), "the prediction's error"),
        element("li", _sample("stock"), "best stock rule"),
        element("li", f"across: {axis}; up: predicted tokens/s"),
        class_="legend",
    )
    return element("figure", element("figcaption", title), drawing, legend)


def _dot(spot: Spot, x: str, most: float) -> Node:
    if not spot.rate:
        cross = element("text", "×", x=x, y=_HEIGHT - _FOOT - 4, text_anchor="middle", class_="nothing")
        return element(
            "g", element("title", f"{spot.label}: does not fit"), cross, data_key=spot.key, class_="dot"
        )
    words = f"{spot.label}: {spot.rate:.1f} tokens/s ({spot.low:.1f}–{spot.high:.1f})"
    words += f", best stock rule {spot.stock:.1f}" if spot.stock else ", no stock rule fits"
    circle = element("circle", cx=x, cy=_y(spot.rate, most), r=5)
    return element("g", element("title", words), circle, data_key=spot.key, class_="dot")


def _band(drawing: Node, spots: Sequence[Spot], most: float) -> None:
    """The error of each point, as a bar behind the curve."""
    for spot in spots:
        if spot.rate:
            x = percent(_x(spots, spot))
            ends = {"x1": x, "x2": x, "y1": _y(spot.low, most), "y2": _y(spot.high, most)}
            drawing.append(element("line", class_="error", **ends))


def _line(
    spots: Sequence[Spot], start: Spot, end: Spot, y1: float, y2: float, most: float, name: str
) -> Node:
    ends = {"x1": percent(_x(spots, start)), "x2": percent(_x(spots, end))}
    return element("line", class_=name, y1=_y(y1, most), y2=_y(y2, most), **ends)


def _sample(name: str) -> Node:
    line = element("line", x1=0, x2=22, y1=7, y2=7, class_=name)
    return element("svg", line, class_="swatch", width=22, height=14, aria_hidden="true")


def _x(spots: Sequence[Spot], spot: Spot) -> float:
    first, last = spots[0].x, spots[-1].x
    share = (spot.x - first) / (last - first) if last > first else 0.5
    return _LEFT + 0.03 + share * (_RIGHT - _LEFT - 0.06)


def _y(rate: float, most: float) -> str:
    room = _HEIGHT - _TOP - _FOOT
    return f"{_TOP + room * (1 - min(rate / most, 1)):.1f}"


def _scale(most: float) -> list[float]:
    """Round figures from 0 to the first that nothing exceeds."""
    rough = most / _TICKS
    power = 10.0 ** (len(str(int(rough))) - 1) if rough >= 1 else 0.1
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    return [step * n for n in range(max(math.ceil(most / step - 1e-9), 1) + 1)]
