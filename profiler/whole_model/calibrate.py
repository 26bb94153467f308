"""Whole-model calibration: the few parameters that operator timings cannot give, fitted to measured runs.

The planner's price of a placement is linear in them:

    T = sum over devices (scale * operators + small * small operators)
        + changes * split + mixed + token + copies

so the coefficients of every run are found by pricing it with one parameter at a time, and the parameters
by least squares on relative errors. A prior keeps what few runs cannot tell near its expected value;
nothing is negative. Runs of a generated model calibrate the machine, with its cost of a small operator;
two or three runs of a real one correct the result for that model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.constants import CPU, PPM
from planner.machine.profile import Calibration, Device, Profile
from planner.model.inventory import Inventory
from planner.workload import Workload
from profiler.whole_model.placements import Placement, Predictor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_US = 1000
# Expected value, and how far from it is no surprise.
SCALE = "scale"
SMALL = "small operators of "
_TIMES = ("split", "mixed", "token")
_PRIOR: Mapping[str, tuple[float, float]] = {
    "split": (20 * _US, 25 * _US),
    "mixed": (500 * _US, 1500 * _US),
    "token": (150 * _US, 250 * _US),
    SCALE: (1.0, 0.25),
}
ERROR = 0.02  # relative error of one measured run
ENOUGH = 4  # runs that tell the cost of small operators from that of large ones


@dataclass(frozen=True, slots=True)
class Run:
    """One measured placement."""

    placement: Placement
    decode_ns: int
    paged_bytes: int = 0  # read from disk while it was timed


@dataclass(frozen=True, slots=True)
class Parameter:
    """One unknown: its expected value and uncertainty."""

    name: str  # split, mixed, token, a device (its scale), or SMALL + a device
    expected: float
    sigma: float


def machine(inventory: Inventory, workload: Workload, profile: Profile, runs: Sequence[Run]) -> Profile:
    """The profile with the calibration "" and the cost of small operators that explain the runs best."""
    parameters = _parameters(profile, runs, _PRIOR, small=len(runs) >= ENOUGH)
    found, worst = _fit(inventory, workload, profile, runs, parameters)
    made = _calibration("", profile, _PRIOR, found, worst, len(runs))
    devices = tuple(_with_small(d, found, made) for d in profile.devices)
    kept = tuple(c for c in profile.calibrations if c.model)
    return profile.model_copy(update={"devices": devices, "calibrations": (made, *kept)})


def model(inventory: Inventory, workload: Workload, profile: Profile, runs: Sequence[Run]) -> Profile:
    """The profile with a calibration of that model; what the runs do not tell is the machine's."""
    known = next((c for c in profile.calibrations if not c.model), None)
    prior = _expected(known) if known else _PRIOR
    parameters = _parameters(profile, runs, prior, small=False)
    found, worst = _fit(inventory, workload, profile, runs, parameters)
    digest = inventory.table_digest()
    made = _calibration(digest, profile, prior, found, worst, len(runs))
    kept = tuple(c for c in profile.calibrations if c.model != digest)
    return profile.model_copy(update={"calibrations": (*kept, made)})


def _with_small(device: Device, found: Mapping[str, float], made: Calibration) -> Device:
    """A small operator's own time: what was fitted includes the scale of its device."""
    if SMALL + device.name not in found:
        return device
    scale = max(made.scale_ppm[device.name], 1) / PPM
    return device.model_copy(update={"op_overhead_ns": round(found[SMALL + device.name] / scale)})


def _calibration(
    model: str,
    profile: Profile,
    prior: Mapping[str, tuple[float, float]],
    found: Mapping[str, float],
    worst: float,
    runs: int,
) -> Calibration:
    """What was fitted; changes of device that no run had are as expected before, not free."""
    others = any(device.kind != "cpu" for device in profile.devices)
    expected = {name: prior[name][0] if others else 0.0 for name in ("split", "mixed")}
    return Calibration(
        model=model,
        split_ns=round(found.get("split", expected["split"])),
        mixed_ns=round(found.get("mixed", expected["mixed"])),
        token_ns=round(found["token"]),
        scale_ppm={d.name: round(found[d.name] * PPM) for d in profile.devices if d.name in found},
        residual_ppm=round(worst * PPM),
        runs=runs,
    )


