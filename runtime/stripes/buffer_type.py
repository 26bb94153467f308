"""Striped experts: a ggml buffer type whose tensors lie partly in VRAM and partly in pinned host memory.

The buffer type is a copy of the CUDA device's own with another name, granule alignment and another
`alloc_buffer`. A buffer of it is a tiny real CUDA buffer pointed at a range of reserved addresses; its
`init_tensor` gives each tensor memory (the first experts on the device, the rest on the host),
`set_tensor` fills both parts at once, and `free_buffer` restores and frees everything. Kernels see one
contiguous tensor. Nothing in the engine is changed.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from planner.errors import AtsplanError, MachineError
from planner.site import Site
from runtime.engine.ggml import Ggml, Handle, Tensor
from runtime.stripes import ggml_structs as layout
from runtime.stripes.cuda_driver import Attribute, CudaCallFailed, CudaMissing, Driver
from runtime.stripes.ggml_structs import Layout, StripesRefused
from runtime.stripes.mapped_range import GRANULE, Gpu, Part, StripeRange, copy_in_pieces

_TINY = 4096  # bytes of the real buffer behind a stripe; never used
_FAILED = -2  # GGML_STATUS_ALLOC_FAILED
_P, _Z = c.c_void_p, c.c_size_t
_ALLOC = c.CFUNCTYPE(_P, _P, _Z)
_ALIGN = c.CFUNCTYPE(_Z, _P)
_FREE = c.CFUNCTYPE(None, _P)
_INIT = c.CFUNCTYPE(c.c_int, _P, _P)
_MOVE = c.CFUNCTYPE(None, _P, _P, _P, _Z, _Z)


class _Props(c.Structure):
    """struct ggml_backend_dev_props, up to the device id."""

    _fields_ = (
        ("name", c.c_char_p),
        ("description", c.c_char_p),
        ("memory_free", _Z),
        ("memory_total", _Z),
        ("type", c.c_int),
        ("device_id", c.c_char_p),
        ("room", c.c_char * 64),
    )


@dataclass(frozen=True, slots=True)
class Striped:
    """What one buffer of stripes holds now."""

    device: str
    experts: int  # hot experts of each tensor
    tensors: int
    device_bytes: int
    host_bytes: int


@dataclass(slots=True)
class _Buffer:
    """A live buffer: its range, and what must be put back before ggml frees it."""

    range: StripeRange
    kind: _Kind
    address: int  # the real buffer's own


class Stripes:
    """Striped buffer types for one engine; a context manager.

    Close it after every model that uses it; a model that is still loaded keeps it alive.
    """

    def __init__(self, ggml: Ggml, threads: int = 0) -> None:
        self.ggml = ggml
        self._driver: Driver | None = None
        self.problem: AtsplanError | None = None
        # Pinning is bound by a lock of the kernel, copying by the memory: each has its own threads.
        self.pinning = ThreadPoolExecutor(4, "stripe-pin")
        self.copying = ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), "stripe-copy")
        self._kinds: dict[str, _Kind] = {}
        self._gpus: dict[str, tuple[Gpu, Layout]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def driver(self) -> Driver:
        """The CUDA driver, loaded when first needed. Raises StripesRefused."""
        if self._driver is None:
            try:
                self._driver = Driver()
            except CudaMissing as problem:
                raise StripesRefused("this machine", problem.why) from None
        return self._driver

    def buffer_type(self, name: str) -> Handle:
        """The buffer type that is named like a striped site: so many experts in VRAM.

        Raises StripesRefused, with the reason, where it cannot be had.
        """
        if name not in self._kinds:
            site = Site.of_buffer(name)
            gpu, found = self._gpu(site.device)
            self._kinds[name] = _Kind(self, name, gpu, found, site.amount)
        return self._kinds[name].handle

    def host_type(self, device: str) -> Handle:
        """A buffer type of the device with all its memory in host granules, as cold experts lie.

        For measuring: tensors may be laid over one another in it. Raises StripesRefused.
        """
        name = f"zero-copy:{device}"
        if name not in self._kinds:
            self._kinds[name] = _Kind(self, name, *self._gpu(device), None)
        return self._kinds[name].handle

    def held(self) -> tuple[Striped, ...]:
        """What is loaded now, a line a buffer."""
        return tuple(kind.describe(buffer) for kind in self._kinds.values() for buffer in kind.live.values())

    def parts(self) -> tuple[tuple[StripeRange, Part], ...]:
        """Every tensor's memory now."""
        buffers = [b for kind in self._kinds.values() for b in kind.live.values()]
        return tuple((b.range, part) for b in buffers for part in b.range.parts.values())

    def gpu(self, device: str) -> Gpu:
        """The driver's side of a ggml device. Raises StripesRefused."""
        return self._gpu(device)[0]

    def layout(self, device: str) -> Layout:
        """How this build lays out its structs. Raises StripesRefused."""
        return self._gpu(device)[1]

    def check(self) -> None:
        """Raise what went wrong inside a callback of the engine since the last call."""
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Stop; MachineError when a model still uses a stripe."""
        if any(kind.live for kind in self._kinds.values()):
            raise MachineError("stripes: a model that uses them is still loaded")
        self.pinning.shutdown()
        self.copying.shutdown()
        self._kinds.clear()

    def _gpu(self, device: str) -> tuple[Gpu, Layout]:
        if device not in self._gpus:
            handle = self.ggml.device(device).handle
            name = self.ggml.device(device).name
            buft = self.ggml.lib.ggml_backend_dev_buffer_type(handle)
            _require_cuda(self.ggml, name, handle, buft)
            gpu = find_gpu(self.driver, name, _pci_id(self.ggml, handle))
            self._gpus[device] = gpu, layout.find(self.ggml, name, buft)
        return self._gpus[device]


class _Kind:
    """One buffer type: the C struct, its callbacks, and the buffers made of it."""

    def __init__(self, owner: Stripes, name: str, gpu: Gpu, found: Layout, experts: int | None) -> None:
        # Without a number of experts the whole buffer is host memory from the start.
        self.owner, self.gpu, self.layout, self.experts = owner, gpu, found, experts
        self.live: dict[Handle, _Buffer] = {}
        lib = owner.ggml.lib
        origin = lib.ggml_backend_dev_buffer_type(owner.ggml.device(gpu.name).handle)
        words = [layout.read(origin, index) for index in range(found.type_words)]
        self._alloc_real = _ALLOC(words[layout.ALLOC_BUFFER])
        self._text = c.create_string_buffer(name.encode())
        # {int device; std::string name}: pointer, length; the string is never destroyed.
        device_number = layout.read(words[found.type_context], 0) & 0xFFFFFFFF
        self._context = (c.c_uint64 * 5)(device_number, c.addressof(self._text), len(name), len(name), 0)
        self._callbacks = (_ALLOC(self._guard(self._alloc, None)), _ALIGN(lambda _buft: GRANULE))
        words[layout.ALLOC_BUFFER] = _address(self._callbacks[0])
        words[found.get_alignment] = _address(self._callbacks[1])
        words[found.type_context] = c.addressof(self._context)
        self._words = (c.c_uint64 * len(words))(*words)
        self.handle: Handle = c.addressof(self._words)
        self._real: dict[int, int] = {}  # the functions of a real CUDA buffer, by index
        self._hooks = self._buffer_hooks()

    def describe(self, buffer: _Buffer) -> Striped:
        parts = buffer.range.parts.values()
        return Striped(
            device=self.gpu.name,
            experts=self.experts or 0,
            tensors=len(parts),
            device_bytes=sum(part.hot_bytes for part in parts),
            host_bytes=sum(part.host_bytes for part in parts),
        )

    def _buffer_hooks(self) -> dict[int, Any]:
        return {
            layout.FREE: _FREE(self._guard(self._free, None)),
            layout.INIT_TENSOR: _INIT(self._guard(self._init, _FAILED)),
            layout.SET_TENSOR: _MOVE(self._guard(self._set, None)),
            layout.GET_TENSOR: _MOVE(self._guard(self._get, None)),
        }

    def _guard(self, function: Callable[..., Any], failed: Any) -> Callable[..., Any]:
        # An exception must not cross the engine: it is kept, and the engine is told that it failed.
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except AtsplanError as problem:
                self.owner.problem = problem
            except Exception as fault:
                self.owner.problem = MachineError(f"stripes: {type(fault).__name__}: {fault}")
            return failed

        return call

    def _alloc(self, buft: Handle, size: int) -> Handle | None:
        memory = StripeRange(self.owner.driver, self.gpu, size, self.owner.pinning)
        if self.experts is None:
            memory.place(memory.base, size, size, 0)
        buffer = self._alloc_real(buft, _TINY)
        if not buffer:
            memory.close()
            return None
        context = layout.read(buffer, self.layout.buffer_context)
        self.live[buffer] = _Buffer(memory, self, layout.read(context, 1))
        layout.write(context, 1, memory.base)
        layout.write(buffer, self.layout.buffer_size, size)
        for index, hook in self._hooks.items():
            self._real[index] = layout.read(buffer, index)
            layout.write(buffer, index, _address(hook))
        return int(buffer)

    def _init(self, buffer: Handle, tensor: Handle) -> int:
        record = Tensor.from_address(tensor)
        if record.view_src or self.experts is None:
            return 0
        lib, memory = self.owner.ggml.lib, self.live[buffer].range
        data, padded = lib.ggml_nbytes(tensor), lib.ggml_backend_buft_get_alloc_size(self.handle, tensor)
        if memory.place(record.data, data, padded, self.experts * record.nb[2]):
            return 0
        # Kernels read rows in whole blocks: the original clears what lies behind the last one.
        memory.part(record.data)
        return int(_INIT(self._real[layout.INIT_TENSOR])(buffer, tensor))

    def _set(self, buffer: Handle, tensor: Handle, data: int, offset: int, size: int) -> None:
        start, hot = self._hot(buffer, tensor, offset, size)
        if hot:
            _MOVE(self._real[layout.SET_TENSOR])(buffer, tensor, data, offset, hot)
        self.live[buffer].range.part(self._key(buffer, start))
        if self.gpu.host_access:
            copy_in_pieces(self.owner.copying, start + offset + hot, data + hot, size - hot)
        elif hot < size:
            _MOVE(self._real[layout.SET_TENSOR])(buffer, tensor, data + hot, offset + hot, size - hot)

    def _get(self, buffer: Handle, tensor: Handle, data: int, offset: int, size: int) -> None:
        # One copy across the boundary is not something every driver can do.
        start, hot = self._hot(buffer, tensor, offset, size)
        if hot:
            _MOVE(self._real[layout.GET_TENSOR])(buffer, tensor, data, offset, hot)
        if self.gpu.host_access:
            c.memmove(data + hot, start + offset + hot, size - hot)
        elif hot < size:
            _MOVE(self._real[layout.GET_TENSOR])(buffer, tensor, data + hot, offset + hot, size - hot)

    def _hot(self, buffer: Handle, tensor: Handle, offset: int, size: int) -> tuple[int, int]:
        """Address of a tensor, and how many of `size` bytes from `offset` lie on the device."""
        start: int = Tensor.from_address(tensor).data
        part = self.live[buffer].range.parts[self._key(buffer, start)]
        return start, max(0, min(size, part.hot_bytes - offset))

    def _key(self, buffer: Handle, start: int) -> int:
        return self.live[buffer].range.base if self.experts is None else start

    def _free(self, buffer: Handle) -> None:
        held = self.live.pop(buffer)
        layout.write(layout.read(buffer, self.layout.buffer_context), 1, held.address)
        for index, function in self._real.items():
            layout.write(buffer, index, function)
        _FREE(self._real[layout.FREE])(buffer)
        held.range.close()


def find_gpu(driver: Driver, name: str, pci_id: str) -> Gpu:
    """The driver's side of a ggml device, its abilities tried out. Raises StripesRefused."""
    try:
        number = driver.device(pci_id)
        if not driver.attribute(number, Attribute.VIRTUAL_MEMORY):
            raise StripesRefused(name, "its driver has no virtual memory management")
        node = max(0, driver.attribute(number, Attribute.HOST_NUMA_ID))
        return Gpu(name, number, node, _try_host_memory(driver, name, number, node))
    except CudaCallFailed as problem:
        raise StripesRefused(name, problem.message()) from None


