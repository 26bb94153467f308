"""Watches a model route: a cb_eval on `ffn_moe_topk-N` while it reads prompts and writes answers.

The model runs in a child process that reports as it goes: `progress` while it works, `rows` after each
prompt, `cost` at the end.
"""

from __future__ import annotations

import ctypes as c
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import EngineProblem, InputError
from planner.plan.load_spec import LoadSpec
from planner.routing import trace as traces
from planner.routing.trace import Row, Trace
from runtime.child.ask import Limits, stream
from runtime.child.serve import Emit, Message, serve_events
from runtime.engine.ggml import Tensor
from runtime.load import dry_run

if TYPE_CHECKING:
    from runtime.engine.libllama import Engine
    from runtime.session.session import Session

_TOPK = b"ffn_moe_topk-"
_LAYER = re.compile(rb"ffn_moe_topk-(\d+)")
_COST_TOKENS = 24  # decoded once more without the callback, to tell what watching costs


@dataclass(frozen=True, slots=True)
class Prompt:
    """One source of routing."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Options:
    """What to generate after each prompt."""

    gen: int = 64
    temperature: float = 0.8  # greedy answers of small models run in circles, and so would their routing
    seed: int = 1
    chat: bool = False  # put the prompt into the model's chat template
    cost: bool = True  # load once more without the callback to measure what watching costs


@dataclass(frozen=True, slots=True)
class Cost:
    """Decode time of the same tokens with and without the callback; 0 when not measured."""

    watched_ns: int
    plain_ns: int

    @property
    def share(self) -> float:
        """Extra time as a share of the plain time."""
        return self.watched_ns / self.plain_ns - 1 if self.plain_ns else 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the child is: prompt `prompt` (from 0), tokens made of it, and the newest text."""

    prompt: int
    tokens: int
    text: str


def trace(
    engine: str | None,
    model: Path,
    spec: LoadSpec,
    prompts: Sequence[Prompt],
    n_expert: int,
    options: Options | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Trace, Cost]:
    """Route prompts through a model. Ids are positions in the file: permuted files need mapping back.

    Raises EngineProblem when the engine cannot load or dies, InputError for prompts it cannot take.
    """
    options = options or Options()
    request = {
        "engine": engine,
        "model": str(model.resolve()),
        "spec": dry_run.to_json(spec),
        "prompts": [(p.name, p.text) for p in prompts],
        "options": {name: getattr(options, name) for name in Options.__dataclass_fields__},
    }
    rows: list[Row] = []
    cost = Cost(0, 0)
    limits = Limits(total_s=math.inf)  # as long as the prompts ask for
    with closing(stream("profiler.routing_trace", request, engine or "default", limits)) as events:
        for event in events:
            if "progress" in event:
                on_progress(Progress(*event["progress"]))
            elif "rows" in event:
                rows += [(s, bool(d), step, layer, tuple(ids)) for s, d, step, layer, ids in event["rows"]]
            elif "cost" in event:
                cost = Cost(*event["cost"])
    if not rows:
        raise EngineProblem(engine or "default", "the model ran, but no node ffn_moe_topk-N was computed")
    largest = max(max(row[4]) for row in rows)
    return traces.make("", max(n_expert, largest + 1), [p.name for p in prompts], rows), cost


# Below here: the child.


