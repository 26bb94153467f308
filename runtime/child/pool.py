"""Work of this program shared out over processes: they end with it, also in the middle of their work."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import TypeVar

from planner.errors import MachineError
from runtime.child.environment import isolated

P = TypeVar("P")
R = TypeVar("R")


class WorkerGone(MachineError):
    """A process that the work was shared out to was ended from outside."""

    def message(self) -> str:
        return "a process at work was ended, as the system does to whom has taken the last memory"


def share_out(work: Callable[[P], R], parts: Sequence[P], workers: int) -> Generator[R]:
    """The results of `work(part)` as they come; to be closed by whom may not read to the end.

    Raises WorkerGone.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_end_children)
        # The first lock of a pool starts a process that looks after it, before any work is given.
        with _deaf(), isolated():
            # Spawned, not forked: the solver's library keeps threads of its own.
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
            waiting = [pool.submit(work, part) for part in parts]
        try:
            yield from (each.result() for each in as_completed(waiting))
        except BrokenProcessPool:
            raise WorkerGone from None
        pool.shutdown()


def _end_children() -> None:
    """None is left when the work was done and the pool shut down."""
    for process in multiprocessing.active_children():
        process.terminate()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C; the one that starts them does, once all are started."""
    heard: list[int] = []
    with isolated():
        resource_tracker.ensure_running()  # else starting a process starts it, and unblocks signals
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt
