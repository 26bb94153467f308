"""One configuration on a GPU: load, measure, unload; run as a child process by gpu.py.

Request (JSON on stdin): engine, model, spec (a LoadSpec as data), threads (counts to try), prompts
(prefill lengths), depths (KV cells before decoding), gen (tokens to decode), coverage (trace routing).
"""

from __future__ import annotations

import ctypes as c
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timed_decode import TimedContext
from runtime.child.serve import serve
from runtime.engine.ggml import Tensor
from runtime.engine.libllama import Engine
from runtime.load import dry_run
from runtime.session.session import Session
from runtime.session.striped import StripedSession, session_for
from runtime.stripes.cuda_driver import Driver

WARM_UP = 4  # decoded tokens that are not counted
REPEATS = 3  # of a prefill


@dataclass(slots=True)
class Run(TimedContext):
    """Tokens are random, from a fixed seed."""

    seed: int = 7

    def tokens(self, count: int) -> Any:
        """The next random tokens; the same sequence for every configuration."""
        self.seed += 1
        return np.random.default_rng(self.seed).integers(0, self.n_vocab, count).astype(np.int32)

    def prefill(self, tokens: Any, n_batch: int) -> int:
        """Evaluate a prompt in batches; nanoseconds."""
        return sum(self.decode(tokens[at : at + n_batch], at) for at in range(0, len(tokens), n_batch))

    def logits(self) -> Any:
        """Logits of the last token."""
        address = self.engine.lib.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array((c.c_float * self.n_vocab).from_address(address)).copy()


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load as asked and measure."""
    engine, driver = Engine.find(request["engine"]), Driver()
    spec, counter = dry_run.from_json(request["spec"]), _Routing(engine)
    primary = driver.retain(0)
    before = _free(driver, primary)
    start = time.perf_counter()
    watch = counter.see if request.get("coverage") else None
    with session_for(engine, Path(request["model"]), spec, on_node=watch) as opened:
        answer: dict[str, Any] = {"load_s": round(time.perf_counter() - start, 3)}
        run = Run(engine, opened.context, opened.n_vocab)
        answer["stripes"] = _held(opened)
        answer["digests"] = _digests(run)
        if request.get("coverage"):
            answer["choices"] = _trace(run, counter, request["coverage"])
        else:
            n_batch = spec.workload.n_batch
            answer["prefill"] = [_prefill(run, n, n_batch) for n in request["prompts"]]
            answer["decode"] = []
            for depth in request["depths"]:
                answer["decode"] += _decode(run, depth, request["threads"], request["gen"], n_batch)
        answer["free_bytes"] = before
        answer["vram_bytes"] = before - _free(driver, primary)
    answer["left_bytes"] = before - _free(driver, primary)
    return answer


def _free(driver: Driver, primary: int) -> int:
    with driver.current(primary):
        return driver.memory()[0]


def _held(session: Session) -> list[dict[str, int]]:
    if not isinstance(session, StripedSession):
        return []
    return [
        {"k": s.experts, "tensors": s.tensors, "device": s.device_bytes, "host": s.host_bytes}
        for s in session.stripes.held()
    ]


def _digests(run: Run) -> list[str]:
    """Digests of the logits after a 40-token prompt and after each of 6 decoded tokens."""
    prompt = np.random.default_rng(3).integers(0, run.n_vocab, 46).astype(np.int32)
    run.clear()
    run.decode(prompt[:40], 0)
    found = [run.logits()]
    for index in range(40, 46):
        run.decode(prompt[index : index + 1], index)
        found.append(run.logits())
    run.clear()
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in found]


def _prefill(run: Run, length: int, n_batch: int) -> dict[str, Any]:
    times: list[int] = []
    for _ in range(REPEATS + 1 if length <= 1024 else 2):
        run.clear()
        times.append(run.prefill(run.tokens(length), n_batch))
    return {"prompt": length, "first_ns": times[0], **_summary(times[1:])}


def _decode(run: Run, depth: int, threads: list[int], gen: int, n_batch: int) -> list[dict[str, Any]]:
    """Tokens one by one behind `depth` cells, for each thread count in turn."""
    run.clear()
    run.seed = 1000
    if depth:
        run.prefill(run.tokens(depth), n_batch)
    found, position = [], depth
    for count in threads:
        run.engine.lib.llama_set_n_threads(run.context, count, count)
        tokens = run.tokens(gen + WARM_UP)
        times = [run.decode(tokens[i : i + 1], position + i) for i in range(len(tokens))]
        position += len(tokens)
        found.append({"depth": depth, "threads": count, **_summary(times[WARM_UP:])})
    return found


def _summary(times: list[int]) -> dict[str, int]:
    low, middle, high = np.percentile(times, (25, 50, 75))
    return {"median_ns": int(middle), "iqr_ns": int(high - low), "mean_ns": int(np.mean(times))}


class _Routing:
    """Counts of chosen experts per layer, from the routers' own output."""

    def __init__(self, engine: Engine) -> None:
        self.counts: dict[int, Any] = {}
        self.engine = engine

    def see(self, address: int, ask: bool, _user: int | None) -> bool:
        tensor = Tensor.from_address(address)
        if not tensor.name.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask:
            layer, rows, span = int(tensor.name.split(b"-")[1]), tensor.ne[1], tensor.nb[1] // 4
            room = np.empty((rows - 1) * span + tensor.ne[0], np.int32)
            self.engine.lib.ggml_backend_tensor_get(address, room.ctypes.data, 0, room.nbytes)
            for row in range(rows):
                chosen = room[row * span : row * span + tensor.ne[0]]
                self.counts.setdefault(layer, np.zeros(1024, np.int64))
                np.add.at(self.counts[layer], chosen, 1)
        return True


def _trace(run: Run, counter: _Routing, n_tokens: int) -> dict[int, list[int]]:
    counter.counts.clear()
    run.seed = 5000
    for at in range(0, n_tokens, 512):
        run.clear()
        run.decode(run.tokens(min(512, n_tokens - at)), 0)
    return {layer: np.trim_zeros(row, "b").tolist() for layer, row in sorted(counter.counts.items())}


if __name__ == "__main__":
    serve(measure)
