"""A generated model's routing as the engine computes it: a stream through `heat_trace`, as an array."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.plan.load_spec import LoadSpec
from planner.routing.trace import Trace
from planner.workload import Workload
from profiler import routing_trace
from profiler.routed.stream import text_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

PROMPT = 512  # tokens of a prompt: a stream is read in pieces, since the routers ignore what went before


def trace(model: Path, ids: Ints, n_expert: int, engine: str | None = None, n_threads: int = 2) -> Ints:
    """The experts (layers, tokens, experts of a token), best first, that the engine chose for a stream.

    The last layer of a model is left out: the engine routes there only tokens whose logits are wanted.
    Raises EngineProblem when the engine cannot load the model.
    """
    pieces = [ids[at : at + PROMPT] for at in range(0, len(ids), PROMPT)]
    prompts = [routing_trace.Prompt(str(index), text_of(piece)) for index, piece in enumerate(pieces)]
    options = routing_trace.Options(gen=1, cost=False)
    found, _ = routing_trace.trace(engine, model, load_spec(n_threads), prompts, n_expert, options)
    return chosen_of(found)


def load_spec(n_threads: int) -> LoadSpec:
    """A load on the CPU, with room for one piece of a stream."""
    work = Workload(n_ctx=PROMPT + 64, n_batch=PROMPT, n_ubatch=PROMPT)
    return LoadSpec((), (), 0, (), work, threads=n_threads)


def chosen_of(trace: Trace) -> Ints:
    """The prompts' rows of a trace as an array (layers but the last, tokens, experts of a token)."""
    import numpy as np

    layers = np.unique(trace.layer)[:-1]
    return np.stack([trace.ids[(trace.layer == one) & ~trace.decode] for one in layers]).astype(np.int64)