@dataclass(slots=True)
class Watcher:
    """The callback. It must always answer true when a node is done: false skips the rest of the graph."""

    engine: Engine
    prefill_passes: int = 0
    source: int = 0
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    _passes: int = -1
    _last: int = 1 << 30

    def begin(self, source: int, prefill_passes: int) -> None:
        """The next passes belong to this prompt; the first so many of them read it."""
        self.source, self.prefill_passes = source, prefill_passes
        self.rows, self._passes, self._last = [], -1, 1 << 30

    def __call__(self, address: int, ask: bool, _user: int | None) -> bool:
        tensor = Tensor.from_address(address)
        if ask:
            return bool(tensor.name.startswith(_TOPK))
        try:
            self._take(tensor, address)
        except Exception as problem:  # must not reach C
            self.problem = f"{type(problem).__name__}: {problem}"
        return True

    def _take(self, tensor: Tensor, address: int) -> None:
        found = _LAYER.match(tensor.name)
        if found is None or not tensor.ne[1]:
            return
        layer = int(found[1])
        if layer <= self._last:
            self._passes += 1
        self._last = layer
        decode = self._passes >= self.prefill_passes
        step = self._passes - self.prefill_passes if decode else self._passes
        for ids in self._ids(tensor, address):
            self.rows.append((self.source, decode, step, layer, tuple(ids)))

    def _ids(self, tensor: Tensor, address: int) -> list[list[int]]:
        # The ids are a view: the best k of a row that is sorted over all experts, rows nb[1] bytes apart.
        size = self.engine.lib.ggml_nbytes(address)
        raw = c.create_string_buffer(size)
        self.engine.lib.ggml_backend_tensor_get(address, c.cast(raw, c.c_void_p), 0, size)
        used, stride = tensor.ne[0], tensor.nb[1]
        return [list((c.c_int32 * used).from_buffer(raw, row * stride)) for row in range(tensor.ne[1])]


def _work(request: Mapping[str, Any], send: Emit) -> Message:
    from runtime.engine.libllama import Engine
    from runtime.session.striped import session_for

    engine = Engine.find(request["engine"])
    send({"engine": engine.label})
    spec = dry_run.from_json(request["spec"])
    options = Options(**request["options"])
    watcher = Watcher(engine)
    model = Path(request["model"])
    with session_for(engine, model, spec, on_node=watcher) as session:
        for index, (_, text) in enumerate(request["prompts"]):
            tokens = _tokens(session, text, options)
            watcher.begin(index, _passes(len(tokens), spec))
            _generate(session, tokens, options, _reporter(index, send))
            if watcher.problem:
                raise EngineProblem(engine.label, f"reading ffn_moe_topk failed: {watcher.problem}")
            send({"rows": watcher.rows})
        if options.cost:
            watched = _decode_ns(session, tokens, options)
    if options.cost:
        with session_for(engine, model, spec) as session:
            send({"cost": (watched, _decode_ns(session, tokens, options))})
    return {}


def _tokens(session: Session, text: str, options: Options) -> list[int]:
    asked = session.chat(text) if options.chat else text
    if asked is None:
        raise InputError("the model has no chat template: trace plain prompts, without --chat")
    tokens = session.tokenize(asked)
    if not tokens:
        raise InputError("a prompt is empty")
    return tokens


def _passes(n_tokens: int, spec: LoadSpec) -> int:
    """Evaluations of the graph that read a prompt: batches, each cut into micro-batches."""
    work = spec.workload
    batch = max(work.n_batch, work.n_ubatch)
    whole, rest = divmod(n_tokens, batch)
    per_batch = -(-batch // work.n_ubatch)
    return whole * per_batch + -(-rest // work.n_ubatch)


def _generate(
    session: Session,
    tokens: Sequence[int],
    options: Options,
    on_text: Callable[[str], None] = lambda text: None,
    ignore_end: bool = False,
) -> int:
    """Read and continue; returns the time of a decoded token."""
    from runtime.session.session import Sampling

    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    return session.generate(tokens, max(1, options.gen), on_text, sampling, ignore_end=ignore_end).tpot_ns


def _decode_ns(session: Session, tokens: Sequence[int], options: Options) -> int:
    """Best of three short answers: the machine may be busy with others."""
    short = Options(gen=min(_COST_TOKENS, max(2, options.gen)), temperature=0.0)
    return min(_generate(session, tokens, short, ignore_end=True) for _ in range(3))


def _reporter(index: int, send: Emit) -> Callable[[str], None]:
    made = 0

    def on_text(text: str) -> None:
        nonlocal made
        made += 1
        send({"progress": (index, made, text)})

    return on_text


if __name__ == "__main__":
    serve_events(_work)
