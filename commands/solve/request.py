"""From the options of `solve` and `sweep` to everything a plan is made from."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.shared.console import say
from commands.shared.models import load_inventory, load_profile
from commands.solve.extras import beside, drafting_of, extras_of, first_gpu
from commands.solve.options import Asked
from planner.errors import AnswerIsNo, OptionProblem
from planner.quoting import shell
from planner.solver.deadline import Deadline
from planner.workload import Workload, usual

if TYPE_CHECKING:
    from planner.machine.profile import Profile
    from planner.memory.reserves import Extras
    from planner.model.inventory import Inventory
    from planner.passes.draft_length import Drafting
    from planner.plan.plan import Plan
    from planner.plan.request import SolveOptions


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a plan is made from."""

    inventory: Inventory
    profile: Profile
    budgets: Mapping[str, int]
    workload: Workload
    options: SolveOptions
    lowest_ctx: int  # 0: the context is fixed
    model: Path
    fit_engine: str = ""  # whose --fit to ask; "": none
    drafting: Drafting | None = None  # the draft length is to be chosen
    movable: Extras | None = None  # what runs beside it, where the projector in it may go to the CPU

    def within(self, share: float) -> Inputs:
        """The same with this share of the time that is left."""
        return replace(self, options=replace(self.options, deadline=self.options.deadline.part(share)))

    def plan(self) -> Plan:
        """The plan; with a context that may shrink, the largest that fits.

        A projector that may goes to the CPU where there is no plan with it on the GPU.
        """
        try:
            return self._plan()
        except AnswerIsNo as refusal:
            if self.movable is None:
                raise self._with_remedies(refusal) from None
            try:
                made = self._with_projector_on_cpu(self.movable)._plan()
            except AnswerIsNo:
                raise refusal from None
            say("the vision projector goes to the CPU: there is no room for it on the GPU")
            return made

    def _with_remedies(self, refusal: AnswerIsNo) -> AnswerIsNo:
        """A refusal for want of memory, with what was tried and fits."""
        from planner.passes.refusal import Infeasible
        from planner.passes.remedies import with_remedies

        if self.lowest_ctx or not isinstance(refusal, Infeasible):
            return refusal
        lowest = min(_needed(self.workload), self.workload.n_ctx)
        return with_remedies(
            refusal, self.inventory, self.profile, self.budgets, self.workload, self.options, lowest
        )

    def _with_projector_on_cpu(self, extras: Extras) -> Inputs:
        there = replace(extras, mmproj_device="CPU")
        kept = beside(self.inventory, self.workload, there, first_gpu(self.profile, self.budgets))
        drafting = replace(self.drafting, extras=there) if self.drafting else None
        return replace(self, options=replace(self.options, **kept), drafting=drafting)

    def _plan(self) -> Plan:
        from planner.passes.make_plan import make_plan

        workload, options = self.workload, self.options
        if self.lowest_ctx:
            from planner.passes.largest_context import largest_context

            half = replace(self.options, deadline=self.options.deadline.part(0.5))
            largest, keep = largest_context(
                self.inventory, self.profile, self.budgets, workload, half, self.lowest_ctx
            )
            say(f"context {largest}: the largest with {keep.value}")
            workload = workload.model_copy(update={"n_ctx": largest})
        if self.fit_engine:
            from commands.solve.fitting import engine_fit

            options = replace(options, fit=engine_fit(self, workload))
        if self.drafting:
            from planner.passes.draft_length import best_length

            return best_length(self.inventory, self.profile, self.budgets, workload, options, self.drafting)
        return make_plan(self.inventory, self.profile, self.budgets, workload, options)


def inputs_of(asked: Asked) -> Inputs:
    """Read every file and option of a command line; raises InputError with the option at fault."""
    from planner.machine.budgets import budgets_for, parse_budget
    from planner.model.layers import layers_of
    from planner.model.nextn import nextn_fault

    deadline = Deadline(asked.time_limit or math.inf)
    profile = load_profile(asked.profile_path, asked.machine)
    _note_changes(profile, asked.profile_path)
    given = {} if asked.budget is None else parse_budget(asked.budget)
    inventory = load_inventory(asked.model)
    budgets = budgets_for(profile, given, hybrid=any(layers_of(inventory).recurrent))
    workload = workload_of(asked, inventory)
    if asked.mtp and (fault := nextn_fault(inventory)):
        raise OptionProblem("--mtp", "", f"the model {fault}")
    lowest = asked.ctx_min or (min(_needed(workload), workload.n_ctx) if asked.ctx == "max" else 0)
    if lowest > workload.n_ctx:
        raise OptionProblem("--ctx-min", str(lowest), f"is above the context of {workload.n_ctx}")
    gpu = first_gpu(profile, budgets)
    extras = extras_of(asked, profile, budgets)
    options = _options(asked, inventory, workload, beside(inventory, workload, extras, gpu), deadline)
    if asked.engine == "":
        raise OptionProblem("--fit", "", "expected a library, a folder, or auto")
    if asked.engine and asked.model.suffix in (".yaml", ".yml"):
        raise OptionProblem("--fit", asked.engine, "needs the model file itself, not its inventory")
    return Inputs(
        inventory,
        profile,
        budgets,
        workload,
        options,
        lowest,
        asked.model,
        asked.engine or "",
        drafting_of(asked, extras, gpu),
        extras if asked.mmproj and asked.eyes == "auto" and gpu != "CPU" else None,
    )


