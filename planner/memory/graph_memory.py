"""Memory of a graph of operators, as llama.cpp's allocator deals it out (`ggml_gallocr_alloc_graph`).

Results take the best fitting gap, else the end; one that may be computed in place takes the memory of its
first source of equal size that nobody else reads; what nobody reads any more is free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 128  # of tensors in the memory of CUDA; other devices' differs by some bytes a tensor


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What an operator gives; an input of the graph has no sources."""

    size_bytes: int
    sources: tuple[Result, ...] = ()
    in_place: bool = False  # may be computed where its source is

    @property
    def given(self) -> bool:
        """Whether it is an input, which is there before the first operator."""
        return not self.sources


class _Gaps:
    """Free memory: blocks by where they begin; the last one has no end."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.end = self.most = 0

    def take(self, size: int) -> int:
        fitting = [(length, -at) for at, length in self.blocks if length >= size]
        if not fitting:
            at, self.end = self.end, self.end + size
            self.most = max(self.most, self.end)
            return at
        length, at = min(fitting)  # of equal ones the last
        at = -at
        self.blocks.remove((at, length))
        if length > size:
            self._add(at + size, length - size)
        return at

    def give(self, at: int, size: int) -> None:
        for begins, length in list(self.blocks):
            if begins + length == at or at + size == begins:
                self.blocks.remove((begins, length))
                at, size = min(at, begins), size + length
        self._add(at, size)

    def _add(self, at: int, size: int) -> None:
        if at + size == self.end:
            self.end = at
        else:
            self.blocks = sorted([*self.blocks, (at, size)])


def graph_bytes(nodes: Sequence[Result]) -> int:
    """Size of the buffer for these operators, in the order in which they are computed."""
    gaps, places = _Gaps(), dict[int, int]()
    readers = Counter(id(source) for node in nodes for source in node.sources)
    inputs = dict.fromkeys(source for node in nodes for source in node.sources if source.given)
    for given in inputs:
        places[id(given)] = gaps.take(_aligned(given))
    for node in nodes:
        reused = _reused(node, readers, places)
        if reused is not None:
            places[id(node)] = places.pop(id(reused))
        else:
            places[id(node)] = gaps.take(_aligned(node))
        for source in node.sources:
            readers[id(source)] -= 1
            if not readers[id(source)] and id(source) in places:
                gaps.give(places.pop(id(source)), _aligned(source))
    return gaps.most


def _reused(node: Result, readers: Counter[int], places: dict[int, int]) -> Result | None:
    """The source whose memory an operator takes over."""
    for source in node.sources if node.in_place else ():
        alone = readers[id(source)] == 1 and id(source) in places
        if alone and source.size_bytes == node.size_bytes:
            return source
    return None


def _aligned(result: Result) -> int:
    return -(-result.size_bytes // ALIGNMENT) * ALIGNMENT
