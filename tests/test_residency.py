"""Slots that follow the text: the simulation held to plain loops, and to the counters of the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hybrid_runs import Run, distance, run_all

from planner.plan.adaptation import Adaptation, Policy
from planner.routing.residency import follow
from profiler.routed import model as routed
from profiler.routed import stream
from profiler.routed.codes import chosen_by_code
from profiler.routed.presets import PRESETS
from runtime.hybrid.device import Block

EACH = 1000  # bytes of an expert
SEVERAL = (
    Adaptation(),
    Adaptation(Policy.LRU, upload_bytes=10**9),
    Adaptation(Policy.LRU, upload_bytes=EACH // 3, protect=2),
    Adaptation(Policy.LFU, half_life=5, upload_bytes=3 * EACH, refill_bytes=4 * EACH),
    Adaptation(Policy.LFU, half_life=16, upload_bytes=EACH // 2, protect=1),
    Adaptation(Policy.LFU, half_life=4, upload_bytes=EACH, protect=1, least_misses=2),
    Adaptation(Policy.LFU, half_life=4, upload_bytes=2 * EACH, refill_bytes=3 * EACH, least_misses=1),
    Adaptation(Policy.LRU, upload_bytes=EACH, least_misses=2),
)


def by_hand(
    steps: Sequence[Sequence[Sequence[int]]], how: Adaptation, seed: Sequence[int], n: int
) -> tuple[list[int], list[int]]:
    """Hits and admissions of one layer, step by step: the words of the module as plain loops."""
    slots, fixed, credit, tick = list(seed), set(seed[: how.protect]), 0, 0
    halved = 0
    ghost, ghost_credit, lead, back = list(seed), 0, 0, False
    never = float("-inf")
    score: list[float] = [0.0 if how.policy is Policy.LFU else never] * n
    for rank, expert in enumerate(seed):
        lfu = (1 << 16) * how.half_life // 8 * (len(seed) - rank) // len(seed)
        score[expert] = lfu if how.policy is Policy.LFU else -1 - rank
    hits, admitted = [], []
    for tokens in steps:
        hits.append(sum(expert in slots for token in tokens for expert in token))
        admitted.append(0)
        if how.policy is Policy.STATIC:
            continue
        moment = tick
        for number, token in enumerate(tokens):
            moment = tick + number if len(tokens) > 16 else tick  # of a prompt, or all at once
            while how.policy is Policy.LFU and halved < moment // how.half_life:
                score = [one // 2 for one in score]
                halved += 1
            for place, expert in enumerate(token):
                if how.policy is Policy.LRU:
                    score[expert] = moment * 1024 + 1023 - place
                else:
                    score[expert] += round((1 << 16) * 2 ** (moment % how.half_life / how.half_life))
        tick += len(tokens)
        if len(tokens) > 16:
            credit = max(credit, how.refill_bytes)
            continue
        chosen = {expert for token in tokens for expert in token}
        for token in tokens if how.least_misses else ():
            lead += (sum(e in seed for e in token) - sum(e in ghost for e in token)) * 65536 - lead // 256
        back = lead > (0 if back else len(tokens[0]) * 65536 * 2)
        ghost_credit, _ = exchanged(ghost, ghost_credit, None, how, chosen, fixed, score, moment)
        credit, admitted[-1] = exchanged(
            slots, credit, seed if back else None, how, chosen, fixed, score, moment
        )
    return hits, admitted


def exchanged(
    slots: list[int],
    credit: int,
    back: Sequence[int] | None,
    how: Adaptation,
    chosen: set[int],
    fixed: set[int],
    score: Sequence[float],
    moment: int,
) -> tuple[int, int]:
    """One step's exchanges: what is left of the credit, and how many there were."""
    credit = max(credit, min(credit + how.upload_bytes, max(how.upload_bytes, EACH)))
    missed = chosen - set(slots)
    fresh: set[int] = set()
    few = len(missed) < how.least_misses
    use = (1 << 16) * 2 ** (moment % how.half_life / how.half_life)
    ahead = (2 * round(use) if how.policy is Policy.LFU else float("inf")) if few else 0
    while credit >= EACH:
        inside = [e for e in sorted(slots) if e not in chosen | fixed | fresh | set(back or ())]
        coming = missed if how.least_misses else range(len(score))
        outside = [e for e in sorted(coming) if e not in slots and score[e] > float("-inf")]
        outside = [e for e in outside if back is None or e in back]
        if not inside or not outside:
            break
        comes, goes = max(outside, key=lambda e: score[e]), min(inside, key=lambda e: score[e])
        if score[comes] - score[goes] <= ahead and (back is None or few):
            break
        slots[slots.index(goes)] = comes
        fresh.add(comes)
        credit -= EACH
    return credit, len(fresh)


