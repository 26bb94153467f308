"""What one plan is made from, and what was found for each way to load the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.cost.build_problem import Model, Priced, analyse, build_problem
from planner.cost.unit_time import Timed
from planner.errors import AnswerIsNo
from planner.machine.engine_builds import Fault, mixing_fault
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.structure import Structure, structure_of
from planner.passes.chosen import Chosen
from planner.passes.margin import choice
from planner.passes.stock_rules import Candidate, Settings, all_settings, candidates, same_settings
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import EngineFit
from planner.plan.request import Request
from planner.solver.clock import Clock
from planner.workload import Workload

_Asked = tuple[tuple[int, int], Workload, EngineSettings, Request, Known]  # model and profile by identity
_MOST = 16  # problems that are kept: more than one plan is checked with


@dataclass(frozen=True, slots=True)
class _Stock:
    """Where stock rules place everything in a problem, and what comes of it."""

    priced: Priced
    fit: EngineFit | None
    placed: Settings
    found: tuple[Candidate, ...]


@dataclass(eq=False)
class Built:
    """Structures, problems and what stock rules do in them, kept for whoever asks for the same again.

    A check prices a plan and then solves it again, and both ask for much the same; plans of one model share
    its structure. What is kept never changes.
    """

    _structures: list[Structure] = field(default_factory=list)
    _problems: list[tuple[_Asked, Priced]] = field(default_factory=list)
    _rules: list[_Stock] = field(default_factory=list)

    def _timed(self, same: tuple[int, int], model: Model, settings: EngineSettings) -> Timed | None:
        """What units take, of a problem of the same model, profile and speculation."""
        for (other, workload, tried, *_), priced in reversed(self._problems):
            if (other, workload, tried.speculation) == (same, model.workload, settings.speculation):
                return priced.prices.timed
        return None

    def structure(self, inventory: Inventory) -> Structure:
        """The inventory analysed; errors of `structure_of`."""
        found = next((each for each in self._structures if each.inventory is inventory), None)
        if found is None:
            found = structure_of(inventory)
            self._structures.append(found)
        return found

    def problem(
        self, model: Model, profile: Profile, request: Request, settings: EngineSettings, known: Known
    ) -> Priced:
        """The problem of a request with these settings."""
        same = id(model.structure), id(profile)  # which the problem holds: no other can have that number
        key = (same, model.workload, settings, request, known)
        found = next((priced for each, priced in self._problems if each == key), None)
        if found is None:
            timed = self._timed(same, model, settings)
            found = build_problem(model, profile, request, settings, known, timed)
            self._problems = [*self._problems, (key, found)][-_MOST:]
        return found

    def stock(self, priced: Priced, fit: EngineFit | None = None) -> tuple[Candidate, ...]:
        """What stock rules do in a problem."""
        known = [each for each in self._rules if each.fit == fit]
        found = next((each for each in known if each.priced is priced), None)
        if found is None:
            alike = next((each for each in known if same_settings(priced, each.priced)), None)
            placed = alike.placed if alike else all_settings(priced, fit)
            found = _Stock(priced, fit, placed, candidates(priced, fit, placed))
            self._rules = [*self._rules, found][-_MOST:]
        return found.found


@dataclass(frozen=True, slots=True)
class Case:
    """Model, machine, request and knowledge: what stays while settings of the engine are tried."""

    structure: Structure
    profile: Profile
    request: Request
    known: Known = field(default_factory=Known)
    clock: Clock = field(default_factory=Clock)
    tell: Callable[[str], None] = lambda text: None  # what was decided on the way
    keeps: str = ""  # what the context was made as large as possible for; "": it was given
    built: Built = field(default_factory=Built, compare=False)

    @property
    def inventory(self) -> Inventory:
        return self.structure.inventory

    @property
    def fault(self) -> Fault | None:
        """Of the engine: no weights on the CPU beside those of a GPU."""
        engine = self.profile.fingerprint.engine
        return mixing_fault(self.inventory.architecture, engine, self.request.budgets)

    @property
    def limits(self) -> Request:
        """The request as the engine can keep it."""
        return replace(self.request, no_cpu=True) if self.fault else self.request

    def analysed(self, settings: EngineSettings) -> Model:
        """The model for the requested use with these settings."""
        return analyse(self.structure, settings.workload(self.request.workload))


@dataclass(eq=False)
class Loading:
    """One way to load the model (what runs beside it, draft length, host memory), and what came of it."""

    case: Case
    model: Model
    settings: EngineSettings  # GPUs open, prompts copied, weights repacked
    fault: Fault | None  # of the engine: no weights on the CPU beside those of a GPU
    stock: tuple[Candidate, ...] = ()  # every stock rule at its best, for the record
    plain: tuple[Candidate, ...] = ()  # the same where prompts are not copied, if that was tried
    bound_ns: int = 0  # of placements that copy prompts, where one was found; 0: none
    crowded: bool = False  # what runs beside the model takes all of a device
    copying: Priced | None = None  # the problem in which prompts of host weights are copied to a GPU
    found: list[Chosen] = field(default_factory=list)

    @property
    def limits(self) -> Request:
        """The request as the engine can keep it."""
        return self.case.limits

    def constrained(self, settings: EngineSettings) -> Priced:
        """The problem of the request."""
        return self._problem(self.limits, settings)

    def asked(self, settings: EngineSettings) -> Priced:
        """The problem of the stock rules: what was asked, whether or not the engine can keep it."""
        return self._problem(self.case.request, settings)

    def unlimited(self, settings: EngineSettings) -> Priced:
        """The problem without limits but memory."""
        return self._problem(self.case.request.unconstrained(), settings)

    def _problem(self, request: Request, settings: EngineSettings) -> Priced:
        case = self.case
        return case.built.problem(self.model, case.profile, request, settings, case.known)

    @property
    def best(self) -> Chosen | None:
        """The best placement so far."""
        return choice(self.found) if self.found else None


def loading_of(case: Case, model: Model, settings: EngineSettings) -> Loading:
    """A loading of which nothing is known yet."""
    return Loading(case, model, settings, case.fault)


@dataclass
class Tried:
    """Every loading so far, and why there was none where there was none."""

    loadings: list[Loading] = field(default_factory=list)
    refusals: list[AnswerIsNo] = field(default_factory=list)

    @property
    def found(self) -> list[Chosen]:
        """All placements of all loadings."""
        return [chosen for loading in self.loadings for chosen in loading.found]
