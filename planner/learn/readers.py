"""Measurements out of the files that other commands and tools write.

JSON of `atsplan run` and `bench`, of llama-bench (-o json); the log of llama-server, its /metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planner.errors import FileProblem
from planner.learn.llama_bench import bench_test
from planner.learn.samples import Kind, Sample

_MS = 1_000_000
_MOST_NS = 1 << 53
_LAUNCH = re.compile(r"launch_slot_: id +(\d+) \| task (\d+) \|")
_RELEASE = re.compile(r"release: id +(\d+) \| task (\d+) \|")
_PROMPT = re.compile(
    r"print_timing: id +(\d+) \| task (\d+) \| +prompt eval time = +([0-9.]+) ms / +(\d+) tokens"
)
_TOKENS = re.compile(r"print_timing: id +(\d+) \| task (\d+) \| +eval time = +([0-9.]+) ms / +(\d+) tokens")
_METRIC = re.compile(r"^llamacpp:(\w+) ([0-9.e+]+)\s*$", re.M)
_FEW = 32  # tokens of a prompt: below it a batch is computed as tokens are, not as prompts
_KNOWN = "the JSON of atsplan run, bench or llama-bench, or the log or /metrics of llama-server"


def samples_in(text: str, path: str) -> tuple[Sample, ...]:
    """The measurements of a file; FileProblem where it holds none of a known kind."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            found = tuple(_of_json(json.loads(text)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
            raise FileProblem(path, f"not read as measurements ({problem}): expected {_KNOWN}") from None
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
    return min(max(round(float(value)), 0), _MOST_NS)


def _count(value: Any) -> int:
    return min(max(int(value), 0), _MOST_NS)


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
    running: dict[tuple[str, str], int] = {}  # to the most that ran beside it, itself included
    fewest: dict[tuple[str, str], int] = {}
    asked: dict[tuple[str, str], int] = {}
    waiting: list[tuple[tuple[str, str], Callable[[int, bool], Sample]]] = []
    seen = 0
    for line in text.splitlines():
        if match := _LAUNCH.search(line):
            running[match[1], match[2]] = 0
        elif match := _PROMPT.search(line):
            key, ns, tokens = (match[1], match[2]), _ns(float(match[3]) * _MS), _count(match[4])
            asked[key] = tokens
            if tokens >= _FEW:
                waiting.append((key, _later(Kind.PROMPT, ns, tokens, 0, seen == 0)))
        elif match := _TOKENS.search(line):
            key, made = (match[1], match[2]), _count(match[4])
            ns = _ns(float(match[3]) * _MS) // max(made, 1)
            waiting.append((key, _later(Kind.TOKEN, ns, made, asked.get(key, 0) + made // 2, seen == 0)))
        for key in running:
            running[key] = max(running[key], len(running))
            fewest[key] = min(fewest.get(key, len(running)), len(running))
        if match := _RELEASE.search(line):
            key = match[1], match[2]
            most = running.pop(key, 1)
            for other, make in [each for each in waiting if each[0] == key]:
                waiting.remove((other, make))
                # Others that came or went while it ran: of no one number of sequences.
                yield make(most, fewest.get(key, most) != most)
            seen += 1


def _later(kind: Kind, ns: int, tokens: int, depth: int, cold: bool) -> Callable[[int, bool], Sample]:
    def made(lanes: int, contended: bool) -> Sample:
        return Sample(kind, ns, tokens, depth, lanes, warm_up=cold, contended=contended)

    return made


def _of_metrics(text: str) -> Iterator[Sample]:
    """The sums of a server since it started: a mean with its first pass in it, so that it counts once."""
    sums = dict(_METRIC.findall(text))
    made, seconds = (float(sums.get(f"tokens_predicted{tail}", 0)) for tail in ("_total", "_seconds_total"))
    busy = float(sums.get("n_busy_slots_per_decode", 1)) > 1.2
    if made >= 1 and seconds > 0:
        yield Sample(Kind.TOKEN, _ns(seconds * 1e9 / made), _count(made), contended=busy)
