"""A range of addresses with two kinds of memory: the first bytes of a tensor on the GPU, the rest pinned."""

from __future__ import annotations

import ctypes as c
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from planner.constants import STRIPE_GRANULE
from planner.errors import MachineError
from runtime.engine.host_memory_left import host_memory_left
from runtime.stripes.cuda_driver import Address, CudaCallFailed, Driver, Place

GRANULE = STRIPE_GRANULE
COPY_BYTES = 8 * 2**20  # one piece of a parallel copy
MARGIN_BYTES = 2**30  # host memory left to the rest of the system


@dataclass(eq=False)
class HostMemoryShort(MachineError):
    """Not enough host memory that can be pinned."""

    need_bytes: int
    free_bytes: int

    def message(self) -> str:
        need, free = self.need_bytes / 2**20, self.free_bytes / 2**20
        return f"stripes: {need:,.0f} MiB of host memory must be pinned, {free:,.0f} MiB can be had"


@dataclass(eq=False)
class DeviceMemoryShort(MachineError):
    """Not enough device memory for the hot part."""

    device: str
    need_bytes: int

    def message(self) -> str:
        return f"stripes: {self.device} has no room for another {self.need_bytes / 2**20:,.0f} MiB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device as stripes need it."""

    name: str  # ggml's
    number: int  # the driver's
    numa_node: int  # the host node whose memory is nearest
    host_access: bool  # whether the processor may write host granules directly


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor lies in its range."""

    start: Address
    hot_bytes: int  # whole granules of device memory from `start`
    host_bytes: int  # whole granules of host memory after them
    ready: Future[None] | None  # pinning host memory takes longer than copying into it


@dataclass(slots=True)
class StripeRange:
    """Reserved addresses; tensors are given memory one by one, host memory in the background."""

    driver: Driver
    gpu: Gpu
    size_bytes: int
    pool: ThreadPoolExecutor
    base: Address = 0
    parts: dict[Address, Part] = field(default_factory=dict)
    _mapped: list[tuple[Address, int]] = field(default_factory=list)
    _room: int = 0  # host memory when the range was made, less what the system keeps

    def __post_init__(self) -> None:
        self._room = (host_memory_left() or 0) - MARGIN_BYTES
        self.size_bytes = rounded(self.size_bytes)
        self.base = self.driver.reserve(self.size_bytes, GRANULE)

    def place(self, start: Address, data_bytes: int, padded_bytes: int, hot_bytes: int) -> bool:
        """Memory for a tensor at `start` (granule-aligned): `hot_bytes`, rounded up, on the device.

        Returns whether the padding behind the data is zero; if not, the caller clears it.
        Raises DeviceMemoryShort, HostMemoryShort.
        """
        total = rounded(padded_bytes)
        hot = min(rounded(hot_bytes), total)
        need = total - hot + sum(part.host_bytes for part in self.parts.values())
        if hot < total and need > self._room:  # asking for more would wake the system's out-of-memory killer
            raise HostMemoryShort(need, max(self._room, 0))
        if hot:
            self._map(start, hot, Place.DEVICE, self.gpu.number)
        part = Part(start, hot, total - hot, None)
        clear = self.gpu.host_access and hot <= data_bytes
        if part.host_bytes:
            job = self.pool.submit(self._pin, part, data_bytes if clear else padded_bytes, padded_bytes)
            part = replace(part, ready=job)
        self.parts[start] = part
        return clear or padded_bytes == data_bytes

    def part(self, start: Address) -> Part:
        """The memory of the tensor at `start`, all of it there. Raises HostMemoryShort."""
        part = self.parts[start]
        if part.ready is not None:
            part.ready.result()
        return part

    def close(self) -> None:
        """Unmap and free everything."""
        wait([part.ready for part in self.parts.values() if part.ready is not None])
        while self._mapped:
            self.driver.unmap(*self._mapped.pop())
        self.parts.clear()
        if self.base:
            self.driver.give_back(self.base, self.size_bytes)
            self.base = 0

    def _pin(self, part: Part, data_bytes: int, padded_bytes: int) -> None:
        self._map(part.start + part.hot_bytes, part.host_bytes, Place.HOST_NUMA, self.gpu.numa_node)
        c.memset(part.start + data_bytes, 0, padded_bytes - data_bytes)

    def _map(self, start: Address, size: int, place: Place, number: int) -> None:
        memory = self._create(size, place, number)
        try:
            self.driver.map(start, size, memory)
            self._mapped.append((start, size))
        finally:
            self.driver.drop(memory)  # the mapping keeps it
        readers = [(Place.DEVICE, self.gpu.number)]
        if place is Place.HOST_NUMA and self.gpu.host_access:
            readers.append((Place.HOST_NUMA, self.gpu.numa_node))
        self.driver.allow(start, size, *readers)

    def _create(self, size: int, place: Place, number: int) -> int:
        try:
            return self.driver.create(size, place, number)
        except CudaCallFailed as problem:
            if not problem.out_of_memory:
                raise
            if place is Place.DEVICE:
                raise DeviceMemoryShort(self.gpu.name, size) from None
            raise HostMemoryShort(size, host_memory_left() or 0) from None


def rounded(size_bytes: int) -> int:
    """Bytes rounded up to whole granules."""
    return -(-size_bytes // GRANULE) * GRANULE


def copy_in_pieces(pool: ThreadPoolExecutor, target: Address, source: Address, size: int) -> None:
    """Copy host memory with several threads."""
    pieces = [(at, min(COPY_BYTES, size - at)) for at in range(0, size, COPY_BYTES)]
    list(pool.map(lambda piece: c.memmove(target + piece[0], source + piece[0], piece[1]), pieces))
