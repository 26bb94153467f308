"""Token streams that carry the locality: topics, passages inside them, tokens inside these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.routed.codes import Habits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

FIRST_ID = 320  # token ids below are bytes, the end of text and merges


def codes_of(habits: Habits, length: int, seed: int = 1) -> Ints:
    """A stream of codes; the same length and seed give the same stream.

    Topics take turns in shuffled rounds, for 0.5 to 1.5 of `topic_tokens` each, so that the halves of a
    stream have seen the same topics; with `drift` the round is a window that moves over them.
    A passage ends after each token with probability 1 / passage_tokens.
    """
    import numpy as np

    draw = np.random.Generator(np.random.SFC64([habits.seed, 3, seed]))
    topics = _topics(habits, length, draw)
    starts = draw.random(length) < 1 / max(1.0, habits.passage_tokens)
    starts |= np.diff(topics, prepend=-1) != 0
    fresh = draw.integers(0, habits.n_passages, length)
    passages = fresh[np.maximum.accumulate(np.where(starts, np.arange(length), 0))]
    tokens = draw.choice(habits.n_tokens, length, p=habits.token_weights())
    return (topics * habits.n_passages + passages) * habits.n_tokens + tokens


def ids_of(habits: Habits, length: int, seed: int = 1) -> Ints:
    """The same stream as token ids of a generated model."""
    return codes_of(habits, length, seed) + FIRST_ID


def text_of(ids: Ints) -> str:
    """Text that a generated model's tokenizer reads as exactly these ids."""
    return "".join(word(int(one)) for one in ids)


def word(token: int) -> str:
    """How a token with a code is written."""
    return f"<{token - FIRST_ID}>"


def _topics(habits: Habits, length: int, draw: np.random.Generator) -> Ints:
    import numpy as np

    n = habits.n_topics
    window = max(1, round(n * (1 - habits.drift)))
    parts, total = [], 0
    while total < length:
        first = min(n - window, int((n - window + 1) * total / length))
        for topic in draw.permutation(window) + first:
            size = max(1, round(habits.topic_tokens * draw.uniform(0.5, 1.5)))
            parts.append(np.full(size, topic))
            total += size
    return np.concatenate(parts)[:length]