def test_follows_the_rules() -> None:
    dice = random.Random(4)
    for how in SEVERAL:
        for _ in range(6):
            n, k = dice.randint(6, 20), dice.randint(2, 5)
            layers = [
                [
                    [dice.sample(range(n), 3) for _ in range(tokens)]
                    for tokens in dice.choices((1, 2, 20), (8, 2, 1), k=60)
                ]
            ]
            sizes = [len(step) for step in layers[0]]
            layers.append([[dice.sample(range(n), 3) for _ in range(size)] for size in sizes])
            seeds = [dice.sample(range(n), k) for _ in layers]
            steps = [np.array([layer[t] for layer in layers]) for t in range(len(sizes))]
            found = follow(steps, how, seeds, n, [EACH] * 2)
            for layer, seed in enumerate(seeds):
                hits, admitted = by_hand(layers[layer], how, seed, n)
                assert found.hits[:, layer].tolist() == hits, how
                assert found.admitted[:, layer].tolist() == admitted, how
                assert found.asked[:, layer].tolist() == [3 * size for size in sizes]


@pytest.mark.parametrize(("policy", "misses"), [(Policy.LRU, 0), (Policy.LFU, 0), (Policy.LFU, 2)])
def test_the_engine_counts_what_was_foretold(policy: Policy, misses: int, tmp_path: Path) -> None:
    preset = PRESETS["olmoe"]
    # Quantised experts: a token may name a slot twice, so that choices of the CPU need no place of their own.
    spec = replace(preset.spec("small"), n_layers=3)
    path = routed.write(tmp_path / "m.gguf", spec, preset.habits)
    codes = stream.codes_of(preset.habits, 240)
    tokens = tuple(int(code) + stream.FIRST_ID for code in codes)
    n, slots, prompt = preset.habits.n_expert, 20, 12
    plain = Run(path, prompt=tokens[:prompt], more=tokens[prompt:], n_experts=n, threads=1)
    seed = {layer: list(range(slots)) for layer in range(3)}
    follows = plain.on(
        policy=policy.value, half_life=16, upload_bytes=1 << 20, least_misses=misses, lockstep=True, stage=0,
        cpu_bytes_us=1000,
    )  # fmt: skip
    static = replace(plain.on(stage=0, cpu_bytes_us=1000), residents=seed)
    # A bus so fast that the steps bring newcomers to their slots by themselves.
    bus = plain.on(
        policy=policy.value, half_life=16, upload_bytes=1 << 20, least_misses=misses, lockstep=True, stage=0,
        guests=2, cpu_bytes_us=1000, bus_bytes_us=10**9,
    )  # fmt: skip
    ran = run_all([plain, static, replace(follows, residents=seed), replace(bus, residents=seed)], tmp_path)
    for run in ran[2:]:
        assert distance(ran[0].logits, run.logits) < 2e-2  # q4_0, on other kernels than the engine's
    table = chosen_by_code(preset.habits, 3)[:, codes]
    steps = [table[:, :prompt], *(table[:, t : t + 1] for t in range(prompt, len(codes)))]
    how = Adaptation(policy, 16, upload_bytes=1 << 20, least_misses=misses)
    static_slots = Adaptation()
    for number, rules in ((1, static_slots), (2, how), (3, how)):
        foretold = follow(steps, rules, list(seed.values()), n, [1000] * 3)
        report = ran[number].report
        assert report is not None
        for block in report.freed[:2]:  # the engine routes in the last layer only what it gives logits of
            hits, asked = foretold.hits[:, block.block].sum(), foretold.asked[:, block.block].sum()
            assert sum(block.chosen) == asked
            assert abs(block.hits - hits) / asked < 0.02
            assert abs(block.admitted - foretold.admitted[:, block.block].sum()) <= 0.05 * asked
        assert any(block.admitted for block in report.freed) == (rules is not static_slots)
        sent = sum(b.admitted_bytes / b.expert_bytes for b in report.freed) / max(admitted(report.freed), 1)
        assert sent == (0 if rules is static_slots else 1) if number < 3 else sent < 0.2


def admitted(blocks: Sequence[Block]) -> int:
    return sum(block.admitted for block in blocks)


def test_two_contexts_write_what_they_write_alone(tmp_path: Path) -> None:
    """Threads of one model whose slots change at every step, in both contexts at once."""
    from engines import python

    script = Path(__file__).parent / "two_contexts.py"
    path = tmp_path / "m.gguf"
    preset = PRESETS["olmoe"]
    routed.write(path, replace(preset.spec("small"), n_layers=3), preset.habits)
    done = python(str(script), str(path), limit_s=200)
    assert done.stdout.strip().endswith("the same"), done.stdout + done.stderr[-2000:]
