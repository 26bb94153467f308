"""Powers of chances that are the same number on every machine."""

from __future__ import annotations


def power(base: float, exponent: int) -> float:
    """`base` to a whole `exponent` of 0 or more, by multiplications alone.

    IEEE 754 rounds a product alike everywhere; `**` asks the C library's pow, of which each has its own. Up
    to an exponent of 4096 the relative error is below 1e-12. ValueError for a negative exponent.
    """
    if exponent < 0:
        raise ValueError(f"exponent {exponent} is negative")
    found = 1.0
    while exponent:
        if exponent & 1:
            found *= base
        base *= base
        exponent >>= 1
    return found
