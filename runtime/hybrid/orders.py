"""Other residents for a program of the engine that runs: files that its devices look at now and then.

A file is replaced whole and is the user's alone; a device refuses any other. Its report says which order it
followed last, or what is wrong with the one it read last.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import MachineError
from planner.plan.load_spec import Residents
from runtime.hybrid.lane_files import LaneFiles

_LOOK_S = 0.2
_PATIENCE_S = 300.0  # a step of the largest prompt on a CPU takes minutes, and is not interrupted


@dataclass(eq=False)
class NotFollowed(MachineError):
    """Residents that a running device did not take over."""

    device: str
    why: str

    def message(self) -> str:
        return f"{self.device}: did not take other experts into its slots: {self.why}"


@dataclass(frozen=True, slots=True)
class Orders:
    """What is sent to the devices of one program, and what they say of it."""

    files: Mapping[str, Path]  # by the plan's device
    reports: LaneFiles

    def send(
        self, residents: Residents, stopped: Callable[[], bool] = lambda: False, limit_s: float = _PATIENCE_S
    ) -> None:
        """Put these experts, by position in the file, into the slots of every device; wait until they say so.

        Raises NotFollowed with a device's reason, after which some devices may have followed and others not;
        returns early when `stopped` says so.
        """
        number = 1 + secrets.randbelow(2**53)  # no answer to another order can have it
        for device, path in self.files.items():
            try:
                _replace(path, order_text(number, residents))
            except OSError as problem:
                raise NotFollowed(device, f"{path}: {problem.strerror or problem}") from None
        deadline = time.monotonic() + limit_s
        for device in self.files:
            while not stopped():
                said = self.reports.answer(device)
                if said.order == number:
                    if said.fault:
                        raise NotFollowed(device, said.fault)
                    break
                if time.monotonic() > deadline:
                    raise NotFollowed(device, said.fault or f"no answer in {limit_s:.0f} s")
                time.sleep(_LOOK_S)


def order_text(number: int, residents: Residents) -> str:
    """One order as a device reads it."""
    lines = [f"resident {layer} {n} {','.join(map(str, e)) or '-'}" for layer, n, e in sorted(residents)]
    return "\n".join([f"order {number}", *lines, "end", ""])


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    part.replace(path)
