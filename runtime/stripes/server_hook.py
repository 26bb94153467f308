"""Stripes without overrides: the device's own buffer type hands named tensors to another one.

A server that builds its own load parameters cannot be told a stripe's buffer type. It allocates weights
through the device's default buffer type, whose optional `alloc_buffer_n` receives the list of tensors:
while the hook is set, those with a width go to a stripe and the rest where they always went.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from planner.site import Site, SiteKind
from runtime.engine.ggml import Ggml, Handle, Tensor
from runtime.stripes import ggml_structs as layout
from runtime.stripes.buffer_type import Stripes
from runtime.stripes.ggml_structs import StripesRefused

_ALLOC_N = 2  # index of alloc_buffer_n where a buffer type has eight functions
_WITH_LISTS = 8
_HOOK = c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.c_void_p, c.c_int)


@contextmanager
def striped_weights(
    stripes: Stripes, device: str, widths: Mapping[str, int], on_made: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside the block, models loaded with mmap on `device` keep `widths[tensor]` hot experts in VRAM.

    `on_made` is called when stripes have their memory. Models must be freed before `stripes` is closed.
    Raises StripesRefused.
    """
    ggml = stripes.ggml
    buft = ggml.lib.ggml_backend_dev_buffer_type(ggml.device(device).handle)
    # Made before the hook is set: they copy the device's own type.
    kinds = {k: stripes.buffer_type(str(Site(SiteKind.STRIPE, device, k))) for k in set(widths.values())}
    if stripes.layout(device).type_functions != _WITH_LISTS:
        raise StripesRefused(
            device, "this build allocates weights without telling which: serve needs a newer"
        )
    with diverted(ggml, buft, lambda name: kinds.get(widths.get(name, -1)), on_made):
        yield


@contextmanager
def diverted(
    ggml: Ggml,
    buft: Handle,
    choose: Callable[[str], Handle | None],
    on_made: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Tensors allocated together through `buft` go to the buffer type that `choose(name)` gives, if any."""
    original = layout.read(buft, _ALLOC_N)

    def allocate(_buft: Handle, array: Handle, count: int) -> Handle | None:
        groups: dict[Handle, list[Handle]] = {}
        for tensor in (c.c_uint64 * count).from_address(array):
            name = Tensor.from_address(tensor).name.decode(errors="replace")
            groups.setdefault(choose(name) or buft, []).append(tensor)
        layout.write(buft, _ALLOC_N, original)
        try:
            made = _together(ggml, groups)
        finally:
            layout.write(buft, _ALLOC_N, address)
        if set(groups) != {buft}:
            on_made()
        return made

    hook = _HOOK(allocate)
    address = c.cast(hook, c.c_void_p).value or 0
    layout.write(buft, _ALLOC_N, address)
    try:
        yield
    finally:
        layout.write(buft, _ALLOC_N, original)


def _together(ggml: Ggml, groups: Mapping[Handle, Sequence[Handle]]) -> Handle | None:
    """One buffer of each type, joined; None, with nothing left behind, when one cannot be had."""
    allocate: Any = ggml.lib.ggml_backend_buft_alloc_buffer_n
    allocate.argtypes, allocate.restype = (c.c_void_p, c.c_void_p, c.c_int), c.c_void_p
    join: Any = ggml.lib.ggml_backend_multi_buffer_alloc_buffer
    join.argtypes, join.restype = (c.c_void_p, c.c_size_t), c.c_void_p
    made: list[Handle] = []
    for buft, tensors in groups.items():
        buffer = allocate(buft, (c.c_void_p * len(tensors))(*tensors), len(tensors))
        if not buffer:
            for each in made:
                ggml.lib.ggml_backend_buffer_free(each)
            return None
        made.append(buffer)
    if len(made) == 1:
        return made[0]
    joined: Handle | None = join((c.c_void_p * len(made))(*made), len(made))
    return joined
