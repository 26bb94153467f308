"""Measurements out of the files that other commands and tools write.

JSON of `atsplan run` and `bench`, of llama-bench (-o json); the log of llama-server, its /metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planner.constants import MAX_SEQUENCES
from planner.errors import FileProblem
from planner.learn.llama_bench import another_model, bench_test
from planner.learn.samples import Kind, Sample
from planner.llama_server import MOST, figures, nanoseconds, timing, whole
from planner.model.inventory import Inventory

_LAUNCH = re.compile(r"launch_slot_: id +(\d+) \| task (\d+) \|", re.ASCII)
_RELEASE = re.compile(r"release: id +(\d+) \| task (\d+) \|", re.ASCII)
_FEW = 32  # tokens of a prompt: below it a batch is computed as tokens are, not as prompts
_KNOWN = "the JSON of atsplan run, bench or llama-bench, or the log or /metrics of llama-server"


def samples_in(text: str, path: str, inventory: Inventory | None = None) -> tuple[Sample, ...]:
    """The measurements of a file.

    FileProblem where it holds none of a known kind, or says another size of its model than `inventory` has.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = json.loads(text)
            found = tuple(_of_json(data))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
            raise FileProblem(path, f"not read as measurements ({problem}): expected {_KNOWN}") from None
        rows = data if isinstance(data, list) else []
        sizes = {row["model_size"] for row in rows if isinstance(row.get("model_size"), int)}
        for size in sorted(sizes):
            if inventory is not None and (why := another_model(size, inventory)):
                raise FileProblem(path, why)
    elif "print_timing" in text:
        found = tuple(_of_log(text))
    else:
        found = tuple(_of_metrics(text))
    if not found:
        raise FileProblem(path, f"holds no measurements: expected {_KNOWN}")
    return found


def _of_json(data: Any) -> Iterator[Sample]:
    if isinstance(data, list):
        for test in data:
            yield from _llama_bench(test)
    elif "contenders" in data:
        yield from _bench(data)
    else:
        yield from _run(data)


def _ns(value: Any) -> int:
    return nanoseconds(float(value))


def _count(value: Any) -> int:
    return min(max(int(value), 0), MOST)


def _run(data: Mapping[str, Any]) -> Iterator[Sample]:
    """One process, one request: its tokens are warm after the prompt, its prompt is not."""
    prompt, made = _count(data["prompt_tokens"]), len(data["tokens"])
    yield Sample(Kind.PROMPT, _ns(data["prefill_ns"]), prompt, warm_up=True)
    yield Sample(Kind.TOKEN, _ns(data["tpot_ns"]), made, prompt + made // 2)


def _bench(data: Mapping[str, Any]) -> Iterator[Sample]:
    """The plan's own arm, measured in rounds, each a process that was warmed up."""
    plan = next((arm for arm in data["contenders"] if arm["name"] == "plan"), None)
    if plan is None:
        return
    busy = bool(plan.get("unsettled"))
    for kind, key in ((Kind.TOKEN, "decode_ns"), (Kind.PROMPT, "prefill_ns")):
        for prompt, each in plan[key].items():
            tokens = _count(prompt)
            yield Sample(
                kind,
                _ns(each["median"]),
                max(tokens, 1),
                tokens,
                count=_count(each["samples"]),
                contended=busy,
            )


def _llama_bench(test: Mapping[str, Any]) -> Iterator[Sample]:
    """A test of prompt or generation alone; llama-bench warms up unless told not to."""
    what = bench_test(test)
    if not what.alone:
        return
    times = test.get("samples_ns") or [test["avg_ns"]]
    for n, ns in enumerate(times):
        cold = n == 0 and bool(test.get("no_warmup"))
        if what.gen:
            yield Sample(Kind.TOKEN, _ns(ns) // what.gen, what.gen, what.at, warm_up=cold)
        elif what.prompt >= _FEW:
            yield Sample(Kind.PROMPT, _ns(ns), what.prompt, what.at, warm_up=cold)


def _of_log(text: str) -> Iterator[Sample]:
    """Each request of a server: the first is cold; how many ran at the same time is told by the slots."""
    slots = _Slots()
    asked: dict[tuple[str, str], int] = {}
    waiting: dict[tuple[str, str], list[Callable[[int, bool], Sample]]] = {}
    seen = 0
    for line in text.splitlines():
        if match := _LAUNCH.search(line):
            slots.launch(match[1], match[2])
        elif match := _RELEASE.search(line):
            most, fewest = slots.release(match[1], match[2])
            for make in waiting.pop((match[1], match[2]), []):
                # Others that came or went while it ran: of no one number of sequences.
                yield make(most, fewest != most)
            seen += 1
        elif said := timing(line):
            key, tokens, cold = (said.slot, said.task), said.tokens, seen == 0
            if not said.prompt:
                depth = asked.get(key, 0) + tokens // 2
                make = _later(Kind.TOKEN, said.ns // max(tokens, 1), tokens, depth, cold)
                waiting.setdefault(key, []).append(make)
                continue
            asked[key] = tokens
            if tokens >= _FEW:
                waiting.setdefault(key, []).append(_later(Kind.PROMPT, said.ns, tokens, 0, cold))


class _Slots:
    """How many requests a server computes at once, as its slots take them and let them go."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[str, int]] = {}  # task, and its launch's place in `_counts`
        self._counts: list[int] = []  # slots that are taken, after every launch and release

    def launch(self, slot: str, task: str) -> None:
        """A slot has one request at a time: what it had before has ended, whatever the log lacks."""
        if whole(slot) < MAX_SEQUENCES:
            self._taken[whole(slot)] = task, len(self._counts)
            self._counts.append(len(self._taken))

    def release(self, slot: str, task: str) -> tuple[int, int]:
        """The most and the fewest that ran while this one did, itself included."""
        there, since = self._taken.get(whole(slot), ("", 0))
        if there != task:
            return 1, 1
        del self._taken[whole(slot)]
        while_it_ran = self._counts[since:]
        self._counts.append(len(self._taken))
        return max(while_it_ran), min(while_it_ran)


def _later(kind: Kind, ns: int, tokens: int, depth: int, cold: bool) -> Callable[[int, bool], Sample]:
    def made(lanes: int, contended: bool) -> Sample:
        return Sample(kind, ns, tokens, depth, lanes, warm_up=cold, contended=contended)

    return made


def _of_metrics(text: str) -> Iterator[Sample]:
    """The sums of a server since it started: a mean with its first pass in it, so that it counts once."""
    said = {name: value for (name, position), value in figures(text).items() if not position}
    made, seconds = (said.get(f"tokens_predicted{tail}", 0.0) for tail in ("_total", "_seconds_total"))
    busy = said.get("n_busy_slots_per_decode", 1.0) > 1.2
    if made >= 1 and seconds > 0:
        yield Sample(Kind.TOKEN, nanoseconds(seconds * 1e9 / made), _count(made), contended=busy)
