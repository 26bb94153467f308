"""What limits a placement, as the frontier search sees it: memories that can run out, costs paid once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solver.labels import Ints
from planner.solver.problem import Problem

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Memory:
    """One limit: the devices it sums over."""

    devices: tuple[int, ...]
    capacity: int


def binding(problem: Problem) -> list[Memory]:
    """The limits that some placement could break."""
    limits = [Memory((i,), d.capacity_bytes) for i, d in enumerate(problem.devices)]
    for p, pool in enumerate(problem.pools):
        members = tuple(i for i, d in enumerate(problem.devices) if d.pool == p)
        limits.append(Memory(members, pool.capacity_bytes))
    return [m for m in limits if _most(problem, m) > m.capacity]


def _most(problem: Problem, memory: Memory) -> int:
    shares = sum(s.size_bytes for s in problem.shares if s.device in memory.devices)
    each = (max(sum(o.memory[d] for d in memory.devices) for o in e.options) for e in problem.decisions)
    return shares + sum(each)


def grain_of(problem: Problem) -> int:
    """The greatest common divisor of all prices: no two placements differ by less."""
    grain = problem.price(problem.decode_ns, problem.prefill_ns)
    for _, _, option in problem.all_options():
        grain = math.gcd(grain, problem.price(option.decode_ns, option.prefill_ns))
    for decode, prefill in {(e.decode_ns, e.prefill_ns) for e in problem.edges}:
        for row, prompt in zip(decode, prefill, strict=True):
            grain = math.gcd(grain, *(problem.price(a, b) for a, b in zip(row, prompt, strict=True)))
    for mixed in problem.mixed:
        grain = math.gcd(grain, problem.price(mixed.decode_ns, mixed.prefill_ns))
    return max(grain, 1)


def free_shares(problem: Problem, memories: list[Memory]) -> frozenset[int]:
    """Shares that limit nothing: of no bytes, or on a device with plenty, and compatible with all others."""
    scarce = {d for m in memories for d in m.devices}
    choices = {i for group in problem.exclusive for i in group}
    return frozenset(
        i
        for i, share in enumerate(problem.shares)
        if i not in choices and not (share.size_bytes and share.device in scarce)
    )


def share_sets(problem: Problem, memories: list[Memory]) -> list[frozenset[int]]:
    """Every set of shares worth paying: unions of what options ask for, free ones always in."""
    free = free_shares(problem, memories)
    asked = {frozenset(o.shares) - free for _, _, o in problem.all_options()}
    unions: set[frozenset[int]] = {frozenset()}
    groups = [frozenset(group) for group in problem.exclusive]
    for each in sorted(asked, key=sorted):
        joined = {each | other for other in unions}
        unions |= {u for u in joined if all(len(u & group) <= 1 for group in groups)}
    return [u | free for u in sorted(unions, key=lambda u: (len(u), sorted(u)))]


def share_memory(problem: Problem, memories: list[Memory], paid: frozenset[int]) -> Ints:
    return np.array(
        [
            sum(problem.shares[s].size_bytes for s in paid if problem.shares[s].device in m.devices)
            for m in memories
        ],
        dtype=np.int64,
    )


def with_modes(problem: Problem, within: list[Bools], modes: tuple[int, ...]) -> tuple[list[Bools], int]:
    """Options left when each mixed cost is paid (2), or avoided: nothing (0) or all (1) on the host."""
    allowed, fixed = list(within), 0
    for mixed, mode in zip(problem.mixed, modes, strict=True):
        if mode == 2:
            fixed += problem.price(mixed.decode_ns, mixed.prefill_ns)
            continue
        unwanted = problem.on_host if mode == 0 else problem.off_host
        left: dict[tuple[int, bytes], Bools] = {}  # many decisions have the same options
        for i in mixed.decisions:
            options = problem.decisions[i].options
            key = id(options), allowed[i].tobytes()
            if key not in left:
                left[key] = allowed[i] & ~np.array([unwanted(mixed, o) for o in options])
            allowed[i] = left[key]
    return allowed, fixed
