"""From the options of `solve` and `sweep` to everything a plan is made from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from commands.shared.console import say
from commands.shared.models import load_inventory, load_profile
from commands.shared.option_types import began, whole
from commands.shared.spellings import expert_pins
from commands.solve.extras import acceptance, extras_of, first_gpu
from commands.solve.options import UBATCH_AUTO, SolveOptions
from planner.constants import CPU
from planner.errors import OptionProblem
from planner.quoting import shell
from planner.solver.deadline import Deadline
from planner.workload import Workload, usual

if TYPE_CHECKING:
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.plan.engine_settings import EngineSettings
    from planner.plan.known import Known
    from planner.plan.plan import EngineFit, Plan
    from planner.plan.request import Request
    from planner.workload import CacheType


Watch = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a plan is made from, read from files and options."""

    model: Path
    inventory: Inventory
    profile: Profile
    request: Request
    known: Known
    deadline: Deadline
    fit_engine: str = ""  # whose --fit to ask; "": none

    def within(self, share: float) -> Inputs:
        """The same with this share of the time that is left."""
        return replace(self, deadline=self.deadline.part(share))

    def plan(self, *, advise: bool = True, watch: Watch = lambda done, total: None) -> Plan:
        """The plan; what was decided for it is said. `advise`: a refusal says what was tried and fits;
        `watch` is told of problems solved and expected.
        """
        from planner.check.reprice import with_step_times
        from planner.passes.make_plan import make_plan
        from planner.solver.clock import Clock

        made = make_plan(
            self.inventory,
            self.profile,
            self.request,
            self.known,
            clock=Clock(deadline=self.deadline, watch=watch),
            ask_engine=self._engine_fit if self.fit_engine else None,
            tell=say,
            advise=advise,
        )
        return with_step_times(made, self.inventory, self.profile, self.known)

    def _engine_fit(self, workload: Workload, settings: EngineSettings) -> EngineFit:
        from commands.solve.engine_fit import Target, engine_fit

        where = Target(self.model, self.inventory, self.profile, self.request.budgets)
        return engine_fit(self.fit_engine, where, workload, settings)


def inputs_of(asked: SolveOptions) -> Inputs:
    """Read every file and option of a command line; raises InputError with the option at fault."""
    from planner.cost.pins import parse_pin
    from planner.machine.budgets import budgets_for, parse_budget
    from planner.memory.reserves import check_drafted, check_extras
    from planner.model.layers import layers_of
    from planner.model.nextn import nextn_fault
    from planner.plan.request import Request

    deadline = Deadline(asked.time_limit or math.inf, began=began())
    profile = load_profile(asked.profile_path, asked.machine)
    _note_changes(profile, asked.profile_path)
    given = {} if asked.budget is None else parse_budget(asked.budget)
    inventory = load_inventory(asked.model, planned=True)
    budgets = budgets_for(profile, given, hybrid=any(layers_of(inventory).recurrent))
    workload = workload_of(asked, inventory, profile)
    if asked.mtp and (fault := nextn_fault(inventory)):
        raise OptionProblem("--mtp", "", f"the model {fault}")
    lowest = asked.ctx_min or (workload.least_ctx if asked.ctx == "max" else 0)
    if lowest > workload.n_ctx:
        raise OptionProblem("--ctx-min", str(lowest), f"is above the context of {workload.n_ctx}")
    gpu = first_gpu(profile, budgets)
    extras = extras_of(asked, profile, budgets)
    check_extras(extras.mmproj, extras.draft)
    check_drafted(inventory, extras)
    if asked.engine == "":
        raise OptionProblem("--fit", "", "expected a library, a folder, or auto")
    if asked.engine and asked.model.suffix in (".yaml", ".yml"):
        raise OptionProblem("--fit", asked.engine, "needs the model file itself, not its inventory")
    movable = asked.mmproj is not None and asked.eyes == "auto" and gpu != CPU
    request = Request(
        budgets=budgets,
        workload=workload,
        lowest_ctx=lowest,
        pins=tuple(parse_pin(text) for text in (*asked.pins, *_expert_pins(asked, inventory))),
        contiguous=asked.contiguous,
        no_cpu=asked.no_cpu,
        page=asked.page,
        stripes=asked.stripes,
        hybrid=asked.hybrid,
        extra_models=replace(acceptance(asked), extras=extras, gpu=gpu, projector_moves=movable),
        command=shell(["atsplan", *sys.argv[1:]]),
        **_host_memory(asked),
    )
    return Inputs(
        asked.model,
        inventory,
        profile,
        request,
        _known(asked, inventory, workload),
        deadline,
        asked.engine or "",
    )


