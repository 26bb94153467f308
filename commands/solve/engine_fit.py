"""The engine's own --fit for the machine, budgets and use of a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import OptionProblem

if TYPE_CHECKING:
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.plan.engine_settings import EngineSettings
    from planner.plan.plan import EngineFit
    from planner.workload import Workload
    from runtime.engine.libllama import Engine


@dataclass(frozen=True, slots=True)
class Target:
    """A model file and the memory it may take."""

    path: Path
    inventory: Inventory
    profile: Profile
    budgets: Mapping[str, int]


def engine_fit(name: str, target: Target, workload: Workload, settings: EngineSettings) -> EngineFit:
    """What --fit chooses under the same budgets, in a child process.

    Raises OptionProblem for an engine that lacks a GPU of the plan, EngineProblem for one without --fit.
    """
    from planner.passes.engine_fit import fit_record
    from planner.plan.load_spec import LoadSpec
    from runtime.engine.libllama import Engine
    from runtime.load.engine_fit import NoPlacement, fit

    engine = Engine.find(None if name == "auto" else name)
    room = _margins(name, target, settings, engine)
    spec = LoadSpec(tuple(room), (1,) * len(room), -1, (), workload)
    try:
        found = fit(str(engine.path), target.path, spec, room)
    except NoPlacement:
        found = None
    return fit_record(target.inventory, engine.label, found, workload)


def _margins(name: str, target: Target, settings: EngineSettings, engine: Engine) -> dict[str, int]:
    """Bytes that the model may take on each GPU: the budget without driver and reserves."""
    from runtime.engine.rpc import endpoints

    here = {device.name for device in engine.ggml.devices()}
    found = {}
    for device in target.profile.devices:
        if device.kind == "cpu" or device.name not in target.budgets:
            continue
        if device.name not in here and not endpoints([device.name]):
            raise OptionProblem("--fit", name, f"the engine has no {device.name} here")
        reserved = settings.reserved_bytes(device.name)
        size = target.budgets[device.name] - device.context_bytes - reserved
        found[device.name] = max(size, 0)
    return found
