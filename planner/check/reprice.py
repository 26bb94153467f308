"""What a plan says follows from its decisions: the same decisions, priced again from the inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.block_names import block_of
from planner.cost.build_problem import Priced
from planner.cost.pins import parse_pin
from planner.cost.placed import evaluate_placed
from planner.drafts.length import MOST
from planner.errors import AnswerIsNo
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.passes import stock_rules
from planner.passes.case import Built, Case, Loading, loading_of
from planner.passes.chosen import Chosen
from planner.passes.placements import baselines, cpu_alone, untuned
from planner.passes.predict import Breakdown, breakdown
from planner.passes.record import baseline_of, record
from planner.passes.stock_rules import Candidate
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.plan.request import Request
from planner.site import Site, SiteKind
from planner.solver.problem import Decision
from planner.workload import ENGINE_UBATCH


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
    """The plan that the decisions give, and the placement it was made from."""

    plan: Plan
    chosen: Chosen

    @property
    def violations(self) -> tuple[str, ...]:
        """The limits that the placement breaks."""
        return self.chosen.evaluation.violations

    def breakdown(self) -> Breakdown:
        """The parts of the predicted time."""
        return breakdown(self.chosen.priced, self.chosen.solution, self.chosen.evaluation)


def request_of(plan: Plan) -> Request:
    """What the solver was asked for, the settings of the engine as the plan has them."""
    constraints = plan.constraints
    return Request(
        budgets=constraints.budgets,
        workload=plan.workload,
        pins=tuple(parse_pin(text) for text in constraints.pins),
        contiguous=constraints.contiguous,
        no_cpu=constraints.no_cpu,
        page=constraints.page,
        host_memory=plan.host_memory,
        stripes=constraints.stripes,
        hybrid=constraints.hybrid is True,
        command=plan.command,
    )


def settings_of(plan: Plan) -> EngineSettings:
    """The settings that were not for the solver to choose."""
    return EngineSettings(
        host_memory=plan.host_memory,
        speculation=plan.speculation,
        slots=any(p.site.kind is SiteKind.HYBRID for p in plan.units),
        following=plan.following,
        projector=plan.projector,
        reserves=plan.constraints.reserves,
    )


def known_of(plan: Plan, known: Known) -> Known:
    """What the solver knew; `known` carries what a plan does not hold: coverage curves."""
    constraints = plan.constraints
    return replace(
        known,
        heat_digest=constraints.heat_digest,
        fit=plan.fit if plan.fit and plan.fit.n_ctx == plan.workload.n_ctx else None,
        cache=constraints.cache or (),
    )


def reprice(
    plan: Plan, inventory: Inventory, profile: Profile, known: Known, built: Built | None = None
) -> Repriced:
    """Every derived value of a plan, recomputed from its sites and layer devices.

    Bound, gap and status are taken over, since only solving again can tell them; `built` keeps for that what
    is built here. Raises NotPlaceable.
    """
    built = built or Built()
    loading = _loading(plan, inventory, profile, known, built)
    case, settings = loading.case, loading.settings
    everything = loading.asked(settings)
    stock = built.stock(everything, case.known.fit)
    alone = cpu_alone(loading, replace(settings, gpus=False))
    decided = replace(settings, op_offload=plan.op_offload)
    if not plan.op_offload:
        stock = stock_rules.either_way(stock, built.stock(loading.asked(decided)))
    same = decided == settings and loading.limits == case.request
    priced = _unopened(plan, loading, alone)
    priced = priced or (everything if same else loading.constrained(decided))
    chosen = _chosen_with_its_slots(plan, loading, priced)
    made = record(chosen, baselines(alone, stock), profile, case.request, case.known)
    # Plans of before do not tell what the engine's own batches take: that is no difference.
    batched = plan.workload.n_ubatch != ENGINE_UBATCH and plan.untuned is None
    plain = None if batched else untuned(loading, made)
    own = baseline_of(plain) if plain else None
    told = made.model_copy(update={"notes": plan.notes, "search": plan.search, "untuned": own})
    if plan.speculation is not None and plan.speculation.step_ns:
        told = with_step_times(told, inventory, profile, known, built)
    return Repriced(told, chosen)


def with_step_times(
    plan: Plan, inventory: Inventory, profile: Profile, known: Known, built: Built | None = None
) -> Plan:
    """The plan with the time of a step for each draft length, all with its own placement; without drafts the
    plan itself.

    A length that follows what is accepted asks with them whether one more token pays.
    """
    drafts = plan.speculation
    if drafts is None or not drafts.tokens:
        return plan
    found, built = [], built or Built()
    for tokens in range(MOST + 1):
        each = drafts.model_copy(update={"tokens": tokens, "step_ns": ()})
        loading = _loading(plan.model_copy(update={"speculation": each}), inventory, profile, known, built)
        made, ones = each.step
        found.append(_token_ns(plan, loading) * made // ones)
    return plan.model_copy(update={"speculation": drafts.model_copy(update={"step_ns": tuple(found)})})


def _loading(plan: Plan, inventory: Inventory, profile: Profile, known: Known, built: Built) -> Loading:
    """The plan's own way to load the model; how prompts are computed is left open."""
    structure = built.structure(inventory)
    case = Case(structure, profile, request_of(plan), known_of(plan, known), built=built)
    settings = settings_of(plan)
    return loading_of(case, case.analysed(settings), settings)


