"""atsplan fit: does a model fit a machine, how fast it would be, and what to type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.fit.levers import Lever, lever_bars, levers, most
from commands.shared.console import counted, mib, out, out_json, out_table, out_text, progress, say, table
from commands.shared.machine_options import (
    BUDGET,
    MACHINE,
    PROFILE,
    Described,
    machine_parts,
    profile_of,
    with_found,
    words_of,
)
from commands.shared.models import ELSEWHERE, load_inventory
from commands.shared.option_types import html_option
from commands.shared.paste import known_by, pasted
from commands.shared.refusals import refusal_data
from commands.shared.spellings import FIT, answers
from commands.shared.verdicts import best_stock, doubt, gain, rates, told_apart_ppm, verdict
from commands.solve.use import Use, use_options
from planner.errors import AnswerIsNo
from planner.quoting import shell

if TYPE_CHECKING:
    from commands.fit.remote import Reference
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.passes.case import Case
    from planner.passes.refusal import Infeasible
    from planner.plan.known import Known
    from planner.plan.plan import Plan
    from planner.plan.request import Request

_FILE = click.Path(path_type=Path)
Watch = Callable[[int, int], None]
Words = tuple[str, ...]  # by which llama-server finds a model that is not here
_HEADER = "reading the header"
_SAME = 0.01  # a gain that no measurement shows
_STEPS_GIB = (0, 1, 2, 4, 8, 16)  # beyond the shortage, for units that do not divide


class Model(click.ParamType[Any]):
    """A file here, or a reference to one elsewhere."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).startswith(ELSEWHERE):
            from commands.fit.remote import reference

            return reference(str(value)) or Path(str(value))
        return Path(str(value))


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that is asked: a model, a machine, what it may use, and for what."""

    inventory: Inventory
    profile: Profile
    request: Request
    known: Known | None = None  # about its routing


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found for a model that fits."""

    plan: Plan
    hybrid: Plan | None  # where slots of experts are faster beyond the error
    largest_ctx: int
    keeps: str  # what the largest context leaves on GPUs
    levers: tuple[Lever, ...]  # what each change alone brings


