"""How long each case may take, so that all of them end in time; child process only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHORTEST_S = 0.04  # less says nothing
LONGEST_S = 0.25  # more gains nothing
_MEMORY = 8  # cases over which the time beside the passes is averaged


class Pace:
    """Shares the time until a deadline (of `time.monotonic`) between the cases that are left."""

    def __init__(self, until_s: float, cases: int) -> None:
        self._until_s, self._left = until_s, cases
        self._beside_s = 0.05  # of one case: its graph made, its first passes

    @contextmanager
    def case(self) -> Iterator[float]:
        """The seconds of passes that the next case gets."""
        begin = time.monotonic()
        each = (self._until_s - begin) / max(self._left, 1)
        limit_s = min(max(each - self._beside_s, SHORTEST_S), LONGEST_S)
        yield limit_s
        beside = max(time.monotonic() - begin - limit_s, 0.0)
        self._beside_s += (beside - self._beside_s) / _MEMORY
        self._left -= 1
