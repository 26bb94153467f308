"""The same runs as a smaller machine would see them: fewer cores, a slower link, for every contender alike.

    with conditions(cores=8, link=12.0, pacer=CompetingStream("cuda:0")) as now:
        print(now.said())
        subprocess.run(command, env={**os.environ, **now.environment})

Children inherit the cores. Who slows the link is a Pacer's affair: today other copies that compete for it;
a device that forwards to the GPU and paces each copy can take over by `ByEnvironment`. What is slowed and
what is not belongs to every result: `Conditions.record()`.
"""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import MachineError
from runtime.child.environment import environment, python
from runtime.child.process import tie

NEAR = 0.08  # a paced link may be off by so much of the asked rate
STREAMS = (1, 2, 4, 8, 16)
PROBE_S = 0.3
ALWAYS_FULL = ("speed of the GPU and of its memory", "rate of host memory", "caches and clock of the CPU")
Probe = Callable[[int, float], float]  # streams, busy share -> GB/s left for others


@dataclass(eq=False)
class NotPaced(MachineError):
    """A link that cannot be brought to the asked rate."""

    asked: float
    found: float
    why: str

    def message(self) -> str:
        return f"link: asked for {self.asked:.1f} GB/s, measured {self.found:.1f}: {self.why}"


@dataclass(frozen=True, slots=True)
class Pace:
    """A link as contenders see it; rates in GB/s."""

    how: str
    asked: float | None  # None: as fast as it is
    measured: float
    paced: tuple[str, ...] = ()
    not_paced: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # for the contenders' processes


class Pacer(ABC):
    """Slows a link for all that use it, or for all that ask through it."""

    @abstractmethod
    def at(self, rate: float | None) -> AbstractContextManager[Pace]:
        """Hold the link at `rate` GB/s inside the block. Raises NotPaced when it cannot be held there."""


@dataclass(frozen=True, slots=True)
class CompetingStream(Pacer):
    """Copies of another process take what the asked rate leaves over, always the same part."""

    link: str  # of link_stream: cuda:N or host

    @contextmanager
    def at(self, rate: float | None) -> Iterator[Pace]:
        if rate is None:
            yield Pace("nothing", None, probe(self.link))
            return
        command = python("-m", "benchmarks.rounds.link_stream", self.link)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            text=True,
            env=environment(),
            start_new_session=True,
            preexec_fn=tie(),
        )
        assert process.stdin is not None and process.stdout is not None
        try:

            def left(streams: int, busy: float) -> float:
                assert process.stdin is not None and process.stdout is not None
                print(streams, busy, file=process.stdin, flush=True)
                if not process.stdout.readline():
                    raise NotPaced(rate, 0.0, f"the competing copies ended with status {process.wait()}")
                return probe(self.link)

            streams, busy, found = calibrated(left, rate)
            yield Pace(
                f"a competing stream ({streams} at once, {busy:.2f} of the time)",
                rate,
                found,
                ("copies from host memory to the GPU", "reads of host memory by kernels on the GPU"),
                ("copies from the GPU to host memory", "the delay of a single small copy"),
            )
        finally:
            process.stdin.close()
            process.terminate()
            process.wait()
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class ByEnvironment(Pacer):
    """A device or library that paces by itself when an environment variable names bytes a second."""

    how: str
    variable: str
    paced: tuple[str, ...]
    not_paced: tuple[str, ...]
    measure: Callable[[Mapping[str, str]], float]  # GB/s through it under an environment

    @contextmanager
    def at(self, rate: float | None) -> Iterator[Pace]:
        given = {} if rate is None else {self.variable: str(round(rate * 1e9))}
        found = self.measure(given)
        if rate is None:
            yield Pace("nothing", None, found)
            return
        if abs(found - rate) > NEAR * rate:
            raise NotPaced(rate, found, f"{self.how} does not hold it")
        yield Pace(self.how, rate, found, self.paced, self.not_paced, given)


