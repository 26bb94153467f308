"""What fills one device, by part: the one record in which memory is counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.records import Bytes, Record


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device; records add up part by part."""

    weights: int = 0
    kv: int = 0
    state: int = 0  # of recurrent layers
    compute: int = 0  # buffers of the graph, what is copied or staged for it included
    cache: int = 0  # the engine's MoE cache
    reserve: int = 0  # driver context, projector, draft, other users
    # Looked-up tables that stay mapped from the file. Single rows of them are read, through the page cache,
    # which gives its pages back to whoever needs them: no part of the total.
    tables: int = 0

    def __add__(self, other: Memory) -> Memory:
        if other is NOTHING:  # most of what is added up lies on another device
            return self
        if self is NOTHING:
            return other
        return Memory(
            self.weights + other.weights,
            self.kv + other.kv,
            self.state + other.state,
            self.compute + other.compute,
            self.cache + other.cache,
            self.reserve + other.reserve,
            self.tables + other.tables,
        )

    @property
    def total(self) -> int:
        """What must be there for it: everything but mapped tables."""
        return self.weights + self.kv + self.state + self.compute + self.cache + self.reserve

    @property
    def unpaged(self) -> int:
        """What must be there though weights may be paged from the file: nothing else is in the file."""
        return self.total - self.weights


NOTHING = Memory()


def together(parts: Iterable[Memory]) -> Memory:
    """The sum of some records."""
    return sum(parts, start=NOTHING)


class Reserve(Record):
    """Memory on a device that a plan leaves to something else."""

    name: str  # projector, draft, other users
    device: str
    size_bytes: Bytes

    @property
    def opens(self) -> bool:
        """Whether its device is in use on its account, even where no layer of the model is."""
        return self.name.startswith(("projector", "draft"))
