"""What llama-server says of each request in its log, into metrics as the lines come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner import llama_server
from planner.llama_server import Drafts
from runtime.metrics.registry import Metrics, Request


def listening(metrics: Metrics) -> Callable[[str], None]:
    """A function that takes the server's log line by line.

    The time until the first token counts from when a slot took the request: what waits in the queue is not in
    the log. Sums of drafts by position come with `--verbosity 4`; without it those of each request are added.
    """
    waiting: dict[tuple[str, str], tuple[int, int]] = {}
    sums: dict[str, Drafts] = {}
    told = Drafts(0, 0, 0)  # of the requests together

    def heard(line: str) -> None:
        nonlocal told
        if said := llama_server.timing(line):
            key = said.slot, said.task
            if said.prompt:
                waiting[key] = said.ns, said.tokens
            else:
                first_ns, prompt = waiting.pop(key, (0, 0))
                metrics.request(Request(prompt, first_ns, said.tokens, said.ns // max(said.tokens, 1)))
        elif found := llama_server.sums(line):
            sums.update(found)
            _tell(metrics, _summed(tuple(sums.values())))
        elif not sums and (drafts := llama_server.requests(line)):
            told = _summed((told, *drafts))
            _tell(metrics, told)

    return heard


def _tell(metrics: Metrics, told: Drafts) -> None:
    metrics.drafted_in_all(told.steps, told.drafted, told.accepted, told.at)


def _summed(drafts: Sequence[Drafts]) -> Drafts:
    """Counts of all together."""
    steps, drafted, accepted = (
        sum(counts) for counts in zip(*((d.steps, d.drafted, d.accepted) for d in drafts), strict=True)
    )
    return Drafts(steps, drafted, accepted, at=tuple(llama_server.by_position(drafts)))