@click.command()
@click.argument("model", type=Model(), metavar="MODEL")
@PROFILE
@MACHINE
@machine_parts
@BUDGET
@use_options
@click.option("--heat", type=_FILE, help="Expert routing (heat.csv): what slots are worth with it.")
@click.option("--levers/--no-levers", "with_levers", default=True, help="What each change alone brings.")
@html_option
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@answers(FIT)
def command(
    model: Path | Reference,
    profile_path: Path | None,
    machine: str | None,
    parts: Described,
    budget: str | None,
    use: Use,
    heat: Path | None,
    with_levers: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Does MODEL fit, how fast, with what context, and what to type.

    MODEL is a GGUF file, any shard or the folder of a split one, an inventory.yaml, or lies elsewhere:
    https://… or hf:owner/repo/file.gguf, of which only the header is fetched. The machine is a profile,
    a known one, its parts (--gpu 'RTX 4070' --ram 64GiB --memory ddr5-6000 --cpu 8), or this one, with
    --memory alone where the system does not tell that.
    """
    from planner.passes.refusal import Infeasible

    # What is wrong with a file comes before questions about the machine.
    here = _opened(model) if isinstance(model, Path) else None
    if profile_path is None and machine is None and not parts.other_machine:
        parts = with_found(parts)
    profile = profile_of(profile_path, machine, parts)
    inventory, where = here or _opened(model)
    words = () if isinstance(model, Path) else model.words
    question = _question(inventory, profile, budget, use, heat)
    try:
        answer = _answer(question, with_levers)
    except AnswerIsNo as refusal:
        if as_json:
            out_json({"verdict": "does not fit", **refusal_data(refusal), **_changes(question, refusal)})
        else:
            _show_refusal(question, refusal)
            if isinstance(refusal, Infeasible):  # its figures stand above
                raise AnswerIsNo("does not fit") from None
        raise
    if html is not None:
        from commands.page.page import plan_page, view_of, write_page

        told = f"Largest context: {answer.largest_ctx}, with {answer.keeps}."
        view = view_of(answer.plan, inventory, where, words=words)
        gained = most(answer.levers)
        facts = (told, *([f"{gained[0].upper()}{gained[1:]}."] if gained else []), *view.facts)
        view = replace(view, hybrid=answer.hybrid, facts=facts, levers=lever_bars(answer.levers))
        write_page(html, plan_page(view))
    if as_json:
        out_json(_data(answer, inventory, where, words))
    else:
        _show(answer, inventory, where, words)
    limits = [] if budget is None else ["--budget", budget]
    limits += use.words
    limits += ["--heat", str(heat)] if heat else []
    limits += ["--hybrid"] if answer.hybrid else []
    which = ["--machine", machine] if machine else ["--profile", str(profile_path or "profile.yaml")]
    _next_steps(where, profile, [*which, *limits], parts, fetch=model is not where)


def _opened(model: Path | Reference) -> tuple[Inventory, Path]:
    """The model's table, and what the model is called here."""
    if isinstance(model, Path):
        return load_inventory(model, planned=True), model
    from commands.fit.remote import read_remote
    from planner.model.validity import check_loadable

    with counted() as told:
        told(_HEADER, 0, 0)
        file = read_remote(model, lambda come, wanted: told(_HEADER, come, wanted))
    for note in file.notes:
        say(f"note: {note}")
    check_loadable(file.inventory, model.name, file.refused)
    return file.inventory, Path(model.name)


def _question(
    inventory: Inventory,
    profile: Profile,
    budget: str | None,
    use: Use,
    heat: Path | None,
) -> Question:
    """The question of a command line; OptionProblem for what makes no sense."""
    from commands.solve.request import workload_of
    from planner.machine.budgets import budgets_for, parse_budget
    from planner.model.layers import layers_of
    from planner.plan.request import Request

    given = {} if budget is None else parse_budget(budget)
    budgets = budgets_for(profile, given, hybrid=any(layers_of(inventory).recurrent))
    workload = workload_of(use, inventory, profile)
    known = None
    if heat is not None:
        from commands.shared.inputs import known_of_heat

        known = known_of_heat(heat, inventory, workload)
    # What a stock tool can be told stands in the first row; slots of experts have one of their own.
    lowest = workload.least_ctx if use.ctx == "max" else 0
    asked = Request(budgets=budgets, workload=workload, lowest_ctx=lowest, stripes=False)
    return Question(inventory, profile, asked, known)


def _answer(question: Question, with_levers: bool) -> Answer:
    """The plan, a faster one with slots of experts, and the largest context. Raises Infeasible."""
    with progress() as bar:
        task, done = bar.add_task("planning", total=4 + 3 * with_levers, rate=""), 0

        def tell(what: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, rate=what)

        def watch(solved: int, expected: int) -> None:
            bar.update(task, completed=done + solved / max(expected, 1))

        return _answered(question, with_levers, tell, watch)


def _answered(question: Question, with_levers: bool, tell: Callable[[str], None], watch: Watch) -> Answer:
    plan = _plan(question, watch)
    tell("experts in slots")
    hybrid = made = None
    if any(line.site.kind == "cpu" and "experts" in line.unit for line in plan.units):
        asked = replace(question, request=replace(question.request, hybrid=True))
        made = _plan(asked, watch)
        if made.predicted.tpot_ns * 10**6 < plan.predicted.tpot_ns * (10**6 - told_apart_ppm(plan)):
            hybrid = made
    tell("the largest context")
    largest, keeps = _largest(question)
    tell("levers")

    def other(request: Request, inventory: Inventory) -> Plan:
        made = _plan(replace(question, request=request, inventory=inventory), watch, advise=False)
        tell("levers")
        return made

    found = levers(plan, made, question.request, question.inventory, other) if with_levers else []
    return Answer(plan, hybrid, largest, keeps, tuple(found))


def _plan(question: Question, watch: Watch, *, advise: bool = True) -> Plan:
    from planner.passes.make_plan import make_plan
    from planner.solver.clock import Clock

    clock = Clock(watch=watch)
    known, request = question.known, question.request
    return make_plan(question.inventory, question.profile, request, known, clock=clock, advise=advise)


def _case(question: Question, profile: Profile, request: Request) -> Case:
    from planner.model.structure import structure_of
    from planner.passes.case import Case

    return Case(structure_of(question.inventory), profile, request)


def _largest(question: Question) -> tuple[int, str]:
    """The largest context up to the trained one, and what it leaves on the GPUs."""
    from planner.passes.largest_context import largest_context
    from planner.plan.engine_settings import EngineSettings

    work = question.request.workload
    trained = max(question.inventory.number("context_length", 4096), work.n_ctx)
    asked = replace(
        question.request,
        workload=work.model_copy(update={"n_ctx": trained}),
        lowest_ctx=work.least_ctx,
    )
    found, keep = largest_context(_case(question, question.profile, asked), EngineSettings())
    return found, keep.value


def _rows(answer: Answer) -> list[dict[str, Any]]:
    """Each placement with its time for a token, GPU memory, and setting."""
    plan = answer.plan
    used = sum(use.used_bytes for use in plan.devices if use.kind != "cpu")
    own = plan.predicted.error_ppm
    found = [
        _row("plan", plan.predicted.status, plan.predicted.tpot_ns, plan.predicted.prefill_ns, used, own)
    ]
    if answer.hybrid is not None:
        p = answer.hybrid.predicted
        more = sum(use.used_bytes for use in answer.hybrid.devices if use.kind != "cpu")
        found.append(_row("hybrid", "solve --hybrid", p.tpot_ns, p.prefill_ns, more, p.error_ppm))
    cpu = [b for b in plan.baselines if b.feasible and b.name == "all-cpu"]
    for name, rule in (("best stock rule", best_stock(plan)), ("all-CPU", cpu[0] if cpu else None)):
        if rule is not None:
            found.append(_row(name, rule.setting, rule.tpot_ns, rule.prefill_ns, rule.vram_bytes, own))
    return found


def _row(
    name: str, setting: str, tpot_ns: int, prefill_ns: int, vram_bytes: int, error_ppm: int
) -> dict[str, Any]:
    return {
        "name": name,
        "setting": setting,
        "tpot_ns": tpot_ns,
        "prefill_ns": prefill_ns,
        "gpu_bytes": vram_bytes,
        "error_ppm": error_ppm,
    }


def _show(answer: Answer, inventory: Inventory, model: Path, words: Words) -> None:
    plan = answer.plan
    used = sum(use.used_bytes for use in plan.devices if use.kind != "cpu")
    host = sum(use.used_bytes for use in plan.devices if use.kind == "cpu")
    assumed = "" if plan.machine.measured else " (assumed, not measured)"
    out(f"{plan.model.name} on {plan.machine.name}{assumed}:")
    out(f"{verdict(plan)}: {mib(used)} on GPUs, {mib(host)} in host memory, context {plan.workload.n_ctx}")
    made = table("placement", "setting", "tokens/s", "from–to", "prompt ms", "GPU")
    for row in _rows(answer):
        rate, low, high = rates(row["tpot_ns"], row["error_ppm"])
        name = row["name"].removesuffix(" rule")
        between = f"{low:.0f}–{high:.0f}"
        prompt = f"{row['prefill_ns'] / 1e6:.0f}"
        made.add_row(name, row["setting"], f"{rate:.1f}", between, prompt, mib(row["gpu_bytes"]))
    out_table(made)
    out(doubt(plan, answer.hybrid))
    out(gain(plan))
    _show_levers(answer)
    out(f"largest context: {answer.largest_ctx}, with {answer.keeps}")
    text, notes = pasted(plan, inventory, model, words)
    for note in notes:
        say(f"not expressible by a stock tool: {note}")
    if told := known_by(plan):
        say(f"note: {told}")
    out("to paste:")
    out_text(text)


def _show_levers(answer: Answer) -> None:
    """What each change alone brings, and the flags whose gain is in the plan's time already."""
    from planner.check.gains import flags_of, gains_text

    if not answer.levers:
        return
    made = table("lever", "option", "tokens/s", "gain", "costs")
    for lever in answer.levers:
        rate = f"{1e9 / max(lever.after_ns, 1):.1f}"
        brings = f"{lever.gain:.2f}x" if abs(lever.gain - 1) >= _SAME else "none"
        made.add_row(lever.name, lever.option, rate, brings, lever.costs)
    out_table(made)
    out(most(answer.levers))
    if set_by_plan := flags_of(answer.plan):
        out(f"flags whose gain is in the plan's time: {' '.join(set_by_plan)}")
        if text := gains_text(answer.plan):
            out(text)


def _data(answer: Answer, inventory: Inventory, model: Path, words: Words) -> dict[str, Any]:
    from planner.check.gains import flags_of

    text, notes = pasted(answer.plan, inventory, model, words)
    return {
        "feasible": True,
        "verdict": verdict(answer.plan),
        "model": answer.plan.model.name,
        "machine": answer.plan.machine.name,
        "measured": answer.plan.machine.measured,
        "error_ppm": answer.plan.predicted.error_ppm,
        "placements": _rows(answer),
        "levers": [
            {
                "name": each.name,
                "option": each.option,
                "costs": each.costs,
                "before_ns": each.before_ns,
                "after_ns": each.after_ns,
            }
            for each in answer.levers
        ],
        "flags": flags_of(answer.plan),
        "n_ctx": answer.plan.workload.n_ctx,
        "largest_ctx": answer.largest_ctx,
        "command": text.strip(),
        "not_expressible": notes,
    }


def _show_refusal(question: Question, refusal: AnswerIsNo) -> None:
    """The verdict, what is short, and what would make it fit, the change that a person minds least first."""
    from planner.passes.refusal import Infeasible, parts
    from planner.passes.remedies import SLOW, tried

    out(f"{question.inventory.name} on {question.profile.name}: does not fit")
    if not isinstance(refusal, Infeasible):
        return
    if refusal.why:
        out(refusal.why)
    for need in refusal.needs:
        if need.total_bytes > need.budget_bytes:
            needed, there = -(-need.total_bytes // 2**20), need.budget_bytes // 2**20
            shown = [mib(n * 2**20) for n in (needed - there, needed, there)]
            out(f"short by {shown[0]} ({need.device}): {shown[1]} are needed, {shown[2]} are there")
            out(f"  of which {parts(need.memory, ' ')} MiB")
    ways = _smallest(question, refusal)
    was_tried = any(tried(way) for way in refusal.hints)
    out("it would fit with one of these, each tried:" if was_tried else "it would take less with:")
    for way in ways:
        slow = ": slow, weights are read from disk again and again" if way.endswith(SLOW) else ""
        out(f"  {tried(way) or way}{slow}")


def _changes(question: Question, refusal: AnswerIsNo) -> dict[str, Any]:
    from planner.passes.refusal import Infeasible

    return {"smallest_change": _smallest(question, refusal)} if isinstance(refusal, Infeasible) else {}


def _smallest(question: Question, refusal: Infeasible) -> list[str]:
    """What was tried and fits, what a person minds least first; else what only frees memory."""
    from planner.passes.remedies import SLOW, tried

    tested = [hint for hint in refusal.hints if tried(hint)]
    more = _more_host(question, refusal)
    if more:
        slow = next((n for n, hint in enumerate(tested) if hint.endswith(SLOW)), len(tested))
        tested.insert(slow, f"{more} GiB more host memory (fits)")
    found = tested or [*refusal.hints] or ["a smaller model"]
    return [hint.replace("such as --quant", "such as solve --quant") for hint in found]


def _more_host(question: Question, refusal: Infeasible) -> int:
    """GiB more of host memory with which there is a plan, tried; 0 where none of those tried is enough."""
    from planner.constants import CPU
    from planner.passes.largest_context import fits
    from planner.plan.engine_settings import EngineSettings

    lacks = max((need.total_bytes - need.budget_bytes for need in refusal.needs), default=0)
    budgets = question.request.budgets
    if not 0 < lacks <= budgets.get(CPU, 0):  # nobody buys several times the memory that is there
        return 0
    for step in _STEPS_GIB:
        gib = -(-lacks // 2**30) + step
        more = gib << 30
        devices = tuple(
            d.model_copy(update={"memory_bytes": d.memory_bytes + more, "free_bytes": d.free_bytes + more})
            if d.name == CPU
            else d
            for d in question.profile.devices
        )
        profile = question.profile.model_copy(update={"devices": devices})
        asked = replace(question.request, budgets={**budgets, CPU: budgets[CPU] + more})
        if fits(_case(question, profile, asked), EngineSettings(), asked.workload):
            return gib
    return 0


def _next_steps(model: Path, profile: Profile, asked: list[str], parts: Described, fetch: bool) -> None:
    """What to do with the answer, as commands; `asked`: machine, budget and use as solve is told them."""
    if fetch:
        say(f"next: download the model, so that {model} is here")
    if parts:
        say(f"next: {shell(['atsplan', 'machines', *words_of(parts), '-o', 'profile.yaml'])}")
    say(f"next: {shell(['atsplan', 'solve', str(model), *asked, '-o', 'plan.yaml'])}")
    if model.suffix not in (".yaml", ".yml"):
        say(f"next: {shell(['atsplan', 'run', str(model), '--plan', 'plan.yaml'])}")
    if not profile.measured:
        say("assumed, not measured: atsplan profile MODEL -o profile.yaml measures the machine itself")
