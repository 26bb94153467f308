"""What the problems of one model, use and machine have in common, whatever is asked and tried."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.cost.unit_time import Prices
from planner.machine.host_memory import HostMemory
from planner.machine.profile import Device, Profile
from planner.memory.buffer_parts import BufferParts, buffer_parts
from planner.model.structure import Structure
from planner.plan.known import Known
from planner.plan.plan import Speculation
from planner.workload import Workload


@dataclass(eq=False)
class SharedCosts:
    """Prices and compute buffers, each made when a problem first needs it."""

    structure: Structure
    workload: Workload
    profile: Profile
    known: Known
    _prices: dict[tuple[bool, HostMemory, Speculation | None], Prices] = field(default_factory=dict)
    _buffers: dict[tuple[str, bool], BufferParts] = field(default_factory=dict)

    def prices(self, repack: bool, host_memory: HostMemory, speculation: Speculation | None) -> Prices:
        """The prices of units, for one way to hold weights on the host."""
        key = repack, host_memory, speculation
        if key not in self._prices:
            alike = (p for (r, _, s), p in self._prices.items() if (r, s) == (repack, speculation))
            first = next(alike, None)
            self._prices[key] = first.held_in(host_memory) if first else self._new(*key)
        return self._prices[key]

    def _new(self, repack: bool, host_memory: HostMemory, speculation: Speculation | None) -> Prices:
        distinct = self.known.distinct
        return Prices(self.structure, self.profile, self.workload, distinct, repack, speculation, host_memory)

    def buffer(self, device: Device, op_offload: bool) -> BufferParts:
        """The compute buffer of a device of the profile, by part."""
        key = device.name, op_offload
        if key not in self._buffers:
            self._buffers[key] = buffer_parts(self.structure, self.workload, device, op_offload)
        return self._buffers[key]
