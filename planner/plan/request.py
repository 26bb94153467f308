"""What a person asks for: the memory and the use of a model, and limits on where its parts may live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.machine.host_memory import HostMemory
from planner.memory.reserves import Extras
from planner.site import Site
from planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Pin:
    """Units that must live at a site; `site` may be `gpu` for any GPU."""

    pattern: str
    site: str


@dataclass(frozen=True, slots=True)
class ExtraModels:
    """What is loaded beside the model, and what of it the planner is to decide."""

    extras: Extras
    gpu: str  # the device of what names none
    accept_ppm: int | None = None  # share of drafted tokens that are right: choose the draft length by it
    accepted_ppm: tuple[int, ...] = ()  # of steps that accept 1, 2, … tokens at least, where that is known
    projector_moves: bool = False  # the projector goes to the CPU where the GPU has no room


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, and only that: nothing that the planner tries, knows or measures."""

    budgets: Mapping[str, int]  # bytes of every device that may be used, the CPU included
    workload: Workload = field(default_factory=Workload)
    lowest_ctx: int = 0  # the context may shrink to this to fit; 0: it is fixed
    pins: tuple[Pin, ...] = ()
    contiguous: bool = False  # whole layers only, one run per device
    no_cpu: bool = False  # every layer and the output head whole on a GPU
    first_on_cpu: int | None = None  # as stock tools count: so many first layers on the CPU, no other one
    page: bool = False  # host weights may exceed memory and are paged from disk
    host_memory: HostMemory | None = None  # of weights that the CPU computes; None: the planner chooses
    pinned_limit_bytes: int = 0  # where it does; 0: half of the host's memory
    stripes: bool = True  # single experts may live on a GPU
    hybrid: bool = False  # experts in slots, the others by CPU and bus at the same time
    sites: tuple[Site, ...] = ()  # numbers of slots that are possible too, beside those that a solve tries
    extra_models: ExtraModels | None = None  # None: the settings that are given say it
    command: str = ""

    def unconstrained(self) -> Request:
        """The same without limits but memory."""
        return replace(self, pins=(), contiguous=False, no_cpu=False, first_on_cpu=None)

    @property
    def limited(self) -> bool:
        """Whether placements are limited by more than memory."""
        return self != self.unconstrained()
