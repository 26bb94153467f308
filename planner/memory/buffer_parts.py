"""What a device needs beside weights and caches as soon as it is used: the parts of its compute buffer."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine.profile import Device
from planner.memory.compute_buffer import (
    compute_bytes,
    converts_caches,
    host_bytes,
    output_bytes,
    staging_bytes,
)
from planner.model.structure import Structure
from planner.model.tensor_roles import Role, parts_of
from planner.remember import remembered
from planner.workload import Workload


@dataclass(frozen=True, slots=True)
class BufferParts:
    """Bytes on one device; the buffer is `base + max(staging if streaming, head if it has the head)`."""

    base_bytes: int  # the layers' largest stage, masks, inputs
    staging_bytes: int  # host weights on their way through the device while a prompt is computed
    head_bytes: int  # what the output head's logits need beyond the base

    @property
    def shared_bytes(self) -> int:
        """Needed by streaming and by the head alike: they do not live at the same time."""
        return min(self.staging_bytes, self.head_bytes)

    @property
    def largest_bytes(self) -> int:
        """The buffer when everything is on the device."""
        return self.base_bytes + max(self.staging_bytes, self.head_bytes)

    def total(self, *, streams: bool, head: bool) -> int:
        """The buffer of a device that streams host weights, or has the output head, or both."""
        return self.base_bytes + max(self.staging_bytes * streams, self.head_bytes * head)


@remembered
def buffer_parts(
    structure: Structure, workload: Workload, device: Device, op_offload: bool = True
) -> BufferParts:
    """The compute buffer of a device by formula, without a pipeline's copies."""
    converts = converts_caches(device.name)
    base = compute_bytes(structure, workload, head=False, converts=converts)
    head = compute_bytes(structure, workload, converts=converts) - base
    if device.kind != "gpu":
        return BufferParts(base, 0, head)
    hybrid = any(structure.layers.recurrent)
    return BufferParts(
        base, staging_bytes(_streamed(structure), workload, op_offload=op_offload, hybrid=hybrid), head
    )


def inputs_bytes(structure: Structure, workload: Workload) -> int:
    """What the host holds of every graph, whoever computes it: its inputs and the logits that are read."""
    return host_bytes(structure, workload) + output_bytes(structure, workload)


@remembered
def _streamed(structure: Structure) -> tuple[int, ...]:
    inventory = structure.inventory
    parts = parts_of(inventory)
    return tuple(t.size_bytes for t in inventory.tensors if parts[t.name].role in (Role.EXPERTS, Role.FFN))
