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
    requests: list[Drafts] = []  # summed up: one at most

    def heard(line: str) -> None:
        if said := llama_server.timing(line):
            key = said.slot, said.task
            if said.prompt:
                waiting[key] = said.ns, said.tokens
            else:
                first_ns, prompt = waiting.pop(key, (0, 0))
                metrics.request(Request(prompt, first_ns, said.tokens, said.ns // max(said.tokens, 1)))
        elif found := llama_server.sums(line):
            sums.update(found)
            _tell(metrics, tuple(sums.values()))
        elif not sums and (drafts := llama_server.requests(line)):
            requests[:] = [_summed([*requests, *drafts])]
            _tell(metrics, requests)

    return heard


def _tell(metrics: Metrics, drafts: Sequence[Drafts]) -> None:
    all_of_it = _summed(drafts)
    metrics.drafted_in_all(all_of_it.steps, all_of_it.drafted, all_of_it.accepted, all_of_it.at)


def _summed(drafts: Sequence[Drafts]) -> Drafts:
    """Counts of all together."""
    steps, drafted, accepted = (
        sum(counts) for counts in zip(*((d.steps, d.drafted, d.accepted) for d in drafts), strict=True)
    )
    return Drafts(steps, drafted, accepted, at=tuple(llama_server.by_position(drafts)))
