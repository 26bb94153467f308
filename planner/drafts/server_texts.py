"""What llama-server says of its drafts: in its log and in its /metrics.

Four texts, seen of b10068 and b11549 on the same requests, with the same counts: a line a request
("draft acceptance = …"); a line a request with each position's rate (verbosity 4); a line a step
("accepted 3/4 draft tokens", verbosity 5); the counters of /metrics (b10434 and later). The one that tells
most is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner import llama_server
from planner.drafts.acceptance import Acceptance, NoAcceptance, Step, counted, of_steps, of_totals
from planner.llama_server import MOST, whole

_STEP = re.compile(r"id +(\d+) \| task (\d+) \| accepted +(\d+)/ *(\d+) draft tokens", re.ASCII)


def acceptance_in(text: str, path: str) -> Acceptance:
    """Acceptance by position, as far as a log or a page of metrics tells; raises NoAcceptance with `path`."""
    steps = [step for one in steps_in(text).values() for step in one]
    statistics = _statistics(text)
    if steps:
        found = of_steps(steps)
        # A step without a draft writes no line; n-grams often find none.
        return found.scaled(*statistics[0]) if statistics else found
    if metrics := _metrics(text):
        return metrics
    if statistics:
        return statistics[1]
    if requests := llama_server.requests(text):
        # One guess each is the most steps that a request can have had which tells none.
        n_steps = sum(each.steps or each.drafted for each in requests)
        return of_totals(sum(r.accepted for r in requests), sum(r.drafted for r in requests), n_steps)
    raise NoAcceptance(
        path,
        "tells nothing of drafted tokens: give a log of llama-server that drafted, or its /metrics "
        "(started with --metrics)",
    )


def steps_in(text: str) -> Mapping[tuple[int, int], tuple[Step, ...]]:
    """The verified drafts of each slot's task, in their order; empty for a log without single steps."""
    found: dict[tuple[int, int], list[Step]] = {}
    for slot, task, accepted, drafted in _STEP.findall(text):
        found.setdefault((whole(slot), whole(task)), []).append(Step(whole(drafted), whole(accepted)))
    return {key: tuple(steps) for key, steps in found.items()}


def _statistics(text: str) -> tuple[tuple[int, int], Acceptance] | None:
    """Drafts and steps, and the acceptance."""
    sums = llama_server.sums(text).values()
    asked, drafts = sum(each.asked for each in sums), sum(each.steps for each in sums)
    if not drafts:
        return None
    if not any(each.at for each in sums):
        accepted, drafted = sum(each.accepted for each in sums), sum(each.drafted for each in sums)
        return (drafts, asked), of_totals(accepted, drafted, asked)
    return (drafts, asked), counted(llama_server.by_position(sums), drafts).scaled(drafts, asked)


def _metrics(text: str) -> Acceptance | None:
    figures = {key: min(round(value), MOST) for key, value in llama_server.figures(text).items()}
    steps = figures.get(("spec_decode_num_drafts_total", ""), 0)
    if not steps:
        return None
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    if at := {int(position): value for (key, position), value in figures.items() if key == name and position}:
        return counted([at.get(n, 0) for n in range(max(at) + 1)], steps)
    accepted = figures.get(("spec_decode_num_accepted_tokens_total", ""), 0)
    return of_totals(accepted, figures.get(("spec_decode_num_draft_tokens_total", ""), 0), steps)
