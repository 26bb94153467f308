"""What a placement is predicted to cost, in parts that a person can add up; no search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cost import evidence
from planner.cost.build_problem import Priced, analyse, build_problem
from planner.cost.evidence import Part
from planner.cost.placed import evaluate_placed
from planner.errors import InputError
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.margin import error_ppm, prompt_error_ppm
from planner.passes.stock_rules import realise
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.request import Request
from planner.site import Site
from planner.site import sites as sites_of
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Solution
from planner.workload import Workload

_NO_LIMIT = 2**60  # bytes; a placement is priced even where it does not fit


@dataclass(eq=False)
class NoSuchPlacement(InputError):
    """Sites and layer devices that the engine cannot be given together."""

    def message(self) -> str:
        return "no legal placement has these layer devices and sites together"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Predicted nanoseconds; `tpot_ns` is the sum of the four parts after it."""

    tpot_ns: int
    units_ns: Mapping[str, int]  # by unit: its operators, of one token
    inside_ns: int  # changes of device inside layers, rounding
    edges_ns: int  # changes of device between layers
    mixed_ns: int  # fixed costs of a mixed graph
    token_ns: int  # sampling, launch
    prefill_ns: int
    measured_ppm: int  # share of the operators' time that rests on measured cases
    error_ppm: int  # relative half-width of the interval around tpot_ns
    prefill_error_ppm: int
    token: tuple[Part, ...]  # what tpot_ns stands on
    prompt: tuple[Part, ...]
    memory: Mapping[str, int]  # bytes by device


def predict(
    inventory: Inventory,
    profile: Profile,
    workload: Workload,
    layer_devices: Sequence[str],
    sites: Mapping[str, Site],
) -> Breakdown:
    """Price one placement: a layer device for each layer and, last, the output head; `sites` of the
    units that do not live there. Raises NoSuchPlacement.
    """
    budgets = {d.name: _NO_LIMIT for d in profile.devices if d.kind == "cpu" or d.name in layer_devices}
    request = Request(budgets, workload, page=True)
    priced = build_problem(
        analyse(structure_of(inventory), workload), profile, request, EngineSettings(), Known()
    )
    solution = realise(priced, layer_devices, sites)
    if solution is None:
        raise NoSuchPlacement
    return breakdown(priced, solution, evaluate_placed(priced, solution))


def breakdown(priced: Priced, solution: Solution, found: Evaluation) -> Breakdown:
    """The parts of an evaluated placement."""
    problem = priced.problem
    token, prompt = evidence.of_token(priced, solution, found), evidence.of_prompt(priced, solution, found)
    units = {
        unit: ns
        for decision, option in zip(problem.decisions, solution.chosen(problem), strict=True)
        for unit, ns in zip(decision.units, option.parts, strict=False)
    }
    return Breakdown(
        tpot_ns=found.decode_ns,
        units_ns=units,
        inside_ns=found.compute_ns - problem.decode_ns - sum(units.values()),
        edges_ns=found.edges_ns,
        mixed_ns=found.mixed_ns,
        token_ns=problem.decode_ns,
        prefill_ns=found.prefill_ns,
        measured_ppm=_measured_ppm(priced, solution),
        error_ppm=error_ppm(priced, found, token),
        prefill_error_ppm=prompt_error_ppm(priced, found, prompt),
        token=token,
        prompt=prompt,
        memory={d.device: m for d, m in zip(problem.devices, found.memory, strict=True)},
    )


def _measured_ppm(priced: Priced, solution: Solution) -> int:
    """Share of the units' time on their own devices that comes from measured cases."""
    by_name = {unit.name: unit for unit in priced.model.units}
    total = measured = 0
    for decision, option in zip(priced.problem.decisions, solution.chosen(priced.problem), strict=True):
        for name, site in zip(decision.units, sites_of(option.sites), strict=True):
            times = priced.prices.on(by_name[name], site.device)
            total, measured = total + times.decode_ns, measured + times.measured_ns
    return measured * 10**6 // max(total, 1)
