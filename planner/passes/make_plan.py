"""From inventory, profile, budgets and workload to a plan, step by step; or to a refusal with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.cost.build_problem import Model, Priced, model_of, price
from planner.errors import InputError
from planner.machine.engine_builds import Fault, mixing_fault, sentence
from planner.machine.host_memory import HostMemory, can_be_pinned
from planner.machine.profile import Profile
from planner.memory.reserves import PROJECTOR
from planner.model.inventory import Inventory
from planner.passes import op_offload, stock_rules
from planner.passes.record import Chosen, indistinct_ppm, record
from planner.passes.refusal import Infeasible, OutOfTime, crowded, forced, refuse
from planner.passes.stock_rules import Candidate, translated
from planner.plan.plan import Plan
from planner.plan.request import SolveOptions
from planner.solver.evaluate import evaluate
from planner.solver.solve import Limits, Solved, solve
from planner.solver.tie_break import tidied
from planner.workload import Workload

_PPM = 10**6


@dataclass(eq=False)
class NothingToPlace(InputError):
    """A file without layers: a vision projector, a vocabulary, an importance matrix."""

    name: str
    architecture: str

    def message(self) -> str:
        beside = "; give a projector to its model with --mmproj" if self.architecture == PROJECTOR else ""
        return f"{self.name}: a file of architecture {self.architecture} without layers to place{beside}"


def make_plan(
    inventory: Inventory,
    profile: Profile,
    budgets: Mapping[str, int],
    workload: Workload,
    options: SolveOptions,
) -> Plan:
    """The best placement under the budgets, as a plan.

    `budgets` holds bytes for every device that may be used, the CPU included. Raises Infeasible with
    what is needed, what is there, and what to change; NothingToPlace for a file without layers.
    """
    model = model_of(inventory, workload)
    if not model.layers.n_main:
        raise NothingToPlace(inventory.name, inventory.architecture)
    if options.host_memory is not None:
        return _plan(model, profile, budgets, workload, options)
    limit = 0 if options.page else can_be_pinned(profile, budgets, options.pinned_limit_bytes)
    hosts = {d.name for d in profile.devices if d.kind == "cpu"}
    if inventory.size_bytes - sum(size for name, size in budgets.items() if name not in hosts) < limit:
        time = options.deadline.part(0.6)  # the rest, should the weights turn out too many to be pinned
        pinned = replace(options, host_memory=HostMemory.PINNED, deadline=time)
        made = _plan(model, profile, budgets, workload, pinned)
        if sum(use.weights_bytes for use in made.devices if use.kind == "cpu") <= limit:
            return made
    return _plan(model, profile, budgets, workload, replace(options, host_memory=HostMemory.MAPPED))


def _plan(
    model: Model,
    profile: Profile,
    budgets: Mapping[str, int],
    workload: Workload,
    options: SolveOptions,
) -> Plan:
    """A plan with host weights in one kind of memory."""
    inventory = model.inventory
    fault = mixing_fault(inventory.architecture, profile.fingerprint.engine, budgets)
    whole = replace(options, no_cpu=True) if fault else options
    everything = price(
        model, profile, budgets, workload, replace(options, pins=(), contiguous=False, no_cpu=False)
    )
    constrained = price(model, profile, budgets, workload, whole)
    stock = stock_rules.candidates(everything, options.fit)
    alone = host_only(model, profile, budgets, workload, options)
    if full := crowded(constrained, budgets, options):
        raise full
    refusal = forced(constrained, budgets, whole)
    chosen = choose(constrained, everything, stock, alone, options, searched=refusal is None)
    if constrained.copies and not fault:
        plain = price(model, profile, budgets, workload, replace(options, op_offload=False))
        chosen = op_offload.better(chosen, constrained, plain, budgets, options)
    if chosen is None:
        if refusal is None and options.deadline.ended_by == "clock":
            raise OutOfTime
        raise _because(fault, refusal or refuse(constrained, budgets, whole))
    chosen = _without_repacking(chosen, profile, budgets, options)
    made = record(chosen, rows(alone, stock), profile, budgets, workload, options)
    left_out = [f"nothing partly on the CPU: {sentence(fault)}"] if fault else []
    return made.model_copy(update={"notes": (*made.notes, *left_out)})


def _because(fault: Fault | None, refusal: Infeasible) -> Infeasible:
    """A refusal that says which fault of the engine left the CPU out, if one did."""
    if fault is None:
        return refusal
    why = "; ".join(filter(None, (f"wholly on the GPUs, since {sentence(fault)}", refusal.why)))
    hints = (*(h for h in refusal.hints if h != "allowing the CPU"), "another build of the engine")
    return Infeasible(refusal.needs, hints, why)


def _without_repacking(
    chosen: Chosen, profile: Profile, budgets: Mapping[str, int], options: SolveOptions
) -> Chosen:
    """Of a placement on the CPU alone the better of two: weights in the layout that the engine gives them,
    or as they are in the file. The first stays unless the second is faster beyond the error.
    """
    own = chosen.evaluation.objective_ns
    if not all(d.host for d in chosen.priced.problem.devices):
        return chosen
    plain = as_stored(chosen.priced, profile, budgets, options)
    same = translated(plain, Candidate("", "", chosen.solution, None), chosen.priced)
    if same is None or same.solution is None or same.evaluation is None:
        return chosen
    margin = own * indistinct_ppm(chosen.priced.prices.calibration) // _PPM
    if same.evaluation.objective_ns + margin >= own:
        return chosen
    bound = min(chosen.bound_ns, same.evaluation.objective_ns)
    status = "optimal" if bound == same.evaluation.objective_ns else "feasible"
    return Chosen(plain, same.solution, same.evaluation, bound, status, "")


def as_stored(priced: Priced, profile: Profile, budgets: Mapping[str, int], options: SolveOptions) -> Priced:
    """A problem of the CPU alone, its weights in the layout of the file."""
    hosts = {d.device for d in priced.problem.devices}
    alone = {name: size for name, size in budgets.items() if name in hosts}
    kept = tuple(r for r in options.reserves if r.device in hosts)
    asked = replace(options, pins=(), contiguous=False, no_cpu=False, reserves=kept, repack=False)
    return price(priced.model, profile, alone, priced.prices.workload, asked)


def host_only(
    model: Model, profile: Profile, budgets: Mapping[str, int], workload: Workload, options: SolveOptions
) -> tuple[Priced, Candidate] | None:
    """Everything on the CPU, GPUs not even opened: a problem of its own with a single answer.

    There is none where a projector or a draft model opens a GPU anyway.
    """
    hosts = {d.name for d in profile.devices if d.kind == "cpu"}
    opened = any(r.opens and r.device not in hosts for r in options.reserves)
    if not hosts & set(budgets) or opened:
        return None
    alone = {name: size for name, size in budgets.items() if name in hosts}
    kept = tuple(r for r in options.reserves if r.device in hosts)
    free = replace(options, pins=(), contiguous=False, no_cpu=False, reserves=kept)
    priced = price(model, profile, alone, workload, free)
    return priced, stock_rules.candidates(priced)[0]


def rows(alone: tuple[Priced, Candidate] | None, stock: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The baselines as recorded: the CPU alone first, and once."""
    return (alone[1], *(c for c in stock if c.name != alone[1].name)) if alone else stock


