"""When a running service is to look at its plan again: seldom, on clean samples, once for each deviation."""

from __future__ import annotations

from collections import deque

from planner.constants import PPM
from planner.learn.samples import Cleaned, Kind, Sample, cleaned

DEVIATION_PPM = 150_000  # from the prediction: solve again
SETTLED_PPM = 75_000  # below it a deviation that led to nothing may trigger anew
APART = 5  # predicted token times between two decisions at least
_KEPT = 64  # samples
_ENOUGH = 8  # tokens' samples for a decision


class Watch:
    """Collects what a service measures; `due` says when to call for `refine`.

    All times are nanoseconds, `now_ns` of a clock that never goes back.
    """

    def __init__(self, predicted_ns: int, now_ns: int, lanes: int = 1) -> None:
        self.lanes = lanes
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._fresh = False
        self._armed = True
        self._predicted_ns = predicted_ns
        self._decided_ns = now_ns
        self._passes = 0

    def changed(self, predicted_ns: int, now_ns: int) -> None:
        """The plan, its residents or its lane shares are others now: nothing from before counts."""
        self._samples.clear()
        self._fresh, self._armed = True, True
        self._predicted_ns, self._decided_ns = predicted_ns, now_ns

    def saw(self, sample: Sample) -> None:
        """Take a sample in; the first of the process, and the first after a change, will not count."""
        first = self._passes == 0
        self._passes += 1
        self._samples.append(
            Sample(
                sample.kind,
                sample.ns,
                sample.tokens,
                sample.depth,
                sample.lanes,
                sample.count,
                warm_up=sample.warm_up or first,
                after_change=sample.after_change or self._fresh,
                contended=sample.contended,
            )
        )
        self._fresh = False

    def seen(self) -> Cleaned:
        """What the samples say by now."""
        return cleaned(self._samples, self.lanes)

    def due(self, now_ns: int) -> bool:
        """Whether to decide now. True once for a deviation: it must settle, or grow by as much again, before
        it counts anew.
        """
        if now_ns - self._decided_ns < APART * self._predicted_ns:
            return False
        token = self.seen().token
        if token is None or token.samples < _ENOUGH:
            return False
        away = abs(token.ns - self._predicted_ns) * PPM // max(self._predicted_ns, 1)
        if away <= SETTLED_PPM:
            self._armed = True
        if away < DEVIATION_PPM or not self._armed:
            return False
        self._armed, self._decided_ns = False, now_ns
        return True

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What was seen last, for `refine`."""
        return tuple(s for s in self._samples if s.kind in Kind)
