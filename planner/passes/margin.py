"""The one rule by which placements are told apart: the simplest of those that the error cannot separate."""

from __future__ import annotations

from collections.abc import Sequence

from planner.constants import PPM
from planner.cost.unit_time import Prices
from planner.machine.profile import Calibration
from planner.passes.chosen import Chosen

_LEAST_PPM, _MOST_PPM = 5_000, 20_000
_UNCALIBRATED_PPM = 10_000
STOCK_TOLERANCE_PPM = _MOST_PPM  # how far a kept stock rule may be from the best that another run finds

_ERROR_PPM = {True: 150_000, False: 300_000}  # without calibration: measured operators, assumed machine


def error_ppm(prices: Prices) -> int:
    """Relative half-width of the interval around a predicted time."""
    return prices.calibration.residual_ppm or _ERROR_PPM[prices.profile.measured]


def indistinct_ppm(calibration: Calibration) -> int:
    """How far two plans for one machine must differ to be told apart.

    The error of a difference is far smaller than that of either time, as both share the machine: a
    third of the calibration's residual, between 0.5 % and 2 %; 1 % without calibration.
    """
    residual = calibration.residual_ppm
    return min(max(residual // 3, _LEAST_PPM), _MOST_PPM) if residual else _UNCALIBRATED_PPM


def simplest_within_error(found: Sequence[Chosen]) -> Chosen:
    """Of the placements within the error of the best the simplest; of these the fastest, the first of equals.

    `found` is not empty, its placements are priced with one calibration.
    """
    best = min(each.doubted_ns for each in found)
    limit = best + best * indistinct_ppm(found[0].priced.prices.calibration) // PPM
    near = [each for each in found if each.doubted_ns <= limit]
    return min(near, key=lambda each: (each.rank, each.evaluation.objective_ns, each.opens_gpus))
