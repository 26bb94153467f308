"""How far a predicted time may be off, from what it stands on: four of five runs lie within it.

Parts that rest on one figure err together, figures err apart, unless runs of whole models tied them to each
other (`Profile.doubts`). What a figure may be off by is the spread of what was seen: published runs against
assumed machines, placements that calibrations of measured machines had not seen (`benchmarks.predict --all`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.constants import PPM
from planner.cost import evidence
from planner.cost.evidence import Part
from planner.machine.profile import Profile

QUANTILE = 1.2816  # of the normal law: 80 % lie within
MOST_PPM = 5 * PPM
_TENTH = PPM // 1000  # of a percent: no library of mathematics rounds differently there
# Standard deviation of the logarithm of measured over predicted, by kind of figure.
_ASSUMED: Mapping[str, float] = {
    evidence.MEMORY: 0.2,
    evidence.ARITHMETIC: 0.4,
    evidence.ATTENTION: 0.7,
    evidence.SMALL: 0.3,
    evidence.COPIES: 0.3,
    evidence.MAPPED: 0.8,
    evidence.CHANGES: 0.4,
    evidence.MIXED: 1.0,
    evidence.TOKEN: 0.4,
    evidence.SHARED: 0.3,
    evidence.SLOTS: 0.3,
    evidence.TIMED: 0.3,
}
_GPU_ARITHMETIC = 0.2  # fitted to six sets: 0.77 to 1.13 times what was assumed of cards
_HOST_MEMORY = 0.7  # of assumed machines: no report states it, and kernels of types differ
_MACHINE = 0.3  # of assumed machines as they are: slower parts, other programs, other builds
_PROMPT = 0.085  # of measured machines: nothing of a prompt is fitted (82 of an H200: 0.09 with all else)
_TIMED = 0.15  # operators timed alone, against the same in a graph
_MEASURED: Mapping[str, float] = {
    evidence.COPIES: 0.1,
    evidence.MAPPED: 0.2,
    evidence.SHARED: 0.15,
    evidence.SLOTS: 0.15,
}
_BEYOND: Mapping[str, float] = {  # beside the error of timed operators
    evidence.MEASURED: 0.0,
    evidence.INTERPOLATED: 0.02,
    evidence.SCALED: 0.1,
    evidence.ASSUMED: 0.35,
}
# A card within 5 % of full: tokens took up to 22 % longer, and of five prompts two as long as ever, others
# 2, 3 and 20 times as long, by what the driver moves to and fro when a batch needs more than there is.
SPILL, SPILL_PROMPT = 0.15, 0.6
# What no figure explains: one run against its placement's mean, and what a cost model leaves out of it.
STRUCTURE = 0.015
# How full the tiles of a prompt's experts are: their use and the build's width of tiles are guessed. Eleven
# prompts of two models on an RTX 4090 and an RTX 3090, in batches of another size than the fitted one's.
_TILES = 0.2
AGAIN = "the same run again"  # a doubt: how far runs of one placement were seen to lie apart on a machine
_RELOADED = 0.07  # of a measured machine: a placement loaded again took 4 % to 10 % longer or shorter


def half_width_ppm(
    parts: Iterable[Part],
    profile: Profile,
    residual_ppm: int,
    *,
    prompt: bool = False,
    nearly_full: bool = False,
) -> int:
    """The error of the 80 % interval; `residual_ppm` of the calibration, 0 without one.

    `nearly_full`: a card is filled so far that its driver may spill to host memory.
    """
    found = variance(tuple(parts), profile, residual_ppm)
    found += (SPILL_PROMPT if prompt else SPILL) ** 2 if nearly_full else 0.0
    found += _PROMPT**2 if prompt and profile.measured else 0.0
    # Beyond the most that is shown the exponential is not asked for: its argument may be any number.
    exponent = min(QUANTILE * math.sqrt(found), math.log1p(MOST_PPM / PPM))
    return min(round(math.expm1(exponent) * PPM / _TENTH) * _TENTH, MOST_PPM)


def variance(parts: tuple[Part, ...], profile: Profile, residual_ppm: int) -> float:
    """Of the logarithm of measured over predicted."""
    total = max(sum(part.ns for part in parts), 1)
    shares: dict[str, float] = defaultdict(float)
    alone = beyond = tiles = 0.0
    for part in parts:
        share = part.ns / total
        shares[part.figure] += share
        alone += (share * part.spread_ppm / PPM) ** 2
        if part.basis in (evidence.SCALED, evidence.INTERPOLATED):
            beyond += share * _BEYOND[part.basis]
        if not profile.measured and _of_experts(part):
            tiles += share * _TILES
    known = covariances(profile)
    own = max(STRUCTURE**2, known.get((AGAIN, AGAIN), 0.0))
    found = own + alone + beyond**2 + tiles**2
    if not profile.measured and not known:
        found += _MACHINE**2
    for one, share in shares.items():
        if (one, one) in known:
            found += math.fsum(share * other * known.get((one, two), 0.0) for two, other in shares.items())
        else:
            found += (share * doubt(one, profile, residual_ppm)) ** 2
    return max(found, own)


def _of_experts(part: Part) -> bool:
    return part.what.startswith("MUL_MAT_ID") and kind_of(part.figure)[0] == evidence.ARITHMETIC


def doubt(figure: str, profile: Profile, residual_ppm: int = 0) -> float:
    """How far a figure may be off before runs of whole models told more."""
    kind, device = kind_of(figure)
    if not profile.measured:
        host = any(d.name == device and d.kind == "cpu" for d in profile.devices)
        special = {(evidence.MEMORY, True): _HOST_MEMORY, (evidence.ARITHMETIC, False): _GPU_ARITHMETIC}
        return special.get((kind, host), _ASSUMED[kind])
    calibrated = max(residual_ppm / PPM, _RELOADED) if residual_ppm else 0.0
    if kind == evidence.TIMED:
        return calibrated or _TIMED
    if kind in (evidence.MEMORY, evidence.ARITHMETIC):
        return math.hypot(calibrated or _TIMED, _BEYOND[evidence.ASSUMED])
    if kind == evidence.ATTENTION:
        return _ASSUMED[kind]
    if kind in (evidence.SMALL, evidence.CHANGES, evidence.MIXED, evidence.TOKEN):
        return 2 * calibrated or _ASSUMED[kind]
    return math.hypot(calibrated, _MEASURED[kind])


def kind_of(figure: str) -> tuple[str, str]:
    """Kind of a figure, and its device or ""."""
    if figure in _ASSUMED:
        return figure, ""
    kind, _, device = figure.partition(" ")
    return kind, device


def covariances(profile: Profile) -> Mapping[tuple[str, str], float]:
    """Of the logarithms of figures that runs of whole models tied to each other."""
    found = {}
    for row, one in enumerate(profile.doubts or ()):
        for other, value in zip((profile.doubts or ())[: row + 1], one.covariance, strict=True):
            found[one.figure, other.figure] = found[other.figure, one.figure] = value / PPM
    return found
