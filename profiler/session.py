"""One profile from start to end: figures, cases, summary; interrupted ones continue. No printing."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.constants import CPU
from planner.machine.fingerprint import differences, host_facts
from planner.machine.op_time import Case
from planner.machine.profile import Device, Fingerprint, Profile
from profiler import host, runner, summarise
from profiler.journal import Journal
from profiler.operators.cases import Job, Place, jobs_of
from profiler.operators.doubtful import doubtful
from profiler.summarise import Contended, Verdict

Line = dict[str, Any]
Choose = Callable[[Sequence[Place]], Iterable[Case]]


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure and how long."""

    engine: str | None  # as for Engine.find
    devices: tuple[str, ...]  # names; () = all
    threads: int  # 0: find the best
    seconds: float  # for all of it
    strict: bool
    name: str
    command: str


@dataclass(frozen=True, slots=True)
class Found:
    """A machine looked at: what it has, and what an interrupted profile left."""

    journal: Journal
    fingerprint: Fingerprint
    figures: tuple[Line, ...]
    until_s: float  # when all should be done, of `time.monotonic`

    @property
    def places(self) -> tuple[Place, ...]:
        """Where weights may lie."""
        return summarise.places(self.figures)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, measured."""
        return summarise.devices(self.figures)

    @property
    def threads(self) -> int:
        """The CPU's best count."""
        return next((d.threads for d in self.devices if d.name == CPU), 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile without whole-model calibration, and what every case came to."""

    profile: Profile
    verdicts: tuple[Verdict, ...]
    streams: dict[str, int]
    journal: Journal  # to be finished when nothing can fail any more


@dataclass(frozen=True, slots=True)
class Watcher:
    """Called as the work goes on."""

    stage: Callable[[str], None]
    begin: Callable[[int, int], None]  # cases in all, cases known from an interrupted run
    case: Callable[[Line], None]
    run: Callable[[str], None]  # a whole-model run has ended
    note: Callable[[str], None]


MAX_FIGURE_S = 0.25
_RETAKES = 2  # of timings that are not believed, each after all others
_RETAKE_S = 1.0  # a timing, where the time for the profile is over


def measure(request: Request, cases: Choose, watch: Watcher) -> Measured:
    """Measure operators on every device; `cases` chooses them when the places are known.

    Raises EngineProblem, and Contended when the request is strict and the machine is not quiet.
    """
    found = find_devices(request, watch)
    return operators(request, found, cases(found.places), watch)


def find_devices(request: Request, watch: Watcher) -> Found:
    """The devices and links of this machine, or what an interrupted profile knows of them."""
    until_s = time.monotonic() + request.seconds
    fingerprint = host.fingerprint("")
    journal = Journal(*map(str, (request.engine, request.devices, request.threads)))
    if journal.damage:
        watch.note(journal.damage)
    forget_another(journal, _facts(request, fingerprint), watch.note)
    if not any(line["kind"] == "link-end" for line in journal.lines):
        load = host.load()
        _refuse_if_busy(request, load)
        watch.stage("devices and links")
        figure_s = min(request.seconds / 50, MAX_FIGURE_S)
        figures = list(runner.figures(request.engine, request.devices, request.threads, figure_s))
        for line in (*figures, {"kind": "link-end", "load": load}):
            journal.add(line)
    found = tuple(line for line in journal.lines if line["kind"] not in ("case", "run", "slots"))
    return Found(journal, fingerprint, found, until_s)


def _facts(request: Request, fingerprint: Fingerprint) -> dict[str, str]:
    """What an interrupted profile belongs to; the engine by its files, since it is not loaded yet."""
    return host_facts(fingerprint) | {"engine": host.library_state(request.engine), "GPUs": host.gpus()}


def forget_another(journal: Journal, here: dict[str, str], note: Callable[[str], None]) -> None:
    """Begin anew, and say why, where an interrupted profile is one of another machine, engine or policy."""
    known = next((line["facts"] for line in journal.lines if line["kind"] == "machine"), None)
    if known == here:
        return
    if known is not None:
        note(f"an interrupted profile is not continued: {'; '.join(differences(known, here))}")
    journal.forget()
    journal.add({"kind": "machine", "facts": here})


def operators(request: Request, found: Found, cases: Iterable[Case], watch: Watcher) -> Measured:
    """Time every case at every place, and make a profile of it all."""
    load = next(line["load"] for line in found.figures if line["kind"] == "link-end")
    jobs = jobs_of(dict.fromkeys(cases), found.places)
    done = {line["key"] for line in found.journal.lines if line["kind"] == "case"}
    watch.begin(len(jobs), sum(job.key in done for job in jobs))
    runner.cases(jobs, request.engine, found.threads, found.until_s, found.journal, watch.case)
    _again(jobs, request, found, watch)
    streams = summarise.streams(found.journal.lines)
    verdicts = summarise.verdicts(jobs, found.journal.lines, streams)
    engine = next(line["text"] for line in found.figures if line["kind"] == "engine")
    fingerprint = found.fingerprint.model_copy(update={"engine": engine})
    notes = summarise.warnings(verdicts, streams, load, fingerprint)
    notes += summarise.slowdowns(found.journal.lines)
    if request.strict and any(note.startswith(("contended", "unsteady", "throttled")) for note in notes):
        raise Contended(notes)
    made = summarise.profile(
        request.name or default_name(found.devices),
        request.command,
        datetime.date.today().isoformat(),
        fingerprint,
        found.figures,
        verdicts,
        notes,
    )
    return Measured(made, verdicts, streams, found.journal)


def _again(jobs: Sequence[Job], request: Request, found: Found, watch: Watcher) -> None:
    """Measure what is not believed once more, after everything else, and what still is not a last time."""
    for _ in range(_RETAKES):
        stalled = doubtful(jobs, found.journal.lines)
        if not stalled:
            return
        watch.stage(f"{len(stalled)} unlikely timings again")
        retaken = [job for job in jobs if job.key in stalled]
        until_s = max(found.until_s, time.monotonic() + _RETAKE_S * len(retaken))
        runner.cases(retaken, request.engine, found.threads, until_s, found.journal, _counted, again=True)


def _counted(line: Line) -> None:
    """A case that the watcher has seen already."""


def _refuse_if_busy(request: Request, load: float) -> None:
    if request.strict and load > summarise.BUSY:
        raise Contended((f"contended: other programs keep {load:.1f} of every core busy",))


def default_name(devices: Sequence[Device]) -> str:
    """A file-name-like name after the GPUs, or the processor."""
    gpus = [d.description for d in devices if d.kind != "cpu"] or [d.description for d in devices]
    words = re.sub(r"\b(nvidia|geforce|amd|radeon|graphics|intel|\(r\)|\(tm\))\b", " ", gpus[0].lower())
    name = re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "machine"
    return f"{len(gpus)}x-{name}" if len(gpus) > 1 else name
