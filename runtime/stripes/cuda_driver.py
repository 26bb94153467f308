"""The CUDA driver's virtual memory calls through ctypes: reserve, create, map, set access, copy.

No CUDA runtime, no toolkit: only `libcuda.so.1`, which the driver installs. Addresses and handles are
plain integers; sizes are bytes. Every failing call raises CudaCallFailed with the driver's own words.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from planner.errors import MachineError

Address = int
Memory = int  # a CUmemGenericAllocationHandle

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Place(IntEnum):
    """CUmemLocationType."""

    DEVICE = 1
    HOST = 2
    HOST_NUMA = 3


class Attribute(IntEnum):
    """The CUdevice_attribute values asked for."""

    VIRTUAL_MEMORY = 102
    HOST_NUMA_ID = 134


class Location(c.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c.c_int), ("id", c.c_int))


class AllocationProp(c.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c.c_int),
        ("handle_types", c.c_int),
        ("location", Location),
        ("win32", c.c_void_p),
        ("flags", c.c_ubyte * 8),
    )


class AccessDesc(c.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c.c_int))


_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST

_P, _I, _Q, _Z = c.c_void_p, c.c_int, c.c_uint64, c.c_size_t
_CALLS: Mapping[str, tuple[Any, ...]] = {
    "cuInit": (c.c_uint,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetName": (c.c_char_p, _I, _I),
    "cuDeviceGetByPCIBusId": (_P, c.c_char_p),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuDevicePrimaryCtxRelease_v2": (_I,),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_P, _P),
    "cuMemAddressReserve": (_P, _Z, _Z, _Q, _Q),
    "cuMemAddressFree": (_Q, _Z),
    "cuMemCreate": (_P, _Z, _P, _Q),
    "cuMemRelease": (_Q,),
    "cuMemMap": (_Q, _Z, _Z, _Q, _Q),
    "cuMemUnmap": (_Q, _Z),
    "cuMemSetAccess": (_Q, _Z, _P, _Z),
    "cuMemsetD8_v2": (_Q, c.c_ubyte, _Z),
    "cuPointerGetAttribute": (_P, _I, _Q),
    "cuGetErrorName": (_I, _P),
    "cuGetErrorString": (_I, _P),
}


@dataclass(eq=False)
class CudaMissing(MachineError):
    """There is no usable CUDA driver."""

    why: str

    def message(self) -> str:
        return f"CUDA driver: {self.why}"


@dataclass(eq=False)
class CudaCallFailed(MachineError):
    """A driver call returned an error."""

    call: str
    code: int
    text: str

    def message(self) -> str:
        return f"CUDA driver: {self.call} failed: {self.text} ({self.code})"

    @property
    def out_of_memory(self) -> bool:
        return self.code == OUT_OF_MEMORY


class Driver:
    """The loaded and initialised CUDA driver."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._lib = c.CDLL(library)
        except OSError as problem:
            raise CudaMissing(f"{library} cannot be loaded: {problem}") from None
        for name, arguments in _CALLS.items():
            try:
                function = getattr(self._lib, name)
            except AttributeError:
                raise CudaMissing(f"it is too old: it has no {name}") from None
            function.argtypes, function.restype = arguments, c.c_int
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """One driver call; CudaCallFailed when it does not return success."""
        code = getattr(self._lib, name)(*arguments)
        if code:
            raise CudaCallFailed(name, code, self._words(code))

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version the driver supports, such as (13, 0)."""
        value = self._int("cuDriverGetVersion")
        return value // 1000, value % 1000 // 10

    def device(self, pci_id: str) -> int:
        """The driver's number of the device with this PCI id; "" means the first one."""
        if not pci_id:
            return self._int("cuDeviceGet", 0)
        return self._int("cuDeviceGetByPCIBusId", pci_id.encode())

    def attribute(self, device: int, attribute: Attribute) -> int:
        """A device attribute; 0 when this driver does not know it."""
        try:
            return self._int("cuDeviceGetAttribute", int(attribute), device)
        except CudaCallFailed:
            return 0

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context current in this thread inside the block."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", c.byref(c.c_void_p()))

    def retain(self, device: int) -> int:
        """The primary context of a device, which the CUDA runtime and ggml use too; see `release`."""
        context = c.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        return context.value or 0

    def release(self, device: int) -> None:
        """Give back what `retain` took."""
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current context's device."""
        free, total = c.c_size_t(), c.c_size_t()
        self.call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value, total.value

    def reserve(self, size: int, alignment: int) -> Address:
        """A range of addresses with nothing behind it."""
        address = c.c_uint64()
        self.call("cuMemAddressReserve", c.byref(address), size, alignment, 0, 0)
        return address.value

    def give_back(self, address: Address, size: int) -> None:
        """Free a reserved range; nothing may be mapped in it."""
        self.call("cuMemAddressFree", address, size)

    def create(self, size: int, place: Place, number: int) -> Memory:
        """Physical memory; it lives until it is released and no longer mapped."""
        memory = c.c_uint64()
        prop = _prop(place, number)
        self.call("cuMemCreate", c.byref(memory), size, c.byref(prop), 0)
        return memory.value

    def drop(self, memory: Memory) -> None:
        """Release physical memory."""
        self.call("cuMemRelease", memory)

    def map(self, address: Address, size: int, memory: Memory) -> None:
        """Put physical memory behind addresses."""
        self.call("cuMemMap", address, size, 0, memory, 0)

    def unmap(self, address: Address, size: int) -> None:
        """Take it away again."""
        self.call("cuMemUnmap", address, size)

    def allow(self, address: Address, size: int, *places: tuple[Place, int]) -> None:
        """Read and write access to a mapped range for devices and for the processor."""
        rights = (AccessDesc * len(places))(*[AccessDesc(Location(p, n), _READ_WRITE) for p, n in places])
        self.call("cuMemSetAccess", address, size, rights, len(places))

    def in_host_memory(self, address: Address) -> bool:
        """Whether the bytes at a device address lie in host memory."""
        kind = c.c_uint()
        self.call("cuPointerGetAttribute", c.byref(kind), _MEMORY_TYPE, address)
        return kind.value == _HOST_MEMORY

    def _int(self, name: str, *arguments: Any) -> int:
        value = c.c_int()
        self.call(name, c.byref(value), *arguments)
        return value.value

    def _words(self, code: int) -> str:
        name, text = c.c_char_p(), c.c_char_p()
        self._lib.cuGetErrorName(code, c.byref(name))
        self._lib.cuGetErrorString(code, c.byref(text))
        parts = [part.value.decode() for part in (name, text) if part.value]
        return ": ".join(parts) or "unknown error"


def _prop(place: Place, number: int) -> AllocationProp:
    return AllocationProp(_PINNED, 0, Location(place, number), None, (c.c_ubyte * 8)())
