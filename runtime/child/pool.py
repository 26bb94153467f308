"""Work of this program shared out over processes: they end with it, also in the middle of their work."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import TypeVar

from planner.errors import MachineError
from runtime.child.environment import isolated
from runtime.child.process import tie

P = TypeVar("P")
R = TypeVar("R")
_THREADED = {"ortools", "xllamacpp"}  # libraries with threads that a copy of this process would lack
_YOUNG = 50_000  # objects between two looks of the collector: work makes many, of which few are circles
_ENDS = {signal.SIGTERM, signal.SIGHUP}


class WorkerGone(MachineError):
    """A process that the work was shared out to was ended from outside."""

    def message(self) -> str:
        return "a process at work was ended, as the system does to whom has taken the last memory"


@contextlib.contextmanager
def share_out(work: Callable[[P], R], parts: Sequence[P], workers: int) -> Iterator[Iterator[R]]:
    """The results of `work(part)` as they come; the processes are there when the block begins.

    Raises WorkerGone.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_end_children)
        copied = _alone()  # what is imported here is then not imported again in every process
        with _deaf() if copied else _isolated():
            context = multiprocessing.get_context("fork" if copied else "spawn")
            pool = ProcessPoolExecutor(workers, context, _at_work, (os.getpid(),))
            waiting = [pool.submit(work, part) for part in parts]
        try:
            yield (each.result() for each in as_completed(waiting))
        except BrokenProcessPool:
            raise WorkerGone from None
        pool.shutdown()


def _alone() -> bool:
    """Whether no thread would be missing in a copy of this process; some libraries keep threads of their own.

    Those of numpy's library of linear algebra are ended before a fork, and begin again when they are needed.
    """
    return sys.platform == "linux" and threading.active_count() == 1 and not sys.modules.keys() & _THREADED


def at_work() -> bool:
    """Whether this process is one that work was shared out to."""
    return multiprocessing.parent_process() is not None


def _at_work(parent: int) -> None:
    """Of a process that works: it ends when it is told to, and with its parent."""
    for number in _ENDS:
        if callable(signal.getsignal(number)):  # the parent's, where it was copied
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    if tied := tie(parent):
        tied()
    gc.freeze()  # what was copied stays: the collector need not look at it again
    gc.set_threshold(_YOUNG)


def _end_children() -> None:
    """None is left when the work was done and the pool shut down."""
    for process in multiprocessing.active_children():
        process.terminate()


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """For processes that begin anew, and the one that looks after the locks of a pool."""
    with isolated():
        resource_tracker.ensure_running()  # else starting a process starts it, and unblocks signals
        with _deaf():
            yield


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C; the one that starts them does, once all are started.

    Nor what ends them, before they have begun.
    """
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt
