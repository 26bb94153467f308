"""A contender that stays loaded: one child process that measures each time it is asked.

The parent's side is `Live`, a Session of paired.py; the child's is `python -m benchmarks.rounds.live`.
Tokens are a stream of the model's own habits (profiler.routed), the same for every contender in the same
round, so that caches meet the locality the model was made for; a model without habits is given random
tokens.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds import paired
from benchmarks.timed_decode import TimedContext
from planner.errors import AtsplanError, EngineProblem
from planner.plan.load_spec import LoadSpec
from runtime.child import process
from runtime.child.ask import Relayed
from runtime.child.environment import environment, python
from runtime.engine.libllama import Engine
from runtime.load import dry_run

Json = dict[str, Any]
WARM_UP = 8  # decoded tokens that are not timed
DIGEST_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Work:
    """What a round measures."""

    prompts: tuple[int, ...] = (512,)
    depth: int = 512  # tokens of the stream before decoding
    gen: int = 64
    threads: int = 0  # 0: as the spec says
    seqs: int = 1  # that arrive together, and are decoded together


@dataclass(slots=True)
class Live(paired.Session):
    """A loaded model in a child process; entering loads it."""

    engine: str
    model: Path
    spec: LoadSpec
    work: Work = Work()
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    loaded: Json = field(default_factory=dict)

    def __enter__(self) -> Live:
        self._process = subprocess.Popen(
            python("-m", "benchmarks.rounds.live"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment(), **self.environment},
            start_new_session=True,
            preexec_fn=process.tie(),
        )
        request = {"engine": self.engine, "model": str(self.model), "spec": dry_run.to_json(self.spec)}
        try:
            self.loaded = self._ask(request)
        except AtsplanError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            process.end(self._process)
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # a child that died before it read
                        stream.close()
            self._process = None

    def measure(self, round_: int) -> Json:
        """`decode_ns` (median of a step), `prefill<N>_ns`, `vram_bytes`, `digest` of the logits.

        Of several sequences that arrive together also `first<N>_ns` and `last<N>_ns`: until the first and the
        last of them have their first token.
        """
        asked = asdict(self.work)
        return {**self.loaded, **self._ask({**asked, "seed": round_ + 1})}

    def _ask(self, request: Mapping[str, Any]) -> Json:
        assert self._process is not None and self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineProblem(self.engine, process.death(self._process.wait(), ())) from None
        answer: Json = json.loads(self._process.stdout.readline() or "null") or {}
        if not answer:
            raise EngineProblem(self.engine, process.death(self._process.wait(), ()))
        if "problem" in answer:
            raise Relayed(self.engine, answer["problem"])
        return answer


# Below here: the child.


class _Run(TimedContext):
    """Tokens follow the habits of the model, where it has some."""

    def __init__(self, engine: Engine, context: Any, n_vocab: int, model: Path) -> None:
        super().__init__(engine, context, n_vocab)
        self._habits = _habits(model)

    def tokens(self, count: int, seed: int) -> Any:
        """A stream of the model's habits; the same for the same seed."""
        if self._habits is None:
            return np.random.default_rng(seed).integers(0, self.n_vocab, count).astype(np.int32)
        from profiler.routed.stream import ids_of

        return ids_of(self._habits, count, seed).astype(np.int32)

    def prefill(self, tokens: Any) -> int:
        """Evaluate a prompt from an empty context; nanoseconds."""
        self.clear()
        size = self.engine.lib.llama_n_batch(self.context)
        return sum(self.decode(tokens[at : at + size], at) for at in range(0, len(tokens), size))

    def arrivals(self, prompts: Any) -> list[int]:
        """Prompts of sequences 0, 1, … that are there at once; nanoseconds until each has its first token.

        Batches are filled with one sequence after the other, as a server fills its own.
        """
        self.clear()
        size, done = self.engine.lib.llama_n_batch(self.context), list[int]()
        lengths = [len(one) for one in prompts]
        tokens = np.concatenate(prompts)
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        wanted = np.zeros(len(tokens), np.int8)
        wanted[np.cumsum(lengths) - 1] = 1
        passed = 0
        for at in range(0, len(tokens), size):
            rows = slice(at, at + size)
            passed += self.decode_rows(*(row[rows].copy() for row in (tokens, positions, sequences, wanted)))
            done += [passed] * int(wanted[rows].sum())
        return done

    def together(self, tokens: Any, position: int) -> int:
        """One step of as many sequences as there are tokens, all at a position; nanoseconds."""
        n = len(tokens)
        positions = np.full(n, position, np.int32)
        return self.decode_rows(tokens.copy(), positions, np.arange(n, dtype=np.int32), np.ones(n, np.int8))

    def digest(self) -> str:
        """Of the last logits."""
        address = self.engine.lib.llama_get_logits_ith(self.context, -1)
        row = np.ctypeslib.as_array((c.c_float * self.n_vocab).from_address(address))
        return hashlib.sha256(row.tobytes()).hexdigest()[:16]


