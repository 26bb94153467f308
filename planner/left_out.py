"""Libraries that another one imports for a part of it that is not used here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def left_out(name: str, *classes: str) -> Iterator[None]:
    """An import of `name` finds a module with nothing but these classes, which have no instances.

    Whoever imports it later gets the real one. Where it is loaded already nothing changes.
    """
    if name in sys.modules:
        yield
        return
    module = ModuleType(name)
    for each in classes:
        setattr(module, each, type(each, (), {}))
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
