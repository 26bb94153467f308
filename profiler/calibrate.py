"""Whole-model calibration: the few parameters that operator timings cannot give, fitted to measured runs.

The planner's price of a placement is linear in its calibration:

    T = sum over devices scale_d * operators_d + changes * split + mixed * fixed + token + copies

so the coefficients of every run are found by pricing it with one parameter at a time, and the parameters
by least squares on relative errors. A prior keeps what few runs cannot tell near its expected value;
nothing is negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.inventory import Inventory
from planner.profile import Calibration, Profile
from planner.workload import Workload
from profiler.placements import Placement, Predictor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_PPM = 10**6
_US = 1000
# Expected value and how far from it is no surprise. Operators: 15 %, what sums of single ones usually miss.
PRIOR_SPLIT_NS = (20 * _US, 25 * _US)
PRIOR_MIXED_NS = (500 * _US, 1500 * _US)
PRIOR_TOKEN_NS = (150 * _US, 250 * _US)
PRIOR_SCALE = (1.0, 0.25)
ERROR = 0.02  # relative error of one measured run


@dataclass(frozen=True, slots=True)
class Run:
    """One measured placement."""

    placement: Placement
    decode_ns: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One unknown: its expected value and uncertainty."""

    name: str  # split, mixed, token, or a device
    expected: float
    sigma: float


def fit(
    inventory: Inventory, workload: Workload, profile: Profile, runs: Sequence[Run], model: str
) -> Calibration:
    """The calibration that explains the runs best; `model` is a table digest, "" for the generated model.

    Its residual is the worst relative error over the runs.
    """
    import numpy as np

    parameters = _parameters(profile, runs)
    design, fixed = coefficients(inventory, workload, profile, runs, parameters)
    measured = np.array([run.decode_ns for run in runs], float)
    values = solve(design, measured - fixed, measured * ERROR, parameters)
    predicted = design @ values + fixed
    worst = float(np.max(np.abs(predicted / measured - 1)))
    named = dict(zip((p.name for p in parameters), values, strict=True))
    return Calibration(
        model=model,
        split_ns=round(named.get("split", 0)),
        mixed_ns=round(named.get("mixed", 0)),
        token_ns=round(named["token"]),
        scale_ppm={d.name: round(named[d.name] * _PPM) for d in profile.devices if d.name in named},
        residual_ppm=round(worst * _PPM),
        runs=len(runs),
    )


def _parameters(profile: Profile, runs: Sequence[Run]) -> tuple[Parameter, ...]:
    """What the runs can tell: the devices they use, and changes of device when there are any."""
    used = {d for run in runs for d in run.placement.layer_devices}
    used |= {"CPU"} if any(run.placement.moved for run in runs) else set()
    found = [Parameter(d.name, *PRIOR_SCALE) for d in profile.devices if d.name in used]
    if any(run.placement.mixed for run in runs):
        found += [Parameter("split", *PRIOR_SPLIT_NS), Parameter("mixed", *PRIOR_MIXED_NS)]
    return (*found, Parameter("token", *PRIOR_TOKEN_NS))


def coefficients(
    inventory: Inventory,
    workload: Workload,
    profile: Profile,
    runs: Sequence[Run],
    parameters: Sequence[Parameter],
) -> tuple[Array, Array]:
    """What one unit of each parameter adds to each run, shape (runs, parameters), and what no one does."""
    import numpy as np

    predictor = Predictor(inventory, workload)
    placements = [run.placement for run in runs]

    def priced(changed: dict[str, float]) -> Array:
        calibrated = profile.model_copy(update={"calibrations": (_unit(profile, changed),)})
        found = predictor.evaluate_all(calibrated, placements)
        return np.array([e.decode_ns for e in found], float)

    nothing = priced({})
    columns = []
    for parameter in parameters:
        step = 1.0 if parameter.name not in ("split", "mixed", "token") else 1e6
        columns.append((priced({parameter.name: step}) - nothing) / step)
    return np.stack(columns, axis=1), nothing


def _unit(profile: Profile, changed: dict[str, float]) -> Calibration:
    """A calibration in which everything is free of charge but what is named."""
    return Calibration(
        model="",
        split_ns=round(changed.get("split", 0)),
        mixed_ns=round(changed.get("mixed", 0)),
        token_ns=round(changed.get("token", 0)),
        scale_ppm={d.name: round(changed.get(d.name, 0) * _PPM) for d in profile.devices},
    )


def solve(design: Array, wanted: Array, sigma: Array, parameters: Sequence[Parameter]) -> Array:
    """Non-negative least squares with a prior: the best of all choices of which parameters are zero."""
    import numpy as np

    expected = np.array([p.expected for p in parameters])
    spread = np.array([p.sigma for p in parameters])
    rows = np.concatenate([design / sigma[:, None], np.diag(1 / spread)])
    right = np.concatenate([wanted / sigma, expected / spread])
    scale = np.abs(rows).max(axis=0)
    best, least = expected, np.inf
    for free in itertools.product((True, False), repeat=len(parameters)):
        kept = np.flatnonzero(free)
        values = np.zeros(len(parameters))
        if kept.size:
            found = np.linalg.lstsq(rows[:, kept] / scale[kept], right, rcond=None)[0]
            values[kept] = found / scale[kept]
        error = float(np.sum((rows @ values - right) ** 2))
        if (values >= 0).all() and error < least:
            best, least = values, error
    return best
