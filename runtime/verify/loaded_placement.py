"""Where things really are after loading: every weight's buffer and every computed node's device."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.constants import CPU
from planner.errors import EngineProblem, MachineError
from runtime.engine.ggml import Handle, Tensor
from runtime.engine.libllama import Engine

# std::vector<std::pair<std::string, ggml_tensor *>> of a loaded model: the function's name tells which
# std::string the build has. The current one is 32 bytes (pointer first), the one before C++11 a pointer.
_TENSOR_MAPS = {
    "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model": 32,
    "_Z29llama_internal_get_tensor_mapPK11llama_model": 8,
}
_POINTER_BYTES = 8
_VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


@dataclass(frozen=True, slots=True)
class Weight:
    """One loaded weight."""

    name: str
    buffer: str  # buffer type name: CPU, CPU_Mapped, CPU_REPACK, CUDA_Host, CUDA0 …
    device: str  # CPU for host memory of any kind
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """One computed node of the graph."""

    name: str
    op: str
    device: str


@dataclass(eq=False)
class Misplaced(MachineError):
    """Weights that are not where the plan puts them."""

    engine: str
    found: tuple[tuple[str, str, str], ...]  # tensor, device it is on, device the plan says

    def message(self) -> str:
        name, have, want = self.found[0]
        more = f" (and {len(self.found) - 1} more)" if len(self.found) > 1 else ""
        return f"engine {self.engine}: {name} was loaded into {have}, the plan says {want}{more}"


def supported(engine: Engine) -> bool:
    """Whether the build shows where its weights are."""
    return any(engine.has(name) for name in _TENSOR_MAPS)


def weights(engine: Engine, model: Handle) -> tuple[Weight, ...]:
    """Every weight of a loaded model with its real buffer, in load order.

    A tied output head appears as a second weight of the same name where the engine made a copy.
    Raises EngineProblem when the build does not show its tensors.
    """
    begin, end, string_bytes = _vector(engine, model)
    found = []
    for address in range(begin, end, string_bytes + _POINTER_BYTES):
        text, tensor = (_pointer(address), _pointer(address + string_bytes))
        found.append(_weight(engine, c.string_at(text).decode(errors="replace"), Tensor.from_address(tensor)))
    return tuple(found)


@dataclass(slots=True)
class Observer:
    """A cb_eval that notes the device of every node and asks for no data."""

    engine: Engine
    nodes: list[Node] = field(default_factory=list)

    def __call__(self, address: int, ask: bool, _user: int | None) -> bool:
        if ask:
            tensor = Tensor.from_address(address)
            op = self.engine.lib.ggml_op_name(tensor.op).decode()
            if tensor.buffer and op not in _VIEWS:
                self.nodes.append(
                    Node(tensor.name.decode(errors="replace"), op, device_of(self.engine, tensor.buffer))
                )
            return False
        return True


def device_of(engine: Engine, buffer: Handle) -> str:
    """The device whose memory a buffer is; CPU for host memory of any kind."""
    buft = engine.lib.ggml_backend_buffer_get_type(buffer)
    return CPU if engine.lib.ggml_backend_buft_is_host(buft) else engine.ggml.buft_device(buft)


def compare(engine: Engine, found: tuple[Weight, ...], planned: Mapping[str, str]) -> None:
    """Compare real devices with the planned ones (tensor to device). Raises Misplaced.

    A weight the plan does not name is fine anywhere; a tied head may be on any of its two devices.
    """
    wrong = []
    for weight in found:
        want = planned.get(weight.name)
        if want is not None and weight.device.casefold() != want.casefold():
            wrong.append((weight.name, weight.device, want))
    where: dict[str, set[str]] = {}
    for weight in found:
        where.setdefault(weight.name, set()).add(weight.device.casefold())
    settled = [w for w in wrong if w[2].casefold() not in where[w[0]]]
    if settled:
        raise Misplaced(engine.label, tuple(settled))


def _vector(engine: Engine, model: Handle) -> tuple[int, int, int]:
    for name, string_bytes in _TENSOR_MAPS.items():
        if engine.has(name):
            function = getattr(engine.lib, name)
            function.restype, function.argtypes = c.c_void_p, [c.c_void_p]
            begin, end = (c.c_uint64 * 2).from_address(function(model))
            if (end - begin) % (string_bytes + _POINTER_BYTES) == 0:
                return begin, end, string_bytes
    raise EngineProblem(engine.label, "this build does not show where its weights are")


def _pointer(address: int) -> int:
    return c.c_uint64.from_address(address).value


def _weight(engine: Engine, name: str, tensor: Tensor) -> Weight:
    size = engine.lib.ggml_nbytes(c.addressof(tensor))
    if not tensor.buffer:
        return Weight(name, "", "", size)
    buft = engine.lib.ggml_backend_buffer_get_type(tensor.buffer)
    return Weight(name, engine.ggml.buft_name(buft), device_of(engine, tensor.buffer), size)
