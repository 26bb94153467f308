"""Work that is done again and again beside a program that this one waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 5.0  # for work under way when the block ends


@contextmanager
def repeated(work: Callable[[Callable[[], bool]], None], every_s: float) -> Iterator[None]:
    """Call `work(ended)` every so many seconds, in a thread, as long as the block runs.

    `ended` says whether the block is over, for work that takes long; `work` itself must not raise.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            work(over.is_set)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_PATIENCE_S)