def choose(
    priced: Priced,
    free: Priced,
    stock: tuple[Candidate, ...],
    host_only: tuple[Priced, Candidate] | None,
    options: SolveOptions,
    *,
    searched: bool = True,
) -> Chosen | None:
    """The solver's answer, unless a stock rule is as good within the error of the prediction.

    `searched` False: no placement on these devices exists, only the CPU alone is left to look at.
    """
    usable = [c for c in (translated(priced, each, free) for each in stock) if c is not None and c.feasible]
    hint = min(usable, key=lambda c: _objective(c), default=None)
    limits = Limits(options.work_s, deadline=options.deadline.part(0.7))
    start = hint.solution if hint else None
    solved = solve(priced.problem, start, limits) if searched else Solved("infeasible", None, 0, 0)
    found = _pick(priced, solved, usable)
    unopened = found is not None and _on_host_alone(found)
    if host_only is None or ((options.no_cpu or options.pins) and not unopened):
        return found
    alone, candidate = host_only
    if not candidate.feasible or candidate.evaluation is None or candidate.solution is None:
        return found
    own = candidate.evaluation.objective_ns
    margin = (
        found.evaluation.objective_ns * indistinct_ppm(priced.prices.calibration) // _PPM
        if found and not found.rule
        else 0
    )
    if found is None or unopened or own <= found.evaluation.objective_ns + margin:
        bound = min(solved.bound_ns, own) if solved.solution else own
        return Chosen(alone, candidate.solution, candidate.evaluation, bound, "baseline", candidate.name)
    return found


def _on_host_alone(chosen: Chosen) -> bool:
    """Whether a placement takes nothing of any GPU: the problem without them says the same, to the digit."""
    pairs = zip(chosen.evaluation.memory, chosen.priced.problem.devices, strict=True)
    return all(device.host or not size for size, device in pairs)


def _pick(priced: Priced, solved: Solved, usable: list[Candidate]) -> Chosen | None:
    """The best stock rule when the solver's answer cannot be told apart from it, else that answer."""
    stock = min(usable, key=_objective, default=None)  # the simpler of equals, as they come in that order
    if solved.solution is None and stock is None:
        return None
    limit, best = 2**62, None
    if solved.solution is not None:
        solution = tidied(priced.problem, solved.solution)
        evaluation = evaluate(priced.problem, solution)
        assert evaluation.feasible, evaluation.violations
        limit = (
            evaluation.objective_ns
            + evaluation.objective_ns * indistinct_ppm(priced.prices.calibration) // _PPM
        )
        best = Chosen(priced, solution, evaluation, solved.bound_ns, solved.status, "")
    if stock is None or _objective(stock) > limit or stock.solution is None or stock.evaluation is None:
        return best
    return Chosen(priced, stock.solution, stock.evaluation, solved.bound_ns, "baseline", stock.name)


def _objective(candidate: Candidate) -> int:
    return candidate.evaluation.objective_ns if candidate.evaluation else 2**62
