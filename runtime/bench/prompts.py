"""Standard prompts of fixed lengths: the same English-like text for every contender and every run."""

from __future__ import annotations

import random

_PARTS = (
    ("the miller", "a young engineer", "my neighbour", "the old captain", "our committee", "a teacher"),
    ("measured", "repaired", "described", "carried", "remembered", "compared", "drew", "questioned"),
    ("the bridge", "an unusual clock", "two letters", "the water level", "a map of the coast"),
    ("before noon", "without any help", "for the third time", "in plain words", "as the rain began"),
)
_CODE = ("def area(w, h): return w * h", "SELECT name FROM ships WHERE year > 1890", "x = [n * n for n in y]")


def text(n_tokens: int, seed: int = 1) -> str:
    """Text of more than `n_tokens` tokens, to be cut at the exact count after tokenizing."""
    chance = random.Random(seed)
    sentences: list[str] = []
    words = 0
    # A token is rarely longer than a word; twice as many words are enough for every tokenizer seen.
    while words < 2 * n_tokens + 16:
        sentence = " ".join(chance.choice(part) for part in _PARTS)
        if chance.random() < 0.1:
            sentence += ": " + chance.choice(_CODE)
        sentences.append(sentence[0].upper() + sentence[1:] + ".")
        words += len(sentence.split())
    return " ".join(sentences)
