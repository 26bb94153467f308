"""An exact dynamic programme for a chain with one memory: the oracle that the solver is held to.

Deliberately plain: every reachable (exit device, bytes used) keeps its least cost. Costs paid once are
enumerated outside, as in any textbook.
"""

from __future__ import annotations

import itertools

from planner.solver.problem import Option, Problem


def optimum(problem: Problem, device: int) -> int | None:
    """The least objective when only the memory of `device` is limited; None when nothing fits.

    For problems whose edges are the chain, without pools, exclusive shares, run limits or modes.
    """
    best: int | None = None
    for paid in itertools.product((False, True), repeat=len(problem.shares)):
        for modes in itertools.product(("free", "host", "other"), repeat=len(problem.mixed)):
            cost = _scenario(problem, device, paid, modes)
            if cost is not None and (best is None or cost < best):
                best = cost
    return best


def _scenario(problem: Problem, device: int, paid: tuple[bool, ...], modes: tuple[str, ...]) -> int | None:
    capacity = problem.devices[device].capacity_bytes
    for share, is_paid in zip(problem.shares, paid, strict=True):
        capacity -= share.size_bytes if is_paid and share.device == device else 0
    states: dict[tuple[int, int], int] = {(-1, 0): problem.price(problem.decode_ns, problem.prefill_ns)}
    for i, decision in enumerate(problem.decisions):
        following: dict[tuple[int, int], int] = {}
        options = [o for o in decision.options if _allowed(problem, i, o, paid, modes)]
        for (exit_device, used), cost in states.items():
            for option in options:
                total = used + option.memory[device]
                if total > capacity:
                    continue
                price = cost + problem.price(option.decode_ns, option.prefill_ns)
                price += _hand_over(problem, i, exit_device, option.entry)
                key = (option.exit, total)
                following[key] = min(price, following.get(key, price))
        states = following
    if not states:
        return None
    fixed = sum(
        problem.price(m.decode_ns, m.prefill_ns)
        for m, mode in zip(problem.mixed, modes, strict=True)
        if mode == "free"
    )
    return min(states.values()) + fixed


def _allowed(
    problem: Problem, i: int, option: Option, paid: tuple[bool, ...], modes: tuple[str, ...]
) -> bool:
    if not all(paid[share] for share in option.shares):
        return False
    for mixed, mode in zip(problem.mixed, modes, strict=True):
        if i in mixed.decisions:
            if mode == "host" and problem.off_host(mixed, option):
                return False
            if mode == "other" and problem.on_host(mixed, option):
                return False
    return True


def _hand_over(problem: Problem, i: int, source: int, target: int) -> int:
    if i == 0:
        return 0
    edge = problem.edges[i - 1]
    return problem.price(edge.decode_ns[source][target], edge.prefill_ns[source][target])
