"""What is said of a routing trace: coverage, LRU hits, what neighbours share, topics and drift.

A trace here is `chosen`, an array (layers, tokens, experts of a token), best expert first. All figures are
means over layers. Sizes are slots a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

BATCH = 512  # tokens of the micro-batch whose distinct experts are counted
Shares = Mapping[int, float]  # slots -> share of choices


@dataclass(frozen=True, slots=True)
class Figures:
    """Asked of a generator, or measured; an empty mapping or None: not asked.

    static       hottest experts of the first half of a trace, judged on the second half
    lru          hits of an LRU cache in the second half, filled by the first
    consecutive  share of a token's experts that the previous token had too
    distinct     share of all experts that BATCH tokens in a row use
    other_topic  hottest experts of one topic, judged on the others (mean over pairs)
    late         hottest experts of the first quarter, judged on the last quarter
    """

    static: Shares = field(default_factory=dict)
    lru: Shares = field(default_factory=dict)
    consecutive: float | None = None
    distinct: float | None = None
    other_topic: Shares = field(default_factory=dict)
    late: Shares = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """Every figure by one name, such as `lru@32`."""
        found = {
            f"{name}@{slots}": share
            for name in ("static", "lru", "other_topic", "late")
            for slots, share in getattr(self, name).items()
        }
        alone = {"consecutive": self.consecutive, "distinct": self.distinct}
        return found | {name: value for name, value in alone.items() if value is not None}


def measure(chosen: Ints, n_expert: int, asked: Figures, topics: Ints | None = None) -> Figures:
    """The figures that are `asked`, of a trace; `topics` names each token's topic.

    Raises ValueError when `other_topic` is asked and no topics are given.
    """
    n_tokens = chosen.shape[1]
    half, quarter = n_tokens // 2, n_tokens // 4
    if asked.other_topic and topics is None:
        raise ValueError("other_topic needs the topic of each token")
    return Figures(
        static=coverage(chosen[:, :half], chosen[:, half:], n_expert, asked.static),
        lru=lru_hits(chosen, n_expert, asked.lru, half),
        consecutive=None if asked.consecutive is None else consecutive(chosen),
        distinct=None if asked.distinct is None else distinct(chosen, n_expert),
        other_topic={} if topics is None else _across(chosen, n_expert, topics, asked.other_topic),
        late=coverage(chosen[:, :quarter], chosen[:, -quarter:], n_expert, asked.late),
    )


def counts(chosen: Ints, n_expert: int) -> Ints:
    """Choices by layer and expert."""
    import numpy as np

    rows = chosen.reshape(len(chosen), -1)
    return np.stack([np.bincount(row, minlength=n_expert) for row in rows])


def coverage(seen: Ints, judged: Ints, n_expert: int, slots: Iterable[int]) -> dict[int, float]:
    """Share of the choices in `judged` on each layer's hottest experts of `seen`."""
    import numpy as np

    hot = np.argsort(-counts(seen, n_expert), axis=1, kind="stable")
    served = np.take_along_axis(counts(judged, n_expert), hot, axis=1).cumsum(axis=1)
    return {size: float(np.mean(served[:, size - 1] / served[:, -1])) for size in slots}


def consecutive(chosen: Ints) -> float:
    """Share of a token's experts that the previous token had."""
    import numpy as np

    same = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).any(axis=-1)
    return float(np.mean(same))


def distinct(chosen: Ints, n_expert: int, batch: int = BATCH) -> float:
    """Share of all experts that `batch` tokens in a row use, mean over the batches of a trace."""
    import numpy as np

    whole = chosen.shape[1] // batch
    used = [
        np.count_nonzero(counts(part, n_expert)) for part in np.split(chosen[:, : whole * batch], whole, 1)
    ]
    return float(np.mean(used)) / len(chosen) / n_expert


def lru_hits(chosen: Ints, n_expert: int, slots: Iterable[int], after: int) -> dict[int, float]:
    """Hits of LRU caches of so many slots, from token `after` on.

    A token's experts are looked up one by one, best first; each is then the most recent.
    """
    import numpy as np

    sizes = list(slots)
    if not sizes:
        return {}
    depths = _depths(chosen, n_expert)[:, after:]
    return {size: float(np.mean(depths < size)) for size in sizes}


def _depths(chosen: Ints, n_expert: int) -> Ints:
    """How many other experts were used since the last use of each choice; n_expert for a first use."""
    import numpy as np

    n_layers, n_tokens, used = chosen.shape
    last = np.full((n_layers, n_expert), -1)
    earlier = np.tril(np.ones((used, used), bool), -1)  # [i, j]: j was looked up before i
    found = np.empty_like(chosen)
    for token in range(n_tokens):
        ids = chosen[:, token]
        seen = np.take_along_axis(last, ids, axis=1)
        newer = np.count_nonzero(last[:, None, :] > seen[:, :, None], axis=2)
        # Those of the same token come to the front before this one, also from behind it.
        passed = np.count_nonzero((seen[:, None, :] <= seen[:, :, None]) & earlier, axis=2)
        found[:, token] = np.where(seen < 0, n_expert, newer + passed)
        np.put_along_axis(last, ids, token * used + np.arange(used)[None, :], axis=1)
    return found


def _across(chosen: Ints, n_expert: int, topics: Ints, slots: Shares) -> dict[int, float]:
    import numpy as np

    if not slots:
        return {}
    parts = [chosen[:, topics == topic] for topic in np.unique(topics)]
    pairs = [coverage(a, b, n_expert, slots) for a in parts for b in parts if a is not b]
    return {size: float(np.mean([pair[size] for pair in pairs])) for size in slots}
