"""Libraries that another one imports for a part of it that is not used here."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """A module with some classes, which have no instances; whatever else is asked of it the real one has."""

    def __init__(self, name: str, classes: tuple[str, ...]) -> None:
        super().__init__(name)
        for each in classes:
            setattr(self, each, type(each, (), {}))

    def __getattr__(self, wanted: str) -> Any:
        if wanted.startswith("__"):  # asked by the import system
            raise AttributeError(wanted)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), wanted)


@contextlib.contextmanager
def left_out(name: str, *classes: str) -> Iterator[None]:
    """An import of `name` finds a module with nothing but these classes; a decorator, too.

    Whoever imports it later gets the real one. Where it is loaded already nothing changes.
    """
    if name in sys.modules:
        yield
        return
    module = sys.modules[name] = _StandIn(name, classes)
    try:
        yield
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]


# CP-SAT imports it for arrays of variables, which no model here has: half of the time until it is loaded.
no_pandas = left_out("pandas", "Index", "Series")
