"""A/B measurement of contenders: separate processes, one after the other, order alternated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.errors import MachineError
from runtime.bench.intervals import Interval, interval, ratio
from runtime.bench.memory_settled import Settling, reader
from runtime.bench.prompts import text
from runtime.bench.rivals import Rival
from runtime.child.ask import Died
from runtime.child.taken_in import UNHEARD, LoadProgress
from runtime.engine.gpu_usage import Watch
from runtime.load.dry_run import Breakdown
from runtime.session.session import Timings
from runtime.worker import Ask, Checks, Outcome, work

_WARM_UP = 8  # tokens generated before anything counts
VERDICT_ROUNDS = 3  # fewer samples have no spread to judge by
_TIE = 1.01  # loads of one placement differ by more than this


@dataclass(frozen=True, slots=True)
class Terms:
    """What is measured."""

    engine: str | None
    llama_h: Path | None
    model: Path
    prompts: tuple[int, ...]  # tokens
    tokens: int  # generated after each prompt
    rounds: int
    seed: int = 1
    timeout_s: float = 3600


@dataclass(frozen=True, slots=True)
class Failure:
    """A contender that did not finish a round."""

    at: str  # ISO time
    why: str
    lines: tuple[str, ...] = ()  # the last ones of its log
    loaded: bool = False  # it died while it computed, not while it was loaded


@dataclass(slots=True)
class Result:
    """All samples of one contender."""

    rival: Rival
    decode: dict[int, list[float]] = field(default_factory=dict)  # prompt tokens -> ns per token
    prefill: dict[int, list[float]] = field(default_factory=dict)  # prompt tokens -> ns per prompt
    load_ns: list[int] = field(default_factory=list)
    memory: Mapping[str, Breakdown] = field(default_factory=dict)
    tokens: int = 0  # generated in all
    guessed: int = 0  # by a draft
    accepted: int = 0  # of those
    utilisation: list[float] = field(default_factory=list)  # percent, one a round
    peak_bytes: list[int] = field(default_factory=list)  # of NVIDIA GPUs, as the driver counts, one a round
    notes: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)  # memory that was not free again after a round

    @property
    def tpot(self) -> list[float]:
        """Decode samples of all prompts together, ns per token."""
        return [sample for samples in self.decode.values() for sample in samples]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plan against one rival at one prompt length; below 1 the plan is faster."""

    rival: str
    prompt: int
    decode: Interval
    prefill: Interval


def run(
    terms: Terms,
    rivals: Sequence[Rival],
    checks: Mapping[str, Checks],
    on_note: Callable[[str], None] = lambda text: None,
    on_step: Callable[[int, str], None] = lambda done, what: None,
    load: LoadProgress = UNHEARD,
) -> list[Result]:
    """Measure every contender in every round; one that dies is recorded and the others go on.

    `on_step` hears before each run how many are done, and what comes; `on_note` what spoils a run;
    `load` how each load goes, and that it is over, either way.
    """
    results = {rival.name: Result(rival) for rival in rivals}
    devices = [name for rival in rivals for name in rival.device_bytes]
    settling = Settling(reader(terms.engine, terms.llama_h, devices))
    for done, (number, rival) in enumerate(schedule(rivals, terms.rounds)):
        on_step(done, f"round {number + 1} of {terms.rounds}: {rival.name}")
        _measure(terms, results[rival.name], checks.get(rival.name), load)
        if held := settling.wait():
            on_note(held)
            results[rival.name].unsettled.append(held)
    return list(results.values())


def schedule(rivals: Sequence[Rival], rounds: int) -> Iterator[tuple[int, Rival]]:
    """Every contender once a round, forwards and backwards in turn: drift hits all alike."""
    for number in range(rounds):
        for rival in rivals if number % 2 == 0 else reversed(rivals):
            yield number, rival


def compare(plan: Result, rival: Result, seed: int = 1) -> list[Comparison]:
    """Ratios of the plan to a rival for each prompt length both have samples of."""
    return [
        Comparison(
            rival.rival.name,
            prompt,
            ratio(plan.decode[prompt], rival.decode[prompt], seed),
            ratio(plan.prefill[prompt], rival.prefill[prompt], seed),
        )
        for prompt in sorted(plan.decode.keys() & rival.decode.keys())
    ]


def slower(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those where the plan decodes slower by more than a tie, whole interval, of enough rounds."""
    return [c for c in comparisons if c.decode.low > _TIE and c.decode.samples >= VERDICT_ROUNDS]


def summary(samples: Sequence[float], seed: int = 1) -> Interval | None:
    """Median and interval; None without samples."""
    return interval(samples, seed) if samples else None


def _measure(terms: Terms, result: Result, checks: Checks | None, load: LoadProgress) -> None:
    asks = [Ask(text(64, terms.seed), _WARM_UP, ignore_end=True, silent=True, cut=32)]
    asks += [
        Ask(text(n, terms.seed + n), terms.tokens, ignore_end=True, silent=True, cut=n) for n in terms.prompts
    ]
    loaded = False

    def begin() -> None:
        nonlocal loaded
        loaded = True
        load.over()
        watch.begin()

    with Watch(result.rival.device_bytes) as watch:
        try:
            outcome = work(
                terms.engine,
                terms.llama_h,
                terms.model,
                result.rival.spec,
                asks,
                checks,
                load=replace(load, over=begin),
                timeout_s=terms.timeout_s,
                draft=result.rival.draft,
            )
        except MachineError as problem:
            lines = problem.lines if isinstance(problem, Died) else ()
            at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            result.failures.append(Failure(at, str(problem), lines, loaded))
            load.over()
            return
    _keep(result, outcome, outcome.timings[1:])
    if watch.percent is not None:
        result.utilisation.append(watch.percent)
    if watch.peak_bytes is not None:
        result.peak_bytes.append(watch.peak_bytes)


def _keep(result: Result, outcome: Outcome, timings: Sequence[Timings]) -> None:
    for one in timings:
        result.decode.setdefault(one.prompt_tokens, []).append(float(one.tpot_ns))
        result.prefill.setdefault(one.prompt_tokens, []).append(float(one.prefill_ns))
        result.tokens += len(one.tokens)
        result.guessed += one.guessed
        result.accepted += one.accepted
    result.load_ns.append(outcome.loaded.load_ns)
    result.memory = outcome.loaded.memory
    result.notes = outcome.loaded.notes
