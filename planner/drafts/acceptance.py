"""How many drafted tokens are right, by position: what is known of it, and what follows for longer drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.constants import PPM
from planner.errors import InputError

LONGEST = 64  # positions kept; llama-server drafts 3 unless told, its n-grams up to 48


@dataclass(eq=False)
class NoAcceptance(InputError):
    """A text that tells nothing of drafted tokens."""

    what: str
    why: str

    def message(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class Step:
    """One verified draft."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of steps, in ppm.

    `by_position[i]`: the first i + 1 guesses were all right; it never rises. Beyond it, and where it is
    empty, one more is right in `each_ppm` of the cases in which all before it are.
    """

    each_ppm: int
    by_position: tuple[int, ...] = ()

    def scaled(self, part: int, whole: int) -> Acceptance:
        """The same where only `part` of `whole` steps have a draft at all."""
        if part >= whole:
            return self
        return Acceptance(self.each_ppm, tuple(ppm * part // whole for ppm in self.by_position))


def by_rates(shares: Sequence[int]) -> Acceptance:
    """From shares of steps that accept at least 1, 2, … guesses; a single one is that of each position."""
    return Acceptance(shares[0]) if len(shares) == 1 else counted(shares, PPM)


def counted(accepted: Sequence[int], steps: int) -> Acceptance:
    """From how many of some steps accepted at least 1, 2, … guesses."""
    shares, least = [], PPM
    for number in accepted[:LONGEST]:
        least = min(least, number * PPM // max(steps, 1))
        shares.append(least)
    return Acceptance(sum(shares) * PPM // (PPM + sum(shares[:-1])) if shares else 0, tuple(shares))


def of_steps(steps: Iterable[Step]) -> Acceptance:
    """From single steps: a draft that the end of a text cut short says nothing of positions it has not."""
    drafts = [step for step in steps if step.drafted]
    shares: list[int] = []
    right = among = 0
    share = PPM
    for n in range(min(max((step.drafted for step in drafts), default=0), LONGEST)):
        tried = sum(step.drafted > n and step.accepted >= n for step in drafts)
        if not tried:
            break
        went = sum(step.drafted > n and step.accepted > n for step in drafts)
        share = share * went // tried
        shares.append(share)
        right, among = right + went, among + tried
    return Acceptance(right * PPM // max(among, 1), tuple(shares))


def of_totals(accepted: int, drafted: int, steps: int) -> Acceptance:
    """From sums alone: the one rate of every position that gives as many accepted tokens in as many steps."""
    if not accepted or not steps:
        return Acceptance(0)
    length = min(max(-(-drafted // steps), 1), LONGEST)
    low, high = 0, PPM
    while low < high:
        middle = (low + high + 1) // 2
        if _yield_ppm(middle, length) * steps <= accepted * PPM:
            low = middle
        else:
            high = middle - 1
    return Acceptance(low)


def _yield_ppm(each_ppm: int, length: int) -> int:
    total, share = 0, PPM
    for _ in range(length):
        share = share * each_ppm // PPM
        total += share
    return total
