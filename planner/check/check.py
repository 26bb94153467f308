"""Is a plan still right? Every recorded value is derived again and compared; findings carry the line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date

from planner.check.consistency import agreement_faults, workload_faults
from planner.check.divided_sites import site_faults
from planner.check.findings import Finding, Severity
from planner.check.plan_alone import faults
from planner.check.reprice import NotPlaceable, known_of, reprice, request_of, settings_of
from planner.constants import PPM
from planner.errors import AtsplanError, FieldProblem
from planner.machine.attention_kernels import kv_problem
from planner.machine.budgets import tight
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.structure import Structure
from planner.model.units import foreign_note
from planner.model.validity import load_faults
from planner.passes.case import Built
from planner.passes.make_plan import make_plan
from planner.passes.prompt_pipeline import restated
from planner.passes.refusal import OutOfTime
from planner.plan.difference import Change, difference
from planner.plan.known import Known
from planner.plan.override_match import disagreements
from planner.plan.overrides import wanted_buffers
from planner.plan.plan import Plan, from_text, to_text, to_text_of_schema_1
from planner.records import schema_of
from planner.solver.clock import Clock
from planner.solver.deadline import Deadline
from planner.yaml_reader import Lines, read

_NOT_SEARCHED = "the time limit ended the search: that nothing better exists was not shown again"
_RULE_OF = {
    "devices": "memory",
    "overrides": "overrides",
    "units": "units",
    "model": "inputs",
    "machine": "inputs",
    "layers": "sites",
    "experts": "sites",
}
_FREE = ("notes", "command", "version", "predicted.bound_ns", "predicted.gap_ppm", "predicted.status")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan was made from, as far as it was found."""

    inventory: Inventory | None
    profile: Profile | None
    known: Known = field(default_factory=Known)  # curves and orders of a heat file

    def heat_missing(self, plan: Plan) -> bool:
        """Whether the plan rests on a heat file that was not found."""
        return plan.constraints.heat_digest != self.known.heat_digest


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How far to look."""

    resolve: bool = True
    time_limit_s: float = math.inf  # by the clock, for each plan
    today: date | None = None  # for the age of the profile; None: not judged
    max_age_days: int = 180


def read_plan(text: str, path: str) -> tuple[Plan | None, list[Finding]]:
    """The plan, or the finding that says why it cannot be read."""
    try:
        return from_text(text, path), []
    except FieldProblem as problem:
        why = f"{problem.field}: {problem.why}" if problem.field else problem.why
        return None, [Finding(path, max(problem.line, 1), "schema", Severity.INPUT, why)]


def check_plan(
    plan: Plan, text: str, path: str, inputs: Inputs, options: CheckOptions, built: Built | None = None
) -> list[Finding]:
    """All findings about one plan, in the order of the file; `built` is shared by plans of one model."""
    built = built or Built()
    report = _Report(path, Lines(text))
    _canonical(plan, text, report)
    _budgets(plan, report)
    _search(plan, report)
    if problem := kv_problem(plan.workload):
        report.add("inputs", problem, "workload", "flash_attn")
    impossible = site_faults(plan, inputs.inventory)
    for site_fault in impossible:
        report.add("sites", site_fault.why, "units", site_fault.index, "site")
    refused = load_faults(inputs.inventory) if inputs.inventory is not None else ()
    for why in refused:
        message = f"{plan.model.name}: stock llama.cpp would not load it: {why}"
        report.add("inputs", message, "model", severity=Severity.INPUT)
    if inputs.inventory is not None and not impossible and not refused:
        structure = built.structure(inputs.inventory)
        for fault in workload_faults(plan.workload, inputs.inventory):
            report.add("inputs", fault, "workload", "mtp")
        _overrides(plan, structure, report)
        if foreign := foreign_note(structure.units):
            report.add("inputs", foreign, "model", severity=Severity.NOTE)
        if inputs.profile is not None and not inputs.heat_missing(plan):
            _derived(plan, inputs.inventory, inputs.profile, inputs.known, options, report, built)
    if inputs.profile is not None:
        _headroom(plan, inputs.profile, report)
        _stale(inputs.profile, options, report)
    _alone(plan, text, report)
    if inputs.inventory is not None and not any(f.severity is not Severity.NOTE for f in report.findings):
        for why in agreement_faults(plan, built.structure(inputs.inventory)):
            report.add("sites", why, why.partition(":")[0])
    return sorted(report.findings, key=lambda f: (f.line, f.rule))


def _alone(plan: Plan, text: str, report: _Report) -> None:
    """What the plan itself disproves, where no better finding stands on that line already."""
    said = {f.line for f in report.findings if f.severity is not Severity.NOTE}
    schema = 0 if text.startswith(f"schema: {plan.schema_}\n") else schema_of(read(text, report.path))
    for fault in faults(plan, schema):
        if report.lines.of(*fault.where) not in said:
            report.add(fault.rule, fault.message, *fault.where)


@dataclass
class _Report:
    path: str
    lines: Lines
    findings: list[Finding]

    def __init__(self, path: str, lines: Lines) -> None:
        self.path, self.lines, self.findings = path, lines, []

    def add(
        self,
        rule: str,
        message: str,
        *where: str | int,
        severity: Severity = Severity.DRIFT,
        line: int = 0,
    ) -> None:
        at = line or self.lines.of(*where)
        self.findings.append(Finding(self.path, at, rule, severity, message))


def _canonical(plan: Plan, text: str, report: _Report) -> None:
    """Whether the text is the canonical one of its schema, and the schema today's."""
    canonical = to_text(plan)
    if text == canonical:
        return
    schema = schema_of(read(text, report.path)) or plan.schema_
    if schema < plan.schema_:
        message = f"schema {schema}: atsplan fmt writes it in today's, {plan.schema_}"
        report.add("schema", message, "schema", severity=Severity.NOTE)
        canonical = to_text_of_schema_1(plan)
    if text != canonical:
        line = _first_change(canonical, text)
        report.add("canonical", "not in canonical form; atsplan fmt rewrites it", line=line)


