"""One configuration on a GPU: load, measure, unload; run as a child process by gpu.py.

Request (JSON on stdin): engine, model, spec (a LoadSpec as data), threads (counts to try), prompts
(prefill lengths), depths (KV cells before decoding), gen (tokens to decode), coverage (trace routing).
"""

from __future__ import annotations

import ctypes as c
import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import child, dryrun, load
from runtime.cuda import Driver
from runtime.ggml import Handle, Tensor
from runtime.libllama import Batch, Engine
from runtime.stripe import Stripes

WARM_UP = 4  # decoded tokens that are not counted
REPEATS = 3  # of a prefill


@dataclass(slots=True)
class Session:
    """A loaded model under measurement; tokens are random, from a fixed seed."""

    engine: Engine
    context: Handle
    n_vocab: int
    seed: int = 7

    def tokens(self, count: int) -> Any:
        """The next random tokens; the same sequence for every configuration."""
        self.seed += 1
        return np.random.default_rng(self.seed).integers(0, self.n_vocab, count).astype(np.int32)

    def clear(self) -> None:
        """Empty the KV cache."""
        lib = self.engine.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def decode(self, tokens: Any, position: int) -> int:
        """Evaluate tokens from a position on, logits for the last one; nanoseconds."""
        n = len(tokens)
        positions = np.arange(position, position + n, dtype=np.int32)
        one = (c.c_int32 * 1)(0)
        counts, wanted = np.ones(n, np.int32), np.zeros(n, np.int8)
        wanted[-1] = 1
        sequences = (c.c_void_p * n)(*[c.addressof(one)] * n)
        batch = Batch(
            n,
            tokens.ctypes.data,
            None,
            positions.ctypes.data,
            counts.ctypes.data,
            c.addressof(sequences),
            wanted.ctypes.data,
        )
        start = time.perf_counter_ns()
        status = self.engine.lib.llama_decode(self.context, batch)
        self.engine.lib.llama_synchronize(self.context)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return time.perf_counter_ns() - start

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
    spec, kept = dryrun.from_json(request["spec"]), load.Kept()
    primary = driver.retain(0)
    with ExitStack() as stack:
        stack.enter_context(driver.current(primary))
        before = driver.memory()[0]
        stripes = stack.enter_context(Stripes(engine.ggml))
        own = {b: stripes.buffer_type(b) for _, b in spec.overrides if b.startswith("stripe:")}
        start = time.perf_counter()
        model = stack.enter_context(
            load.model(engine, Path(request["model"]), spec, load.model_params(engine, spec, kept, own=own))
        )
        stripes.check()
        load_s = time.perf_counter() - start
        counter = _Routing()
        observe = counter.see if request.get("coverage") else None
        counter.engine = engine
        context = stack.enter_context(
            load.context(engine, model, load.context_params(engine, spec, kept, observe))
        )
        n_vocab = engine.lib.llama_vocab_n_tokens(engine.lib.llama_model_get_vocab(model))
        session = Session(engine, context, n_vocab)
        answer: dict[str, Any] = {"load_s": round(load_s, 3), "stripes": _held(stripes)}
        answer["digests"] = _digests(session)
        if request.get("coverage"):
            answer["choices"] = _trace(session, counter, request["coverage"])
        else:
            answer["prefill"] = [_prefill(session, n, spec.workload.n_batch) for n in request["prompts"]]
            answer["decode"] = [
                _decode(session, depth, threads, request["gen"], spec.workload.n_batch)
                for depth in request["depths"]
                for threads in request["threads"]
            ]
        answer["vram_bytes"] = before - driver.memory()[0]
    answer["left_bytes"] = _left(driver, primary, before)
    return answer


def _left(driver: Driver, primary: int, before: int) -> int:
    with driver.current(primary):
        return before - driver.memory()[0]


def _held(stripes: Stripes) -> list[dict[str, Any]]:
    return [
        {"k": s.experts, "tensors": s.tensors, "device": s.device_bytes, "host": s.host_bytes}
        for s in stripes.held()
    ]


def _digests(session: Session) -> list[str]:
    """Digests of the logits after a 40-token prompt and after each of 6 decoded tokens."""
    prompt = np.random.default_rng(3).integers(0, session.n_vocab, 46).astype(np.int32)
    session.clear()
    session.decode(prompt[:40], 0)
    found = [session.logits()]
    for index in range(40, 46):
        session.decode(prompt[index : index + 1], index)
        found.append(session.logits())
    session.clear()
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in found]


def _prefill(session: Session, length: int, n_batch: int) -> dict[str, Any]:
    times = []
    for _ in range(REPEATS + 1):
        session.clear()
        times.append(session.prefill(session.tokens(length), n_batch))
    return {"prompt": length, "first_ns": times[0], **_summary(times[1:])}


def _decode(session: Session, depth: int, threads: int, gen: int, n_batch: int) -> dict[str, Any]:
    session.engine.lib.llama_set_n_threads(session.context, threads, threads)
    session.clear()
    session.seed = 1000
    if depth:
        session.prefill(session.tokens(depth), n_batch)
    tokens = session.tokens(gen + WARM_UP)
    times = [session.decode(tokens[i : i + 1], depth + i) for i in range(gen + WARM_UP)]
    return {"depth": depth, "threads": threads, **_summary(times[WARM_UP:])}


def _summary(times: list[int]) -> dict[str, int]:
    low, middle, high = np.percentile(times, (25, 50, 75))
    return {"median_ns": int(middle), "iqr_ns": int(high - low), "mean_ns": int(np.mean(times))}


class _Routing:
    """Counts of chosen experts per layer, from the routers' own output."""

    def __init__(self) -> None:
        self.counts: dict[int, Any] = {}
        self.engine: Engine | None = None

    def see(self, address: int, ask: bool, _user: int | None) -> bool:
        tensor = Tensor.from_address(address)
        if not tensor.name.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask and self.engine is not None:
            layer, rows, span = int(tensor.name.split(b"-")[1]), tensor.ne[1], tensor.nb[1] // 4
            room = np.empty((rows - 1) * span + tensor.ne[0], np.int32)
            self.engine.lib.ggml_backend_tensor_get(address, room.ctypes.data, 0, room.nbytes)
            for row in range(rows):
                chosen = room[row * span : row * span + tensor.ne[0]]
                self.counts.setdefault(layer, np.zeros(1024, np.int64))
                np.add.at(self.counts[layer], chosen, 1)
        return True


def _trace(session: Session, counter: _Routing, n_tokens: int) -> dict[int, list[int]]:
    counter.counts.clear()
    session.seed = 5000
    for at in range(0, n_tokens, 512):
        session.clear()
        session.decode(session.tokens(min(512, n_tokens - at)), 0)
    return {layer: np.trim_zeros(row, "b").tolist() for layer, row in sorted(counter.counts.items())}


if __name__ == "__main__":
    child.serve(measure)
