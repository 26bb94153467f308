"""Sequences that share slots: what each is served is counted by its rank in a step; none is crowded out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_steps import Step, rows_after

from planner.plan.adaptation import Adaptation, Policy
from planner.routing.residency import follow
from profiler.routed import model
from profiler.routed.codes import Habits, chosen_by_code
from profiler.routed.presets import PRESETS
from profiler.routed.stream import FIRST_ID
from runtime.hybrid.device import ROWS, Block

HABITS = Habits(64, 4, n_topics=2, n_passages=4, n_tokens=32)
LAYERS = 2
EXPERT = 4 * 1024  # bytes, less than may be brought in a step
FREE = 1 << 30


@pytest.fixture(scope="module")
def chosen() -> Any:
    """Experts by layer and code; the engine chooses the same (tests/test_told_routing.py)."""
    return chosen_by_code(HABITS, LAYERS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(PRESETS["olmoe"].spec("small"), n_layers=LAYERS, n_vocab=FIRST_ID + HABITS.n_codes)
    return model.write(tmp_path_factory.mktemp("rows") / "moe.gguf", spec, HABITS)


def apart(chosen: Any, n: int, size: int) -> list[list[int]]:
    """So many codes for each of n sequences, of which no two sequences share an expert in any layer."""
    texts: list[list[int]] = [[] for _ in range(n)]
    taken = np.full((len(chosen), HABITS.n_expert), -1)
    for code in range(HABITS.n_codes):
        for text in sorted(range(n), key=lambda t: len(texts[t])):
            owners = np.take_along_axis(taken, chosen[:, code], axis=1)
            if len(texts[text]) < size and np.isin(owners, (-1, text)).all():
                np.put_along_axis(taken, chosen[:, code], text, axis=1)
                texts[text].append(code)
                break
    assert all(len(text) == size for text in texts)
    return texts


def together(texts: Sequence[Sequence[int]], count: int, seed: int = 1) -> list[Step]:
    """Steps of all sequences, each with a token of its text at random."""
    dice = np.random.default_rng(seed)
    return [[(n, FIRST_ID + int(dice.choice(text))) for n, text in enumerate(texts)] for _ in range(count)]


def used(chosen: Any, layer: int, codes: Sequence[int]) -> set[int]:
    return {int(expert) for code in codes for expert in chosen[layer, code]}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("settings", [{}, {"guests": 2}, {"regions": False}], ids=str)
def test_each_row_has_the_choices_of_its_sequence(
    n: int, settings: dict[str, Any], path: Path, chosen: Any
) -> None:
    """Real choices of every step, counted here too: of all sequences, of some, single tokens, a prompt."""
    texts = apart(chosen, n, 2)
    steps = together(texts, 12)
    steps += [step[1:] for step in together(texts, 6, seed=2)]  # the first is idle: the next is rank 0
    steps += [step[:1] for step in together(texts, 3, seed=3)]  # alone: no rank
    steps += [[(0, FIRST_ID + code) for code in range(ROWS + 1)]]  # a prompt
    # The first text is at home in the slots, the last one is not.
    seed = [sorted(used(chosen, layer, texts[0]))[:6] for layer in range(LAYERS)]
    seed = [experts + [e for e in range(64) if e not in experts][: 6 - len(experts)] for experts in seed]
    (blocks,) = rows_after(path, settings, seed, HABITS.n_expert, steps, [len(steps)])
    products = 3 if settings.get("regions") is False else 1
    for block in blocks:
        choices, hits = [0] * ROWS, [0] * ROWS
        for step in steps:
            for row, (_, token) in enumerate(step if 2 <= len(step) <= ROWS else ()):
                experts = chosen[block.block, token - FIRST_ID]
                choices[row] += products * len(experts)
                hits[row] += products * int(np.isin(experts, seed[block.block]).sum())
        assert (list(block.row_choices), list(block.row_hits)) == (choices, hits)
        assert hits[0] > 0


def rates(before: Sequence[Block], after: Sequence[Block], n: int) -> list[float]:
    """Share of the choices of each row whose expert had a slot, all layers."""

    def sums(blocks: Sequence[Block], field: str) -> Any:
        return np.sum([getattr(block, field) for block in blocks], axis=0)[:n]

    choices = sums(after, "row_choices") - sums(before, "row_choices")
    return list((sums(after, "row_hits") - sums(before, "row_hits")) / choices)


def ranked(texts: Sequence[Sequence[int]], count: int, order: Sequence[int]) -> list[Step]:
    """The same tokens in every step, whichever text comes first."""
    return [[(rank, step[n][1]) for rank, n in enumerate(order)] for step in together(texts, count)]


FOLLOWING: dict[str, dict[str, Any]] = {
    "lru": {"policy": "lru"},
    "lfu": {"policy": "lfu", "half_life": 32},
    "lfu on demand": {"policy": "lfu", "half_life": 32, "least_misses": 2},
}
EXACT = {"upload_bytes": FREE, "lockstep": True, "cpu_bytes_us": 1000}


@pytest.mark.parametrize("policy", FOLLOWING)
def test_with_slots_enough_each_sequence_is_served_alike(policy: str, path: Path, chosen: Any) -> None:
    """Also where the slots began as those of the first alone."""
    texts = apart(chosen, 2, 4)
    needed = [[used(chosen, layer, text) for text in texts] for layer in range(LAYERS)]
    k = max(len(first | second) for first, second in needed)
    seed = [(sorted(first) + sorted(set(range(64)) - first - second))[:k] for first, second in needed]
    steps = together(texts, 120)
    early, late = rows_after(path, {**EXACT, **FOLLOWING[policy]}, seed, HABITS.n_expert, steps, [60, 120])
    first, second = rates(early, late, 2)
    assert min(first, second) > 0.98
    assert all(block.admitted > 0 for block in late)


@pytest.mark.parametrize("policy", FOLLOWING)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_with_few_slots_the_rank_in_a_step_brings_nothing(
    policy: str, share: float, path: Path, chosen: Any
) -> None:
    """A text is served as well whichever place its token has: what decides is how often experts are used."""
    texts = apart(chosen, 2, 4)
    k = [int(share * len(used(chosen, layer, [*texts[0], *texts[1]]))) for layer in range(LAYERS)]
    seed = [list(range(n)) for n in k]
    found, settings = [], FOLLOWING[policy]
    for order in ((0, 1), (1, 0)):
        steps = ranked(texts, 400, order)
        early, late = rows_after(path, {**EXACT, **settings}, seed, HABITS.n_expert, steps, [100, 400])
        by_rank = rates(early, late, 2)
        found.append([by_rank[order.index(n)] for n in (0, 1)])
        # The replay knows as much of steps of several sequences.
        ids = [chosen[:, [token - FIRST_ID for _, token in step]] for step in steps]
        how = Adaptation(Policy(settings["policy"]), **{k: v for k, v in settings.items() if k != "policy"})
        foretold = follow(ids, replace(how, upload_bytes=FREE), seed, HABITS.n_expert, [EXPERT] * LAYERS)
        assert abs(foretold.rate(100) - np.mean(by_rank)) < 0.02
    assert all(abs(first - last) < 0.02 for first, last in zip(*found, strict=True))
    assert abs(found[0][0] - found[0][1]) < 0.1
