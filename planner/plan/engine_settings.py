"""How the engine is run with a placement: what the planner may try, one combination after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.constants import STOCK_DRAFT
from planner.machine.host_memory import HostMemory
from planner.memory.memory import Reserve
from planner.memory.reserves import reserves
from planner.model.structure import Structure
from planner.plan.plan import Following, Projector, Speculation
from planner.plan.request import ExtraModels
from planner.workload import Workload


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One way to run the engine; the defaults are the engine's own beside a GPU."""

    gpus: bool = True  # False: no GPU is even opened
    op_offload: bool = True  # long prompts of host weights are computed on a GPU
    slots: bool = False  # experts in slots of a GPU, the others by CPU and bus at the same time
    following: Following | None = None  # experts in slots change with the text
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
        own = self.speculation.own and self.speculation.tokens > 0
        return asked.model_copy(update={"mtp": own})

    def with_extra_models(
        self, structure: Structure, extra: ExtraModels | None, asked: Workload
    ) -> EngineSettings:
        """The same with the memory of what runs beside the model, which is a function of the context.

        Without `extra` the reserves are as given. Where nobody chose how much is drafted it is what a
        server drafts; it keeps copies of a state for a NextN block, and none for a draft model of its own.
        """
        if extra is None:
            return self
        extras, drafts = extra.extras, self.speculation
        if self.projector is not None:
            extras = replace(extras, mmproj_device=self.projector.device)
        if drafts is None:
            extras = replace(extras, rollback=0 if extras.draft else STOCK_DRAFT)
        else:
            extras = replace(
                extras,
                rollback=drafts.tokens,
                draft=extras.draft if drafts.tokens else None,
                draft_device=drafts.device or extras.draft_device,
                draft_experts_on_host=drafts.experts_on_host is True,
            )
        lines = reserves(structure, self.workload(asked), extras, gpu=extra.gpu)
        return replace(self, reserves=lines)
