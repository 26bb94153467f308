"""Logits of model files by the embedded engine, in a child process: an abort there fails one test only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENS = tuple(range(3, 27))


def logits(*models: Path) -> list[NDArray[np.float32]]:
    """Logits of TOKENS for each model, shape (24, n_vocab), on the CPU without repacked kernels."""
    import numpy as np

    target = models[0].with_suffix(".npz")
    paths = [str(Path(__file__)), str(target), *map(str, models)]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run([sys.executable, *paths], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(target) as found:
        return [found[f"arr_{n}"] for n in range(len(models))]


def _main(target: str, models: Sequence[str]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import numpy as np

    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.engine.libllama import Engine
    from runtime.session.session import Session

    engine = Engine.find(None)
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=64, prompt=8), use_extra_bufts=False, threads=2)
    rows = []
    for model in models:
        with Session(engine, Path(model), spec) as session:
            rows.append(session.logits(TOKENS))
    np.savez(target, *rows)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
