"""Codes in the embedding that routers read, and routers that read them.

The first CODE elements of the residual stream hold a code of the token, and no layer writes there (see
`model.py`), so the input of every router is the code and what the router makes of it depends on the token
alone. A token has a topic, a passage inside the topic, and something of its own; an expert's logit is

    bias + topic * t + passage * p + o

with t, p and o of deviation 1, shared by all tokens of the topic, of the passage, and by none. The bias of
an expert is set so that the expert is chosen as often as the static coverage asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from planner.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    Ints = NDArray[np.int64]

CODE = 64  # elements: 1 constant, 15 of the topic, 16 of the passage, 32 of the token itself
TOPIC, PASSAGE, OWN = slice(1, 16), slice(16, 32), slice(32, 64)
STEP = 1 / 64  # codes are whole multiples of it, so that q8_0 holds them exactly
LENGTH = 3.0  # of the dense parts of a code; the constant and the topic have length 1
ROUNDS, ENOUGH = 12, 0.02  # of setting the biases: at most, and the error at which to stop


@dataclass(eq=False)
class UnfitRouting(InputError):
    """Figures that no routing has, or habits out of range."""

    what: str
    why: str

    def message(self) -> str:
        return f"routing: {self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class Habits:
    """How a generated model routes and how its token streams move; everything follows from it."""

    n_expert: int
    n_used: int
    static: tuple[tuple[int, float], ...] = ()  # slots, share of choices on so many hottest experts
    topic: float = 0.0  # deviation of a topic's logits, in those of a token's own
    passage: float = 0.0
    n_topics: int = 4  # at most 15
    n_passages: int = 16  # of a topic
    n_tokens: int = 64  # of a passage
    topic_tokens: int = 256  # mean length of a visit
    passage_tokens: float = 8.0
    zipf: float = 0.0  # exponent of the tokens' frequency in a passage
    drift: float = 0.0  # share of the topics that are left behind from start to end of a stream
    hot_first: bool = False  # experts in order of heat
    seed: int = 1

    @property
    def n_codes(self) -> int:
        return self.n_topics * self.n_passages * self.n_tokens

    def topic_of(self, codes: Ints) -> Ints:
        """Topics of codes."""
        return codes // (self.n_passages * self.n_tokens)

    def weights(self) -> Doubles:
        """Long-run share of each code in a stream."""
        import numpy as np

        one = self.token_weights()
        groups = self.n_topics * self.n_passages
        return np.concatenate([one / groups] * groups)

    def token_weights(self) -> Doubles:
        """Shares of the tokens of a passage."""
        import numpy as np

        raw = (np.arange(self.n_tokens) + 1.0) ** -self.zipf
        return np.asarray(raw / raw.sum(), np.float64)


def frequencies(habits: Habits) -> Doubles:
    """How often each expert is chosen by a token, hottest first: sums to n_used.

    Between two asked points of the static coverage all experts are alike. Raises UnfitRouting when hotter
    ones would be chosen less, or any more than once by every token.
    """
    import numpy as np

    n, used = habits.n_expert, habits.n_used
    points = sorted({0: 0.0, **dict(habits.static), n: 1.0}.items())
    slots, shares = (np.asarray(column, float) for column in zip(*points, strict=True))
    if slots[-1] != n or slots[0] != 0:
        raise UnfitRouting(f"static coverage of {slots[-1]:.0f} slots", f"a layer has {n} experts")
    density = np.diff(shares) / np.diff(slots)
    if (np.diff(density) > 1e-9).any() or density[-1] <= 0:
        raise UnfitRouting(f"static coverage {dict(habits.static)}", "colder experts would be asked more")
    if density[0] * used > 0.98:
        raise UnfitRouting(f"static coverage {dict(habits.static)}", "more than every token's choice")
    per_rank = np.interp(np.arange(n + 1), slots, shares)
    return np.asarray(np.diff(per_rank) * used, np.float64)


def codes(habits: Habits) -> Floats:
    """The code of every token (n_codes, CODE), in multiples of STEP."""
    import numpy as np

    if not 1 <= habits.n_topics <= 15:
        raise UnfitRouting(f"{habits.n_topics} topics", "1 to 15 are possible")
    draw = np.random.Generator(np.random.SFC64([habits.seed, 1]))
    n_passages = habits.n_topics * habits.n_passages
    table = np.zeros((habits.n_codes, CODE))
    table[:, 0] = 1.0
    index = np.arange(habits.n_codes)
    table[index, TOPIC.start + habits.topic_of(index)] = 1.0
    table[:, PASSAGE] = LENGTH * np.repeat(_directions(draw, n_passages, 16), habits.n_tokens, axis=0)
    table[:, OWN] = LENGTH * _directions(draw, habits.n_codes, 32)
    return (np.clip(np.round(table / STEP), -127, 127) * STEP).astype(np.float32)


def _directions(draw: np.random.Generator, count: int, size: int) -> Doubles:
    import numpy as np

    raw = draw.standard_normal((count, size))
    return np.asarray(raw / np.linalg.norm(raw, axis=1, keepdims=True), np.float64)


def router(habits: Habits, table: Floats, layer: int) -> Floats:
    """Weights (n_expert, CODE) of a layer's router."""
    import numpy as np

    draw = np.random.Generator(np.random.SFC64([habits.seed, 2, layer]))
    weights = np.zeros((habits.n_expert, CODE), np.float32)
    parts = ((TOPIC, habits.topic), (PASSAGE, habits.passage / LENGTH), (OWN, 1 / LENGTH))
    for part, deviation in parts:
        rows = draw.standard_normal((habits.n_expert, part.stop - part.start))
        if part is OWN:  # rows of equal length: no expert is favoured by chance
            rows *= OWN_LENGTH / np.linalg.norm(rows, axis=1, keepdims=True)
        weights[:, part] = rows * deviation
    wanted = frequencies(habits)
    if not habits.hot_first:
        wanted = draw.permutation(wanted)
    weights[:, 0] = _biases(habits, table @ weights.T, wanted)
    return weights


