"""The other way with prompts: host weights computed where they are, not copied to a GPU (op_offload off).

Copying is the engine's own way. It needs a link faster than the CPU computes, and on the GPU a buffer for
the largest weight on its way.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.cost.build_problem import Priced
from planner.passes.record import Chosen, error_ppm, indistinct_ppm
from planner.passes.refusal import forced
from planner.passes.stock_rules import Candidate, translated
from planner.plan.request import SolveOptions
from planner.solver.evaluate import evaluate
from planner.solver.problem import Option
from planner.solver.solve import Limits, solve

_PPM = 10**6


def better(
    streamed: Chosen | None,
    priced: Priced,
    plain: Priced,
    budgets: Mapping[str, int],
    options: SolveOptions,
) -> Chosen | None:
    """The better of a placement with copies, None where there is none, and the best without.

    Where the first really copies, the second must be faster by more than the error of its prompt: the speed
    of a link and that of a CPU do not share their errors, as two placements do.
    """
    start = _same(streamed, priced, plain)
    worth = streamed is None or _faster(priced, plain) or _roomier(streamed, start, plain)
    if not worth or forced(plain, budgets, options) is not None:
        return streamed
    hint = start.solution if start is not None and start.feasible else None
    solved = solve(plain.problem, hint, Limits(options.work_s, deadline=options.deadline))
    if solved.solution is None:
        return streamed
    found = evaluate(plain.problem, solved.solution)
    assert found.feasible, found.violations
    if streamed is not None:
        own = streamed.evaluation.objective_ns
        margin = own * indistinct_ppm(priced.prices.calibration)
        if _copies(streamed, start):
            margin += found.prefill_ns * error_ppm(plain.prices)
        if found.objective_ns + margin // _PPM >= own:
            return streamed
    return Chosen(plain, solved.solution, found, solved.bound_ns, solved.status, "")


def _same(streamed: Chosen | None, priced: Priced, plain: Priced) -> Candidate | None:
    """The placement itself without copies."""
    if streamed is None or streamed.priced is not priced:
        return None
    return translated(plain, Candidate("", "", streamed.solution, None), priced)


def _copies(streamed: Chosen, same: Candidate | None) -> bool:
    """Whether its prompt is computed elsewhere than where the weights are, so that it takes another time."""
    evaluation = same.evaluation if same is not None else None
    return evaluation is not None and evaluation.prefill_ns != streamed.evaluation.prefill_ns


def _faster(priced: Priced, plain: Priced) -> bool:
    """Whether some placement's prompt takes less time without copies to a GPU."""
    for decision, other in zip(priced.problem.decisions, plain.problem.decisions, strict=True):
        streamed = {o.key: o.prefill_ns for o in decision.options}
        if any(o.prefill_ns < streamed.get(o.key, 0) for o in other.options):
            return True
    return False


def _roomier(streamed: Chosen, same: Candidate | None, plain: Priced) -> bool:
    """Whether the room for copies, given up, would hold one more part on some GPU; or there is no GPU yet."""
    if same is None or same.evaluation is None or same.solution is None:
        return True
    pairs = zip(streamed.evaluation.memory, same.evaluation.memory, strict=True)
    freed = {d for d, (with_copies, without) in enumerate(pairs) if without < with_copies}
    devices, memory = plain.problem.devices, same.evaluation.memory
    chosen = zip(plain.problem.decisions, same.solution.chosen(plain.problem), strict=True)
    return any(
        _gains(option, other, d, devices[d].capacity_bytes - memory[d])
        for decision, option in chosen
        for other in decision.options
        for d in freed
    )


def _gains(option: Option, other: Option, device: int, free: int) -> bool:
    more = other.memory[device] - option.memory[device]
    return 0 < more <= free and other.decode_ns < option.decode_ns
