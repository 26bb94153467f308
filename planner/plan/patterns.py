"""Patterns of overrides, matched in time linear in the names, whoever wrote them.

The patterns that this program writes stand for a finite list of names and are read as such. All others go
through RE2, which has no backtracking and bounds its memory; what it refuses (look-around, references back,
counts without end) is no pattern here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache

MAX_NAMES = 1 << 14  # that a pattern of our own may list
_MAX_BYTES = 8 << 20  # of a compiled pattern
# A literal, a class of literals, or a flat alternation of such, as planner.plan.overrides writes them.
_ATOM = re.compile(r"\\([^\w\s])|\[([\w-]+)\]|([\w-])", re.ASCII)
_GROUP = re.compile(r"\(\?:((?:\\[^\w\s]|\[[\w-]+\]|[\w|-])*)\)", re.ASCII)

Search = Callable[[str], bool]


@lru_cache(maxsize=4096)
def searcher(pattern: str) -> Search | None:
    """Whether a name matches anywhere, as a function; None for what is no pattern."""
    names = listed(pattern)
    return names.__contains__ if names is not None else _general(pattern)


def hits(pattern: str, names: Collection[str]) -> Collection[str]:
    """Those of the names that a pattern matches, in no order; none for what is no pattern."""
    own = listed(pattern)
    if own is not None:
        return [name for name in own if name in names]
    search = searcher(pattern)
    return [name for name in names if search(name)] if search else ()


@lru_cache(maxsize=4096)
def listed(pattern: str) -> frozenset[str] | None:
    """The names that a pattern of this program's own form matches; None for any other form."""
    if not (pattern.startswith("^") and pattern.endswith("$") and len(pattern) > 1):
        return None
    return _sequence(pattern[1:-1])


def _sequence(text: str) -> frozenset[str] | None:
    """Names of literals, classes and groups one after the other."""
    found, at = [""], 0
    while at < len(text):
        group = _GROUP.match(text, at)
        each = _alternatives(group[1]) if group else None
        atom = None if group else _ATOM.match(text, at)
        if atom:
            each = _letters(atom)
        match = group or atom
        if match is None or each is None or len(found) * len(each) > MAX_NAMES:
            return None
        found = [name + part for name in found for part in each]
        at = match.end()
    return frozenset(found)


def _alternatives(text: str) -> list[str] | None:
    found: list[str] = []
    for branch in re.split(r"(?<!\\)\|", text):
        names = _sequence(branch)
        if names is None:
            return None
        found += names
    return found


def _letters(atom: re.Match[str]) -> list[str] | None:
    if atom[2] is None:
        return [atom[1] or atom[3]]
    found: list[str] = []
    for first, last in re.findall(r"(\w)(?:-(\w))?", atom[2], re.ASCII):
        found += map(chr, range(ord(first), ord(last or first) + 1))
    # A hyphen at an end is a letter of its own, and a backward range an error: left to the general form.
    whole = re.fullmatch(r"(?:\w(?:-\w)?)+", atom[2], re.ASCII)
    return found if whole and found else None


def _general(pattern: str) -> Search | None:
    import re2

    options = re2.Options()
    options.max_mem, options.log_errors = _MAX_BYTES, False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error:
        return None
    return lambda name: compiled.search(name) is not None
