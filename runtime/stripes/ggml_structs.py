"""Where ggml keeps what a stripe must change: the C structs of buffer types and buffers, found by looking.

Nothing is assumed from a version number. The device of a buffer type, the type of a buffer and the base
address of its memory are known through public functions; the words that hold them are searched in the
structs, and only layouts seen in real builds are accepted.
"""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass

from planner.errors import MachineError
from runtime.engine.ggml import Ggml, Handle

WORD = 8
PROBE_BYTES = 2 * 2**20

# Order of the first functions of a buffer's interface, the same in every build seen.
FREE, GET_BASE, INIT_TENSOR, MEMSET, SET_TENSOR, GET_TENSOR = range(6)
GET_NAME, ALLOC_BUFFER = range(2)  # of a buffer type's interface
_TYPE_FUNCTIONS = {6: 2, 8: 3}  # functions of a buffer type -> index of get_alignment
_BUFFER_FUNCTIONS = (9, 11)


@dataclass(eq=False)
class StripesRefused(MachineError):
    """Stripes cannot be had on this device with this engine."""

    device: str
    why: str

    def message(self) -> str:
        return f"stripes on {self.device}: {self.why}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Word indices in ggml's structs; the context follows the device, and the size follows the context."""

    type_functions: int  # function pointers at the start of a buffer type
    buffer_functions: int  # function pointers at the start of a buffer

    @property
    def get_alignment(self) -> int:
        return _TYPE_FUNCTIONS[self.type_functions]

    @property
    def type_words(self) -> int:
        return self.type_functions + 2

    @property
    def type_context(self) -> int:
        return self.type_functions + 1

    @property
    def buffer_context(self) -> int:
        return self.buffer_functions + 1

    @property
    def buffer_size(self) -> int:
        return self.buffer_functions + 2


def read(address: Handle, index: int) -> int:
    """A word of a C struct."""
    return c.c_uint64.from_address(address + index * WORD).value


def write(address: Handle, index: int, value: int) -> None:
    """Change a word of a C struct."""
    c.c_uint64.from_address(address + index * WORD).value = value


def find(ggml: Ggml, device: str, buft: Handle) -> Layout:
    """The layout of this build, proven on the device's own buffer type and a small buffer of it.

    Raises StripesRefused with what did not match.
    """
    type_functions = _type_functions(ggml, device, buft)
    buffer = ggml.lib.ggml_backend_buft_alloc_buffer(buft, PROBE_BYTES)
    if not buffer:
        raise StripesRefused(device, f"{PROBE_BYTES} bytes cannot be allocated there")
    try:
        return Layout(type_functions, _buffer_functions(ggml, device, buft, buffer))
    finally:
        ggml.lib.ggml_backend_buffer_free(buffer)


def _type_functions(ggml: Ggml, device: str, buft: Handle) -> int:
    owner = ggml.lib.ggml_backend_buft_get_device(buft)
    count = next((n for n in _TYPE_FUNCTIONS if read(buft, n) == owner), None)
    if count is None:
        raise StripesRefused(device, "this build lays out buffer types in a way not known here")
    name = ggml.lib.ggml_backend_buft_name(buft)
    context = read(buft, count + 1)
    kept = c.string_at(read(context, 1), len(name) + 1)  # std::string: pointer, length, room
    if kept != name + b"\0" or read(context, 2) != len(name):
        raise StripesRefused(device, "the name of its buffer type is not where it was expected")
    alignment = c.CFUNCTYPE(c.c_size_t, c.c_void_p)(read(buft, _TYPE_FUNCTIONS[count]))
    if alignment(buft) != ggml.lib.ggml_backend_buft_get_alignment(buft):
        raise StripesRefused(device, "its buffer type has its functions in another order")
    return count


def _buffer_functions(ggml: Ggml, device: str, buft: Handle, buffer: Handle) -> int:
    count = next((n for n in _BUFFER_FUNCTIONS if read(buffer, n) == buft), None)
    if count is None or read(buffer, count + 2) != PROBE_BYTES:
        raise StripesRefused(device, "this build lays out buffers in a way not known here")
    context, base = read(buffer, count + 1), ggml.lib.ggml_backend_buffer_get_base(buffer)
    if read(context, 1) != base or (read(context, 0) & 0xFFFFFFFF) >= 64:
        raise StripesRefused(device, "its buffers keep their address elsewhere: unified or split memory?")
    _check_redirection(ggml, device, buffer, context, base)
    return count


def _check_redirection(ggml: Ggml, device: str, buffer: Handle, context: Handle, base: int) -> None:
    write(context, 1, base + PROBE_BYTES // 2)
    moved = ggml.lib.ggml_backend_buffer_get_base(buffer)
    write(context, 1, base)
    if moved != base + PROBE_BYTES // 2 or ggml.lib.ggml_backend_buffer_get_base(buffer) != base:
        raise StripesRefused(device, "its buffers do not follow a change of address")
