"""Patterns that tell colours apart for eyes that do not, and in print."""

from __future__ import annotations

from commands.page.elements import Node, element

_SIZE = 6
_PATHS = {
    "slant": ("p-cpu", "M-1 1 l2 -2 M0 6 l6 -6 M5 7 l2 -2"),
    "back": ("p-bus", "M-1 5 l2 2 M0 0 l6 6 M5 -1 l2 2"),
    "grid": ("p-gpu3", "M0 3 h6 M3 0 v6"),
    "level": ("p-reserve", "M0 3 h6"),
}
_DOTS = {"dots": "p-gpu1", "specks": "p-state"}


def patterns() -> Node:
    """An invisible drawing that the others refer to."""
    found = [
        _pattern(name, fill, element("path", d=d, class_="p-mark")) for name, (fill, d) in _PATHS.items()
    ]
    found += [
        _pattern(name, fill, element("circle", cx=3, cy=3, r=1.2, class_="p-dot"))
        for name, fill in _DOTS.items()
    ]
    return element("svg", element("defs", *found), class_="patterns", aria_hidden="true")


def _pattern(name: str, fill: str, mark: Node) -> Node:
    back = element("rect", width=_SIZE, height=_SIZE, class_=fill)
    return element("pattern", back, mark, id=name, width=_SIZE, height=_SIZE, patternUnits="userSpaceOnUse")
