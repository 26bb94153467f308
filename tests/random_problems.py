"""Small random placement problems, and their optimum by trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from planner.solver.evaluate import evaluate
from planner.solver.problem import (
    Capacity,
    Decision,
    Edge,
    Matrix,
    Mixed,
    Option,
    Pool,
    Problem,
    Share,
    Solution,
)


def brute_force(problem: Problem) -> int | None:
    """The least objective over all placements without a violation."""
    best: int | None = None
    for choices in itertools.product(*(range(len(d.options)) for d in problem.decisions)):
        found = evaluate(problem, Solution(choices))
        if found.feasible and (best is None or found.objective_ns < best):
            best = found.objective_ns
    return best


def random_problem(
    seed: int, *, length: int = 4, gpus: int | None = None, limit_host: bool = True, extras: bool = True
) -> Problem:
    """A chain of `length` layers behind an input table; a third of all problems repeat one kind of layer."""
    random = Random(seed)
    gpus = random.choice((1, 1, 2)) if gpus is None else gpus
    count = gpus + 1
    shares = tuple(Share(f"share {d}", d, random.randrange(0, 6)) for d in range(count))
    shares += tuple(Share(f"other {d}", d, random.randrange(0, 4)) for d in range(count))
    kinds = [_layer(random, count) for _ in range(random.choice((1, 2, length)))]
    table = Option(gpus, gpus, ("cpu",), 1, 2, (*(0,) * gpus, 3), (gpus,))
    decisions = [Decision("input", ("token_embd",), (table,), layer=False)]
    decisions += [Decision(f"blk.{n}", ("a", "b"), random.choice(kinds)) for n in range(length)]
    total = sum(max(sum(o.memory) for o in d.options) for d in decisions)
    pools, pool = _pools(random, total) if extras and random.random() < 0.2 else ((), -1)
    devices = tuple(
        Capacity(
            f"GPU{d}" if d < gpus else "CPU",
            "gpu" if d < gpus else "cpu",
            random.randrange(0, total + 2) if d < gpus or (limit_host and random.random() < 0.3) else 10**6,
            pool,
        )
        for d in range(count)
    )
    decode, prefill = _matrix(random, count), _matrix(random, count)
    return Problem(
        devices=devices,
        decisions=tuple(decisions),
        edges=tuple(Edge(i, i + 1, decode, prefill) for i in range(length)),
        pools=pools,
        shares=shares,
        exclusive=((0, 2 * count - 1),) if extras and random.random() < 0.2 else (),
        mixed=_mixed(random, length),
        decode_weight=random.randrange(1, 5),
        prefill_weight=random.randrange(0, 3),
        decode_ns=random.randrange(0, 9),
        max_runs=random.choice((0, 0, 2, 3)) if extras else 0,
        contiguous=extras and random.random() < 0.15,
        host_leads=extras and random.random() < 0.4,
    )


def sharing_problem(seed: int, *, gpus: int = 2, caches: int = 2, readers: int = 3) -> Problem:
    """A chain whose last layers read a cache of one before: for nothing where it lies, for a price elsewhere.

    That a cache lies somewhere is a share of no bytes; of one cache's only one may be asked for.
    """
    random = Random(seed)
    count = gpus + 1
    shares = tuple(Share(f"share {d}", d, random.randrange(0, 6)) for d in range(count))
    lies = [[count * (1 + c) + d for d in range(count)] for c in range(caches)]
    shares += tuple(Share(f"{c} lies on {d}", d, 0) for c in range(caches) for d in range(count))
    decisions = []
    for c in range(caches):
        options = tuple(_plain(random, d, count, (lies[c][d],)) for d in range(count))
        decisions.append(Decision(f"blk.{c}", ("a",), options))
    kinds = [tuple(_readers(random, lies[c], count)) for c in range(caches)]
    for n in range(readers):
        options = (
            kinds[n % caches] if random.random() < 0.8 else tuple(_readers(random, lies[n % caches], count))
        )
        decisions.append(Decision(f"blk.{caches + n}", ("a",), options))
    total = sum(max(sum(o.memory) for o in d.options) for d in decisions)
    devices = tuple(
        Capacity(f"GPU{d}", "gpu", random.randrange(0, total)) if d < gpus else Capacity("CPU", "cpu", 10**6)
        for d in range(count)
    )
    decode, prefill = _matrix(random, count), _matrix(random, count)
    length = len(decisions)
    return Problem(
        devices=devices,
        decisions=tuple(decisions),
        edges=tuple(Edge(i, i + 1, decode, prefill) for i in range(length - 1)),
        shares=shares,
        exclusive=tuple(map(tuple, lies)),
        mixed=_mixed(random, length - 1),
        decode_weight=random.randrange(1, 5),
        prefill_weight=random.randrange(0, 3),
        max_runs=random.choice((0, 0, 3)),
        host_leads=random.random() < 0.5,
    )


def _plain(random: Random, device: int, count: int, shares: tuple[int, ...]) -> Option:
    memory = tuple(random.randrange(1, 9) if d == device else 0 for d in range(count))
    cost = random.randrange(0, 20) + 30 * (device == count - 1)
    return Option(device, device, ("x",), cost, random.randrange(0, 20), memory, (device, *shares))


def _readers(random: Random, lies: list[int], count: int) -> Iterator[Option]:
    """With the cache on every device, and away from it: more memory and time."""
    near = [_plain(random, d, count, (lies[d],)) for d in range(count)]
    yield from near
    for option in near:
        memory = tuple(m + 2 * (d == option.entry) for d, m in enumerate(option.memory))
        slower = option.decode_ns + random.randrange(1, 9)
        yield replace(option, away=True, decode_ns=slower, memory=memory, shares=option.shares[:1])


def with_budget(problem: Problem, device: int, capacity: int) -> Problem:
    """The same problem with another budget on one device."""
    devices = list(problem.devices)
    devices[device] = replace(devices[device], capacity_bytes=capacity)
    return replace(problem, devices=tuple(devices))


def _layer(random: Random, count: int) -> tuple[Option, ...]:
    options = []
    for _ in range(random.randrange(1, 5)):
        entry, out = random.randrange(count), random.randrange(count)
        memory = tuple(random.randrange(0, 9) if d in (entry, out) else 0 for d in range(count))
        shares = tuple(sorted({entry, out} | ({count + out} if random.random() < 0.3 else set())))
        times = random.randrange(0, 60), random.randrange(0, 60)
        options.append(Option(entry, out, ("x", "y"), *times, memory, shares, int(entry != out)))
    return tuple(options)


def _matrix(random: Random, count: int) -> Matrix:
    return tuple(tuple(0 if p == q else random.randrange(0, 20) for q in range(count)) for p in range(count))


def _mixed(random: Random, length: int) -> tuple[Mixed, ...]:
    every = tuple(range(1, length + 1))
    found = [Mixed("graph", every, random.randrange(0, 30), 1)] if random.random() < 0.7 else []
    if random.random() < 0.3:
        found.append(Mixed("some", every[::2], random.randrange(0, 30), 0, layers_only=random.random() < 0.5))
    return tuple(found)


def _pools(random: Random, total: int) -> tuple[tuple[Pool, ...], int]:
    return (Pool("one memory", random.randrange(0, total + 2)),), 0
