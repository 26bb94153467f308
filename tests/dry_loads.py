"""Many dry loads by an engine in one child process: exact bytes for tests of formulas.

As a program it reads a list of [path, workload, swa_full, rollback, nextn] from stdin and answers with a
line of [model, context, compute] for each, or of the reason why the engine refuses it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
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
    answers = attempt(loads, engine)
    for each in answers:
        assert isinstance(each, Bytes), each
    return [each for each in answers if isinstance(each, Bytes)]


def attempt(loads: Iterable[Load], engine: str = "") -> list[Bytes | str]:
    """The same, with the reason in place of numbers where the engine refuses a load, or dies of it."""
    from engines import python  # not in the child, which needs no pytest

    left = [[str(x.path), x.workload.model_dump(), x.swa_full, x.rollback, x.nextn] for x in loads]
    answers: list[Bytes | str] = []
    while left:
        asked = python(__file__, engine, given=json.dumps(left), limit_s=300)
        said = [json.loads(line) for line in asked.stdout.splitlines()]
        answers += [each if isinstance(each, str) else Bytes(*each) for each in said]
        left = left[len(said) :]
        if asked.returncode != 0:
            assert left, asked.stderr[-2000:]
            answers.append(f"dies: {asked.stderr[-2000:]}")
            left = left[1:]
    return answers


def _measure_here(request: list[list[Any]]) -> Iterator[list[int] | str]:
    from planner.errors import AtsplanError
    from planner.plan.load_spec import LoadSpec
    from runtime.engine.libllama import Engine
    from runtime.load import load_params

    engine, kept = Engine.find(sys.argv[1] or None), load_params.Kept()
    for path, workload, swa_full, rollback, nextn in request:
        work = Workload.model_validate(workload)
        spec = LoadSpec((), (), 0, (), work, use_mmap=False, use_extra_bufts=False)
        try:
            yield _one(engine, kept, Path(path), spec, swa_full, rollback, nextn)
        except AtsplanError as refused:
            yield refused.message()


def _one(
    engine: Any, kept: Any, path: Path, spec: Any, swa_full: bool, rollback: int, nextn: bool
) -> list[int]:
    from runtime.load import load_params
    from runtime.load.dry_run import Breakdown, breakdown

    with load_params.model(engine, path, load_params.model_params(engine, spec, kept, True)) as model:
        params = load_params.context_params(engine, spec, kept)
        params.swa_full, params.n_rs_seq, params.ctx_type = swa_full, rollback, int(nextn)
        with load_params.context(engine, model, params) as context:
            total = sum(breakdown(engine, context).values(), start=Breakdown(0, 0, 0))
            return [total.model, total.context, total.compute]


if __name__ == "__main__":
    for answer in _measure_here(json.load(sys.stdin)):
        print(json.dumps(answer), flush=True)
