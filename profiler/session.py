"""One profile from start to end: figures, cases, summary; interrupted ones continue. No printing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.profile import Device, Fingerprint, Profile
from planner.timing import Case
from profiler import host, runner, summarise
from profiler.cases import Place, jobs_of
from profiler.journal import Journal
from profiler.summarise import Contended, Verdict

Line = dict[str, Any]
Choose = Callable[[Sequence[Place]], Iterable[Case]]


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure and how long."""

    engine: str | None  # as for Engine.find
    devices: tuple[str, ...]  # names; () = all
    threads: int  # 0: find the best
    seconds: float  # for the cases together
    strict: bool
    name: str
    command: str


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


MIN_LIMIT_S = 0.04
MAX_LIMIT_S = 0.25
MAX_FIGURE_S = 0.15


def measure(request: Request, cases: Choose, watch: Watcher) -> Measured:
    """Measure operators on every device; `cases` chooses them when the places are known.

    Raises EngineProblem, and Contended when the request is strict and the machine is not quiet.
    """
    load = host.load()
    fingerprint = host.fingerprint("")
    journal = Journal(*map(str, (fingerprint, request.engine, request.devices, request.threads)))
    if not any(line["kind"] == "link-end" for line in journal.lines):
        _refuse_if_busy(request, load)
        watch.stage("devices and links")
        figure_s = min(request.seconds / 50, MAX_FIGURE_S)
        figures = list(runner.figures(request.engine, request.devices, request.threads, figure_s))
        for line in (*figures, {"kind": "link-end", "load": load}):
            journal.add(line)
    return _with_cases(request, cases, journal, fingerprint, watch)


def _with_cases(
    request: Request,
    cases: Choose,
    journal: Journal,
    fingerprint: Fingerprint,
    watch: Watcher,
) -> Measured:
    figures = [line for line in journal.lines if line["kind"] != "case"]
    load = next(line["load"] for line in figures if line["kind"] == "link-end")
    places = summarise.places(figures)
    jobs = jobs_of(dict.fromkeys(cases(places)), places)
    known = sum(line["kind"] == "case" for line in journal.lines)
    watch.begin(len(jobs), min(known, len(jobs)))
    limit_s = min(max(request.seconds / max(len(jobs), 1) / 2, MIN_LIMIT_S), MAX_LIMIT_S)
    threads = next((d["threads"] for d in figures if d["kind"] == "device" and d["name"] == "CPU"), 0)
    runner.cases(jobs, request.engine, threads, limit_s, journal, watch.case)
    streams = summarise.streams(journal.lines)
    verdicts = summarise.verdicts(jobs, journal.lines, streams)
    engine = next(line["text"] for line in figures if line["kind"] == "engine")
    fingerprint = fingerprint.model_copy(update={"engine": engine})
    notes = summarise.warnings(verdicts, streams, load, fingerprint)
    if request.strict and any(note.startswith(("contended", "unsteady")) for note in notes):
        raise Contended(notes)
    made = summarise.profile(
        request.name or default_name(summarise.devices(figures)),
        request.command,
        datetime.date.today().isoformat(),
        fingerprint,
        figures,
        verdicts,
        notes,
    )
    return Measured(made, verdicts, streams, journal)


def _refuse_if_busy(request: Request, load: float) -> None:
    if request.strict and load > summarise.BUSY:
        raise Contended((f"contended: other programs keep {load:.1f} of every core busy",))


def default_name(devices: Sequence[Device]) -> str:
    """A file-name-like name after the GPUs, or the processor."""
    gpus = [d.description for d in devices if d.kind != "cpu"] or [d.description for d in devices]
    words = re.sub(r"\b(nvidia|geforce|amd|radeon|graphics|intel|\(r\)|\(tm\))\b", " ", gpus[0].lower())
    name = re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "machine"
    return f"{len(gpus)}x-{name}" if len(gpus) > 1 else name
