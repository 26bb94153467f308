"""What the scheduler says about its graphs (GGML_SCHED_DEBUG=2): work that is not where its data lies.

Names in that log are cut at 20 characters and backends at 5; both are enough to tell layers and devices
of different kinds apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

_NODE = re.compile(r"node #\s*\d+ \(\s*(\w+)\):\s*(.+?) \(\s*([\d.]+)([KMG])\) \[\s*(\w+)\s*\]")
# A source that the scheduler copies to the operator's backend first: BACKEND#name#0.
_CACHE = re.compile(r"\w+#cache_[kv]_l(\d+)")
_WEIGHT = re.compile(r"\w+#((?:blk\.\d+\.|output\.)\S*)")
_UNITS = {"K": 1, "M": 1024, "G": 1024 * 1024}


@dataclass(frozen=True, slots=True)
class Stray:
    """One operator that runs away from its data."""

    op: str
    what: str  # the layer whose cache, or the weight that, is copied for every token
    runs_on: str
    cache: bool


@dataclass(slots=True)
class Graph:
    """One graph as the scheduler divided it."""

    first_kib: float = 0.0  # size of the first node: tells one token from a batch
    nodes: int = 0
    strays: list[Stray] = field(default_factory=list)


class Listener:
    """Reads log lines as they come; `decode()` is the graph of one token."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._open = ""

    def add(self, level: int, text: str) -> None:
        """One log call: a fragment, a line or several lines."""
        *whole, self._open = (self._open + text).split("\n")
        for line in whole:
            self._line(line)

    def decode(self) -> Graph:
        """The graph of the fewest tokens; empty when the build printed none."""
        return min((g for g in self.graphs if g.nodes), key=lambda g: g.first_kib, default=Graph())

    def _line(self, line: str) -> None:
        if "## SPLIT #0:" in line:
            self.graphs.append(Graph())
        found = _NODE.search(line)
        if not found or not self.graphs:
            return
        graph = self.graphs[-1]
        if not graph.nodes:
            graph.first_kib = float(found[3]) * _UNITS[found[4]]
        graph.nodes += 1
        graph.strays += list(_strays(found[1], found[5], line[found.end() :]))


def describe(strays: Iterable[Stray], shared: Collection[int] = ()) -> tuple[str, ...]:
    """One sentence for each kind of stray work; caches that other layers `shared` may be read elsewhere."""
    kinds: dict[tuple[str, str, bool], list[str]] = {}
    for stray in strays:
        if stray.cache and int(stray.what) in shared:
            continue
        kinds.setdefault((stray.op, stray.runs_on, stray.cache), []).append(stray.what)
    return tuple(_sentence(*kind, what) for kind, what in kinds.items())


def _strays(op: str, backend: str, sources: str) -> Iterable[Stray]:
    if cache := _CACHE.search(sources):
        yield Stray(op, cache[1], backend, True)
    elif op.startswith("MUL_MAT") and (weight := _WEIGHT.search(sources)):
        yield Stray(op, weight[1], backend, False)


def _sentence(op: str, runs_on: str, cache: bool, what: list[str]) -> str:
    if cache:
        layers = dict.fromkeys(what)
        which = f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"
        return (
            f"attention of {which} runs on {runs_on}, away from its KV cache: "
            "the layer's device has no kernel for this KV type or head size"
        )
    named = what[0] + (f" and {len(what) - 1} more" if len(what) > 1 else "")
    return f"{named} is copied to {runs_on} for every token: its own device cannot run {op} on its type"
