"""Prices rounded to a step far below any measurement's error, so that optimality can be proven."""

from __future__ import annotations

from dataclasses import replace

from planner.solver.problem import Edge, Matrix, Option, Problem

_FIGURES = 10_000  # times are rounded to this share of a token, at least: finer is noise, and slow to prove


def _tick(fastest: int) -> int:
    """The rounding step of decode times: a power of ten, at most 1/10000 of the fastest token."""
    tick = 1
    while tick * 10 * _FIGURES <= fastest:
        tick *= 10
    return tick


def rounded(problem: Problem, fastest_ns: int) -> Problem:
    """Times rounded to a step far below any measurement's error, so that optimality can be proven.

    `fastest_ns`: the least that the decisions of a token take together whatever pins and limits leave, or
    these would change what other placements cost.
    """
    decode = _tick(problem.decode_ns + fastest_ns)
    prefill = decode * max(problem.decode_weight, 1)

    def near(ns: int, step: int) -> int:
        return (ns + step // 2) // step * step

    def matrix(values: Matrix, step: int) -> Matrix:
        return tuple(tuple(near(ns, step) for ns in row) for row in values)

    edges: dict[tuple[Matrix, Matrix], tuple[Matrix, Matrix]] = {}
    for edge in problem.edges:
        key = (edge.decode_ns, edge.prefill_ns)
        if key not in edges:
            edges[key] = (matrix(key[0], decode), matrix(key[1], prefill))
    options: dict[int, tuple[Option, ...]] = {}  # decisions that are alike share theirs
    for d in problem.decisions:
        if id(d.options) not in options:
            options[id(d.options)] = tuple(
                replace(o, decode_ns=near(o.decode_ns, decode), prefill_ns=near(o.prefill_ns, prefill))
                for o in d.options
            )
    return replace(
        problem,
        decisions=tuple(replace(d, options=options[id(d.options)]) for d in problem.decisions),
        edges=tuple(Edge(e.source, e.target, *edges[e.decode_ns, e.prefill_ns]) for e in problem.edges),
        mixed=tuple(
            replace(m, decode_ns=near(m.decode_ns, decode), prefill_ns=near(m.prefill_ns, prefill))
            for m in problem.mixed
        ),
        decode_ns=near(problem.decode_ns, decode),
        prefill_ns=near(problem.prefill_ns, prefill),
    )
