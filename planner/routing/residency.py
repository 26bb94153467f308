"""Slots whose experts follow the text: what the native library's residency does, replayed on routing.

Every layer scores its experts: by when they were used last (LRU), or by counts that fade (LFU with decay).
Between two steps the highest score without a slot takes the slot of the lowest, while bytes are left to
upload: so with enough of them the slots hold the experts of the highest scores. The rules are those of
runtime/hybrid/native/policy.cpp, in the same whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.plan.adaptation import Adaptation, Policy

Ints = NDArray[np.int64]

ONE = 1 << 16  # a use, at the beginning of a half-life
NEVER = -(1 << 62)
PLACES = 1 << 10  # of a token, at most
PROMPT = 16  # tokens: longer steps are prompts, after which slots are refilled


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """What came of it, by step and layer."""

    asked: Ints  # choices
    hits: Ints  # choices whose expert had a slot
    admitted: Ints  # experts uploaded after a step

    def rate(self, after: int = 0) -> float:
        """Share of hits from a step on."""
        return float(self.hits[after:].sum() / max(1, self.asked[after:].sum()))


def follow(
    steps: Iterable[Ints],
    adaptation: Adaptation,
    seed: Sequence[Sequence[int]],
    n_expert: int,
    expert_bytes: Sequence[int],
) -> Followed:
    """Replay steps, each (layers, tokens, choices of a token) best first, -1 where a token chose fewer.

    `seed`: the experts in each layer's slots at first, hottest first; `expert_bytes`: of one, by layer.
    """  # fmt: skip
    slots = _Slots(adaptation, seed, n_expert, expert_bytes)
    rows = [slots.step(ids) for ids in steps]
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    return Followed(*(np.asarray(list(column), np.int64).reshape(len(rows), -1) for column in columns))


class _Slots:
    """All layers: scores, who has a slot, and bytes saved up."""

    def __init__(
        self,
        adaptation: Adaptation,
        seed: Sequence[Sequence[int]],
        n_expert: int,
        expert_bytes: Sequence[int],
    ) -> None:
        n = len(seed)
        self.how, self.tick = adaptation, 0
        self.rows = np.arange(n)
        self.bytes = np.asarray(expert_bytes, np.int64)
        self.credit = np.zeros(n, np.int64)
        # One more column than experts: the padding id -1 reads and writes there.
        self.score = np.full((n, n_expert + 1), 0 if adaptation.policy is Policy.LFU else NEVER, np.int64)
        self.resident = np.zeros((n, n_expert + 1), bool)
        self.fixed = np.zeros((n, n_expert + 1), bool)
        self.gains = [round(ONE * 2 ** (t / adaptation.half_life)) for t in range(adaptation.half_life)]
        for layer, experts in enumerate(seed):
            self.resident[layer, list(experts)] = True
            self.fixed[layer, list(experts[: adaptation.protect])] = True
            self.score[layer, list(experts)] = seed_scores(adaptation, len(experts))

    def step(self, ids: Ints) -> tuple[Ints, Ints, Ints]:
        """Choices, hits and admissions of each layer."""
        valid = ids >= 0
        hits = (self.resident[self.rows[:, None, None], ids] & valid).sum(axis=(1, 2))
        asked = valid.sum(axis=(1, 2))
        if self.how.policy is Policy.STATIC:
            return asked, hits, np.zeros_like(hits)
        for token in range(ids.shape[1]):
            self._touch(ids[:, token])
        if ids.shape[1] > PROMPT:
            self.credit = np.maximum(self.credit, self.how.refill_bytes)
            return asked, hits, np.zeros_like(hits)
        most = np.maximum(self.how.upload_bytes, self.bytes)
        self.credit = np.maximum(self.credit, np.minimum(self.credit + self.how.upload_bytes, most))
        return asked, hits, self._exchange(ids)

    def _touch(self, ids: Ints) -> None:
        """One token; a layer's choices differ from each other."""
        t = self.tick % self.how.half_life
        if self.how.policy is Policy.LRU:
            order = self.tick * PLACES + PLACES - 1 - np.arange(ids.shape[1])
            self.score[self.rows[:, None], ids] = order
        else:
            if t == 0 and self.tick:
                self.score >>= 1
            self.score[self.rows[:, None], ids] += self.gains[t]
        self.tick += 1

    def _exchange(self, ids: Ints) -> Ints:
        """Who comes and who goes after a step; what the step chose stays."""
        n = self.resident.shape[1] - 1
        admitted = np.zeros(len(self.rows), np.int64)
        stays = self.fixed.copy()
        stays[self.rows[:, None, None], ids] = True
        leaves = self.resident & ~stays
        while True:
            coming = np.where(self.resident[:, :n], NEVER, self.score[:, :n])
            going = np.where(leaves[:, :n], self.score[:, :n], -NEVER)
            come, go = coming.argmax(axis=1), going.argmin(axis=1)
            best, least = coming[self.rows, come], going[self.rows, go]
            turns = (least < -NEVER) & (best > NEVER) & (best > least) & (self.credit >= self.bytes)
            if not turns.any():
                return admitted
            layers = np.flatnonzero(turns)
            self.resident[layers, go[layers]] = leaves[layers, go[layers]] = False
            self.resident[layers, come[layers]] = True
            self.credit[layers] -= self.bytes[layers]
            admitted[layers] += 1


def seed_scores(adaptation: Adaptation, count: int) -> list[int]:
    """What the experts of a seed begin with, hottest first: used before the first token, in that order."""
    if adaptation.policy is Policy.LRU:
        return [-1 - rank for rank in range(count)]
    return [ONE * adaptation.half_life // 8 * (count - rank) // count for rank in range(count)]
