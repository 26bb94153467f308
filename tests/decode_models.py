"""Load models one after the other and decode: `python decode_models.py MODEL…`, one JSON line each.

Meant for a child process: a model the engine cannot take ends it, and the lines so far tell which one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from planner.loading import LoadSpec
from planner.workload import Workload
from runtime.libllama import Engine
from runtime.session import Session

TEXT = "The hat of the ant"
ON_CPU = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64), threads=1)


def decode(engine: Engine, path: Path) -> dict[str, object]:
    """What a model makes of TEXT: its tokens, the spread of the logits, four greedy tokens."""
    with Session(engine, path, ON_CPU) as session:
        tokens = session.tokenize(TEXT)
        text = b"".join(session.piece(token) for token in tokens).decode()
        logits = session.logits(tokens)
        made = session.generate(tokens, 4, ignore_end=True).tokens
    return {
        "model": path.name,
        "tokens": tokens,
        "text": text,
        "shape": list(logits.shape),
        "deviation": float(logits.std()),
        "made": made,
    }


if __name__ == "__main__":
    found = Engine.find()
    for name in sys.argv[1:]:
        print(json.dumps(decode(found, Path(name))), flush=True)
