"""The one rule by which one of several placements is chosen: the fastest of each way to run the engine, the
simplest way of those that the error cannot separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from planner.constants import PPM
from planner.cost.build_problem import Priced
from planner.cost.error_bar import half_width_ppm
from planner.cost.evidence import Part
from planner.machine.profile import Calibration, Profile
from planner.passes.chosen import Chosen
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Capacity

_LEAST_PPM, _MOST_PPM = 5_000, 20_000
_UNCALIBRATED_PPM = 10_000
_FULL_PPM = 950_000  # of a card


def error_ppm(priced: Priced, found: Evaluation, token: tuple[Part, ...]) -> int:
    """How far the time of a token may be off: 80 % lie within it divided and multiplied by 1 + error.

    `token`: what it stands on, by `evidence.of_token`.
    """
    return _half_width(priced, found, token)


def prompt_error_ppm(priced: Priced, found: Evaluation, prompt: tuple[Part, ...]) -> int:
    """The same of the prompt's time, by `evidence.of_prompt`."""
    return _half_width(priced, found, prompt, prompt=True)


def prompt_doubt_ppm(priced: Priced, prompt: tuple[Part, ...]) -> int:
    """The same beside a placement whose prompt is computed elsewhere: a full card slows both."""
    prices = priced.prices
    return half_width_ppm(prompt, prices.profile, prices.calibration.residual_ppm, prompt=True)


def _half_width(priced: Priced, found: Evaluation, parts: tuple[Part, ...], prompt: bool = False) -> int:
    prices = priced.prices
    full = any(map(_nearly_full, priced.problem.devices, found.memory, repeat(prices.profile)))
    residual = prices.calibration.residual_ppm
    return half_width_ppm(parts, prices.profile, residual, prompt=prompt, nearly_full=full)


def _nearly_full(device: Capacity, used: int, profile: Profile) -> bool:
    """Whether so little of a card is left that its driver may hold a part elsewhere without a word."""
    size = profile.device(device.device).memory_bytes
    return not device.host and used * PPM > size * _FULL_PPM > 0


def indistinct_ppm(calibration: Calibration) -> int:
    """How far two plans for one machine must differ to be told apart.

    The error of a difference is far smaller than that of either time, as both share the machine: a
    third of the calibration's residual, between 0.5 % and 2 %; 1 % without calibration.
    """
    residual = calibration.residual_ppm
    return min(max(residual // 3, _LEAST_PPM), _MOST_PPM) if residual else _UNCALIBRATED_PPM


def choice(found: Sequence[Chosen]) -> Chosen:
    """The fastest placement of the simplest way that is not slower than the fastest by more than the error.

    Within one way nothing is slower than another placement of it, or a pin might make a plan faster; of
    equals a stock rule is kept. What goes beyond stock rules (drafts, slots) must beat the choice without it
    as both are predicted: whose prompt is doubted is settled before, or asking for slots made plans slower.
    `found` is not empty, its placements are priced with one calibration.
    """
    best = _of_all(found)
    simpler = [each for each in found if each.beyond < best.beyond]
    without = choice(simpler) if simpler else best
    return without if without.evaluation.objective_ns < best.evaluation.objective_ns else best


def _of_all(found: Sequence[Chosen]) -> Chosen:
    ways: dict[tuple[bool, ...], list[Chosen]] = {}
    for each in found:
        ways.setdefault(each.way, []).append(each)
    fastest = [min(alike, key=_first) for alike in ways.values()]
    best = min(each.doubted_ns for each in fastest)
    limit = best + best * indistinct_ppm(found[0].priced.prices.calibration) // PPM
    return min(
        (each for each in fastest if each.doubted_ns <= limit), key=lambda each: (each.way, _first(each))
    )


def _first(each: Chosen) -> tuple[int, bool, bool]:
    return each.doubted_ns, not each.rule, each.opens_gpus