OWN_LENGTH = 32**0.5


def _biases(habits: Habits, logits: Floats, wanted: Doubles) -> Doubles:
    """Constant logits at which each expert is chosen as often as wanted, found step by step."""
    import numpy as np

    share = habits.weights()
    deviation = (1 + habits.topic**2 + habits.passage**2) ** 0.5
    goal = _quantiles(wanted)
    bias = deviation * goal
    best, least = bias, np.inf
    for _ in range(ROUNDS):
        found = _chosen_share(logits + bias.astype(np.float32), habits.n_used, share)
        error = float(np.abs(found - wanted).sum())
        if error < least:
            best, least = bias, error
        if least < ENOUGH * habits.n_used:
            break
        bias = bias + 0.8 * deviation * (goal - _quantiles(found))
    return np.asarray(best - best.mean(), np.float64)


def _chosen_share(logits: Floats, n_used: int, share: Doubles) -> Doubles:
    import numpy as np

    chosen = top(logits, n_used)
    weight = np.repeat(share, n_used)
    return np.asarray(np.bincount(chosen.ravel(), weight, minlength=logits.shape[1]), np.float64)


def _quantiles(shares: Doubles) -> Doubles:
    import numpy as np

    normal = NormalDist()
    return np.array([normal.inv_cdf(min(max(x, 1e-4), 1 - 1e-4)) for x in shares.tolist()])


def top(logits: Floats, n_used: int) -> Ints:
    """The chosen experts of each row, best first."""
    import numpy as np

    some = np.argpartition(-logits, n_used - 1, axis=1)[:, :n_used]
    order = np.argsort(-np.take_along_axis(logits, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)


def chosen_by_code(habits: Habits, layers: int) -> Ints:
    """The experts (layers, n_codes, n_used) that every code asks for: what a model will route."""
    import numpy as np

    table = codes(habits)
    return np.stack([top(table @ router(habits, table, il).T, habits.n_used) for il in range(layers)])
