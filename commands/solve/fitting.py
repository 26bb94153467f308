"""The engine's own --fit for the machine, budgets and use of a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import OptionProblem

if TYPE_CHECKING:
    from commands.solve.request import Inputs
    from planner.plan.plan import EngineFit
    from planner.workload import Workload
    from runtime.engine.libllama import Engine


def engine_fit(inputs: Inputs, workload: Workload) -> EngineFit:
    """What --fit chooses under the same budgets, in a child process.

    Raises OptionProblem for an engine that lacks a GPU of the plan, EngineProblem for one without --fit.
    """
    from planner.passes.engine_fit import fit_record
    from planner.plan.load_spec import LoadSpec
    from runtime.engine.libllama import Engine
    from runtime.load.engine_fit import NoPlacement, fit

    engine = Engine.find(None if inputs.fit_engine == "auto" else inputs.fit_engine)
    room = _room(inputs, engine)
    spec = LoadSpec(tuple(room), (1,) * len(room), -1, (), workload)
    try:
        found = fit(str(engine.path), inputs.model, spec, room)
    except NoPlacement:
        found = None
    return fit_record(inputs.inventory, engine.label, found, workload)


def _room(inputs: Inputs, engine: Engine) -> dict[str, int]:
    """Bytes that the model may take on each GPU: the budget without driver and reserves."""
    from runtime.engine.rpc import endpoints

    here = {device.name for device in engine.ggml.devices()}
    found = {}
    for device in inputs.profile.devices:
        if device.kind == "cpu" or device.name not in inputs.budgets:
            continue
        if device.name not in here and not endpoints([device.name]):
            raise OptionProblem("--fit", inputs.fit_engine, f"the engine has no {device.name} here")
        reserved = inputs.options.reserved_bytes(device.name)
        size = inputs.budgets[device.name] - device.context_bytes - reserved
        found[device.name] = max(size, 0)
    return found
