"""A complete profile: devices and links, whole-model runs, operators in the time that is left, the fit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from planner.machine.op_time import Case
from planner.machine.profile import Profile
from planner.model.gguf_file import read_model
from planner.model.inventory import Inventory
from profiler import session
from profiler.session import Found, Measured, Request, Watcher
from profiler.whole_model import whole
from profiler.whole_model.calibrate import Run
from profiler.whole_model.whole import Model


def complete(
    request: Request,
    cases: Sequence[Case],
    model: tuple[Path, Inventory] | None,
    watch: Watcher,
) -> tuple[Measured, Profile]:
    """Measure this machine and calibrate it on runs of a generated model and, when it is here, of `model`.

    Errors of `session.measure`.
    """
    found = session.look(request, watch)
    with tempfile.TemporaryDirectory(prefix="atsplan-") as folder:
        ran = _runs(request, found, Path(folder), model, watch)
    extra = [c for m, _ in ran if not m.own for c in whole.generated_cases(m.inventory)]
    measured = session.operators(request, found, [*cases, *extra], watch)
    return measured, whole.calibrated(measured.profile, ran)


def _runs(
    request: Request, found: Found, folder: Path, model: tuple[Path, Inventory] | None, watch: Watcher
) -> list[tuple[Model, list[Run]]]:
    """Every model with its runs; one that no device but the CPU could run in time is not asked twice."""
    ran: list[tuple[Model, list[Run]]] = []
    if whole.gpus_of(found):
        watch.stage("generated model")
        path = whole.generated(folder)
        made = whole.of_machine(found, path, read_model(path).inventory)
        ran.append((made, whole.measured(found, made, request, watch)))
    if model is not None and all(runs for _, runs in ran):
        watch.stage(model[0].name)
        own = whole.of_model(found, *model)
        ran.append((own, whole.measured(found, own, request, watch)))
    return ran
