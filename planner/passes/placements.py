"""For one way to run the engine: its problem, the placements worth a look, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.constants import PPM
from planner.cost.build_problem import Priced
from planner.cost.evidence import of_prompt
from planner.cost.paged import resident_problem
from planner.cost.pins import pinned
from planner.cost.placed import evaluate_placed
from planner.machine.host_memory import HostMemory
from planner.passes.case import Case, Loading, Tried, loading_of
from planner.passes.chosen import Chosen
from planner.passes.margin import choice, prompt_doubt_ppm
from planner.passes.refusal import OutOfTime, because, overfilled_by_extras, refuse, unavoidable
from planner.passes.stock_rules import Candidate, request_ns, translated
from planner.plan.engine_settings import EngineSettings
from planner.plan.load_spec import pins_host_weights
from planner.plan.plan import Plan
from planner.plan.stock_rule import NOT_KEPT
from planner.site import ON_CPU
from planner.solver.problem import Option, Solution
from planner.solver.solve import Solved, price_of, solve
from planner.solver.stretches import best_stretches, break_ties
from planner.workload import ENGINE_BATCH, ENGINE_UBATCH

_AFTER = 4  # CPU alone, record, rules without flags, in terms of pricing a problem and its stock rules


def placements(loading: Loading, settings: EngineSettings, tried: Tried) -> Iterator[Chosen]:
    """The placements to choose from under these settings; where there is none, `tried` learns why."""
    if not settings.gpus:
        yield from _on_the_cpu(loading, settings)
    elif settings.op_offload:
        yield from _on_all_devices(loading, settings, tried)
    else:
        yield from _without_copies(loading, settings)


def _on_all_devices(loading: Loading, settings: EngineSettings, tried: Tried) -> Iterator[Chosen]:
    """The solver's answer and every stock rule that keeps the request."""
    case = loading.case
    began = case.clock.deadline.look()
    asked = loading.asked(settings)
    loading.stock = case.built.stock(asked, case.known.fit)
    priced = asked if loading.limits == case.request else loading.constrained(settings)
    if full := overfilled_by_extras(priced, case.request):
        loading.crowded = True
        tried.refusals.append(full)
        return
    loading.copying = priced if priced.copies and not loading.fault else None
    usable = [c for c in (translated(priced, each, asked) for each in loading.stock) if c and c.feasible]
    refusal = unavoidable(priced, loading.limits)
    case.clock.deadline.keep(began, _AFTER)
    solved = Solved("infeasible", None, 0, 0) if refusal else _solved(case, priced, usable)
    if solved.solution is not None:
        loading.bound_ns = solved.bound_ns
        found = _best_placed(priced, solved, solved.solution)
        yield found
        yield from _undivided(loading, settings, found, usable)
    for stock in usable:
        yield _baseline(priced, stock, solved.bound_ns)
    if solved.solution is None and not usable:
        late = refusal is None and case.clock.deadline.ended_by == "clock"
        reason = refusal or refuse(priced, loading.limits)
        tried.refusals.append(OutOfTime() if late else because(loading.fault, reason))


def _undivided(
    loading: Loading, settings: EngineSettings, found: Chosen, usable: list[Candidate]
) -> Iterator[Chosen]:
    """The best without single experts on a GPU, where the error cannot tell some stock rule from `found`:
    what is simpler is not to be slower than another placement as simple.
    """
    if not found.divided or settings.slots:
        return
    rules = [_baseline(found.priced, stock, found.bound_ns) for stock in usable]
    if not rules or choice([found, *rules]) is found:
        return
    case = loading.case
    whole = replace(case, request=replace(case.request, stripes=False), known=replace(case.known, cache=()))
    priced = replace(loading, case=whole).constrained(settings)
    kept = [c for c in (translated(priced, each, found.priced) for each in usable) if c and c.feasible]
    solved = _solved(whole, priced, kept, 1.0)
    if solved.solution is not None:
        yield _best_placed(priced, solved, solved.solution)


def _solved(case: Case, priced: Priced, usable: list[Candidate], share: float = 0.7) -> Solved:
    """The solver's answer, started from the best of the placements that are at hand."""
    hint = min(usable, key=request_ns, default=None)
    hinted = hint.solution if hint else None
    return solve(resident_problem(priced), hinted, case.clock.limits(share))


