"""Models loaded and decoded in a child process: an engine that aborts ends the child, not the tests.

A request has `model`, and may have `engine` (a folder), `devices`, `tensor_split`, `n_gpu_layers`,
`overrides`, `repack`, `text`. The answer has the logits as lists, tokens, and where weights and work were.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import python

from planner.plan.load_spec import LoadSpec
from planner.workload import Workload

TEXT = "The hat of the ant"
SMALL = Workload(n_ctx=256, n_batch=64, n_ubatch=64)
Answer = dict[str, Any]


def decode_all(requests: Sequence[Mapping[str, object]]) -> list[Answer]:
    """The answers to requests for one engine, from one child; a request it died of answers `error`."""
    done = python(__file__, given=json.dumps(requests), limit_s=300)
    answers: list[Answer] = [json.loads(line) for line in done.stdout.splitlines()]
    lost = {"error": f"exit {done.returncode}: {done.stderr[-400:]}"}
    return answers + [lost] * (len(requests) - len(answers))


def _decode(engine: Any, request: Mapping[str, Any]) -> Answer:
    from runtime.session.session import Session

    spec = LoadSpec(
        tuple(request.get("devices", ())),
        tuple(request.get("tensor_split", ())),
        request.get("n_gpu_layers", 0),
        tuple((pattern, buffer) for pattern, buffer in request.get("overrides", ())),
        SMALL,
        use_extra_bufts=request.get("repack", False),
        threads=1,
    )
    with Session(engine, Path(request["model"]), spec, observe=True) as session:
        tokens = session.tokenize(request.get("text", TEXT))
        return {
            "tokens": tokens,
            "text": b"".join(session.piece(token) for token in tokens).decode(),
            "logits": session.logits(tokens).tolist(),
            "made": session.generate(tokens, 4, ignore_end=True).tokens,
            "weights": session.tensor_devices(),
            "work": Counter(node.device for node in session.nodes()),
        }


def _answer() -> None:
    from runtime.engine.libllama import Engine

    requests = json.load(sys.stdin)
    engine = Engine.find(requests[0].get("engine"))
    for request in requests:
        print(json.dumps(_decode(engine, request)), flush=True)


if __name__ == "__main__":
    _answer()
