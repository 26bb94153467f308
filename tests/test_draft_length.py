"""Draft lengths that follow acceptance: the rule step by step, and replayed on logs against fixed ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from engines import ROOT

from planner.drafts.acceptance import Step
from planner.drafts.length import EVERY, MOST, DraftLength, bounds, time_of
from planner.drafts.replay import best_fixed, fixed, following, oracle, right_of

# A step of 0, 1, … drafted tokens: all on a GPU, experts on the CPU, and in between.
COSTS = {name: [100 + slope * n for n in range(MOST + 1)] for name, slope in (("gpu", 6), ("cpu", 30))}
COSTS["mid"] = [100, 118, 130, 142, 154, 166, 178, 190, 202]


def log(*parts: tuple[float, int], seed: int = 1) -> tuple[bool, ...]:
    """Guesses of which a share is right, part after part."""
    rng = random.Random(seed)
    return tuple(rng.random() < share for share, tokens in parts for _ in range(tokens))


def bursts(seed: int) -> tuple[bool, ...]:
    rng = random.Random(seed)
    return log(*((rng.choice((0.95, 0.2)), rng.randint(5, 60)) for _ in range(100)), seed=seed)


STEADY = {f"{share:g}": log((share, 4000)) for share in (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0)}
CHANGING = {
    "good and bad": log(*((0.95, 500), (0.1, 500)) * 4),
    "better and worse": log(*((0.97, 800), (0.4, 800)) * 3),
    "worse at the end": log((0.97, 3000), (0.05, 3000)),
}
LOGS = {**STEADY, **CHANGING, "bursts": bursts(3), "other bursts": bursts(4)}


def planned(right: Sequence[bool], step_ns: Sequence[int]) -> int:
    """What a plan would draft that knows the mean rate."""
    share = sum(right) / len(right)
    speed = [sum(share**i for i in range(n + 1)) / step_ns[n] for n in range(MOST + 1)]
    return speed.index(max(speed))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", LOGS)
def test_near_the_best_fixed_length_on_every_log(name: str, costs: str) -> None:
    right, step_ns = LOGS[name], COSTS[costs]
    base = planned(right, step_ns)
    if not base:  # a plan that drafts nothing has no length to follow
        return
    found, (_, best) = following(right, base, step_ns), best_fixed(right, step_ns)
    bar = oracle(right, step_ns)
    assert found.speed >= best.speed * 95 / 100
    assert bar.speed >= max(found.speed, best.speed)
    assert found.tokens == best.tokens == bar.tokens == len(right)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", CHANGING)
def test_better_than_any_fixed_length_where_acceptance_changes(name: str, costs: str) -> None:
    right, step_ns = LOGS[name], COSTS[costs]
    base = planned(right, step_ns)
    assert following(right, base, step_ns).speed > best_fixed(right, step_ns)[1].speed


def served() -> list[list[Step]]:
    """The steps of each request in the log of a real server."""
    lines = (ROOT / "tests" / "data" / "drafts-tiny-moe.txt").read_text().splitlines()
    counts = [[pair.split("/") for pair in line.split()] for line in lines if not line.startswith("#")]
    return [[Step(int(n), int(accepted)) for accepted, n in steps] for steps in counts]


@pytest.mark.parametrize("costs", COSTS)
def test_near_the_best_fixed_length_on_the_log_of_a_server(costs: str) -> None:
    """Twenty requests (tests/data/drafts-tiny-moe.txt): each by itself, and as one long text."""
    each = [right_of(steps) for steps in served()]
    whole = tuple(right for text in each for right in text)
    step_ns = COSTS[costs]
    base = planned(whole, step_ns)
    _, best = best_fixed(whole, step_ns)
    assert len(each) == 20 and following(whole, base, step_ns).speed >= best.speed * 95 / 100
    apart = sum(following(text, base, step_ns).time_ns for text in each)
    of_best = min(sum(fixed(text, n, step_ns).time_ns for text in each) for n in range(MOST + 1))
    assert of_best >= apart * 95 / 100


def _percent(shares: Iterable[float]) -> str:
    found = sorted(100 * each for each in shares)
    return f"{found[0]:.1f} to {found[-1]:.1f} %"


def test_the_figures_of_the_page_are_those_of_these_logs() -> None:
    """Of every log and shape of cost: the worst beside what is gained."""
    page = " ".join((ROOT / "docs" / "drafts.md").read_text(encoding="utf-8").split())
    rows = [(name, right, step_ns) for name, right in LOGS.items() for step_ns in COSTS.values()]
    of_best = {
        (name, tuple(step_ns)): float(
            following(right, base, step_ns).speed / best_fixed(right, step_ns)[1].speed
        )
        for name, right, step_ns in rows
        if (base := planned(right, step_ns))
    }
    more = [100 * of_best[name, tuple(step_ns)] - 100 for name in CHANGING for step_ns in COSTS.values()]
    top = max(
        oracle(right, step_ns).speed / best_fixed(right, step_ns)[1].speed for _, right, step_ns in rows
    )
    assert f"on {len(LOGS)} generated logs" in page
    assert f"at worst {100 * min(of_best.values()):.1f} % of the best fixed length" in page
    assert f"{min(more):.0f} to {max(more):.0f} % faster than it where acceptance changes" in page
    assert f"would bring up to {100 * float(top) - 100:.0f} % more" in page

    requests = served()
    assert requests[:10] == requests[10:]
    steps = [step for request in requests for step in request]
    accepted = sum(step.accepted for step in steps) / sum(step.drafted for step in steps)
    each = [right_of(request) for request in requests]
    whole = tuple(right for text in each for right in text)
    joined, apart = [], []
    for step_ns in COSTS.values():
        base = planned(whole, step_ns)
        joined.append(float(following(whole, base, step_ns).speed / best_fixed(whole, step_ns)[1].speed))
        best = min(sum(fixed(text, n, step_ns).time_ns for text in each) for n in range(MOST + 1))
        apart.append(float(best / sum(following(text, base, step_ns).time_ns for text in each)))
    assert f"{len(steps)} of them, of whose tokens {100 * accepted:.0f} % were accepted" in page
    assert f"{_percent(joined)} as one long text, {_percent(apart)} with each text by itself" in page


def test_shares_alone_overshoot_where_a_longer_batch_is_dear() -> None:
    """Why costs are asked for: half accepted is no sign that one more token pays."""
    right, step_ns = STEADY["0.8"], COSTS["cpu"]
    base, best = planned(right, step_ns), best_fixed(right, step_ns)[1].speed
    assert following(right, base, step_ns, costs_known=False).speed < best * 95 / 100
    assert following(right, base, step_ns).speed >= best * 97 / 100


@pytest.mark.parametrize(
    ("base", "most", "wanted"),
    [
        (1, 8, (1, 2)),
        (3, 8, (1, 6)),
        (4, 8, (2, 8)),
        (6, 8, (3, 8)),
        (8, 8, (4, 8)),
        (4, 4, (2, 4)),
        (5, 1, (1, 1)),
    ],
)
def test_bounds(base: int, most: int, wanted: tuple[int, int]) -> None:
    assert bounds(base, most) == wanted


def fed(length: DraftLength, shares: Sequence[int], steps: int) -> list[int]:
    """The lengths after each of some steps that accept `shares` percent in turn."""
    found = []
    for n in range(steps):
        length.saw(Step(length.tokens, length.tokens * shares[n % len(shares)] // 100))
        found.append(length.tokens)
    return found


def test_a_step_every_five_and_never_out_of_bounds() -> None:
    up = fed(DraftLength(3), [100], 30)
    assert up[: EVERY + 4] == [3, 3, 3, 3, 4, 4, 4, 4, 4] and max(up) == 6
    down = fed(DraftLength(6), [0], 60)
    assert down[:5] == [6, 6, 6, 6, 5] and min(down) == 3
    assert set(fed(DraftLength(4), [25, 50], 50)) == {4}


def test_what_was_drafted_long_ago_is_forgotten() -> None:
    length = DraftLength(4)
    fed(length, [100], 40)
    assert length.tokens == 8
    assert fed(length, [0], 60)[-1] == 2


def test_nothing_is_learnt_from_steps_without_a_draft() -> None:
    length = DraftLength(4)
    for _ in range(50):
        length.saw(Step(0, 0))
    assert length.tokens == 4


def test_a_log_of_steps_is_the_text_behind_them() -> None:
    steps = [Step(4, 4), Step(4, 2), Step(2, 0)]
    right = right_of(steps)
    assert right == (True,) * 5 + (True, True, False, False)
    again = fixed(right, 4, COSTS["gpu"])
    assert (again.steps, again.accepted) == (3, 6) and again.tokens == 9


def test_times_past_the_last_known_one_go_on_in_a_line() -> None:
    assert [time_of((10, 12, 15), n) for n in range(6)] == [10, 12, 15, 18, 21, 24]