def probe(link: str) -> float:
    """What a process of its own gets of a link now, in GB/s."""
    command = python("-m", "benchmarks.rounds.link_stream", link, str(PROBE_S))
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise NotPaced(0.0, 0.0, (done.stderr.strip().splitlines() or ["the probe failed"])[-1])
    return float(done.stdout)


def calibrated(left: Probe, rate: float) -> tuple[int, float, float]:
    """Streams, busy share and what they leave: the fewest streams that can leave `rate`, then bisection.

    Raises NotPaced when the link is slower than `rate` already, or not even the most streams slow it so far.
    """
    free = left(0, 0.0)
    if free < rate * (1 - NEAR):
        raise NotPaced(rate, free, "the link is slower than that by itself")
    if free <= rate * (1 + NEAR):
        return 0, 0.0, free
    for streams in STREAMS:
        full = left(streams, 1.0)
        if full <= rate:
            break
    else:
        raise NotPaced(rate, full, f"{STREAMS[-1]} competing streams leave more")
    low, high, best = 0.0, 1.0, (1.0, full)
    for _ in range(8):
        if abs(best[1] - rate) <= NEAR * rate / 2:
            break
        busy = (low + high) / 2
        found = left(streams, busy)
        best = min(best, (busy, found), key=lambda pair: abs(pair[1] - rate))
        low, high = (busy, high) if found > rate else (low, busy)
    found = left(streams, best[0])  # leaves the load there, and measures it once more
    if abs(found - rate) > NEAR * rate:
        raise NotPaced(rate, found, "the competing copies do not hold it")
    return streams, best[0], found


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every contender of a run is given."""

    cores: tuple[int, ...]
    cores_of: int
    pace: Pace

    @property
    def environment(self) -> Mapping[str, str]:
        return self.pace.environment

    def record(self) -> dict[str, Any]:
        """For a journal."""
        return {
            "cores": len(self.cores),
            "cores_of": self.cores_of,
            "link_gb_s": round(self.pace.measured, 2),
            "link_asked_gb_s": self.pace.asked,
            "paced_by": self.pace.how,
            "paced": [*self._limited_cores(), *self.pace.paced],
            "not_paced": [*self.pace.not_paced, *ALWAYS_FULL],
        }

    def said(self) -> str:
        """For a reader."""
        facts = self.record()
        asked = f", asked for {self.pace.asked:.1f}" if self.pace.asked is not None else ""
        return (
            f"{facts['cores']} of {facts['cores_of']} cores; link {self.pace.measured:.1f} GB/s{asked}, "
            f"slowed by {self.pace.how}\n"
            f"slowed: {', '.join(facts['paced']) or 'nothing'}\nnot slowed: {', '.join(facts['not_paced'])}"
        )

    def _limited_cores(self) -> tuple[str, ...]:
        return ("number of cores",) if len(self.cores) < self.cores_of else ()


@contextmanager
def conditions(cores: int | None, link: float | None, pacer: Pacer) -> Iterator[Conditions]:
    """Limit this process, and with it the children it starts, to `cores`; hold the link at `link` GB/s.

    The pacing process itself keeps all cores. Raises NotPaced, or ValueError for more cores than there are.
    """
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        pace = stack.enter_context(pacer.at(link))
        chosen = pick(before, cores if cores is not None else len(before))
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, chosen)
        yield Conditions(tuple(chosen), len(before), pace)


def pick(usable: set[int], count: int, siblings: Callable[[int], str] | None = None) -> list[int]:
    """`count` CPUs, one of each physical core before second threads of any."""
    if not 1 <= count <= len(usable):
        raise ValueError(f"{count} cores of {len(usable)}")
    asked = siblings or _siblings
    seen: dict[str, int] = {}
    ranked = []
    for cpu in sorted(usable):
        group = asked(cpu)
        ranked.append((seen.get(group, 0), cpu))
        seen[group] = seen.get(group, 0) + 1
    return sorted(cpu for _, cpu in sorted(ranked)[:count])


def _siblings(cpu: int) -> str:
    """The CPUs that share a physical core with this one, as Linux writes them."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(cpu)