def _first_change(canonical: str, text: str) -> int:
    """The first line that differs from the canonical text."""
    pairs = zip(canonical.splitlines(), text.splitlines(), strict=False)
    return next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 1)


def _budgets(plan: Plan, report: _Report) -> None:
    """Each device within its budget, and the budgets those that were asked for."""
    names = [use.name for use in plan.devices]
    for i, use in enumerate(plan.devices):
        if names.count(use.name) > 1:
            report.add("memory", f"{use.name} appears twice", "devices", i, "name")
        asked_for = plan.constraints.budgets.get(use.name)
        if asked_for != use.budget_bytes:
            report.add(
                "memory", f"{use.name}: budget {use.budget_bytes}, asked for {asked_for}", "devices", i
            )
        over = use.over_bytes(plan.constraints.page)
        if over > 0:
            report.add("memory", f"{use.name} holds {over} bytes more than its budget", "devices", i)


def _search(plan: Plan, report: _Report) -> None:
    """Whether another run would find this plan."""
    if plan.search is not None and plan.search.ended_by == "clock":
        seconds = plan.search.time_limit_ms / 1000
        message = (
            f"its search was ended by the clock after {seconds:g} s: another run may find another plan; "
            "without --time-limit every run gives the same one"
        )
        report.add("search", message, "search", severity=Severity.NOTE)


def _headroom(plan: Plan, profile: Profile, report: _Report) -> None:
    """Room for what grows after loading: a note, as the budget is the user's own."""
    devices = {device.name: device for device in profile.devices}
    for i, use in enumerate(plan.devices):
        if use.name in devices and (text := tight(devices[use.name], use.used_bytes, profile)):
            report.add("memory", text, "devices", i, severity=Severity.NOTE)


