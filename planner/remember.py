"""Answers about an object that never changes, remembered for as long as the object lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def remembered(function: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Compute once for each object, such as an inventory, and further arguments, which must be hashable.

    Objects are told apart by identity, since comparing a table of a thousand tensors would cost more than it
    saves. An exception is not remembered. The answer is shared: it must be immutable.
    """
    known: dict[int, dict[Any, T]] = {}

    @wraps(function)
    def wrapped(record: R, *args: P.args, **named: P.kwargs) -> T:
        mine = known.get(id(record))
        if mine is None:
            mine = known[id(record)] = {}
            weakref.finalize(record, known.pop, id(record), None)
        key = (args, *named.items())
        if key not in mine:
            mine[key] = function(record, *args, **named)
        return mine[key]

    return cast(Callable[Concatenate[R, P], T], wrapped)
