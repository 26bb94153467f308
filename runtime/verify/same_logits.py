"""Whether two model files give the same logits, bit by bit, on the CPU: `same_logits(engine, first, second)`.

Run as a module it is the child process that asks the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

N_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """Logits of two files for the same tokens."""

    n_tokens: int
    n_vocab: int
    different: int  # numbers whose bits differ
    largest: float  # difference of two of them

    @property
    def same(self) -> bool:
        return self.different == 0


def same_logits(engine: str | None, first: Path, second: Path) -> Comparison:
    """Decode the same tokens with both files in a child process. Raises EngineProblem."""
    from runtime.child.ask import ask

    request = {"engine": engine, "models": [str(first.absolute()), str(second.absolute())]}
    return Comparison(**ask("runtime.verify.same_logits", request, engine or "embedded"))


def _compare(request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.engine.libllama import Engine
    from runtime.session.session import Session

    engine = Engine.find(request["engine"])
    workload = Workload(n_ctx=256, n_batch=N_TOKENS, n_ubatch=N_TOKENS)
    # Repacked kernels sum in another order: plain ones, so that equal weights give equal bits.
    spec = LoadSpec((), (), 0, (), workload, use_extra_bufts=False)
    found = []
    for model in request["models"]:
        with Session(engine, Path(model), spec) as session:
            tokens = [7 + 11 * index % 200 for index in range(N_TOKENS)]
            found.append(session.logits(tokens))
    first, second = found
    unequal = first.view(np.uint32) != second.view(np.uint32)
    return {
        "n_tokens": first.shape[0],
        "n_vocab": first.shape[1],
        "different": int(unequal.sum()),
        "largest": float(np.abs(first - second).max()),
    }


if __name__ == "__main__":
    from runtime.child.serve import serve

    serve(_compare)
