"""A complete profile: devices and links, whole-model runs, operators in the time that is left, the fit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from planner.machine.op_time import Case
from planner.machine.profile import Profile
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from profiler import session
from profiler.session import Found, Measured, Request, Watcher
from profiler.whole_model import calibration_runs, slots
from profiler.whole_model.calibrate import Run
from profiler.whole_model.calibration_runs import Model


def complete(
    request: Request,
    cases: Sequence[Case],
    model: tuple[Path, Inventory] | None,
    watch: Watcher,
) -> tuple[Measured, Profile]:
    """Measure this machine and calibrate it on runs of a generated model and, when it is here, of `model`;
    of its experts also what they cost in slots.

    Errors of `session.measure`.
    """
    found = session.find_devices(request, watch)
    with tempfile.TemporaryDirectory(prefix="atsplan-") as folder:
        ran = _runs(request, found, Path(folder), model, watch)
        costs, notes = slots.measured(found, model[1], request, watch, Path(folder)) if model else ((), ())
    extra = [c for m, _ in ran if not m.own for c in calibration_runs.generated_cases(m.inventory)]
    measured = session.operators(request, found, [*cases, *extra], watch)
    made = calibration_runs.calibrated(measured.profile, ran)
    return measured, made.model_copy(update={"slots": costs or None, "warnings": (*made.warnings, *notes)})


def _runs(
    request: Request, found: Found, folder: Path, model: tuple[Path, Inventory] | None, watch: Watcher
) -> list[tuple[Model, list[Run]]]:
    """Every model with its runs; one that no device but the CPU could run in time is not asked twice."""
    ran: list[tuple[Model, list[Run]]] = []
    if calibration_runs.gpus_of(found):
        watch.stage("generated model")
        path = calibration_runs.generated(folder)
        made = calibration_runs.of_machine(found, path, read_model(path).inventory)
        ran.append((made, calibration_runs.measured(found, made, request, watch)))
    if model is not None and all(runs for _, runs in ran):
        watch.stage(model[0].name)
        own = calibration_runs.of_model(found, *model)
        ran.append((own, calibration_runs.measured(found, own, request, watch)))
    return ran
