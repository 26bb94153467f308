"""How wide each column of a table is: empty columns leave, and words are never broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Letters = Callable[[str], int]  # places that a text takes on a terminal
_BETWEEN = 3  # letters between two columns
_EDGE = 2  # outside of the first and the last
_LONG = 60  # words above this, as strangers' names may be, are broken all the same
_FIGURE = re.compile(r"[-+±<>~]?[0-9][0-9 \u202f.,]*(?: ?[A-Za-z%/]{1,9})?")
_MIB = " MiB"
_NOTHING = ("", "-")


@dataclass(frozen=True, slots=True)
class Layout:
    """A table as it is to be shown."""

    head: list[str]
    rows: list[list[str]]
    widths: list[int]  # of the columns, in letters
    total: int  # letters of a whole line


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, letters: Letters) -> Layout:
    """The columns that say something, within `width` letters where words allow it; `letters` measures."""
    full = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    kept = [i for i in range(len(head)) if i == 0 or not rows or any(r[i] not in _NOTHING for r in full)]
    names, cells = [head[i] for i in kept], [[row[i] for i in kept] for row in full]
    if _total(_natural(names, cells, letters)) > width:
        names, cells = _unit_above(names, cells)
    natural, least = _natural(names, cells, letters), _least(names, cells, letters)
    figures = [max(map(letters, column), default=0) for column in zip(*cells, strict=True)] or least
    # Heads go on below first: a cell in two lines is harder to read than a head in two.
    widths = _shrunk(natural, list(map(max, least, figures)), width)
    widths = _shrunk(widths, least, width)
    return Layout(names, cells, widths, _total(widths))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _BETWEEN * (len(widths) - 1) + _EDGE


def _natural(head: Sequence[str], rows: Sequence[Sequence[str]], letters: Letters) -> list[int]:
    return [max(map(letters, column)) for column in _columns(head, rows)]


def _least(head: Sequence[str], rows: Sequence[Sequence[str]], letters: Letters) -> list[int]:
    """The longest part of each column that stays on one line: a word, or a figure with its unit."""
    return [min(max(_piece(cell, letters) for cell in column), _LONG) for column in _columns(head, rows)]


def _piece(text: str, letters: Letters) -> int:
    if _FIGURE.fullmatch(text):
        return letters(text)
    return max(map(letters, text.split()), default=0)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    return list(zip(head, *rows, strict=True))


def _unit_above(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """MiB once in the head of a column where every figure has it."""
    names, changed = list(head), [list(row) for row in rows]
    for i in range(1, len(names)):
        said = [row[i] for row in changed if row[i] not in _NOTHING]
        if said and all(text.endswith(_MIB) and _FIGURE.fullmatch(text) for text in said):
            names[i] = f"{names[i]}{_MIB}"
            for row in changed:
                row[i] = row[i].removesuffix(_MIB)
    return names, changed


def _shrunk(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Widths of columns after the widest that can have given way, letter by letter."""
    widths = list(natural)
    while _total(widths) > width:
        able = [i for i, each in enumerate(widths) if each > least[i]]
        if not able:
            break
        widths[max(able, key=lambda i: widths[i])] -= 1
    return widths
