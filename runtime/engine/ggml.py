"""libggml through ctypes: devices, buffer types, tensors, graphs, quantisation, compute.

`Ggml.lib` carries the C functions with their types set; handles are plain integers (addresses).
Functions that a build lacks are listed in `Ggml.missing` and raise AttributeError when called.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from planner.errors import EngineProblem
from planner.model.ggml_types import TYPES
from runtime.engine.prototypes import bind

Handle = int  # the address of a C object

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # ggml_backend_dev_type

# Numbers of ggml_type, by ggml's own names.
TYPE_NUMBERS: Mapping[str, int] = {kind.name: number for number, kind in TYPES.items()}


class InitParams(c.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool))


class Tensor(c.Structure):
    """struct ggml_tensor, the same in every build from b10434 to b11739."""

    _fields_ = (
        ("type", c.c_int32),
        ("buffer", c.c_void_p),
        ("ne", c.c_int64 * 4),
        ("nb", c.c_size_t * 4),
        ("op", c.c_int32),
        ("op_params", c.c_int32 * 16),
        ("flags", c.c_int32),
        ("src", c.c_void_p * 10),
        ("view_src", c.c_void_p),
        ("view_offs", c.c_size_t),
        ("data", c.c_void_p),
        ("name", c.c_char * 64),
        ("extra", c.c_void_p),
        ("padding", c.c_char * 8),
    )


_EXTRA = {"N": InitParams, "B": c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)}

PROTOTYPES: Mapping[str, str] = {
    # devices and backends
    "ggml_backend_dev_count": "z",
    "ggml_backend_dev_get": "pz",
    "ggml_backend_dev_by_name": "ps",
    "ggml_backend_dev_by_type": "pi",
    "ggml_backend_dev_name": "sp",
    "ggml_backend_dev_description": "sp",
    "ggml_backend_dev_type": "ip",
    "ggml_backend_dev_memory": "vppp",
    "ggml_backend_dev_backend_reg": "pp",
    "ggml_backend_dev_init": "pps",
    "ggml_backend_dev_buffer_type": "pp",
    "ggml_backend_dev_host_buffer_type": "pp",
    "ggml_backend_dev_supports_op": "bpp",
    "ggml_backend_dev_supports_buft": "bpp",
    "ggml_backend_dev_offload_op": "bpp",
    "ggml_backend_reg_name": "sp",
    "ggml_backend_reg_count": "z",
    "ggml_backend_reg_get": "pz",
    "ggml_backend_reg_dev_count": "zp",
    "ggml_backend_reg_dev_get": "ppz",
    "ggml_backend_reg_get_proc_address": "pps",
    "ggml_backend_register": "vp",
    "ggml_backend_load": "ps",
    "ggml_backend_load_all": "v",
    "ggml_backend_load_all_from_path": "vs",
    "ggml_backend_rpc_add_server": "ps",
    "ggml_backend_free": "vp",
    "ggml_backend_name": "sp",
    "ggml_backend_synchronize": "vp",
    "ggml_backend_graph_compute": "ipp",
    "ggml_backend_graph_compute_async": "ipp",
    # buffer types and buffers
    "ggml_backend_cpu_buffer_type": "p",
    "ggml_backend_buft_name": "sp",
    "ggml_backend_buft_get_device": "pp",
    "ggml_backend_buft_get_alignment": "zp",
    "ggml_backend_buft_get_max_size": "zp",
    "ggml_backend_buft_get_alloc_size": "zpp",
    "ggml_backend_buft_is_host": "bp",
    "ggml_backend_buft_alloc_buffer": "ppz",
    "ggml_backend_buffer_name": "sp",
    "ggml_backend_buffer_free": "vp",
    "ggml_backend_buffer_get_base": "pp",
    "ggml_backend_buffer_get_size": "zp",
    "ggml_backend_buffer_get_type": "pp",
    "ggml_backend_buffer_set_usage": "vpi",
    "ggml_backend_buffer_clear": "vpi",
    "ggml_backend_alloc_ctx_tensors_from_buft": "ppp",
    "ggml_backend_tensor_alloc": "ippp",
    "ggml_backend_tensor_set": "vppzz",
    "ggml_backend_tensor_get": "vppzz",
    "ggml_backend_tensor_copy": "vpp",
    "ggml_backend_tensor_copy_async": "vpppp",
    "ggml_gallocr_new": "pp",
    "ggml_gallocr_alloc_graph": "bpp",
    "ggml_gallocr_free": "vp",
    # scheduler: a graph over several backends
    "ggml_backend_sched_new": "pppizbb",
    "ggml_backend_sched_free": "vp",
    "ggml_backend_sched_reset": "vp",
    "ggml_backend_sched_alloc_graph": "bpp",
    "ggml_backend_sched_graph_compute": "ipp",
    "ggml_backend_sched_get_n_splits": "ip",
    "ggml_backend_sched_set_tensor_backend": "vppp",
    # contexts, tensors, graphs
    "ggml_init": "pN",
    "ggml_free": "vp",
    "ggml_tensor_overhead": "z",
    "ggml_graph_overhead": "z",
    "ggml_graph_overhead_custom": "zzb",
    "ggml_new_tensor_1d": "ppiq",
    "ggml_new_tensor_2d": "ppiqq",
    "ggml_new_tensor_3d": "ppiqqq",
    "ggml_new_tensor_4d": "ppiqqqq",
    "ggml_view_1d": "pppqz",
    "ggml_view_2d": "pppqqzz",
    "ggml_set_name": "pps",
    "ggml_set_input": "vp",
    "ggml_set_output": "vp",
    "ggml_new_graph": "pp",
    "ggml_new_graph_custom": "ppzb",
    "ggml_build_forward_expand": "vpp",
    "ggml_graph_n_nodes": "ip",
    "ggml_graph_node": "ppi",
    "ggml_nbytes": "zp",
    "ggml_nelements": "qp",
    # types
    "ggml_type_name": "si",
    "ggml_type_size": "zi",
    "ggml_blck_size": "qi",
    "ggml_row_size": "ziq",
    "ggml_is_quantized": "bi",
    "ggml_op_name": "si",
    "ggml_version": "s",
    "ggml_commit": "s",
    "ggml_time_us": "q",
    # operators
    "ggml_mul_mat": "pppp",
    "ggml_mul_mat_id": "ppppp",
    "ggml_get_rows": "pppp",
    "ggml_set_rows": "ppppp",
    "ggml_add": "pppp",
    "ggml_add_id": "ppppp",
    "ggml_mul": "pppp",
    "ggml_sub": "pppp",
    "ggml_exp": "ppp",
    "ggml_sum_rows": "ppp",
    "ggml_repeat": "pppp",
    "ggml_scale": "pppf",
    "ggml_rms_norm": "pppf",
    "ggml_l2_norm": "pppf",
    "ggml_rope_ext": "pppppiiiffffff",
    "ggml_soft_max_ext": "ppppff",
    "ggml_flash_attn_ext": "ppppppfff",
    "ggml_silu": "ppp",
    "ggml_swiglu_split": "pppp",
    "ggml_argsort": "pppi",
    "ggml_top_k": "pppi",
    "ggml_ssm_conv": "pppp",
    "ggml_ssm_scan": "pppppppppq",
    "ggml_gated_delta_net": "ppppppppq",
    "ggml_rwkv_wkv7": "ppppppppp",
    "ggml_cpy": "pppp",
    "ggml_cont": "ppp",
    "ggml_cast": "pppi",
    "ggml_permute": "pppiiii",
    "ggml_reshape_3d": "pppqqq",
}


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the library names it."""

    handle: Handle
    name: str
    kind: str  # cpu, gpu, igpu, accel, meta
    description: str
    free_bytes: int
    total_bytes: int


