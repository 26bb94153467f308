"""Measurements of a plan: into the calibration, and from there to another plan where one is worth it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from planner.check.reprice import known_of, reprice, request_of, settings_of, with_step_times
from planner.constants import PPM
from planner.learn.calibrate import Calibrated, calibrated, deviation_ppm, predicted
from planner.learn.samples import Cleaned, Sample, cleaned
from planner.learn.watch import DEVIATION_PPM
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.passes.make_plan import make_plan
from planner.plan.difference import Difference, difference
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.solver.clock import Clock

GAIN_PPM = 30_000  # of the request's time: what another plan must bring
UNEXPLAINED_PPM = 500_000  # what the best calibration is off by: then it is no matter of calibration


class Verdict(Enum):
    """What came of some measurements."""

    UNKNOWN = "too few clean measurements to say anything"
    AS_PREDICTED = "as predicted: nothing to solve"
    UNEXPLAINED = "no calibration explains it: measured of another model, machine or use?"
    KEPT = "another machine than predicted, and still the plan for it"
    BETTER = "another plan is faster"


@dataclass(frozen=True, slots=True)
class Refined:
    """A verdict with all that it rests on."""

    verdict: Verdict
    seen: Cleaned
    calibrated: Calibrated | None = None  # None: nothing reached the calibration
    deviation_ppm: int = 0  # of the measurement from the prediction
    plan: Plan | None = None  # the same placement, priced with the new calibration
    proposed: Plan | None = None  # where it is faster by enough
    gain_ppm: int = 0  # of the best plan found over the one there is
    changes: Difference = field(default_factory=lambda: Difference((), ()))


def refine(
    plan: Plan,
    inventory: Inventory,
    profile: Profile,
    known: Known,
    samples: Iterable[Sample],
    clock: Clock | None = None,
) -> Refined:
    """What the samples say of a plan that runs.

    Below a deviation of 15 % nothing is touched: a calibration that follows every breath of a machine would
    let plans swing. Above it the calibration takes the measurement in and the request is solved again; a plan
    that is less than 3 % faster than the one there is, both priced anew, is not proposed. Nothing is learnt
    of times that are far from the prediction even so: a file of another model would move every plan.
    """
    seen = cleaned(samples, plan.workload.n_seq, plan.workload.n_ctx)
    if seen.token is None and seen.prompt is None:
        return Refined(Verdict.UNKNOWN, seen)
    away = deviation_ppm(predicted(plan, inventory, profile, known, seen), seen)
    if away < DEVIATION_PPM:
        return Refined(Verdict.AS_PREDICTED, seen, deviation_ppm=away)
    found = calibrated(plan, inventory, profile, known, seen)
    if deviation_ppm(found.after, seen) >= UNEXPLAINED_PPM:
        return Refined(Verdict.UNEXPLAINED, seen, deviation_ppm=away)
    same = reprice(plan, inventory, found.profile, known).plan
    asked = request_of(plan), known_of(plan, known), settings_of(plan)
    best = make_plan(inventory, found.profile, *asked, clock or Clock())
    best = with_step_times(best, inventory, found.profile, known)
    before, after = same.predicted.objective_ns, best.predicted.objective_ns
    gain = max(before - after, 0) * PPM // max(before, 1)
    if gain < GAIN_PPM:
        return Refined(Verdict.KEPT, seen, found, away, same, None, gain)
    return Refined(Verdict.BETTER, seen, found, away, same, best, gain, difference(same, best))