def _overrides(plan: Plan, structure: Structure, report: _Report) -> None:
    """The patterns against the real tensor list."""
    sites = {p.unit: p.site for p in plan.units}
    inventory, units = structure.inventory, structure.units
    if {u.name for u in units} != sites.keys():
        return  # reported by the comparison of units
    devices = [entry.device for entry in plan.layers for _ in range(entry.first, entry.last + 1)]
    try:
        wanted = wanted_buffers(inventory, units, [sites[u.name] for u in units], devices)
        wanted |= restated(inventory, units, devices, plan.overrides)
    except (AtsplanError, IndexError, KeyError):
        return  # layers or sites are wrong in themselves: reported there
    for fault in disagreements(inventory, plan.overrides, wanted):
        report.add("overrides", fault, *_place(plan, fault))


def _place(plan: Plan, fault: str) -> tuple[str | int, ...]:
    for i, override in enumerate(plan.overrides):
        if override.pattern in fault:
            return ("overrides", i)
    return ("overrides",)


def _derived(
    plan: Plan,
    inventory: Inventory,
    profile: Profile,
    known: Known,
    options: CheckOptions,
    report: _Report,
    built: Built,
) -> None:
    """The plan's own decisions priced again, then the decisions against the best there are."""
    try:
        again = reprice(plan, inventory, profile, known, built)
    except NotPlaceable as problem:
        report.add("sites" if problem.unit else "units", str(problem), *_unit_place(plan, problem.unit))
        return
    except AtsplanError as problem:
        report.add("sites", str(problem), "constraints")
        return
    for violation in again.violations:
        report.add("memory", violation, "devices")
    compared = difference(plan, again.plan)
    for move in compared.moves:
        report.add(
            "sites",
            f"{move.unit}: site {move.before} is not possible; {move.after}",
            *_unit_place(plan, move.unit),
        )
    changes = [c for c in compared.changes if not c.field.startswith(_FREE)]
    for change in changes:
        report.add(_rule(change), _say(change), *_change_place(plan, change))
    _bound(plan, again.plan, report)
    if options.resolve and not changes and not again.violations:
        _optimal(plan, inventory, profile, known, options, report, built)
    elif changes and not again.violations:
        _edited(plan, again.plan, report)


def _unit_place(plan: Plan, unit: str) -> tuple[str | int, ...]:
    indices = [i for i, p in enumerate(plan.units) if p.unit == unit]
    return ("units", indices[-1], "site") if indices else ("units",) if unit else ("layers",)


def _rule(change: Change) -> str:
    return _RULE_OF.get(change.field.split(".")[0], "cost")


def _say(change: Change) -> str:
    return f"{change.field} is {change.before}, the inputs give {change.after}"


def _change_place(plan: Plan, change: Change) -> Iterator[str | int]:
    """The place in the file of a change reported by unit, device, baseline or layer name."""
    head, _, rest = change.field.partition(".")
    lists: dict[str, list[str]] = {
        "units": [p.unit for p in plan.units],
        "devices": [d.name for d in plan.devices],
        "baselines": [b.name for b in plan.baselines],
        "experts": [str(e.layer) for e in plan.experts],
    }
    yield head
    if head not in lists:
        yield from rest.split(".") if rest and head != "layers" else ()
        return
    for index, name in enumerate(lists[head]):
        if rest == name or rest.startswith(name + "."):
            yield index
            yield from filter(None, rest[len(name) :].split("."))
            return


def _bound(plan: Plan, again: Plan, report: _Report) -> None:
    """Bound and gap agree with the objective."""
    recorded, objective = plan.predicted, again.predicted.objective_ns
    if recorded.bound_ns > objective:
        report.add("optimal", "bound_ns is above the plan's own objective", "predicted", "bound_ns")
        return
    gap = (objective - recorded.bound_ns) * PPM // max(objective, 1)
    if gap != recorded.gap_ppm:
        report.add("optimal", f"gap_ppm is {recorded.gap_ppm}, bound and objective give {gap}", "predicted")
    if recorded.status == "optimal" and gap > 0:
        report.add("optimal", f"status says optimal, the gap is {gap} ppm", "predicted", "status")
    if recorded.status not in STATUSES:
        report.add(
            "optimal", f"status {recorded.status}: one of {', '.join(STATUSES)}", "predicted", "status"
        )


