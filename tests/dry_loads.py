"""Many dry loads by an engine in one child process: exact bytes for tests of formulas.

As a program it reads a list of [path, workload, swa_full, rollback, nextn] from stdin and answers with a
list of [model, context, compute].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.workload import Workload

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Load:
    """One model under one workload, all on the CPU."""

    path: Path
    workload: Workload
    swa_full: bool = False
    rollback: int = 0
    nextn: bool = False  # the context of the NextN head instead of the main one


@dataclass(frozen=True, slots=True)
class Bytes:
    """What the engine says a load takes."""

    model: int
    context: int
    compute: int


def measure(loads: Iterable[Load], engine: str = "") -> list[Bytes]:
    """The engine's own numbers for each load ("": the embedded one); the child's last words when it dies."""
    from engines import python  # not in the child, which needs no pytest

    request = [[str(x.path), x.workload.model_dump(), x.swa_full, x.rollback, x.nextn] for x in loads]
    asked = python(__file__, engine, given=json.dumps(request))
    assert asked.returncode == 0, asked.stderr[-2000:]
    return [Bytes(*sizes) for sizes in json.loads(asked.stdout)]


def _measure_here(request: list[list[Any]]) -> list[list[int]]:
    from planner.plan.load_spec import LoadSpec
    from runtime.engine.libllama import Engine
    from runtime.load import load_params
    from runtime.load.dry_run import Breakdown, breakdown

    engine, kept = Engine.find(sys.argv[1] or None), load_params.Kept()
    answers = []
    for path, workload, swa_full, rollback, nextn in request:
        work = Workload.model_validate(workload)
        spec = LoadSpec((), (), 0, (), work, use_mmap=False, use_extra_bufts=False)
        with load_params.model(
            engine, Path(path), load_params.model_params(engine, spec, kept, True)
        ) as model:
            params = load_params.context_params(engine, spec, kept)
            params.swa_full, params.n_rs_seq, params.ctx_type = swa_full, rollback, int(nextn)
            with load_params.context(engine, model, params) as context:
                total = sum(breakdown(engine, context).values(), start=Breakdown(0, 0, 0))
                answers.append([total.model, total.context, total.compute])
    return answers


if __name__ == "__main__":
    json.dump(_measure_here(json.load(sys.stdin)), sys.stdout)
