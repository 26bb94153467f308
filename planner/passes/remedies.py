"""What would make a refused plan possible: changes of the request that were tried and fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.constants import CPU
from planner.errors import AnswerIsNo, OptionProblem
from planner.machine.host_memory import HostMemory
from planner.memory.kv_cache import KvTypeProblem
from planner.model.requantise import Rule, requantised
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.largest_context import bisect, fits, with_context
from planner.passes.refusal import Infeasible
from planner.passes.settings_to_try import draft_lengths, projector_places
from planner.plan.engine_settings import EngineSettings
from planner.plan.request import ExtraModels, Request
from planner.workload import Workload

_SMALLER = "q8_0"
_LEAST_UBATCH = 64
_UNTRIED = ("a smaller quantisation", "another build of the engine")  # nothing here could try them
FITS = " (fits)"
SLOW = " (fits, but slow: weights are read from disk again and again)"
QUANTS = ("q6_K", "q5_K", "q4_K", "q3_K", "q2_K")  # what people can get of most models


def tried(hint: str) -> str:
    """The words of a change that was tried and fits; empty for one that is only named."""
    return next((hint.removesuffix(end) for end in (FITS, SLOW) if hint.endswith(end)), "")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing a person may ask otherwise."""

    words: str
    of: Callable[[Request], Request]
    end: str = FITS  # what is said of it where it fits


def with_remedies(refusal: AnswerIsNo, case: Case, start: EngineSettings) -> AnswerIsNo:
    """The refusal with changes that were tried and fit the whole use, in place of those only named.

    One change at a time; where no single one is enough, the first few together that are.
    """
    if not isinstance(refusal, Infeasible):
        return refusal
    advice = _Advice(case, start)
    tested = [*advice.single()] or [*advice.together()]
    others = [] if tested else [h for h in refusal.hints if h in _UNTRIED]
    return replace(refusal, hints=(*tested, *others))


@dataclass(frozen=True, slots=True)
class _Advice:
    """Requests that differ from the refused one, tried."""

    case: Case
    start: EngineSettings

    @property
    def asked(self) -> Request:
        """The request at the context it must hold at least."""
        request = self.case.request
        if not request.lowest_ctx:
            return request
        return replace(request, workload=with_context(request.workload, request.lowest_ctx))

    @property
    def lowest(self) -> int:
        return self.asked.workload.least_ctx

    def single(self) -> Iterator[str]:
        """Every change that is enough by itself, in the order in which a person would take it.

        First what only lifts a limit, then what costs some speed or context, another file, a part of what
        was asked; weights from disk, which make any model slow, come last.
        """
        yield from self._enough(lifted(self.asked))
        yield from self._smaller_use()
        if quant := self._quant():
            yield f"a smaller quantisation, such as --quant .={quant}{FITS}"
        yield from self._enough(given_up(self.asked))
        yield from self._enough(paged(self.asked))

    def _enough(self, offered: Iterator[Change]) -> Iterator[str]:
        return (change.words + change.end for change in offered if self._fits(change.of(self.asked)))

    def _smaller_use(self) -> Iterator[str]:
        shorter = self._context(self.asked)
        if quantised := _quantised(self.asked):
            longest = self._context(quantised)
            if longest >= self.asked.workload.n_ctx:
                yield f"--kv-type {_SMALLER}{FITS}"
        if smaller := next((n for n in _ubatches(self.asked) if self._fits(_ubatch(self.asked, n))), 0):
            yield f"--ubatch {smaller}{FITS}"
        if shorter:
            yield f"--ctx {shorter}{FITS}"
        if quantised and shorter < longest < self.asked.workload.n_ctx:
            yield f"--kv-type {_SMALLER} --ctx {longest}{FITS}"

    def _quant(self) -> str:
        """The largest type with which the model fits, all its weights in it; empty where there is none."""
        now = self.case.inventory.size_bytes
        for name in QUANTS:
            try:
                smaller = requantised(self.case.inventory, [Rule(".", name)])
            except OptionProblem:  # rows that are not whole blocks of it
                continue
            if smaller.size_bytes >= now:
                continue
            case = replace(self.case, structure=structure_of(smaller))
            if replace(self, case=case)._fits(self.asked):
                return name
        return ""

    def together(self) -> Iterator[str]:
        """The fewest of the changes, in order, that are enough together."""
        every = [*changes(self.asked), *_others(self.asked, self.lowest)]
        for count in range(2, len(every) + 1):
            if self._fits(_all(self.asked, every[:count])):
                break
        else:
            return
        needed = every[:count]
        for change in every[: count - 1]:
            without = [c for c in needed if c is not change]
            if self._fits(_all(self.asked, without)):
                needed = without
        end = SLOW if any(change.end == SLOW for change in needed) else FITS
        yield " and ".join(change.words for change in needed) + end

    def _context(self, request: Request) -> int:
        """The largest context with which a request fits, trained for; 0 for none."""
        work = request.workload
        trained = self.case.inventory.number("context_length", work.n_ctx) * work.n_seq
        highest = max(min(work.n_ctx, trained), self.lowest)

        def at(n_ctx: int) -> bool:
            return self._fits(replace(request, workload=with_context(work, n_ctx)))

        return bisect(at, self.lowest, highest) if at(self.lowest) else 0

    def _fits(self, request: Request) -> bool:
        self.case.clock.watch(0, 0)  # how many there will be is not known
        case = replace(self.case, request=request)
        try:
            places = [draft_lengths(case, each)[0] for each in projector_places(case, self.start)]
            return any(fits(case, each, request.workload) for each in places)
        except KvTypeProblem:
            return False