STATUSES = ("optimal", "feasible", "baseline", "edited")


def _edited(plan: Plan, again: Plan, report: _Report) -> None:
    """A legal placement with values of another one: what it costs now."""
    before, now = plan.predicted.tpot_ns, again.predicted.tpot_ns
    if before != now:
        message = (
            f"legal, but priced for another placement: now {now / 1e6:.2f} ms a token instead of "
            f"{before / 1e6:.2f}; atsplan fmt --reprice writes the new values"
        )
        report.add("cost", message, "predicted", "tpot_ns")


def _optimal(
    plan: Plan,
    inventory: Inventory,
    profile: Profile,
    known: Known,
    options: CheckOptions,
    report: _Report,
    built: Built,
) -> None:
    """Solve again: nothing may be better than the recorded gap allows."""
    deadline = Deadline(options.time_limit_s)
    asked = request_of(plan), known_of(plan, known), settings_of(plan)
    try:
        best = make_plan(inventory, profile, *asked, Clock(deadline=deadline), built=built)
    except OutOfTime:
        report.add("search", _NOT_SEARCHED, "predicted", severity=Severity.NOTE)
        return
    mine, found = plan.predicted.objective_ns, best.predicted.objective_ns
    if plan.predicted.status == "edited":
        loss = (mine - best.predicted.objective_ns) * 100 / max(found, 1)
        message = f"edited by hand: {loss:.2f} % above the best placement found"
        report.add("optimal", message, "predicted", "status", severity=Severity.NOTE)
        return
    slack = mine * plan.predicted.gap_ppm // PPM
    if found < mine - slack:
        report.add(
            "optimal",
            f"a placement {100 * (mine - found) / mine:.2f} % better exists, the recorded gap is "
            f"{plan.predicted.gap_ppm / 1e4:.2f} %",
            "predicted",
            "objective_ns",
        )
    if deadline.ended_by == "clock":
        report.add("search", _NOT_SEARCHED, "predicted", severity=Severity.NOTE)
    elif (
        best.predicted.bound_ns < plan.predicted.bound_ns * 999 // 1000
        and best.predicted.status != "feasible"
    ):
        report.add("optimal", "the recorded bound cannot be proven again", "predicted", "bound_ns")


def _stale(profile: Profile, options: CheckOptions, report: _Report) -> None:
    if options.today is not None and profile.created:
        age = (options.today - date.fromisoformat(profile.created[:10])).days
        if age > options.max_age_days:
            message = f"the profile is {age} days old; atsplan profile measures again"
            report.add("stale", message, "machine", severity=Severity.NOTE)


def missing_inputs(
    plan: Plan, path: str, text: str, inputs: Inputs, *, allowed: bool = False
) -> Iterable[Finding]:
    """Inputs that were not found: without them a plan cannot be judged, and silence would look like proof.

    `allowed`: a note each, for those who check what the plan alone proves.
    """
    severity = Severity.NOTE if allowed else Severity.INPUT
    lines = Lines(text)
    if inputs.inventory is None:
        message = f"no inventory of {plan.model.name} with this digest: overrides and cost were not checked"
        yield Finding(path, lines.of("model"), "inputs", severity, message)
    if inputs.profile is None:
        message = f"no profile of {plan.machine.name} with this digest: cost was not checked"
        yield Finding(path, lines.of("machine"), "inputs", severity, message)
    if inputs.heat_missing(plan):
        message = "no heat file with the recorded digest: cost was not checked"
        yield Finding(path, lines.of("constraints", "heat_digest"), "inputs", severity, message)