def _token_ns(plan: Plan, loading: Loading) -> int:
    """What a token takes with the plan's placement, loaded so, and nothing else. Raises NotPlaceable."""
    settings = replace(loading.settings, op_offload=plan.op_offload)
    alone = cpu_alone(loading, replace(settings, gpus=False)) if plan.op_offload else None
    priced = _unopened(plan, loading, alone) or loading.constrained(settings)
    return _chosen_with_its_slots(plan, loading, priced).evaluation.decode_ns


def _unopened(plan: Plan, loading: Loading, alone: tuple[Priced, Candidate] | None) -> Priced | None:
    """The problem of a plan that opens no GPU, whose compute buffer is not there either; None of others."""
    devices = {use.name for use in plan.devices}
    if not plan.op_offload or alone is None or not devices <= {d.device for d in alone[0].problem.devices}:
        return None
    stored = replace(loading.settings, gpus=False, repack=False)
    return loading.unlimited(stored) if plan.repack is False else alone[0]


def edited(plan: Plan, inventory: Inventory, profile: Profile, known: Known) -> Plan:
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


def _chosen_with_its_slots(plan: Plan, loading: Loading, priced: Priced) -> Chosen:
    """The placement, in a problem that has the plan's numbers of slots where `priced` has not.

    Which numbers a solve tries depends on the routing and on what lanes take. Raises NotPlaceable.
    """
    try:
        return _chosen(plan, priced)
    except NotPlaceable:
        slotted = {str(p.site): p.site for p in plan.units if p.site.kind is SiteKind.HYBRID}
        if not slotted:
            raise
        own = tuple(slotted[text] for text in sorted(slotted))
        case = replace(loading.case, request=replace(loading.case.request, sites=own))
        return _chosen(plan, replace(loading, case=case).constrained(priced.settings))


def _chosen(plan: Plan, priced: Priced) -> Chosen:
    sites = {p.unit: p.site for p in plan.units}
    _same_units(plan, priced, sites)
    devices = _layers(plan, priced.model.layers.n_all)
    solution = stock_rules.realise(priced, devices, sites)
    if solution is None:
        raise _culprit(priced, devices, sites)
    found = evaluate_placed(priced, solution)
    recorded = plan.predicted
    return Chosen(priced, solution, found, recorded.bound_ns, recorded.status, "")


def _same_units(plan: Plan, priced: Priced, sites: Mapping[str, Site]) -> None:
    twice = (name for name, times in Counter(p.unit for p in plan.units).items() if times > 1)
    for name in twice:
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
        home = devices[-1 if (layer := block_of(decision.name)) is None else layer]
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