def _best_placed(priced: Priced, solved: Solved, solution: Solution) -> Chosen:
    """The answer; or one with the CPU first and each device once, where that is faster.

    Pieces beyond the changes of device, which the problem does not know of, come from a CPU behind a GPU and
    from devices that come twice.
    """
    best = _chosen(priced, solution, solved)
    if best.evaluation.objective_ns == price_of(priced.problem, best.solution):
        return best
    other = best_stretches(resident_problem(priced), best.evaluation.objective_ns)
    if other is not None:
        best = min(best, _chosen(priced, other, solved), key=lambda each: each.evaluation.objective_ns)
    return best


def _chosen(priced: Priced, solution: Solution, solved: Solved) -> Chosen:
    solution = break_ties(resident_problem(priced), solution)
    found = evaluate_placed(priced, solution)
    assert found.feasible, found.violations
    proven = found.objective_ns <= solved.bound_ns
    status = solved.status if proven or solved.status != "optimal" else "feasible"
    return Chosen(priced, solution, found, solved.bound_ns, status, "")


def _baseline(priced: Priced, stock: Candidate, bound_ns: int) -> Chosen:
    assert stock.solution is not None and stock.evaluation is not None
    return Chosen(priced, stock.solution, stock.evaluation, bound_ns, "baseline", stock.name)


def cpu_alone(loading: Loading, settings: EngineSettings) -> tuple[Priced, Candidate] | None:
    """Everything on the CPU, GPUs not even opened: a problem of its own with a single answer, which pins and
    limits may forbid.

    There is none where a projector or a draft model opens a GPU anyway.
    """
    case = loading.case
    hosts = {d.name for d in case.profile.devices if d.kind == "cpu"}
    opened = any(r.opens and r.device not in hosts for r in settings.reserves)
    if not hosts & set(case.request.budgets) or opened:
        return None
    priced = loading.unlimited(settings)
    found = case.built.stock(priced)[0]
    if case.request.no_cpu or not _all_on_host(loading):
        found = replace(found, setting=NOT_KEPT, solution=None, evaluation=None)
    return priced, found


def _all_on_host(loading: Loading) -> bool:
    """Whether pins and limits allow that everything is on the CPU."""
    request = loading.case.request
    units = [unit for _, group in loading.model.groups for unit in group]
    loaded = {unit.name for unit in units}
    idle = [unit for unit in loading.model.units if unit.name not in loaded]
    asked = pinned(request.pins, units, list(request.budgets), idle)
    return request.first_on_cpu is None and all(wanted.admits(ON_CPU) for wanted in asked.values())


def untuned(loading: Loading, plan: Plan) -> Candidate | None:
    """The best stock rule as the engine runs it unless told: host weights mapped and repacked, prompts
    copied to a GPU in batches of 512. None where the plan runs it no other way, or none fits.
    """
    batched = plan.workload.n_ubatch != ENGINE_UBATCH
    if plan.op_offload and plan.repack is not False and not pins_host_weights(plan) and not batched:
        return None
    if batched:
        loading = _in_usual_batches(loading)
    own = replace(loading.settings, op_offload=True, repack=True, host_memory=HostMemory.MAPPED)
    # Where no GPU is open, how host weights are held is a matter of looked-up tables alone.
    held = own.host_memory if loading.model.tables_bytes else loading.settings.host_memory
    alone = cpu_alone(loading, replace(own, gpus=False, host_memory=held))
    stock = loading.case.built.stock(loading.asked(own), loading.case.known.fit)
    found = baselines(alone, stock)
    return min((c for c in found if c.feasible), key=request_ns, default=None)


def _in_usual_batches(loading: Loading) -> Loading:
    """The same with the engine's own size of batches; what its --fit placed was for another."""
    case = loading.case
    work = case.request.workload
    batches = {"n_ubatch": ENGINE_UBATCH, "n_batch": ENGINE_BATCH}
    request = replace(case.request, workload=work.model_copy(update=batches))
    case = replace(case, request=request, known=replace(case.known, fit=None))
    return loading_of(case, case.analysed(loading.settings), loading.settings)


