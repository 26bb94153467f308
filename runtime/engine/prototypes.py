"""C prototypes as short codes, so that a table of functions reads like a header.

One letter a value: v void, p pointer, s const char *, b bool, i int32, I uint32, q int64, z size_t,
f float. The first letter is the result, the rest the arguments; other letters come from `extra`.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from typing import Any

CODES: Mapping[str, Any] = {
    "v": None,
    "p": c.c_void_p,
    "s": c.c_char_p,
    "b": c.c_bool,
    "i": c.c_int32,
    "I": c.c_uint32,
    "q": c.c_int64,
    "z": c.c_size_t,
    "f": c.c_float,
}


def bind(library: c.CDLL, table: Mapping[str, str], extra: Mapping[str, Any] | None = None) -> list[str]:
    """Set result and argument types of every function of `table`; returns the names the library lacks."""
    codes = {**CODES, **(extra or {})}
    missing = []
    for name, code in table.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            missing.append(name)
            continue
        function.restype = codes[code[0]]
        function.argtypes = [codes[letter] for letter in code[1:]]
    return missing
