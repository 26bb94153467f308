"""A loaded model in a child process, generating on request: what `run` and `bench` talk to.

The engine lives only here: a crash, an abort or a vanished device ends the child and becomes one line,
and no memory of a device stays with the program that asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import EngineProblem
from planner.machine.engine_builds import Demands
from planner.machine.fingerprint import AnotherMachine, Facts, differences
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, from_text, to_text
from runtime.child.ask import ask
from runtime.child.serve import Emit, serve_events
from runtime.child.taken_in import UNHEARD, LoadProgress, taking_in
from runtime.engine import locate
from runtime.engine.libllama import Engine
from runtime.engine.logs import Tail
from runtime.engine.page_reads import PAGING_BYTES, read_bytes
from runtime.engine.rpc import connect
from runtime.hybrid import build
from runtime.hybrid.device import Report, report_of
from runtime.load import dry_run, load_params
from runtime.load.dry_run import Breakdown
from runtime.session.draft_model import Draft, check_vocabulary, draft_from_json, draft_to_json
from runtime.session.draft_model import generate as drafted
from runtime.session.hybrid import HybridSession, slotted
from runtime.session.session import GREEDY, Sampling, Session, Timings
from runtime.session.striped import session_for
from runtime.verify import loaded_placement
from runtime.verify.memory_against_plan import (
    StrayWork,
    check_budgets,
    check_caches,
    check_free_memory,
    check_items,
    check_loaded,
)

T = TypeVar("T")

_DAY_S = 86_400.0
_WHY_PAGED = "weights not read before, or more of them than stay in memory; such times say little"


@dataclass(frozen=True, slots=True)
class Checks:
    """What is proven around the load."""

    plan: Plan | None  # its budgets are compared with the dry run; None for another machine's plan
    devices: Mapping[str, str]  # tensor to the device it must be on
    shared: tuple[int, ...] = ()  # layers whose KV cache other layers read too
    demands: Demands | None = None  # what the placement asks of a build
    measured_on: Facts = field(default_factory=dict)  # what the plan's timings belong to
    here: Facts = field(default_factory=dict)  # the same facts of this machine, its devices left out
    path: str = ""  # of the plan


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation."""

    prompt: str | tuple[int, ...]
    tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    chat: bool = False  # wrap the prompt in the model's chat template when it has one
    ignore_end: bool = False
    silent: bool = False  # no text events
    cut: int = 0  # use exactly this many tokens of the prompt; 0: all


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model after loading."""

    engine: str
    load_ns: int
    memory: Mapping[str, Breakdown]  # per device, as the engine counts it
    notes: tuple[str, ...]  # what the engine disabled


@dataclass(frozen=True, slots=True)
class Outcome:
    """All generations of one load."""

    loaded: Loaded
    timings: tuple[Timings, ...]
    lanes: tuple[Report, ...] = ()  # work of the devices that hold experts in slots


def work(
    engine: str | None,
    llama_h: Path | None,
    model: Path,
    spec: LoadSpec,
    asks: Sequence[Ask],
    checks: Checks | None = None,
    on_text: Callable[[str], None] = lambda text: None,
    on_note: Callable[[str], None] = lambda note: None,
    load: LoadProgress = UNHEARD,
    timeout_s: float = _DAY_S,
    dry: bool = False,
    draft: Draft | None = None,
) -> Outcome:
    """Load a model in a child process and run generations one after the other.

    `dry` stops after the checks that come before loading. With a `draft`, which is loaded beside the
    model, the generations are greedy.

    Raises MachineError or InputError with the child's or the engine's own line.
    """
    request = {
        "engine": engine,
        "llama_h": str(llama_h) if llama_h else None,
        "model": str(model.resolve()),
        "spec": dry_run.to_json(spec),
        "asks": [asdict(each) for each in asks],
        "dry": dry,
        "draft": draft_to_json(draft) if draft else None,
        "checks": _checks_to_json(checks) if checks else None,
    }

    child: list[int] = []
    with ExitStack() as watched:

        def hear(event: Mapping[str, Any]) -> None:
            if "text" in event:
                on_text(event["text"])
            if "note" in event:
                on_note(event["note"])
            if "compiling" in event:
                load.compiling()
            if "loading" in event:
                watched.enter_context(taking_in(child[0], load.taken))
            if "loaded" in event:
                watched.close()
                load.over()

        answer = ask("runtime.worker", request, locate.find(engine).label, timeout_s, hear, child.append)
    loaded = answer["loaded"]
    memory = {name: Breakdown(**sizes) for name, sizes in loaded["memory"].items()}
    timings = tuple(
        Timings(**{**t, "tokens": tuple(t["tokens"]), "drafts": tuple((a, b) for a, b in t["drafts"])})
        for t in answer["timings"]
    )
    lanes = tuple(report_of(report) for report in answer.get("lanes", ()))
    here = Loaded(loaded["engine"], loaded["load_ns"], memory, tuple(loaded["notes"]))
    return Outcome(here, timings, lanes)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be loaded, in the engine's device names; `renamed` leads from the plan's to those."""

    engine: Engine
    path: Path
    spec: LoadSpec
    renamed: Mapping[str, str]
    checks: Checks | None
    draft: Draft | None

    def named(self, found: Mapping[str, T]) -> dict[str, T]:
        """The same by the plan's names: remote devices have others in the engine."""
        planned = {here: name for name, here in self.renamed.items()}
        return {planned.get(name, name): value for name, value in found.items()}


