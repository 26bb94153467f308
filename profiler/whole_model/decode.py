"""Whole-model runs in a child: `python -m profiler.whole_model.decode`, a request in, a JSON line a run.

Each run loads the model anew, throws its first pass away and times the next ones, token by token. The
tokens are given, not sampled: they differ, so that a model of random weights does not send all of them to
the same experts, and every placement computes the same ones.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from time import perf_counter_ns

from planner.errors import AtsplanError, EngineProblem
from runtime.child.serve import Message as Line
from runtime.child.serve import serve_lines
from runtime.engine.libllama import Batch, Engine
from runtime.engine.page_reads import read_bytes
from runtime.load.dry_run import from_json
from runtime.session.session import Session

WARM_TOKENS = 4  # decoded before those that count: the graph is new, clocks are low


def runs(request: Line) -> Iterator[Line]:
    """A line for each run that is asked for."""
    engine = Engine.find(request["engine"])
    for run in request["runs"]:
        yield {"kind": "start", "key": run["key"]}
        try:
            yield {"kind": "run", "key": run["key"], **_run(engine, Path(request["model"]), run, request)}
        except AtsplanError as problem:
            yield {"kind": "run", "key": run["key"], "skipped": str(problem)}


def _run(engine: Engine, model: Path, run: Line, request: Line) -> Line:
    draw = Random(request["seed"])
    started = perf_counter_ns()
    with Session(engine, model, from_json(run["spec"])) as session:
        load_ns = perf_counter_ns() - started
        tokens = [
            draw.randrange(session.n_vocab) for _ in range(request["prompt"] + request["gen"] + WARM_TOKENS)
        ]
        prompt, rest = tokens[: request["prompt"]], tokens[request["prompt"] :]
        prefill, decode, before = [], [], 0
        for repeat in range(request["repeats"] + 1):
            session.clear()
            first = timed(session, prompt, 0)
            each = [timed(session, [token], len(prompt) + i) for i, token in enumerate(rest)]
            if repeat:  # the first pass allocates, uploads and captures
                prefill.append(first)
                decode += each[WARM_TOKENS:]
            else:
                before = read_bytes()
        paged = read_bytes() - before
    return {"decode_ns": decode, "prefill_ns": prefill, "load_ns": load_ns, "paged_bytes": paged}


def timed(session: Session, tokens: Sequence[int], start: int) -> int:
    """Nanoseconds to decode tokens at consecutive positions and have the last one's logits."""
    lib, n = session.engine.lib, len(tokens)
    sequence = (c.c_int32 * 1)(0)
    ids, positions = (c.c_int32 * n)(*tokens), (c.c_int32 * n)(*range(start, start + n))
    counts, sequences = (c.c_int32 * n)(*[1] * n), (c.c_void_p * n)(*[c.addressof(sequence)] * n)
    wanted = (c.c_int8 * n)(*[0] * (n - 1), 1)
    pointers = [c.cast(array, c.c_void_p) for array in (ids, positions, counts, sequences, wanted)]
    batch = Batch(n, pointers[0], None, *pointers[1:])
    begin = perf_counter_ns()
    status = lib.llama_decode(session.context, batch)
    lib.llama_get_logits_ith(session.context, -1)  # waits for the devices
    if status:
        raise EngineProblem(session.engine.label, f"decoding failed with status {status}")
    return perf_counter_ns() - begin


if __name__ == "__main__":
    serve_lines(runs)
