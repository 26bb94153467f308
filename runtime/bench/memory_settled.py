"""Between runs: wait until the memory of every device is as free as it was before the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.constants import CPU
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.child.ask import ask
from runtime.child.serve import serve
from runtime.engine import gpu_usage, locate
from runtime.engine.libllama import Engine
from runtime.engine.rpc import connect

Use = Mapping[str, int]  # device to bytes in use

_SLACK_BYTES = 64 * 2**20  # drivers keep a little, and others come and go
_PAUSE_S = 0.25
_PATIENCE_S = 30.0


class Settling:
    """`wait()` after each run; `read` tells the bytes in use on every device."""

    def __init__(self, read: Callable[[], Use], patience_s: float = _PATIENCE_S) -> None:
        self._read, self._patience_s = read, patience_s
        self._before = read()

    def wait(self) -> str:
        """Wait until nothing more is in use than before; "" then, else what still is when patience ends."""
        deadline = time.monotonic() + self._patience_s
        while held := self._held(now := self._read()):
            if time.monotonic() >= deadline:
                self._before = now  # somebody else's by now: not to be waited for again
                return (
                    f"{held[0]}: {held[1] >> 20} MiB more in use than before, "
                    f"{self._patience_s:.0f} s after the run has ended"
                )
            time.sleep(_PAUSE_S)
        return ""

    def _held(self, now: Use) -> tuple[str, int] | None:
        more = {name: used - self._before.get(name, used) for name, used in now.items()}
        return next(((n, size) for n, size in more.items() if size > _SLACK_BYTES), None)


def reader(engine: str | None, llama_h: Path | None, devices: Sequence[str]) -> Callable[[], Use]:
    """How the use of these devices is read: by the driver for NVIDIA GPUs, else by the engine in a child."""
    names = [name for name in dict.fromkeys(devices) if name != CPU]
    if not names:
        return dict
    if gpu_usage.nvidia(names) and all(name.startswith("CUDA") for name in names) and gpu_usage.available():
        return lambda: gpu_usage.used(names)
    request = {"engine": engine, "llama_h": str(llama_h) if llama_h else None, "devices": names}

    def use() -> Use:
        found: Use = ask("runtime.bench.memory_settled", request, locate.find(engine).label)
        return found

    return use


def _use_here(request: Mapping[str, Any]) -> dict[str, int]:
    engine = Engine.find(request["engine"], Path(request["llama_h"]) if request["llama_h"] else None)
    names = tuple(request["devices"])
    spec = LoadSpec(names, (1,) * len(names), len(names), (), Workload())
    here, _ = connect(engine, spec)
    wanted = {name.casefold() for name in here.devices}
    return {
        d.name: d.total_bytes - d.free_bytes for d in engine.ggml.devices() if d.name.casefold() in wanted
    }


if __name__ == "__main__":
    serve(_use_here)