def _work_here(request: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    job = _job(request, emit)
    dry = _review(job, emit) if job.checks or request["dry"] else None
    notes = dry.notes if dry else ()
    if dry and request["dry"]:
        return {"loaded": asdict(Loaded(job.engine.build.text, 0, dry.devices, notes)), "timings": []}
    asks = [_ask_from_json(each) for each in request["asks"]]
    if slotted(job.spec) and not build.built():
        emit({"compiling": True})
        build.library()
    emit({"loading": True})
    start = time.perf_counter_ns()
    with ExitStack() as stack:
        session = stack.enter_context(session_for(job.engine, job.path, job.spec))
        guesser = stack.enter_context(_guesser(job, session)) if job.draft else None
        took = time.perf_counter_ns() - start
        memory = _prove(job, session, guesser, dry)
        emit({"loaded": True})
        before = read_bytes()
        guessing = (guesser, job.draft) if guesser and job.draft else None
        timings = [_generate(session, guessing, ask, emit) for ask in asks]
        lanes = [asdict(r) for r in session.reports().values()] if isinstance(session, HybridSession) else []
        if (paged := read_bytes() - before) > PAGING_BYTES:
            emit({"note": f"note: {paged >> 20} MiB came from disk while it computed: {_WHY_PAGED}"})
        last_words = _closing_words(session)
    loaded = Loaded(job.engine.build.text, took, memory, (*notes, *last_words))
    return {"loaded": asdict(loaded), "timings": [asdict(t) for t in timings], "lanes": lanes}


def _job(request: Mapping[str, Any], emit: Emit) -> _Job:
    """The request in terms of a loaded engine, which the plan's demands are held to."""
    engine = Engine.find(request["engine"], Path(request["llama_h"]) if request["llama_h"] else None)
    emit({"engine": engine.label})
    if request["checks"]:
        _check_build(engine, request["checks"]["demands"], emit)
        _check_machine(engine, request["checks"])
    spec, renamed = connect(engine, dry_run.from_json(request["spec"]))
    for name in spec.devices:
        load_params.device_handle(engine, name, spec.mapped)
    checks = _checks_from_json(request["checks"], renamed) if request["checks"] else None
    draft = _draft_here(engine, request["draft"]) if request["draft"] else None
    return _Job(engine, Path(request["model"]), spec, renamed, checks, draft)


@contextmanager
def _guesser(job: _Job, session: Session) -> Iterator[Session]:
    """The loaded draft, proven where it must be and to speak the model's tokens."""
    assert job.draft is not None
    with Session(job.engine, job.draft.path, job.draft.spec) as guesser:
        check_vocabulary(session, guesser)
        if job.checks:
            loaded_placement.compare(job.engine, guesser.weights(), job.draft.devices)
        yield guesser


def _prove(
    job: _Job, session: Session, guesser: Session | None, dry: dry_run.DryRun | None
) -> dict[str, Breakdown]:
    """Weights, memory and caches after loading against plan and dry run; the memory, a draft's included."""
    if job.checks:
        loaded_placement.compare(job.engine, session.weights(), job.checks.devices)
    memory = job.named(_memory(session))
    if guesser:
        memory = _sum(memory, job.named(_memory(guesser)))
    if dry:
        check_loaded(dry.devices, memory)
    # With a draft there are copies of the state that the plan's items do not count; the dry run did.
    if job.checks and job.checks.plan is not None and not guesser:
        check_items(job.checks.plan, memory, loaded=True)
        check_caches(job.checks.plan, {item: job.named(sizes) for item, sizes in session.caches().items()})
    return memory


def _check_build(engine: Engine, demands: Mapping[str, Any] | None, emit: Emit) -> None:
    """The plan's demands on a build: EngineProblem for one known to fail, a note for another one."""
    if demands is None:
        return
    asked = Demands(**{**demands, "devices": tuple(demands["devices"])})
    if why := asked.refusal(engine.label):
        raise EngineProblem(engine.label, why)
    if difference := asked.difference(engine.label):
        emit({"note": f"note: {difference}"})


def _check_machine(engine: Engine, checks: Mapping[str, Any]) -> None:
    """AnotherMachine where the plan's timings do not hold for this one."""
    if not checks["measured_on"]:
        return
    now = {**checks["here"], **{d.name: d.description for d in engine.ggml.devices()}}
    if changes := differences(checks["measured_on"], now):
        raise AnotherMachine(checks["path"], changes)


def _draft_here(engine: Engine, data: Mapping[str, Any]) -> Draft:
    """The draft in the engine's device names."""
    draft = draft_from_json(data)
    spec, renamed = connect(engine, draft.spec)
    for name in spec.devices:
        try:
            load_params.device_handle(engine, name)
        except load_params.MissingDevice as missing:
            raise replace(missing, draft=True) from None
    devices = {tensor: renamed.get(device, device) for tensor, device in draft.devices.items()}
    return replace(draft, spec=spec, devices=devices)


def _review(job: _Job, emit: Emit) -> dry_run.DryRun:
    """The dry run in the plan's device names: items, budgets and free memory, before anything is loaded.

    A draft's bytes are added, and the state that guesses may be taken back from; a plan's items are without.
    """
    engine, checks, plain = job.engine, job.checks, replace(job.spec, rollback=0)
    dry = dry_run.measure_here(engine, job.path, plain, True, checks.shared if checks else ())
    for note in dry.notes:
        emit({"note": f"engine: {note}"})
    if dry.strays:
        raise StrayWork(engine.label, dry.strays)
    alone = job.named(dry.devices)
    if job.draft:
        parts = ((job.path, job.spec), (job.draft.path, job.draft.spec))
        both = [dry_run.measure_here(engine, model, spec).devices for model, spec in parts]
        dry = replace(dry, devices=_sum(*both))
    check_free_memory(dry.devices, engine.ggml.devices(), job.spec.use_mmap)
    if checks and checks.plan is not None:
        check_items(checks.plan, alone)
        check_budgets(checks.plan, alone)
    return replace(dry, devices=job.named(dry.devices))


def _sum(first: Mapping[str, Breakdown], second: Mapping[str, Breakdown]) -> dict[str, Breakdown]:
    none = Breakdown(0, 0, 0)
    return {name: first.get(name, none) + second.get(name, none) for name in {**first, **second}}


def _generate(session: Session, guessing: tuple[Session, Draft] | None, ask: Ask, emit: Emit) -> Timings:
    prompt = ask.prompt
    if ask.chat and isinstance(prompt, str):
        prompt = session.chat(prompt) or prompt
    if ask.cut and isinstance(prompt, str):
        prompt = tuple(session.tokenize(prompt)[: ask.cut])

    def on_text(text: str) -> None:
        if not ask.silent:
            emit({"text": text})

    if guessing:
        guesser, draft = guessing
        # A length of its own for each sequence: what one accepts says nothing of the next.
        how = draft.guesses, prompt, ask.tokens, on_text, ask.stop, ask.ignore_end
        return drafted(session, guesser, *how)
    return session.generate(
        prompt,
        ask.tokens,
        on_text=on_text,
        sampling=ask.sampling,
        stop=ask.stop,
        ignore_end=ask.ignore_end,
    )


def _closing_words(session: Session) -> tuple[str, ...]:
    """Close a session and catch what the engine says of its MoE cache when it is freed."""
    said = Tail()
    with session.engine.log(said.add):
        session.close()
    return tuple(line.strip() for line in said.lines if "llama_moe_cache" in line)


def _memory(session: Session) -> Mapping[str, Breakdown]:
    try:
        return session.memory()
    except EngineProblem:
        return {}  # a build that does not tell


def _checks_to_json(checks: Checks) -> dict[str, Any]:
    return {
        "plan": to_text(checks.plan) if checks.plan else None,
        "devices": dict(checks.devices),
        "shared": checks.shared,
        "demands": asdict(checks.demands) if checks.demands else None,
        "measured_on": dict(checks.measured_on),
        "here": dict(checks.here),
        "path": checks.path,
    }


def _checks_from_json(data: Mapping[str, Any], renamed: Mapping[str, str]) -> Checks:
    plan = from_text(data["plan"], "plan") if data["plan"] else None
    devices = {tensor: renamed.get(device, device) for tensor, device in data["devices"].items()}
    return Checks(plan, devices, tuple(data["shared"]))


def _ask_from_json(data: Mapping[str, Any]) -> Ask:
    prompt = data["prompt"] if isinstance(data["prompt"], str) else tuple(data["prompt"])
    return Ask(
        **{**data, "prompt": prompt, "sampling": Sampling(**data["sampling"]), "stop": tuple(data["stop"])}
    )


if __name__ == "__main__":
    serve_events(_work_here)
