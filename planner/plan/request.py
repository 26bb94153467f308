"""What a person may ask of the solver beside budget and workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.machine.host_memory import HostMemory
from planner.memory.memory import Reserve
from planner.plan.plan import CachePoint, EngineFit, ExpertOrder, Projector, Speculation
from planner.solver.deadline import Deadline

MAX_ENGINE_DEVICES = 16  # llama_max_devices: entries of the device list, repeats included


@dataclass(frozen=True, slots=True)
class Pin:
    """Units that must live at a site; `site` may be `gpu` for any GPU."""

    pattern: str
    site: str


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """Constraints and extras of one planning run."""

    pins: tuple[Pin, ...] = ()
    contiguous: bool = False  # whole layers only, one run per device
    no_cpu: bool = False  # every layer and the output head whole on a GPU
    op_offload: bool = True  # the engine's default; make_plan looks at both
    repack: bool = True  # the same for weights of a CPU without GPU: in a layout of its kernels
    page: bool = False  # host weights may exceed memory and are paged from disk
    host_memory: HostMemory | None = None  # of weights that the CPU computes; None: make_plan looks at both
    pinned_limit_bytes: int = 0  # where it does; 0: half of the host's memory
    stripes: bool = True
    hybrid: bool = False  # experts in slots, the others by CPU and bus at the same time
    stripe_steps: int = 16  # widths tried per layer
    curves: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # coverage by layer
    orders: tuple[ExpertOrder, ...] = ()  # hot first, for the rewriter
    distinct: Mapping[int, float] = field(default_factory=dict)  # experts a ubatch touches, by layer
    cache: tuple[CachePoint, ...] = ()  # the engine has a MoE cache; concave hit curve
    reserves: tuple[Reserve, ...] = ()
    fit: EngineFit | None = None  # what the engine's own --fit chose: one more stock rule
    projector: Projector | None = None
    speculation: Speculation | None = None
    max_runs: int = MAX_ENGINE_DEVICES
    work_s: float = 20.0  # deterministic seconds for each problem to solve: the same on every machine
    deadline: Deadline = field(default_factory=Deadline, compare=False)  # by the clock, for all of them
    heat_digest: str = ""  # of the heat file behind curves and orders
    command: str = ""

    def reserved_bytes(self, device: str) -> int:
        """Memory of a device that the plan leaves to everything else."""
        return sum(line.size_bytes for line in self.reserves if line.device == device)