def _habits(model: Path) -> Any:
    from profiler.routed.codes import UnfitRouting
    from profiler.routed.model import habits_of

    try:
        return habits_of(model)
    except UnfitRouting:
        return None


def measured(run: _Run, request: Json) -> Json:
    """One round: prompts, then tokens one by one behind `depth` others."""
    seed, gen, depth = request["seed"], request["gen"], request["depth"]
    if count := request["threads"]:
        run.engine.lib.llama_set_n_threads(run.context, count, count)
    if request["seqs"] > 1:
        return _measured_together(run, request)
    found: Json = {}
    for length in request["prompts"]:
        found[f"prefill{length}_ns"] = run.prefill(run.tokens(length, 1000 + seed))
    stream = run.tokens(depth + gen + WARM_UP, 2000 + seed)
    if depth:
        run.prefill(stream[:depth])
    else:
        run.clear()
    times = [run.decode(stream[at : at + 1], at) for at in range(depth, len(stream))][WARM_UP:]
    run.prefill(run.tokens(DIGEST_TOKENS, 1))
    return found | {"decode_ns": int(np.median(times)), "digest": run.digest()}


def _measured_together(run: _Run, request: Json) -> Json:
    """One round of several sequences: prompts that arrive at once, then a token of each in every step."""
    seed, gen, depth, seqs = (request[name] for name in ("seed", "gen", "depth", "seqs"))
    found: Json = {}
    for length in request["prompts"]:
        done = run.arrivals([run.tokens(length, 1000 * n + seed) for n in range(1, seqs + 1)])
        found |= {f"first{length}_ns": done[0], f"last{length}_ns": done[-1]}
    count = depth + gen + WARM_UP
    streams = np.stack([run.tokens(count, 1000 * (seqs + n) + seed) for n in range(1, seqs + 1)])
    if depth:
        run.arrivals(list(streams[:, :depth]))
    else:
        run.clear()
    times = [run.together(streams[:, at], at) for at in range(depth, count)][WARM_UP:]
    run.prefill(run.tokens(DIGEST_TOKENS, 1))
    return found | {"decode_ns": int(np.median(times)), "digest": run.digest()}


def main() -> None:
    """Load what the first line asks for, then answer a line with a line."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine may print

    def send(answer: Json) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    try:
        _serve(send)
    except AtsplanError as problem:
        send({"problem": str(problem)})


def _serve(send: Any) -> None:
    from runtime.session.striped import session_for

    request = json.loads(sys.stdin.readline())
    engine, spec = Engine.find(request["engine"] or None), dry_run.from_json(request["spec"])
    free = _free_bytes(spec)
    before, start = free() if free else 0, time.perf_counter()
    model = Path(request["model"])
    with session_for(engine, model, spec) as session:
        run = _Run(engine, session.context, session.n_vocab, model)
        run.prefill(run.tokens(DIGEST_TOKENS, 1))  # buffers that only a first run takes
        load_s = round(time.perf_counter() - start, 2)
        vram = before - free() if free else _accounted(engine, session.context, spec)
        send({"load_s": load_s, "vram_bytes": vram, "vram_by": "driver" if free else "engine"})
        for line in sys.stdin:
            send(measured(run, json.loads(line)))


def _accounted(engine: Engine, context: Any, spec: LoadSpec) -> int:
    """Bytes on the spec's devices by the engine's own account, where no driver tells."""
    if not spec.devices:
        return 0
    found = dry_run.by_device(engine, dry_run.breakdown(engine, context))
    sizes = [sizes for name, sizes in found.items() if name in spec.devices]
    return sum(one.model + one.context + one.compute for one in sizes)


def _free_bytes(spec: LoadSpec) -> Any:
    """A function that tells the free memory of the first CUDA device; None for a spec without one."""
    if not any(name.startswith("CUDA") for name in spec.devices):
        return None
    from runtime.stripes.cuda_driver import Driver

    driver = Driver()
    primary = driver.retain(0)

    def free() -> int:
        with driver.current(primary):
            return driver.memory()[0]

    return free


if __name__ == "__main__":
    main()