def _try_host_memory(driver: Driver, name: str, number: int, node: int) -> bool:
    """Map one host granule for the device; whether the processor may use the same addresses."""
    pool = ThreadPoolExecutor(1)
    trial = StripeRange(driver, Gpu(name, number, node, host_access=True), 2 * GRANULE, pool)
    try:
        trial.place(trial.base, 2 * GRANULE, 2 * GRANULE, GRANULE)
        trial.part(trial.base)
        at = trial.base + GRANULE
        c.memmove(at, b"stripe", 6)
        return c.string_at(at, 6) == b"stripe" and driver.in_host_memory(at)
    except CudaCallFailed as problem:
        if problem.call == "cuMemSetAccess":
            return False
        raise StripesRefused(
            name, f"its driver cannot map host memory for it ({problem.text}): CUDA 12.2 or later is needed"
        ) from None
    finally:
        trial.close()
        pool.shutdown()


def _require_cuda(ggml: Ggml, name: str, device: Handle, buft: Handle) -> None:
    reg = ggml.lib.ggml_backend_reg_name(ggml.lib.ggml_backend_dev_backend_reg(device)).decode()
    if reg != "CUDA":
        raise StripesRefused(name, f"it is a {reg} device, CUDA is needed")
    if ggml.lib.ggml_backend_buft_is_host(buft):
        raise StripesRefused(name, "it shares its memory with the processor: there is nothing to gain")


def _pci_id(ggml: Ggml, device: Handle) -> str:
    get: Any = ggml.lib.ggml_backend_dev_get_props
    get.argtypes, get.restype = (_P, _P), None
    props = _Props()
    get(device, c.byref(props))
    return (props.device_id or b"").decode()


def _address(function: Any) -> int:
    return c.cast(function, c.c_void_p).value or 0
