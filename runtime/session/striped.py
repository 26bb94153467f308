"""Sessions of any spec: stripes are made for those that name them, proven after the load, freed after use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.constants import CPU
from planner.errors import MachineError
from planner.plan.load_spec import LoadSpec
from planner.site import Site, SiteKind
from runtime.engine.libllama import Engine
from runtime.load.dry_run import Breakdown
from runtime.load.load_params import usable_cores
from runtime.session.hybrid import HybridSession, slotted
from runtime.session.session import Session
from runtime.stripes.buffer_type import Stripes

IDLE_THREADS = 4


@dataclass(eq=False)
class StripesMisplaced(MachineError):
    """Memory of a loaded stripe is not where it was asked for."""

    address: int
    expected: str

    def message(self) -> str:
        return f"stripes: the memory at {self.address:#x} is not on the {self.expected}"


class StripedSession(Session):
    """A session whose spec names striped buffers; `stripes` tells what they hold."""

    stripes: Stripes

    def __enter__(self) -> StripedSession:
        """Raises StripesRefused, HostMemoryShort, DeviceMemoryShort, StripesMisplaced."""
        self.stripes = Stripes(self.engine.ggml)
        try:
            self._own = {name: self.stripes.buffer_type(name) for name in stripes_of(self.spec)}
            super().__enter__()
            self.stripes.check()
            prove(self.stripes)
            self._calm()
        except BaseException:
            self.close()
            self.stripes.check()  # the cause, when it was a stripe
            raise
        return self

    def _calm(self) -> None:
        """Where the CPU computes nothing, waiting threads only disturb: 16 of them cost 8 % of a token."""
        lib, spec = self.engine.lib, self.spec
        on_cpu = CPU in (*spec.devices, *(buffer for _, buffer in spec.overrides))
        if not spec.threads and not on_cpu and spec.n_gpu_layers > lib.llama_model_n_layer(self.model):
            few = min(IDLE_THREADS, usable_cores())
            lib.llama_set_n_threads(self.context, few, few)

    def memory(self) -> dict[str, Breakdown]:
        """Bytes per device; the engine's count of a striped tensor is divided as it really lies."""
        found = super().memory()  # buffer types unknown to ggml are counted as host memory
        for held in self.stripes.held():
            for name, moved in ((held.device, held.device_bytes), (CPU, -held.device_bytes)):
                found[name] = found.get(name, Breakdown(0, 0, 0)) + Breakdown(moved, 0, 0)
        return found

    def close(self) -> None:
        """Free context, model and stripes; may be called twice."""
        super().close()
        self.stripes.close()


def session_for(
    engine: Engine,
    path: Path,
    spec: LoadSpec,
    observe: bool = False,
    on_node: Callable[[int, bool, int | None], bool] | None = None,
) -> Session:
    """A session of a spec, striped where it names stripes, through a hybrid device where it names slots."""
    kind = HybridSession if slotted(spec) else StripedSession if stripes_of(spec) else Session
    return kind(engine, path, spec, observe=observe, on_node=on_node)


def stripes_of(spec: LoadSpec) -> tuple[str, ...]:
    """The striped buffers that a spec names, each once."""
    return tuple(dict.fromkeys(b for _, b in spec.overrides if Site.of_buffer(b).kind is SiteKind.STRIPE))


def prove(stripes: Stripes) -> None:
    """Ask the driver where the first and last bytes of each part lie. Raises StripesMisplaced."""
    for memory, part in stripes.parts():
        edges = [(part.start, False), (part.start + part.hot_bytes - 1, False)] if part.hot_bytes else []
        if part.host_bytes:
            end = part.start + part.hot_bytes + part.host_bytes
            edges += [(part.start + part.hot_bytes, True), (end - 1, True)]
        for address, on_host in edges:
            if memory.driver.in_host_memory(address) is not on_host:
                raise StripesMisplaced(address, "host" if on_host else memory.gpu.name)