def changes(request: Request) -> Iterator[Change]:
    """What may be asked otherwise and keeps the use as it is; what frees most comes first."""
    yield from paged(request)
    yield from lifted(request)
    yield from given_up(request)


def paged(request: Request) -> Iterator[Change]:
    """Weights of the host that stay on disk until they are used."""
    if CPU in request.budgets and not request.page and request.host_memory is not HostMemory.PINNED:
        yield Change("--page", lambda asked: replace(asked, page=True), SLOW)


def lifted(request: Request) -> Iterator[Change]:
    """Limits that need not be, with everything that was asked for kept."""
    if request.no_cpu or request.contiguous:
        yield Change("allowing the CPU", lambda asked: replace(asked, no_cpu=False, contiguous=False))
    beside = request.extra_models
    if beside is None or beside.extras.mmproj is None:
        return
    if not beside.projector_moves and (beside.extras.mmproj_device or beside.gpu) != CPU:
        yield Change("--mmproj-device cpu", lambda asked: _beside(asked, mmproj_device=CPU))


def given_up(request: Request) -> Iterator[Change]:
    """Parts of what was asked for."""
    if request.pins:
        yield Change("fewer pins", lambda asked: replace(asked, pins=()))
    beside = request.extra_models
    if beside is None:
        return
    if beside.extras.mmproj is not None:
        yield Change("no --mmproj", lambda asked: _beside(asked, mmproj=None))
    if beside.extras.draft is not None:
        yield Change("no --draft", lambda asked: _beside(asked, draft=None))
    if request.workload.mtp:
        yield Change("no --mtp", lambda asked: _work(asked, mtp=False))


def _others(request: Request, lowest: int) -> Iterator[Change]:
    """Changes of the use, for where nothing else is enough."""
    if _quantised(request):
        yield Change(f"--kv-type {_SMALLER}", lambda asked: _work(asked, type_k=_SMALLER, type_v=_SMALLER))
    if sizes := _ubatches(request):
        least = sizes[-1]
        yield Change(f"--ubatch {least}", lambda asked: _ubatch(asked, least))
    if lowest < request.workload.n_ctx:
        yield Change(
            f"--ctx {lowest}", lambda asked: replace(asked, workload=with_context(asked.workload, lowest))
        )


def _all(request: Request, chosen: Sequence[Change]) -> Request:
    for change in chosen:
        request = change.of(request)
    return request


def _beside(request: Request, **fields: object) -> Request:
    beside = request.extra_models
    assert isinstance(beside, ExtraModels)
    return replace(request, extra_models=replace(beside, extras=replace(beside.extras, **fields)))  # type: ignore[arg-type]


def _work(request: Request, **fields: object) -> Request:
    return replace(request, workload=request.workload.model_copy(update=fields))


def _ubatches(request: Request) -> list[int]:
    """Halves of the batch, largest first."""
    size, found = request.workload.n_ubatch // 2, []
    while size >= _LEAST_UBATCH:
        found.append(size)
        size //= 2
    return found


def _ubatch(request: Request, size: int) -> Request:
    return _work(request, n_ubatch=size)


def _quantised(request: Request) -> Request | None:
    """With smaller types of KV, where they can be had."""
    work: Workload = request.workload
    if work.type_k == _SMALLER or not work.flash_attn:
        return None
    return _work(request, type_k=_SMALLER, type_v=_SMALLER)
