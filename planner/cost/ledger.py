"""The parts behind the solver's integers: what fills each device, for every option and every share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from planner.memory.memory import NOTHING, Memory, together
from planner.solver.problem import Decision, Option, Problem, Share, Solution

Key = tuple[int, tuple[Hashable, ...], bool]  # of an option within its decision
Parts = tuple[Memory, ...]  # one record a device


@dataclass(frozen=True, slots=True)
class Placed:
    """An option and what it holds on each device; the option's own integers are the totals of that."""

    option: Option
    held: Parts


Once = tuple[Share, Memory]  # what is paid once, as the solver sees it and by part


def once(name: str, device: int, held: Memory) -> Once:
    """Memory paid once as soon as any chosen option asks for it."""
    return Share(name, device, held.total), held


@dataclass(frozen=True, slots=True)
class Ledger:
    """What options and shares of one problem hold."""

    options: Mapping[str, Mapping[Key, Parts]]  # by decision, and key of the option
    shares: tuple[Memory, ...]  # in the problem's order, each on the device of its share

    def of(self, decision: Decision, option: Option) -> Parts:
        """What one option holds on each device."""
        return self.options[decision.name][option.key]

    def held(self, problem: Problem, solution: Solution) -> Parts:
        """What fills each device: every chosen option, and each share that any of them asks for, once."""
        chosen = solution.chosen(problem)
        found = [NOTHING] * len(problem.devices)
        for decision, option in zip(problem.decisions, chosen, strict=True):
            found = [a + b for a, b in zip(found, self.of(decision, option), strict=True)]
        for index in {s for option in chosen for s in option.shares}:
            found[problem.shares[index].device] += self.shares[index]
        return tuple(found)


def spread(held: Mapping[int, Memory], devices: int) -> Parts:
    """What lies on some devices, by index, as one record for each."""
    return tuple(held.get(d, NOTHING) for d in range(devices))


def summed(parts: Sequence[Parts], devices: int) -> Parts:
    """Several records a device added up."""
    return tuple(together(each[d] for each in parts) for d in range(devices))


def totals(parts: Parts) -> tuple[int, ...]:
    """The solver's integers: bytes by device, whatever for."""
    return tuple(each.total for each in parts)