def baselines(alone: tuple[Priced, Candidate] | None, stock: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The baselines as recorded: the CPU alone first, and once."""
    return (alone[1], *(c for c in stock if c.name != alone[1].name)) if alone else stock


def _on_the_cpu(loading: Loading, settings: EngineSettings) -> Iterator[Chosen]:
    """The CPU alone, where what was asked for allows it."""
    alone = cpu_alone(loading, settings)
    if alone is None:
        return
    priced, candidate = alone
    if settings.repack:
        loading.stock = baselines(alone, loading.stock)
    best = loading.best
    unopened = best is not None and best.on_host_alone
    if not candidate.feasible:
        return
    assert candidate.solution is not None and candidate.evaluation is not None
    own = candidate.evaluation.objective_ns
    if not settings.repack:  # weights as they are in the file
        assert best is not None
        bound = min(best.bound_ns, own)
        status = "optimal" if bound == own else "feasible"
        yield Chosen(priced, candidate.solution, candidate.evaluation, bound, status, "")
        return
    if unopened:  # the same placement: a problem without GPUs says what the engine does with it
        loading.found = [each for each in loading.found if not each.on_host_alone]
    bound = min(loading.bound_ns, own) if loading.bound_ns else own
    yield _baseline(priced, candidate, bound)


def _without_copies(loading: Loading, settings: EngineSettings) -> Iterator[Chosen]:
    """The solver's answer where prompts are computed where the weights are (op_offload off).

    Copying is the engine's own way. It needs a link faster than the CPU computes, and on the GPU a buffer for
    the largest weight on its way.
    """
    case = loading.case
    if loading.found and case.clock.deadline.over():
        return
    plain = loading.constrained(settings)
    streamed = loading.best
    start = _same(streamed, plain)
    worth = streamed is None or _roomier(streamed, start, plain) or _faster(loading.copying, plain)
    if not worth or unavoidable(plain, case.request) is not None:
        return
    asked = loading.asked(settings)
    loading.plain = case.built.stock(asked)
    usable = [c for c in (translated(plain, each, asked) for each in loading.plain) if c and c.feasible]
    if start is not None and start.feasible:
        usable.append(start)
    solved = _solved(case, plain, usable, 1.0)
    if solved.solution is None:
        return
    found = _best_placed(plain, solved, solved.solution)
    if streamed is not None and _copies(streamed, start):
        # The speed of a link and that of a CPU do not share their errors, as two placements do.
        prompt = of_prompt(plain, found.solution, found.evaluation)
        doubt = found.evaluation.prefill_ns * prompt_doubt_ppm(plain, prompt) // PPM
        found = replace(found, doubt_ns=doubt)
    yield found
    for stock in usable:
        if stock.name:  # a rule and one switch: simpler than a placement of the solver's
            yield replace(_baseline(plain, stock, solved.bound_ns), doubt_ns=found.doubt_ns)


def _same(streamed: Chosen | None, plain: Priced) -> Candidate | None:
    """The placement itself without copies."""
    if streamed is None or not streamed.opens_gpus:
        return None
    return translated(plain, Candidate("", "", streamed.solution, None), streamed.priced)


def _copies(streamed: Chosen, same: Candidate | None) -> bool:
    """Whether its prompt is computed elsewhere than where the weights are, so that it takes another time."""
    evaluation = same.evaluation if same is not None else None
    return evaluation is not None and evaluation.prefill_ns != streamed.evaluation.prefill_ns


def _faster(priced: Priced | None, plain: Priced) -> bool:
    """Whether some placement's prompt takes less time without copies to a GPU."""
    assert priced is not None
    for decision, other in zip(priced.problem.decisions, plain.problem.decisions, strict=True):
        streamed = {o.key: o.prefill_ns for o in decision.options}
        if any(o.prefill_ns < streamed.get(o.key, 0) for o in other.options):
            return True
    return False


def _roomier(streamed: Chosen, same: Candidate | None, plain: Priced) -> bool:
    """Whether the room for copies, given up, would hold one more part on some GPU; or there is no GPU yet."""
    if same is None or same.evaluation is None or same.solution is None:
        return True
    pairs = zip(streamed.evaluation.memory, same.evaluation.memory, strict=True)
    freed = {d for d, (with_copies, without) in enumerate(pairs) if without < with_copies}
    devices, memory = plain.problem.devices, same.evaluation.memory
    chosen = zip(plain.problem.decisions, same.solution.chosen(plain.problem), strict=True)
    return any(
        _gains(option, other, d, devices[d].capacity_bytes - memory[d])
        for decision, option in chosen
        for other in decision.options
        for d in freed
    )


def _gains(option: Option, other: Option, device: int, free: int) -> bool:
    more = other.memory[device] - option.memory[device]
    return 0 < more <= free and other.decode_ns < option.decode_ns