def _expected(known: Calibration) -> dict[str, tuple[float, float]]:
    """A machine's calibration as the prior of a model's: half as uncertain as no knowledge."""
    values = {"split": known.split_ns, "mixed": known.mixed_ns, "token": known.token_ns}
    prior = {name: (float(values[name]), _PRIOR[name][1] / 2) for name in values}
    return prior | {name: (ppm / PPM, _PRIOR[SCALE][1] / 2) for name, ppm in known.scale_ppm.items()}


def _parameters(
    profile: Profile, runs: Sequence[Run], prior: Mapping[str, tuple[float, float]], small: bool
) -> tuple[Parameter, ...]:
    """What the runs can tell: the devices they use, and changes of device when there are any."""
    used = {d for run in runs for d in run.placement.layer_devices}
    used |= {CPU} if any(run.placement.moved for run in runs) else set()
    devices = [d for d in profile.devices if d.name in used]
    found = [Parameter(d.name, *prior.get(d.name, prior.get(SCALE, _PRIOR[SCALE]))) for d in devices]
    if small:
        found += [Parameter(SMALL + d.name, d.op_overhead_ns, 2 * d.op_overhead_ns + 1) for d in devices]
    if any(run.placement.mixed for run in runs):
        found += [Parameter(name, *prior[name]) for name in ("split", "mixed")]
    return (*found, Parameter("token", *prior["token"]))


def _fit(
    inventory: Inventory,
    workload: Workload,
    profile: Profile,
    runs: Sequence[Run],
    parameters: Sequence[Parameter],
) -> tuple[dict[str, float], float]:
    """Values by name, and the worst relative error over the runs."""
    import numpy as np

    design, fixed = coefficients(inventory, workload, profile, runs, parameters)
    measured = np.array([run.decode_ns for run in runs], float)
    values = solve(design, measured - fixed, measured * ERROR, parameters)
    worst = float(np.max(np.abs((design @ values + fixed) / measured - 1)))
    return dict(zip((p.name for p in parameters), values.tolist(), strict=True)), worst


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
    apart = any(p.name.startswith(SMALL) for p in parameters)

    def priced(changed: str, step: float) -> Array:
        changes = _changed(profile, changed, step, apart)
        found = predictor.evaluate_all(profile.model_copy(update=changes), placements)
        return np.array([e.decode_ns for e in found], float)

    nothing = priced("", 0)
    columns = []
    for parameter in parameters:
        step = 1e6 if parameter.name in _TIMES or parameter.name.startswith(SMALL) else 1.0
        base = nothing
        if parameter.name.startswith(SMALL):  # of operators that cost nothing else
            base = priced(parameter.name.removeprefix(SMALL), 1.0)
        columns.append((priced(parameter.name, step) - base) / step)
    return np.stack(columns, axis=1), nothing


def _changed(profile: Profile, changed: str, step: float, apart: bool) -> dict[str, object]:
    """A profile's fields when all is free of charge but one parameter.

    `apart`: small operators are a parameter of their own, so the devices' scales do not pay for them.
    """
    device = changed.removeprefix(SMALL)
    small = changed.startswith(SMALL)
    calibration = Calibration(
        model="",
        split_ns=round(step) if changed == "split" else 0,
        mixed_ns=round(step) if changed == "mixed" else 0,
        token_ns=round(step) if changed == "token" else 0,
        scale_ppm={d.name: PPM if d.name == device else 0 for d in profile.devices},
    )
    if not apart:
        return {"calibrations": (calibration,)}
    devices = [d.model_copy(update={"op_overhead_ns": 0}) for d in profile.devices]
    if small:
        devices = [
            d.model_copy(update={"op_overhead_ns": round(step) if d.name == device else 0}) for d in devices
        ]
    return {"calibrations": (calibration,), "devices": tuple(devices)}


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
