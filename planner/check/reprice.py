"""What a plan says follows from its decisions: the same decisions, priced again from the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.cost.build_problem import OUTPUT, Priced, model_of, price
from planner.cost.pins import parse_pin
from planner.errors import AnswerIsNo
from planner.machine.engine_builds import mixing_fault
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.passes import stock_rules
from planner.passes.make_plan import as_stored, host_only, rows
from planner.passes.predict import Breakdown, breakdown
from planner.passes.record import Chosen, record
from planner.plan.plan import Plan
from planner.plan.request import SolveOptions
from planner.site import Site
from planner.solver.evaluate import evaluate
from planner.solver.problem import Decision


@dataclass(eq=False)
class NotPlaceable(AnswerIsNo):
    """A unit is at a site where it must not be, or units and layers are not the model's."""

    unit: str  # "" for the layers
    why: str

    def message(self) -> str:
        return f"{self.unit or 'layers'}: {self.why}"


@dataclass(eq=False)
class OverLimit(AnswerIsNo):
    """A legal placement that does not fit."""

    violations: tuple[str, ...]

    def message(self) -> str:
        return "; ".join(self.violations)


@dataclass(frozen=True, slots=True)
class Repriced:
    """The plan that the decisions give, and the limits they break."""

    plan: Plan
    violations: tuple[str, ...]
    parts: Breakdown  # of the predicted time


def asked(plan: Plan, known: SolveOptions) -> SolveOptions:
    """What the solver was asked; `known` carries what a plan does not hold: coverage curves, limits."""
    constraints = plan.constraints
    return replace(
        known,
        pins=tuple(parse_pin(text) for text in constraints.pins),
        contiguous=constraints.contiguous,
        no_cpu=constraints.no_cpu,
        page=constraints.page,
        reserves=constraints.reserves,
        heat_digest=constraints.heat_digest,
        stripes=constraints.stripes,
        hybrid=constraints.hybrid is True,
        projector=plan.projector,
        host_memory=plan.host_memory,
        speculation=plan.speculation,
        fit=plan.fit if plan.fit and plan.fit.n_ctx == plan.workload.n_ctx else None,
        cache=constraints.cache or (),
        command=plan.command,
    )


def reprice(plan: Plan, inventory: Inventory, profile: Profile, known: SolveOptions) -> Repriced:
    """Every derived value of a plan, recomputed from its sites and layer devices.

    Bound, gap and status are taken over, since only solving again can tell them. Raises NotPlaceable.
    """
    options = asked(plan, known)
    budgets = plan.constraints.budgets
    model = model_of(inventory, plan.workload)
    free = replace(options, pins=(), contiguous=False, no_cpu=False)
    everything = price(model, profile, budgets, plan.workload, free)
    stock = stock_rules.candidates(everything, options.fit)
    alone = host_only(model, profile, budgets, plan.workload, options)
    fault = mixing_fault(inventory.architecture, profile.fingerprint.engine, budgets)
    decided = replace(options, op_offload=plan.op_offload, no_cpu=options.no_cpu or fault is not None)
    priced = everything if decided == free else price(model, profile, budgets, plan.workload, decided)
    devices = {use.name for use in plan.devices}
    if plan.op_offload and alone is not None and devices <= {d.device for d in alone[0].problem.devices}:
        # No GPU is opened: its compute buffer is not there either.
        priced = as_stored(alone[0], profile, budgets, options) if plan.repack is False else alone[0]
    chosen = _chosen(plan, priced)
    made = record(chosen, rows(alone, stock), profile, budgets, plan.workload, options)
    parts = breakdown(priced, chosen.solution, chosen.evaluation)
    told = made.model_copy(update={"notes": plan.notes, "search": plan.search})
    return Repriced(told, chosen.evaluation.violations, parts)


def edited(plan: Plan, inventory: Inventory, profile: Profile, known: SolveOptions) -> Plan:
    """The plan with everything that follows from its sites recomputed, marked as edited when they changed.

    Raises NotPlaceable for a site that must not be, OverLimit for one that does not fit.
    """
    again = reprice(plan, inventory, profile, known)
    if again.violations:
        raise OverLimit(again.violations)
    if again.plan == plan:
        return plan
    predicted = again.plan.predicted.model_copy(update={"status": "edited"})
    return again.plan.model_copy(update={"predicted": predicted})


def _chosen(plan: Plan, priced: Priced) -> Chosen:
    sites = {p.unit: p.site for p in plan.units}
    _same_units(plan, priced, sites)
    devices = _layers(plan, priced.model.layers.n_all)
    solution = stock_rules.realise(priced, devices, sites)
    if solution is None:
        raise _culprit(priced, devices, sites)
    found = evaluate(priced.problem, solution)
    recorded = plan.predicted
    return Chosen(priced, solution, found, recorded.bound_ns, recorded.status, "")


def _same_units(plan: Plan, priced: Priced, sites: Mapping[str, Site]) -> None:
    names = [p.unit for p in plan.units]
    for name in names:
        if names.count(name) > 1:
            raise NotPlaceable(name, "is placed twice")
    known = {unit.name for unit in priced.model.units}
    for name in sites:
        if name not in known:
            raise NotPlaceable(name, "the model has no such unit")
    for name in sorted(known - sites.keys()):
        raise NotPlaceable(name, "is not placed")


def _layers(plan: Plan, n_all: int) -> tuple[str, ...]:
    """Layer devices with the output head last; every layer exactly once, in order."""
    found: list[str] = []
    for entry in plan.layers:
        span = f"layers {entry.first} to {entry.last}"
        if entry.last > n_all:
            raise NotPlaceable("", f"{span}: the last of the model is {n_all}, the output head")
        if entry.first != len(found) or entry.last < entry.first:
            raise NotPlaceable("", f"{span}: expected to go on at {len(found)}")
        found += [entry.device] * (entry.last - entry.first + 1)
    if len(found) != n_all + 1:
        raise NotPlaceable("", f"{len(found)} entries for {n_all} layers and the output head")
    return tuple(found)


def _culprit(priced: Priced, devices: tuple[str, ...], sites: Mapping[str, Site]) -> NotPlaceable:
    """The first unit whose site no legal option has, with the sites that are possible."""
    names = [d.device for d in priced.problem.devices]
    for decision in priced.problem.decisions:
        if not decision.layer:
            continue
        home = devices[-1] if decision.name == OUTPUT else devices[int(decision.name.removeprefix("blk."))]
        if home not in names:
            return NotPlaceable("", f"{decision.name}: there is no device {home}")
        problem = _fault(decision, names.index(home), home, sites)
        if problem:
            return problem
    return NotPlaceable("", "no legal placement has these sites together")


def _fault(decision: Decision, home: int, device: str, sites: Mapping[str, Site]) -> NotPlaceable | None:
    options = [o for o in decision.options if o.entry == home]
    for index, unit in enumerate(decision.units):
        possible = sorted({str(o.sites[index]) for o in options})
        if not possible:
            return NotPlaceable(unit, f"pins and constraints leave no site on layer device {device}")
        if str(sites[unit]) not in possible:
            return NotPlaceable(
                unit, f"site {sites[unit]} is not possible on layer device {device}; {', '.join(possible)}"
            )
    wanted = tuple(sites[unit] for unit in decision.units)
    if all(o.sites != wanted for o in options):
        together = ", ".join(map(str, wanted))
        return NotPlaceable(decision.units[-1], f"these sites do not go together: {together}")
    return None
