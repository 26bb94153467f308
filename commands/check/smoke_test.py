"""A plan proven on its engine: loaded in a child process, decoded after prompts of three lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import loading, out, say
from commands.shared.plan_job import load_bytes
from planner.errors import MachineError
from planner.machine.host_memory import OFFLOAD_BATCH

if TYPE_CHECKING:
    from commands.shared.plan_job import Job
    from runtime.session.draft_model import Draft

_SHORT = 4  # tokens
_MADE = 3  # tokens decoded after each prompt: the second and third each read a cache that was written to


@dataclass(eq=False)
class SmokeFailed(MachineError):
    """A plan that its engine cannot run."""

    plan: str
    why: str  # names the engine and its build

    def message(self) -> str:
        return f"{self.plan}: {self.why}; the plan is kept as it is: try another build with --engine"


def smoke(
    job: Job, plan_path: Path, engine: str | None, llama_h: Path | None, draft: Draft | None = None
) -> None:
    """Decode after a short prompt, one past the engine's offload threshold, and one of two ubatches.

    A draft guesses along. Raises SmokeFailed with the engine's own reason and the build's name.
    """
    from runtime.bench.prompts import text
    from runtime.worker import Ask, work

    work_, guesses = job.spec.workload, draft.spec.rollback if draft else 0
    room = work_.n_ctx - _MADE - guesses
    lengths = sorted({min(n, room) for n in (_SHORT, OFFLOAD_BATCH + 8, work_.n_ubatch + 88)})
    asks = [Ask(text(n), _MADE, ignore_end=True, silent=True, cut=n) for n in lengths]
    try:
        spec = replace(job.spec, rollback=guesses)
        with loading(load_bytes(job, draft.path if draft else None)) as load:
            outcome = work(
                engine,
                llama_h,
                job.path,
                spec,
                asks,
                job.checks(),
                on_note=say,
                load=load,
                draft=draft,
            )
    except MachineError as problem:
        raise SmokeFailed(str(plan_path), str(problem)) from None
    for timings in outcome.timings:
        out(f"prompt of {timings.prompt_tokens} tokens and {len(timings.tokens)} more: decoded")
