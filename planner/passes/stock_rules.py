"""What stock rules would do with the same memory, pins and limits: full placements, with the engine's exact
counting.

`-ngl N` offloads the last N of the layers (speculative blocks included) and counts the output head as
the last of them; several GPUs take consecutive layers in proportion to their memory. `--n-cpu-moe N`
keeps the experts of the first N layers on the CPU, `--n-cpu-ffn N` the N largest dense FFNs. A pin is one
more override before those of the rule, where the rule alone does not keep it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from planner.block_names import block_name
from planner.constants import CPU
from planner.cost.build_problem import OUTPUT, Model, Priced
from planner.cost.paged import over_resident
from planner.cost.placed import evaluate_placed
from planner.model.units import Kind, Unit
from planner.passes.engine_fit import fit_rules
from planner.passes.prompt_pipeline import pipeline_of
from planner.plan.engine_rules import layers_by_ngl
from planner.plan.plan import EngineFit
from planner.plan.stock_rule import (
    ALL_CPU,
    CPU_MOE,
    FIT,
    N_CPU_FFN,
    N_CPU_MOE,
    NGL,
    NOT_KEPT,
    ONE_GPU,
    PINS,
    PLAIN,
    Rule,
)
from planner.site import ON_CPU, Site
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Decision, Solution
from planner.solver.totals import Totals

_UNASKED = -1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rule's best setting under the budget, priced; `solution` is None where it cannot be expressed."""

    name: str
    setting: str
    solution: Solution | None
    evaluation: Evaluation | None
    vram_bytes: int = 0  # on all devices but the CPU

    @property
    def feasible(self) -> bool:
        return self.evaluation is not None and self.evaluation.feasible


def request_ns(candidate: Candidate) -> int:
    """What the solver minimises; 0 of one that was not priced."""
    return candidate.evaluation.objective_ns if candidate.evaluation else 0


Settings = tuple[tuple[str, tuple[tuple[Rule, Solution], ...]], ...]  # by rule, those that have a placement


def all_settings(priced: Priced, fit: EngineFit | None = None) -> Settings:
    """Every setting of each stock rule with its placement, in order of simplicity.

    The engine's own `--fit` comes last: it takes no overrides beside its own.
    """
    found: list[tuple[str, tuple[tuple[Rule, Solution], ...]]] = []
    placer = Placer(priced)
    for name, rules in itertools.groupby(_rules(priced.model, priced), key=lambda rule: rule.name):
        kept = [again for rule in rules if (again := _with_pins(placer, rule)) is not None]
        found.append((name, placer.placed(kept)))
    if fit is not None:
        found.append((FIT, placer.placed(fit_rules(priced.model.structure, fit, priced.prices.workload))))
    return tuple(found)


def same_settings(priced: Priced, other: Priced) -> bool:
    """Whether two problems of one model have the same placements, whatever these cost.

    Rules deal layers by what GPUs may hold.
    """
    a, b = priced.problem, other.problem
    if priced.model is not other.model or (a.devices, priced.pins) != (b.devices, other.pins):
        return False
    both = [(d.options, e.options) for d, e in zip(a.decisions, b.decisions, strict=True)]
    pairs = {(id(some), id(others)): (some, others) for some, others in both}  # many decisions share theirs
    return all(len(some) == len(others) for some, others in pairs.values()) and all(
        o.key == p.key for some, others in pairs.values() for o, p in zip(some, others, strict=True)
    )


def candidates(
    priced: Priced, fit: EngineFit | None = None, placed: Settings | None = None
) -> tuple[Candidate, ...]:
    """The best feasible setting of each stock rule, in order of simplicity; `placed` is of `all_settings`.

    A rule without a feasible setting appears once, infeasible.
    """
    totals, placed = Totals(priced.problem), all_settings(priced, fit) if placed is None else placed
    found = tuple(_best(priced, totals, name, possible) for name, possible in placed)
    if fit is not None and fit.n_gpu_layers is None:
        return (*found[:-1], Candidate(FIT, "finds no placement", None, None))
    return found


