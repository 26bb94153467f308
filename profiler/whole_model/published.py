"""Runs of stock tools as measurements: the assumed figures of a machine are fitted to them.

Every figure that a predicted time stands on (`planner.cost.evidence`) has a factor; its logarithm is
expected to be 0 with the doubt that the figure has. The likeliest factors are found by Gauss-Newton steps,
whose derivatives are the shares of the time that rest on each figure. What stays unknown afterwards is the
posterior covariance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.constants import CPU, PPM
from planner.cost import error_bar, evidence
from planner.cost.evidence import Part
from planner.machine.host_memory import HostMemory, copy_rate
from planner.machine.profile import Calibration, Device, Doubt, Link, Profile
from planner.model.inventory import Inventory
from planner.workload import Workload
from profiler.whole_model.placements import Placement, Predictor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ERROR = (
    0.008  # of one published number: placements that sets hold twice lie 0.8 % apart (five groups, pooled)
)
_STEPS, _HALVINGS = 12, 6
_LEAST = 0.01  # of twice the log likelihood: a step that gains less ends the search
_MOST = math.log(50)  # a factor beyond it is another machine


@dataclass(frozen=True, slots=True)
class Point:
    """One measured time of one placement of one model."""

    inventory: Inventory
    placement: Placement
    workload: Workload
    ns: int
    prompt: bool = False  # of the whole prompt; else of a token
    host_memory: HostMemory = HostMemory.PINNED
    error: float = ERROR  # relative


@dataclass(frozen=True, slots=True)
class Predicted:
    """A point as a profile prices it."""

    ns: int
    parts: tuple[Part, ...]
    error_ppm: int
    beyond: tuple[str, ...] = ()  # GPUs that it asks more of than all their memory: such a run cannot be

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of the time that rests on each figure."""
        total = max(sum(part.ns for part in self.parts), 1)
        found: dict[str, float] = {}
        for part in self.parts:
            found[part.figure] = found.get(part.figure, 0.0) + part.ns / total
        return found


def predict(profile: Profile, points: Sequence[Point]) -> list[Predicted]:
    """What the planner makes of each point; points of one model and use are priced together."""
    groups: dict[tuple[int, str, HostMemory], list[int]] = {}
    for index, point in enumerate(points):
        key = (id(point.inventory), point.workload.model_dump_json(), point.host_memory)
        groups.setdefault(key, []).append(index)
    found: dict[int, Predicted] = {}
    for (_, _, memory), members in groups.items():
        first = points[members[0]]
        predictor = Predictor(first.inventory, first.workload)
        told = predictor.explain_all(profile, [points[i].placement for i in members], memory)
        for index, parts in zip(members, told, strict=True):
            prompt = points[index].prompt
            found[index] = Predicted(
                parts.prefill_ns if prompt else parts.tpot_ns,
                parts.prompt if prompt else parts.token,
                parts.prefill_error_ppm if prompt else parts.error_ppm,
                tuple(d.name for d in profile.devices if _exceeds(d, parts.memory.get(d.name, 0))),
            )
    return [found[i] for i in range(len(points))]


def _exceeds(device: Device, used: int) -> bool:
    return device.kind == "gpu" and used > device.memory_bytes > 0


def fitted(profile: Profile, points: Sequence[Point], again: float = 0.0) -> Profile:
    """The profile with the likeliest figures; what they may still be off by is in `doubts`.

    `again`: how far runs of one placement lie apart on the machine (relative), where that is known.
    """
    import numpy as np

    start = _begun(profile)
    priced = predict(start, points)
    names = sorted({figure for each in priced for figure in each.shares if _settable(figure)})
    prior = np.diag([1 / error_bar.doubt(name, start) ** 2 for name in names])
    weight = np.array([1 / point.error**2 for point in points])
    search = _Search(start, points, names, prior, weight)
    made, priced = search.run()
    # What cannot be set is as unknown afterwards as before, but the figures that were set made up for it.
    names = sorted({*names, *(f for each in priced for f in each.shares if _shared_by_runs(f))})
    prior = np.diag([1 / error_bar.doubt(name, start) ** 2 for name in names])
    slopes = np.array([[each.shares.get(name, 0.0) for name in names] for each in priced])
    covariance = np.linalg.inv(slopes.T @ (weight[:, None] * slopes) + prior)
    worst = max(abs(e.ns / p.ns - 1) for p, e in zip(points, priced, strict=True))
    calibration = made.calibrations[0].model_copy(
        update={"residual_ppm": round(worst * PPM), "runs": len(points)}
    )
    doubts = tuple(
        Doubt(figure=name, covariance=tuple(round(float(v) * PPM) for v in covariance[row, : row + 1]))
        for row, name in enumerate(names)
    )
    if again:  # a run differs from the mean by it, and so did those that were fitted
        variance = again**2 * (1 + 1 / len(points))
        doubts += (Doubt(figure=error_bar.AGAIN, covariance=(*(0 for _ in doubts), round(variance * PPM))),)
    return made.model_copy(update={"calibrations": (calibration,), "doubts": doubts})