class Ggml:
    """The ggml side of one loaded engine."""

    def __init__(self, library: c.CDLL, name: str) -> None:
        self.lib: Any = library
        self.name = name
        self.missing = frozenset(bind(library, PROTOTYPES, _EXTRA))

    def devices(self) -> tuple[Device, ...]:
        """Every registered device, in the library's order, with its memory now."""
        count = self.lib.ggml_backend_dev_count()
        return tuple(self._device(self.lib.ggml_backend_dev_get(index)) for index in range(count))

    def device(self, name: str) -> Device:
        """The device of that name, upper and lower case alike; EngineProblem lists what is there."""
        for device in self.devices():
            if name.casefold() in (device.name.casefold(), self.plan_name(device).casefold()):
                return device
        there = ", ".join(d.name for d in self.devices()) or "none"
        raise EngineProblem(self.name, f"no device {name} here (devices: {there})")

    def plan_name(self, device: Device) -> str:
        """What plans call a device: a remote one like its memory, RPC0[host:port], which names its server."""
        if not device.name.startswith("RPC"):
            return device.name
        return self.buft_name(self.lib.ggml_backend_dev_buffer_type(device.handle))

    def buffer_types(self, device: Device) -> dict[str, Handle]:
        """Buffer types of a device by name: its own, its pinned host type, extra ones such as CPU_REPACK."""
        own = [self.lib.ggml_backend_dev_buffer_type(device.handle)]
        host = self.lib.ggml_backend_dev_host_buffer_type(device.handle)
        handles = [*own, *([host] if host else []), *self._extra_bufts(device)]
        return {self.buft_name(handle): handle for handle in handles}

    def all_buffer_types(self) -> dict[str, Handle]:
        """Buffer types of all devices by name."""
        found: dict[str, Handle] = {}
        for device in self.devices():
            for name, handle in self.buffer_types(device).items():
                found.setdefault(name, handle)
        return found

    def buft_name(self, buft: Handle) -> str:
        """Name of a buffer type."""
        return str(self.lib.ggml_backend_buft_name(buft).decode(errors="replace"))

    def buft_device(self, buft: Handle) -> str:
        """Name of the device a buffer type belongs to; CPU for host memory of no device."""
        device = self.lib.ggml_backend_buft_get_device(buft)
        return str(self.lib.ggml_backend_dev_name(device).decode(errors="replace")) if device else "CPU"

    def set_threads(self, device: Device, backend: Handle, n_threads: int) -> bool:
        """Set the thread count of a backend; False when the backend has none."""
        setter = self._proc(device, "ggml_backend_set_n_threads")
        if not setter:
            return False
        c.CFUNCTYPE(None, c.c_void_p, c.c_int)(setter)(backend, n_threads)
        return True

    @contextmanager
    def backend(self, device: Device, n_threads: int = 0) -> Iterator[Handle]:
        """A backend on a device, freed at the end."""
        handle = self.lib.ggml_backend_dev_init(device.handle, None)
        if not handle:
            raise EngineProblem(self.name, f"cannot start the device {device.name}")
        try:
            if n_threads:
                self.set_threads(device, handle, n_threads)
            yield handle
        finally:
            self.lib.ggml_backend_free(handle)

    @contextmanager
    def context(self, n_tensors: int, n_nodes: int = 0) -> Iterator[Handle]:
        """A context with room for tensors and one graph of `n_nodes`; holds no data; freed at the end."""
        size = self.lib.ggml_tensor_overhead() * n_tensors
        if n_nodes:
            size += self.lib.ggml_graph_overhead_custom(n_nodes, False)
        handle = self.lib.ggml_init(InitParams(size, None, True))
        if not handle:
            raise EngineProblem(self.name, f"no memory for {n_tensors} tensor records")
        try:
            yield handle
        finally:
            self.lib.ggml_free(handle)

    def tensor(self, handle: Handle) -> Tensor:
        """The C struct of a tensor, shared, not copied."""
        return Tensor.from_address(handle)

    def new_tensor(self, context: Handle, type_name: str, shape: Sequence[int]) -> Handle:
        """A tensor of 1 to 4 dimensions, ne0 first."""
        create = getattr(self.lib, f"ggml_new_tensor_{len(shape)}d")
        return int(create(context, TYPE_NUMBERS[type_name], *shape))

    def compute(self, backend: Handle, graph: Handle) -> None:
        """Run a graph and wait; EngineProblem when the backend says it failed."""
        status = self.lib.ggml_backend_graph_compute(backend, graph)
        if status != 0:
            raise EngineProblem(self.name, f"computing a graph failed with status {status}")

    def await_result(self, tensor: Handle) -> None:
        """Wait until a remote device has computed a tensor: it takes orders, in order, and answers questions.

        Its `synchronize` does nothing, and `compute` is back when the order is sent.
        """
        answer = (c.c_char * 4)()
        self.lib.ggml_backend_tensor_get(tensor, answer, 0, 4)

    def _device(self, handle: Handle) -> Device:
        free, total = c.c_size_t(), c.c_size_t()
        self.lib.ggml_backend_dev_memory(handle, c.byref(free), c.byref(total))
        return Device(
            handle=handle,
            name=self.lib.ggml_backend_dev_name(handle).decode(errors="replace"),
            kind=KINDS[self.lib.ggml_backend_dev_type(handle)],
            description=self.lib.ggml_backend_dev_description(handle).decode(errors="replace").strip(),
            free_bytes=free.value,
            total_bytes=total.value,
        )

    def _extra_bufts(self, device: Device) -> list[Handle]:
        getter = self._proc(device, "ggml_backend_dev_get_extra_bufts")
        if not getter:
            return []
        array = c.CFUNCTYPE(c.POINTER(c.c_void_p), c.c_void_p)(getter)(device.handle)
        found: list[Handle] = []
        while array and (handle := array[len(found)]):
            found.append(handle)
        return found

    def _proc(self, device: Device, name: str) -> Handle | None:
        reg = self.lib.ggml_backend_dev_backend_reg(device.handle)
        address: Handle | None = (
            self.lib.ggml_backend_reg_get_proc_address(reg, name.encode()) if reg else None
        )
        return address