def either_way(copying: Sequence[Candidate], plain: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Each rule at its better one of two: prompts' host weights copied to a GPU, or not (`plain`).

    For plans that do not copy: what that brings is then not mistaken for what the placement brings.
    """
    others = {each.name: each for each in plain}
    return tuple(_better(each, others.get(each.name)) for each in copying)


def _better(copying: Candidate, plain: Candidate | None) -> Candidate:
    if plain is None or plain.evaluation is None or copying.name in (ALL_CPU, FIT):
        return copying
    if copying.evaluation is not None and _rank(copying) <= _rank(plain):
        return copying
    return replace(plain, setting=f"{plain.setting} {PLAIN}")


def _rank(candidate: Candidate) -> tuple[bool, int]:
    assert candidate.evaluation is not None
    return not candidate.feasible, candidate.evaluation.objective_ns


def _best(priced: Priced, totals: Totals, name: str, possible: Sequence[tuple[Rule, Solution]]) -> Candidate:
    """The fastest that fits, the first of equals; where none does the fastest of all."""
    if not possible:
        return Candidate(name, NOT_KEPT, None, None)
    objective, fits = totals.of([solution for _, solution in possible])
    order = objective.argsort(kind="stable").tolist()
    best: Candidate | None = None
    for n in order:
        if best is not None and objective[n] >= request_ns(best):  # what a total says is the least it costs
            break
        if fits[n] and (found := _candidate(priced, name, *possible[n])).feasible:
            best = found if best is None or request_ns(found) < request_ns(best) else best
    return best or _candidate(priced, name, *possible[order[0]])


def _with_pins(placer: Placer, rule: Rule) -> Rule | None:
    """The rule with the pins that it does not keep by itself; None where no override would keep one."""
    if not placer.priced.pins:
        return rule
    sites = dict(rule.sites)
    for unit, wanted in placer.priced.pins.items():
        layer = placer.layer_of(unit)
        if layer is None:
            continue
        home = rule.layer_devices[layer]
        if wanted.admits(sites.get(unit, Site.on(home))):
            continue
        there = wanted.what if isinstance(wanted.what, Site) else Site.on(home)
        if not wanted.admits(there) or there.divided:
            return None
        sites[unit] = there
    same = sites == dict(rule.sites)
    return rule if same else replace(rule, setting=f"{rule.setting} {PINS}", sites=sites)


def _candidate(priced: Priced, name: str, rule: Rule, solution: Solution) -> Candidate:
    result = evaluate_placed(priced, solution)
    pipeline = pipeline_of(priced, solution)
    if pipeline.refused:  # a stock rule does not keep the engine from it
        result = replace(result, violations=(*result.violations, "no room for a pipeline's copies"))
    result = replace(result, violations=(*result.violations, *over_resident(priced, solution)))
    used = zip(result.memory, priced.problem.devices, pipeline.copies, strict=True)
    vram = sum(_vram(priced, d.device, size, extra) for size, d, extra in used if not d.host)
    return Candidate(name, rule.setting, solution, result, vram)


def _vram(priced: Priced, device: str, size: int, copies: int) -> int:
    """What a device holds under a rule: a draft or a projector lies there and opens it, layers or not."""
    beside = priced.settings.reserved_bytes(device)
    if size:
        return size + copies + beside
    opened = any(r.opens and r.device == device for r in priced.settings.reserves)
    return beside + priced.prices.profile.device(device).context_bytes if opened else 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a placer was asked for, and the option of each decision; None where there is none."""

    homes: list[str]
    sites: Mapping[str, Site]
    choices: list[int | None]


class Placer:
    """Finds the placements of one problem that have some layer devices and sites.

    A setting of a rule asks for little else than the one before: only the difference is looked up.
    """

    def __init__(self, priced: Priced) -> None:
        self.priced = priced
        self._names = [d.device for d in priced.problem.devices]
        n_all = priced.model.layers.n_all
        layers = {block_name(n): n for n in range(n_all)} | {OUTPUT: n_all}
        owners = priced.model.owners
        self._rows = [
            (number, d, layers.get(d.name), layers[owners[d.name]] if d.name in owners else None)
            for number, d in enumerate(priced.problem.decisions)
        ]
        self._readers = {number for number, _, _, owner in self._rows if owner is not None}
        self._holder = {unit: n for n, d in enumerate(priced.problem.decisions) for unit in d.units}
        # By decision, home and whether its cache lies elsewhere: sites asked for, few, and the option. Sites
        # are compared, not hashed: nearly all are one object.
        self._known: dict[tuple[int, str, bool], list[tuple[tuple[Site | None, ...], int | None]]] = {}
        self._homes: dict[tuple[str, ...], tuple[list[str], list[int | None]]] = {}
        self._whole: dict[str, list[int | None]] = {}  # by layer device: each decision all there
        self._last: _Asked | None = None

    def layer_of(self, unit: str) -> int | None:
        """The layer of a unit, the head's one after the last; None of input tables, which have no device."""
        number = self._holder.get(unit)
        return None if number is None else self._rows[number][2]

    def placed(self, rules: Sequence[Rule]) -> tuple[tuple[Rule, Solution], ...]:
        """The rules that have a placement."""
        found = ((rule, self.solution(rule.layer_devices, rule.sites)) for rule in rules)
        return tuple((rule, solution) for rule, solution in found if solution is not None)

    def solution(self, layer_devices: Sequence[str], sites: Mapping[str, Site]) -> Solution | None:
        """The placement, all other units on their layer's device; None when a decision has no such option.

        The last layer device is that of the output head.
        """
        homes, at_home = self._at_home(tuple(layer_devices))
        found = self._last.choices.copy() if self._last else list(at_home)
        for number in self._changed(homes, sites):
            _, decision, _, owner = self._rows[number]
            wanted = tuple(map(sites.get, decision.units))
            if owner is None and not any(wanted):
                found[number] = at_home[number]
                continue
            home = homes[number]
            away = owner is not None and layer_devices[owner] != home
            known = self._known.setdefault((number, home, away), [])
            choice = next((option for each, option in known if each == wanted), _UNASKED)
            if choice == _UNASKED:
                choice = self._find(decision, home, sites, away)
                known.append((wanted, choice))
            found[number] = choice
        self._last = _Asked(homes, sites, found)
        return None if None in found else Solution(tuple(cast(list[int], found)))

    def _changed(self, homes: list[str], sites: Mapping[str, Site]) -> set[int]:
        """Decisions for which something else is asked than the last time."""
        last = self._last or _Asked(homes, {}, [])
        changed = {unit for unit in sites if sites[unit] is not last.sites.get(unit)}
        changed |= last.sites.keys() - sites.keys()
        numbers = {self._holder[unit] for unit in changed if unit in self._holder} | self._readers
        if homes is not last.homes:
            numbers |= {n for n, (a, b) in enumerate(zip(homes, last.homes, strict=True)) if a != b}
        return numbers

    def _at_home(self, layer_devices: tuple[str, ...]) -> tuple[list[str], list[int | None]]:
        """Where each decision is at home, and its option with all units there."""
        if layer_devices not in self._homes:
            homes = [CPU if layer is None else layer_devices[layer] for _, _, layer, _ in self._rows]
            whole = {home: self._all_on(home) for home in set(homes)}
            self._homes[layer_devices] = homes, [whole[home][n] for n, home in enumerate(homes)]
        return self._homes[layer_devices]

    def _all_on(self, home: str) -> list[int | None]:
        if home not in self._whole:
            self._whole[home] = [self._find(d, home, {}, away=False) for _, d, _, _ in self._rows]
        return self._whole[home]

    def _find(self, decision: Decision, home: str, sites: Mapping[str, Site], away: bool) -> int | None:
        if not decision.layer:
            return 0 if decision.options else None
        if home not in self._names:
            return None
        wanted = tuple(sites.get(unit, Site.on(home)) for unit in decision.units)
        key = (self._names.index(home), wanted, away)
        return next((index for index, option in enumerate(decision.options) if option.key == key), None)


def realise(priced: Priced, layer_devices: Sequence[str], sites: Mapping[str, Site]) -> Solution | None:
    """The one placement with these layer devices and sites, if there is one."""
    return Placer(priced).solution(layer_devices, sites)


def translated(priced: Priced, candidate: Candidate, free: Priced) -> Candidate | None:
    """A placement of the problem `free` in another; None when that has no such option, as for a limit."""
    if candidate.solution is None:
        return None
    choices = []
    for decision, wanted in zip(
        priced.problem.decisions, candidate.solution.chosen(free.problem), strict=True
    ):
        same = [j for j, o in enumerate(decision.options) if o.key == wanted.key]
        if not same:
            return None
        choices.append(same[0])
    solution = Solution(tuple(choices))
    result = evaluate_placed(priced, solution)
    result = replace(result, violations=(*result.violations, *over_resident(priced, solution)))
    return replace(candidate, solution=solution, evaluation=result)


def _rules(model: Model, priced: Priced) -> Iterator[Rule]:
    n_all = model.layers.n_all
    gpus = [(d.device, d.capacity_bytes) for d in priced.problem.devices if not d.host]
    if not any(d.host for d in priced.problem.devices):
        yield Rule(NGL, f"-ngl {n_all + 1}", layers_by_ngl(n_all, n_all + 1, gpus), {})
        return
    if not gpus:
        yield Rule(ALL_CPU, "-ngl 0 --device none", layers_by_ngl(n_all, 0, gpus), {})
        return
    for gpu in gpus if len(gpus) > 1 else ():
        for n in range(n_all + 2):
            yield Rule(ONE_GPU, f"--device {gpu[0]} -ngl {n}", layers_by_ngl(n_all, n, [gpu]), {})
    for n in range(n_all + 2):
        yield Rule(NGL, f"-ngl {n}", layers_by_ngl(n_all, n, gpus), {})
    full = layers_by_ngl(n_all, n_all + 1, gpus)
    experts = [u for u in model.units if u.kind is Kind.EXPERTS]
    dense = [u for u in model.units if u.kind is Kind.FFN]
    if experts:
        yield from _first_experts(n_all, full, experts)
        on_host = {u.name: ON_CPU for u in experts}
        for n in range(n_all + 1):
            yield Rule(CPU_MOE, f"-ngl {n} --cpu-moe", layers_by_ngl(n_all, n, gpus), on_host)
    if dense and not experts:
        yield from _largest_dense(full, dense)


def _first_experts(n_all: int, full: tuple[str, ...], experts: Sequence[Unit]) -> Iterator[Rule]:
    for n in range(1, n_all + 1):
        moved = {u.name: ON_CPU for u in experts if u.layer is not None and u.layer < n}
        yield Rule(N_CPU_MOE, f"-ngl {n_all + 1} --n-cpu-moe {n}", full, moved)


def _largest_dense(full: tuple[str, ...], dense: Sequence[Unit]) -> Iterator[Rule]:
    largest = sorted(dense, key=lambda u: (-u.size_bytes, u.layer))
    for n in range(1, len(largest) + 1):
        moved = {u.name: ON_CPU for u in largest[:n]}
        yield Rule(N_CPU_FFN, f"-ngl {len(full)} --n-cpu-ffn {n}", full, moved)