@dataclass(slots=True)
class _Search:
    """The likeliest factors of some figures: damped Gauss-Newton, one figure at a time where that is stuck.

    A product is bound by memory or by arithmetic. Beyond the point where it changes sides its time no longer
    follows the figure that a step is taken of, so a step is halved until it helps.
    """

    start: Profile
    points: Sequence[Point]
    names: Sequence[str]
    prior: Array
    weight: Array

    def run(self) -> tuple[Profile, list[Predicted]]:
        """The profile found, and what it makes of the points."""
        import numpy as np

        factors = np.zeros(len(self.names))
        made, priced = self._at(factors)
        for _ in range(_STEPS):
            slopes = np.array([[each.shares.get(name, 0.0) for name in self.names] for each in priced])
            normal = slopes.T @ (self.weight[:, None] * slopes) + self.prior
            downhill = slopes.T @ (self.weight * self._missing(priced)) - self.prior @ factors
            each = np.diag(downhill / np.diag(normal))
            for step in (np.linalg.solve(normal, downhill), *each[np.argsort(-np.abs(downhill))]):
                found = self._better(factors, step, self._cost(priced, factors))
                if found is not None:
                    break
            else:
                break
            gained = self._cost(priced, factors) - self._cost(found[2], found[0])
            factors, made, priced = found
            if gained < _LEAST:
                break
        return made, priced

    def _better(
        self, factors: Array, step: Array, cost: float
    ) -> tuple[Array, Profile, list[Predicted]] | None:
        import numpy as np

        for _ in range(_HALVINGS):
            at = np.clip(factors + step, -_MOST, _MOST)
            made, priced = self._at(at)
            if self._cost(priced, at) < cost:
                return at, made, priced
            step = step / 2
        return None

    def _at(self, factors: Array) -> tuple[Profile, list[Predicted]]:
        made = _applied(self.start, dict(zip(self.names, factors.tolist(), strict=True)))
        return made, predict(made, self.points)

    def _missing(self, priced: Sequence[Predicted]) -> Array:
        import numpy as np

        return np.array([math.log(p.ns / max(e.ns, 1)) for p, e in zip(self.points, priced, strict=True)])

    def _cost(self, priced: Sequence[Predicted], at: Array) -> float:
        return float(self.weight @ self._missing(priced) ** 2 + at @ self.prior @ at)


def _begun(profile: Profile) -> Profile:
    """The profile with what is assumed spelt out: copies of mapped pages, the calibration."""
    links = tuple(
        li.model_copy(update={"mapped_bytes_per_s": copy_rate(li, HostMemory.MAPPED)})
        if li.source == CPU
        else li
        for li in profile.links
    )
    guess = Calibration(model="", split_ns=40_000, mixed_ns=500_000, token_ns=300_000)
    known = next((c for c in profile.calibrations if not c.model), guess)
    return profile.model_copy(update={"links": links, "calibrations": (known,), "doubts": None})


def _settable(figure: str) -> bool:
    """Whether a figure is a number of the profile: timed operators, divided units, attention are not."""
    return error_bar.kind_of(figure)[0] not in (evidence.TIMED, evidence.SHARED, evidence.ATTENTION)


def _shared_by_runs(figure: str) -> bool:
    """Whether a figure that is no number of the profile is off alike in all runs."""
    return error_bar.kind_of(figure)[0] == evidence.ATTENTION


def _applied(profile: Profile, logs: Mapping[str, float]) -> Profile:
    """The profile with each figure's times multiplied by its factor."""
    factor = {name: math.exp(log) for name, log in logs.items()}

    def at(name: str) -> float:
        return factor.get(name, 1.0)

    def device(d: Device) -> Device:
        return d.model_copy(
            update={
                "bandwidth_bytes_per_s": _divided(d.bandwidth_bytes_per_s, at(f"{evidence.MEMORY} {d.name}")),
                "flops_per_s": _divided(d.flops_per_s, at(f"{evidence.ARITHMETIC} {d.name}")),
                "op_overhead_ns": round(d.op_overhead_ns * at(f"{evidence.SMALL} {d.name}")),
            }
        )

    def link(li: Link) -> Link:
        return li.model_copy(
            update={
                "bandwidth_bytes_per_s": _divided(li.bandwidth_bytes_per_s, at(evidence.COPIES)),
                "latency_ns": round(li.latency_ns * at(evidence.COPIES)),
                "mapped_bytes_per_s": li.mapped_bytes_per_s
                and _divided(li.mapped_bytes_per_s, at(evidence.MAPPED)),
            }
        )

    known = profile.calibrations[0]
    calibration = known.model_copy(
        update={
            "split_ns": round(known.split_ns * at(evidence.CHANGES)),
            "mixed_ns": round(known.mixed_ns * at(evidence.MIXED)),
            "token_ns": round(known.token_ns * at(evidence.TOKEN)),
        }
    )
    return profile.model_copy(
        update={
            "devices": tuple(map(device, profile.devices)),
            "links": tuple(map(link, profile.links)),
            "calibrations": (calibration,),
        }
    )


def _divided(rate: int, factor: float) -> int:
    return max(round(rate / factor), 1)
