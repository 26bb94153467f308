"""Decode steps of a routing trace joined into the batches that check drafted tokens.

A batch asks for the experts of all its tokens at once, also of those that turn out wrong. The trace does not
know what a wrong token would have chosen: the tokens that the text has there stand for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from planner.constants import PPM
from planner.routing.trace import Trace, select

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A trace whose decode steps are batches, and how many tokens of the text each brings."""

    trace: Trace
    tokens: Ints  # by decode step, of all sources in turn


def verified(trace: Trace, drafts: int, accept_ppm: int) -> Verified:
    """The decode steps of a trace, `drafts` tokens guessed in each, each right with `accept_ppm` given those
    before it.

    How many are right is spread evenly, so that every replay is the same: over the steps their mean is that
    of a + a^2 + ... + a^drafts. The last batches of a source are as short as what is left of it.
    """
    alone = select(trace, trace.decode)
    key = alone.source.astype(np.int64) << 32 | alone.step
    order = np.argsort(key, kind="stable")
    steps = np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else []
    sources = [int(alone.source[rows[0]]) for rows in steps]
    mean_ppm = round(PPM * sum(Fraction(accept_ppm, PPM) ** n for n in range(1, drafts + 1)))
    rows: list[NDArray[np.intp]] = []
    numbers: list[Ints] = []
    tokens: list[int] = []
    at = credit_ppm = 0
    while at < len(steps):
        end = at
        while end < len(steps) and end - at <= drafts and sources[end] == sources[at]:
            end += 1
        credit_ppm += mean_ppm
        right = min(credit_ppm // PPM, end - at - 1)
        credit_ppm = min(credit_ppm - right * PPM, drafts * PPM)
        batch = np.concatenate(steps[at:end])
        rows.append(batch)
        numbers.append(np.full(len(batch), len(tokens), dtype=np.int64))
        tokens.append(1 + right)
        at += 1 + right
    found = select(alone, np.concatenate(rows)) if rows else alone
    made = replace(found, step=np.concatenate(numbers).astype(np.int32)) if rows else found
    return Verified(made, np.array(tokens, dtype=np.int64))