def _expert_pins(asked: SolveOptions, inventory: Inventory) -> tuple[str, ...]:
    from planner.model.units import Kind, units_of

    if not asked.cpu_moe and not asked.cpu_moe_layers:
        return ()
    routed = [u.layer for u in units_of(inventory).units if u.kind is Kind.EXPERTS and u.layer is not None]
    return expert_pins(asked.cpu_moe_layers, asked.cpu_moe, routed)


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


def forks_among(profile: Profile, types: tuple[str, ...]) -> tuple[CacheType, ...] | None:
    """Those of a profile's cache types that are asked for; None for none."""
    return tuple(one for one in profile.cache_types or () if one.name in types) or None


class Stated(Protocol):
    """What the options of a command say of the use."""

    @property
    def ctx(self) -> str: ...
    @property
    def kv_type(self) -> str: ...
    @property
    def ubatch(self) -> int: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def use(self) -> str | None: ...
    @property
    def mtp(self) -> bool: ...


def workload_of(asked: Stated, inventory: Inventory, profile: Profile) -> Workload:
    """The workload of a command line; OptionProblem for what makes no sense."""
    from pydantic import ValidationError

    from planner.machine.attention_kernels import kv_problem

    assert asked.ubatch != UBATCH_AUTO  # commands.solve.ubatch tries its sizes
    type_k, slash, type_v = asked.kv_type.partition("/")
    use = _use(asked.use) if asked.use is not None else {}
    trained = (inventory.number("context_length") or 4096) * max(use.get("n_seq", 1), 1)
    if asked.ctx != "max" and not 0 < (whole(asked.ctx) or 0) < 2**31:
        raise OptionProblem("--ctx", asked.ctx, "expected a number of tokens, or max")
    fields: dict[str, Any] = {
        "n_ctx": min(trained, 2**31 - 1) if asked.ctx == "max" else int(asked.ctx),
        "cache_types": forks_among(profile, (type_k, type_v if slash else type_k)),
        "type_k": type_k,
        "type_v": type_v if slash else type_k,
        "n_ubatch": asked.ubatch,
        "n_batch": _batch(asked),
        "mtp": asked.mtp,
    }
    fields |= use
    try:
        workload = usual(**fields)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name, value, why = str(first["loc"][0]), first["input"], first["msg"].lower()
        if name in ("type_k", "type_v"):
            forks = "; a type that a fork adds is stated of its machine: machines --kv-fork" if value else ""
            raise OptionProblem("--kv-type", asked.kv_type, f"{value or 'nothing'}: {why}{forks}") from None
        spelt = {field: key for key, field in _USE.items()}.get(name, name)
        raise OptionProblem("--workload", f"{spelt}={value}", why) from None
    if workload.needed_cells > workload.cells_each:
        each = f" for each of {workload.n_seq} sequences" if workload.n_seq > 1 else ""
        why = f"the workload needs {workload.needed_cells} cells{each}"
        raise OptionProblem("--ctx", str(workload.n_ctx), why)
    if kv_problem(workload):
        raise OptionProblem("--kv-type", asked.kv_type, kv_problem(workload))
    return workload


def _batch(asked: Stated) -> int:
    """Tokens handed over at once: as the engine has it, at least those computed at once."""
    if asked.batch is None:
        return max(2048, asked.ubatch)
    if asked.batch < asked.ubatch:
        why = f"is below -ub {asked.ubatch}, of which the engine would compute no more"
        raise OptionProblem("--batch", str(asked.batch), why)
    return asked.batch


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


def _host_memory(asked: SolveOptions) -> dict[str, Any]:
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


def _known(asked: SolveOptions, inventory: Inventory, workload: Workload) -> Known:
    """What files say of the model's routing."""
    from commands.shared.inputs import cache_curve, followings, known_of_heat
    from planner.plan.known import Known

    known = known_of_heat(asked.heat, inventory, workload) if asked.heat else Known()
    if asked.follow:
        if not asked.hybrid:
            raise OptionProblem("--follow", str(asked.follow), "needs --hybrid: only experts in slots follow")
        known = replace(known, following=followings(asked.follow, asked.model))
    return replace(known, cache=cache_curve(asked.cache, asked.model)) if asked.cache else known
