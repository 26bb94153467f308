"""A plan's file, looked at while the plan is served: other experts for its slots reach the running server."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.errors import AtsplanError
from planner.plan.difference import check_while_running
from planner.plan.load_spec import load_spec, newcomers
from planner.plan.plan import Plan
from runtime.child.meanwhile import repeated
from runtime.hybrid.orders import Orders
from runtime.session.hybrid import positions

_EVERY_S = 1.0


@dataclass(slots=True)
class Served:
    """What is served, by which plan, and the way to its devices."""

    model: Path
    plan: Plan
    path: Path  # of the plan
    orders: Orders
    read: Callable[[], Plan]  # what lies there now, a plan of this model; AtsplanError otherwise
    unsure: bool = False  # whether some device may hold other experts than the plan's

    def take_over(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """Give the slots to the experts of the plan that lies there now; "" for nothing new.

        Raises NeedsRestart for a plan that differs in more, and what reading raises: then all stays as it is.
        Raises NotFollowed where a device refuses or is silent: it may follow later, so that the next plan is
        sent whatever it says.
        """
        plan = self.read()
        check_while_running(self.plan, plan, str(self.path))
        before, after = load_spec(self.plan).residents, load_spec(plan).residents
        if before != after or self.unsure:
            residents = positions(self.model, after)
            self.unsure = True
            self.orders.send(residents, stopped)
            self.unsure = False
        self.plan = plan
        new, layers = newcomers(before, after)
        return f"{self.path}: {new} other experts in the slots of {layers} layers" if layers else ""


@contextmanager
def following_file(
    served: Served,
    say: Callable[[str], None],
    taken: Callable[[Plan], None] = lambda plan: None,
    every_s: float = _EVERY_S,
) -> Iterator[None]:
    """Look at the plan's file while the block runs; what is refused is said in one line and changes nothing.

    `taken` hears of every plan that was taken over.
    """
    done = before = None  # it may be another already: a server takes long to start

    def look(ended: Callable[[], bool]) -> None:
        nonlocal done, before
        now = _stamp(served.path)
        # Twice the same: nobody is in the middle of writing it.
        if now is not None and now == before and now != done:
            done = now
            _take(served, say, taken, ended)
        before = now

    with repeated(look, every_s):
        yield


def _take(
    served: Served, say: Callable[[str], None], taken: Callable[[Plan], None], stopped: Callable[[], bool]
) -> None:
    before = served.plan
    try:
        sentence = served.take_over(stopped)
    except AtsplanError as problem:
        say(f"note: {problem}")
        return
    if sentence:
        say(sentence)
    if served.plan != before:
        taken(served.plan)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Which file lies there and when it was written; None for none, and for a pipe, which is read once."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
