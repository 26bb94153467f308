"""How the engine is run with a placement: what the planner may try, one combination after the other."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine.host_memory import HostMemory
from planner.memory.memory import Reserve
from planner.plan.plan import Projector, Speculation
from planner.workload import Workload


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One way to run the engine; the defaults are the engine's own beside a GPU."""

    gpus: bool = True  # False: no GPU is even opened
    op_offload: bool = True  # long prompts of host weights are computed on a GPU
    slots: bool = False  # experts in slots of a GPU, the others by CPU and bus at the same time
    repack: bool = True  # weights of a CPU without GPU change to the layout of its kernels
    host_memory: HostMemory = HostMemory.PINNED  # of weights that the CPU computes
    speculation: Speculation | None = None
    projector: Projector | None = None
    reserves: tuple[Reserve, ...] = ()  # memory for what runs beside the model, and for other users

    def reserved_bytes(self, device: str) -> int:
        """Memory of a device that the plan leaves to everything else."""
        return sum(line.size_bytes for line in self.reserves if line.device == device)

    def workload(self, asked: Workload) -> Workload:
        """The workload with these settings: a NextN block is loaded only where it drafts."""
        if self.speculation is None:
            return asked
        own = not self.speculation.draft and self.speculation.tokens > 0
        return asked.model_copy(update={"mtp": own})