def _note_changes(profile: Profile, path: Path | None) -> None:
    """Say so when a profile seems to be this machine's own from before something changed."""
    from planner.machine.fingerprint import differences, facts_of, host_facts, may_be_same
    from profiler import host

    known = facts_of(profile, ())
    if not known:
        return
    here = host_facts(host.fingerprint(""))
    changes = differences(known, here) if may_be_same(known, here) else ()
    if changes:
        say(f"note: if {path} is of this machine, profile again: {'; '.join(changes)}")


def workload_of(asked: Asked, inventory: Inventory) -> Workload:
    """The workload of a command line; OptionProblem for what makes no sense."""
    from pydantic import ValidationError

    from planner.machine.attention_kernels import kv_problem

    type_k, slash, type_v = asked.kv_type.partition("/")
    trained = inventory.number("context_length", 4096)
    if asked.ctx != "max" and not (asked.ctx.isdecimal() and 0 < int(asked.ctx) < 2**31):
        raise OptionProblem("--ctx", asked.ctx, "expected a number of tokens, or max")
    fields: dict[str, Any] = {
        "n_ctx": trained if asked.ctx == "max" else int(asked.ctx),
        "type_k": type_k,
        "type_v": type_v if slash else type_k,
        "n_ubatch": asked.ubatch,
        "n_batch": max(2048, asked.ubatch),
        "mtp": asked.mtp,
    }
    fields |= _use(asked.use) if asked.use is not None else {}
    try:
        workload = usual(**fields)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name, value, why = str(first["loc"][0]), first["input"], first["msg"].lower()
        if name in ("type_k", "type_v"):
            raise OptionProblem("--kv-type", asked.kv_type, f"{value or 'nothing'}: {why}") from None
        spelt = {field: key for key, field in _USE.items()}.get(name, name)
        raise OptionProblem("--workload", f"{spelt}={value}", why) from None
    if _needed(workload) > workload.n_ctx:
        why = f"the workload needs {_needed(workload)} cells"
        raise OptionProblem("--ctx", str(workload.n_ctx), why)
    if kv_problem(workload):
        raise OptionProblem("--kv-type", asked.kv_type, kv_problem(workload))
    return workload


def _needed(workload: Workload) -> int:
    """Cells that the workload fills: prompt and answer; a depth beyond them is where an answer begins."""
    whole = workload.prompt + workload.gen if workload.gen > 1 else max(workload.prompt, 1)
    return whole if workload.depth <= whole else workload.depth + workload.gen


_USE = {"prompt": "prompt", "gen": "gen", "depth": "depth", "seqs": "n_seq"}


def _use(text: str) -> dict[str, int]:
    """Fields of the workload from --workload; OptionProblem for unknown words and for what is no number."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in _USE or not value.strip().isdecimal() or len(value) > 9:
            raise OptionProblem("--workload", text, "expected prompt=512,gen=256,depth=640,seqs=1")
        if _USE[name] in found:
            raise OptionProblem("--workload", text, f"{name} is given twice")
        found[_USE[name]] = int(value)
    return found


def _options(
    asked: Asked, inventory: Inventory, workload: Workload, beside: Mapping[str, Any], deadline: Deadline
) -> SolveOptions:
    from planner.cost.pins import parse_pin
    from planner.plan.request import SolveOptions

    return SolveOptions(
        pins=tuple(parse_pin(text) for text in asked.pins),
        contiguous=asked.contiguous,
        no_cpu=asked.no_cpu,
        page=asked.page,
        stripes=asked.stripes,
        hybrid=asked.hybrid,
        deadline=deadline,
        command=shell(["atsplan", *sys.argv[1:]]),
        **beside,
        **_host_memory(asked),
        **_heat(asked, inventory, workload),
        **_cache(asked),
    )


def _host_memory(asked: Asked) -> dict[str, Any]:
    """The memory asked for; the limit is for the program's own choice."""
    from planner.machine.budgets import EVERY, parse_budget
    from planner.machine.host_memory import HostMemory

    given = {} if asked.pinned_limit is None else parse_budget(asked.pinned_limit, "--pinned-limit")
    limit, kind = given.get(EVERY, 0), asked.host_memory
    if kind == "auto":
        return {"pinned_limit_bytes": limit}
    if asked.page and kind == HostMemory.PINNED:
        raise OptionProblem("--host-memory", kind, "excludes --page: pinned memory is never paged")
    return {"host_memory": HostMemory(kind)}


def _heat(asked: Asked, inventory: Inventory, workload: Workload) -> dict[str, Any]:
    from commands.shared.inputs import heat_options

    return heat_options(asked.heat, inventory, workload) if asked.heat else {}


def _cache(asked: Asked) -> dict[str, Any]:
    from commands.shared.inputs import cache_options

    return cache_options(asked.cache, asked.model) if asked.cache else {}
