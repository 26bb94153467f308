"""Slots whose experts follow the text: what the native library's residency does, replayed on routing.

Every layer scores its experts: by when they were used last (LRU), or by counts that fade (LFU with decay).
Between two steps the highest score without a slot takes the slot of the lowest, while bytes are left to
upload: so with enough of them the slots hold the experts of the highest scores.

On demand (`least_misses`) an expert comes only in a step that misses it, and where the step misses so many
that the bus would bring some in any case, a guest that stays; where fewer are missed, two uses ahead of who
goes. And the seed has a rival: a ghost, tables without bytes, follows at every time. While the seed serves
more than the ghost, the slots go back to the seed, also on demand. The rules are those of
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
SPAN = 8  # 2^8 tokens are what seed and ghost are compared over
LEAD = 7  # a choice in 2^7 more by the seed: the slots go back to it
USES = 2  # ahead of who goes, where a step misses few


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
        self.how, self.tick, self.halved = adaptation, 0, 0
        self.rows = np.arange(n)
        self.bytes = np.asarray(expert_bytes, np.int64)
        self.credit = np.zeros(n, np.int64)
        # One more column than experts: the padding id -1 reads and writes there.
        self.score = np.full((n, n_expert + 1), 0 if adaptation.policy is Policy.LFU else NEVER, np.int64)
        self.resident = np.zeros((n, n_expert + 1), bool)
        self.fixed = np.zeros((n, n_expert + 1), bool)
        self.lead = np.zeros(n, np.int64)  # choices that the seed served and the ghost did not, fading
        self.back = np.zeros(n, bool)  # whether the slots go back to the seed
        self.last_gain = 0
        self.gains = [round(ONE * 2 ** (t / adaptation.half_life)) for t in range(adaptation.half_life)]
        for layer, experts in enumerate(seed):
            self.resident[layer, list(experts)] = True
            self.fixed[layer, list(experts[: adaptation.protect])] = True
            self.score[layer, list(experts)] = seed_scores(adaptation, len(experts))
        self.seeded, self.ghost = self.resident.copy(), self.resident.copy()
        self.ghost_credit = self.credit.copy()

    def step(self, ids: Ints) -> tuple[Ints, Ints, Ints]:
        """Choices, hits and admissions of each layer."""
        valid = ids >= 0
        hits = (self.resident[self.rows[:, None, None], ids] & valid).sum(axis=(1, 2))
        asked = valid.sum(axis=(1, 2))
        if self.how.policy is Policy.STATIC:
            return asked, hits, np.zeros_like(hits)
        # Tokens that are decoded together are of one moment: none of their sequences is more recent.
        is_prompt = ids.shape[1] > PROMPT
        for token in range(ids.shape[1]):
            self._touch(ids[:, token], self.tick + token * is_prompt)
        self.tick += ids.shape[1]
        if is_prompt:
            self.credit = np.maximum(self.credit, self.how.refill_bytes)
            return asked, hits, np.zeros_like(hits)
        self.credit = self._earned(self.credit)
        chosen = np.zeros_like(self.resident)
        chosen[self.rows[:, None, None], ids] = True
        chosen[:, -1] = False
        if self.how.least_misses:
            self._duel(ids, valid, chosen)
        return asked, hits, self._exchange(self.resident, self.credit, chosen, self.back)

    def _earned(self, credit: Ints) -> Ints:
        most = np.maximum(self.how.upload_bytes, self.bytes)
        return np.maximum(credit, np.minimum(credit + self.how.upload_bytes, most))

    def _least_lead(self) -> int:
        """By how much a score must be above another where a step misses few."""
        return USES * self.last_gain if self.how.policy is Policy.LFU else -NEVER

    def _duel(self, ids: Ints, valid: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> None:
        """What the step says of seed and ghost; then the ghost's own exchanges."""
        ahead = (self.seeded.astype(np.int64) - self.ghost)[self.rows[:, None, None], ids] * valid
        for token in range(ids.shape[1]):
            self.lead += ahead[:, token].sum(axis=1) * ONE - (self.lead >> SPAN)
        self.back = self.lead > np.where(self.back, 0, ids.shape[2] * (ONE << (SPAN - LEAD)))
        self.ghost_credit = self._earned(self.ghost_credit)
        self._exchange(self.ghost, self.ghost_credit, chosen, np.zeros_like(self.back))

    def _touch(self, ids: Ints, moment: int) -> None:
        """One token; a layer's choices differ from each other."""
        epoch, t = divmod(moment, self.how.half_life)
        self.last_gain = self.gains[t]
        if self.how.policy is Policy.LRU:
            order = moment * PLACES + PLACES - 1 - np.arange(ids.shape[1])
            self.score[self.rows[:, None], ids] = order
        else:
            self.score >>= epoch - self.halved
            self.halved = epoch
            self.score[self.rows[:, None], ids] += self.gains[t]

    def _exchange(
        self, held: NDArray[np.bool_], credit: Ints, chosen: NDArray[np.bool_], back: NDArray[np.bool_]
    ) -> Ints:
        """Who comes and who goes after a step, in `held` and `credit`; what the step chose stays."""
        n = held.shape[1] - 1
        admitted = np.zeros(len(self.rows), np.int64)
        many = (chosen & ~held).sum(axis=1) >= self.how.least_misses
        lead = np.where(many, 0, self._least_lead())
        at_once = back & many
        leaves = held & ~self.fixed & ~chosen & ~(back[:, None] & self.seeded)
        comes = ~back[:, None] | self.seeded
        if self.how.least_misses:
            comes &= chosen
        while True:
            coming = np.where((comes & ~held)[:, :n], self.score[:, :n], NEVER)
            going = np.where(leaves[:, :n], self.score[:, :n], -NEVER)
            come, go = coming.argmax(axis=1), going.argmin(axis=1)
            best, least = coming[self.rows, come], going[self.rows, go]
            turns = (least < -NEVER) & (best > NEVER) & (credit >= self.bytes)
            turns &= at_once | (best - least > lead)
            if not turns.any():
                return admitted
            layers = np.flatnonzero(turns)
            held[layers, go[layers]] = leaves[layers, go[layers]] = False
            held[layers, come[layers]] = True
            credit[layers] -= self.bytes[layers]
            admitted[layers] += 1


def seed_scores(adaptation: Adaptation, count: int) -> list[int]:
    """What the experts of a seed begin with, hottest first: used before the first token, in that order."""
    if adaptation.policy is Policy.LRU:
        return [-1 - rank for rank in range(count)]
    return [ONE * adaptation.half_life // 8 * (count - rank) // count for rank in range(count)]
