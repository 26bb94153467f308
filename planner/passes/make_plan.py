"""From model, machine and request to a plan, step by step; or to a refusal with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner.constants import PPM
from planner.cost.paged import over_resident
from planner.errors import InputError
from planner.left_out import no_pandas
from planner.machine.engine_builds import sentence
from planner.machine.profile import Profile
from planner.memory.reserves import PROJECTOR
from planner.model.inventory import Inventory
from planner.passes import stock_rules
from planner.passes.case import Built, Case, Loading, Tried
from planner.passes.chosen import Chosen
from planner.passes.largest_context import Keep
from planner.passes.margin import choice, indistinct_ppm
from planner.passes.placements import placements, untuned
from planner.passes.record import baseline_of, record, search_of
from planner.passes.refusal import refuse
from planner.passes.remedies import with_remedies
from planner.passes.settings_to_try import AskEngine, settings_to_try, ways_expected
from planner.passes.stock_rules import either_way
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.plan.request import Request
from planner.solver.clock import Clock
from planner.solver.deadline import Deadline


@dataclass(eq=False)
class NothingToPlace(InputError):
    """A file without layers: a vision projector, a vocabulary, an importance matrix."""

    name: str
    architecture: str

    def message(self) -> str:
        beside = "; give a projector to its model with --mmproj" if self.architecture == PROJECTOR else ""
        return f"{self.name}: a file of architecture {self.architecture} without layers to place{beside}"


@no_pandas
def make_plan(
    inventory: Inventory,
    profile: Profile,
    request: Request,
    known: Known | None = None,
    start: EngineSettings | None = None,
    clock: Clock | None = None,
    ask_engine: AskEngine | None = None,
    tell: Callable[[str], None] = lambda text: None,
    *,
    advise: bool = False,
    built: Built | None = None,
) -> Plan:
    """The best placement that keeps the request, as a plan.

    `start` holds the settings that are not to be tried; `ask_engine` is asked for the engine's own --fit,
    `tell` is told what was decided on the way, `advise` tries what a refusal names, `built` has what was
    built before. Raises Infeasible with what is needed, what is there, and what to change; NothingToPlace for
    a file without layers.
    """
    built = built or Built()
    structure = built.structure(inventory)
    if not structure.layers.n_main:
        raise NothingToPlace(inventory.name, inventory.architecture)
    case = Case(structure, profile, request, known or Known(), clock or Clock(), tell, built=built)
    start = start or EngineSettings()
    tried = _tried(case, start, ask_engine)
    if not tried.found:
        raise with_remedies(tried.refusals[0], case, start) if advise else tried.refusals[0]
    chosen = choice(tried.found)
    if request.limited and any(chosen.way):
        chosen = _no_faster_than_free(chosen, tried, case, start)
    return _recorded(chosen, tried, case.clock.deadline)


def _tried(case: Case, start: EngineSettings, ask_engine: AskEngine | None) -> Tried:
    """All placements worth a look, of every way to run the engine."""
    tried, expected = Tried(), ways_expected(case)
    for done, (loading, settings) in enumerate(settings_to_try(case, start, tried, ask_engine)):
        case.clock.watch(done, max(expected, done + 1))
        found = list(placements(loading, settings, tried))  # build the problem, solve, tie-break, evaluate
        kept = [each for each in found if not over_resident(each.priced, each.solution)]
        if found and not kept:  # a host that shares its memory with a GPU: the solver knows no limit for both
            tried.refusals.append(refuse(found[0].priced, case.request))
        loading.found.extend(kept)
    return tried


def _no_faster_than_free(chosen: Chosen, tried: Tried, case: Case, start: EngineSettings) -> Chosen:
    """The choice under pins and limits; not a way that would be dismissed without them.

    A way that is dismissed for its doubts may be the best that pins leave, and then look faster than the plan
    without pins.
    """
    quiet = replace(case, request=case.request.unconstrained(), tell=lambda text: None)
    free = choice(found).evaluation.objective_ns if (found := _tried(quiet, start, None).found) else 0
    others = [each for each in tried.found if each.evaluation.objective_ns >= free]
    return choice(others) if chosen.evaluation.objective_ns < free and others else chosen


def _recorded(chosen: Chosen, tried: Tried, deadline: Deadline) -> Plan:
    """The plan of a placement, with what was looked at beside it."""
    loading = next(each for each in tried.loadings if any(found is chosen for found in each.found))
    case = loading.case
    copies = chosen.priced.settings.op_offload
    stock = loading.stock if copies else either_way(loading.stock, loading.plain)
    made = record(chosen, stock, case.profile, case.request, case.known)
    plain = untuned(loading, made)
    made = made.model_copy(update={"untuned": baseline_of(plain) if plain else None})
    if case.keeps:
        case.tell(_largest(made, case.keeps))
    search = search_of(deadline)
    left_out = [f"nothing partly on the CPU: {sentence(loading.fault)}"] if loading.fault else []
    left_out += _asked_costs(made, loading)
    left_out += _dismissed(chosen, tried.found)
    notes = (*made.notes, *left_out, *_draft_lengths(tried.loadings), *_following(made, tried.loadings))
    return made.model_copy(update={"notes": notes, "search": search})


def _dismissed(chosen: Chosen, found: list[Chosen]) -> list[str]:
    """Prompts left to the CPU where that is predicted faster than the plan, but not at its worst."""
    best = min(found, key=lambda each: each.evaluation.objective_ns)
    ours, theirs = chosen.evaluation.objective_ns, best.evaluation.objective_ns
    if not best.doubt_ns or ours * PPM <= theirs * (PPM + indistinct_ppm(chosen.priced.prices.calibration)):
        return []
    prompt_ns = best.evaluation.prefill_ns
    return [
        "prompts left to the CPU (--no-op-offload): a request is predicted "
        f"{ours / theirs:.2f} times as fast; not chosen, as their {prompt_ns / 1e6:.0f} ms may be "
        f"{100 * best.doubt_ns / max(prompt_ns, 1):.0f} % more"
    ]


def _asked_costs(plan: Plan, loading: Loading) -> list[str]:
    """What pins and limits cost, where the plan without them would be faster than this one by a mere rule."""
    if not loading.case.request.limited:
        return []
    free = loading.case.built.stock(loading.unlimited(loading.settings), loading.case.known.fit)
    best = min((c for c in free if c.feasible), key=stock_rules.request_ns, default=None)
    if best is None or stock_rules.request_ns(best) >= plan.predicted.objective_ns:
        return []
    times = plan.predicted.objective_ns / max(stock_rules.request_ns(best), 1)
    return [
        f"without what was asked (pins, limits) the stock rule {best.name} ({best.setting}) answers a "
        f"request {times:.2f} times as fast"
    ]


def _largest(plan: Plan, keeps: str) -> str:
    """What the context of a plan was made as large as possible for, and where the plan does otherwise."""
    text = f"context {plan.workload.n_ctx}: the largest with {keeps}"
    if plan.speculation is not None:
        drafts = plan.speculation.tokens
        text += f", {drafts} tokens drafted a step" if drafts else ", nothing drafted"
    away = sum(use.kv_bytes + use.state_bytes for use in plan.devices if use.kind == "cpu") >> 20
    if keeps != Keep.ANY.value and away:
        text += f"; the plan leaves {away} MiB of it to the CPU, which is faster"
    return text


def _following(made: Plan, loadings: list[Loading]) -> Iterator[str]:
    """Why the experts in slots stay, where they might follow the text."""
    slotted = [each for each in loadings if each.settings.slots and each.found]
    ways = [each for each in slotted if each.settings.following]
    if ways and made.following is None:
        stays = [each for each in slotted if not each.settings.following]
        told = [
            f"{min(found.evaluation.decode_ns for each in some for found in each.found) / 1e6:.2f} ms"
            for some in (ways, stays)
            if some
        ]
        yield f"slots that follow the text (--follow) do not pay: {' against '.join(told)}, staying"


def _draft_lengths(loadings: list[Loading]) -> list[str]:
    """What a token takes with each draft length that has a placement."""
    times: dict[int, int] = {}
    for loading in loadings:
        drafts = loading.settings.speculation
        if drafts is not None and loading.found:
            found = choice(loading.found).evaluation.decode_ns
            times[drafts.tokens] = min(found, times.get(drafts.tokens, found))
    if not times or loadings[0].case.request.extra_models is None:
        return []
    drafts = loadings[0].settings.speculation
    assert drafts is not None
    told = ", ".join(f"{n}: {times[n] / 1e6:.2f} ms" for n in sorted(times))
    rate = "/".join(f"{ppm / PPM:g}" for ppm in drafts.accepted_ppm[:8]) or f"{drafts.accept_ppm / PPM:g}"
    return [f"drafted tokens a step and time of a token, acceptance {rate}: {told}"]
