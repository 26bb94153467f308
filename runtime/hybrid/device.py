"""A hybrid device in this process: opened on a device of a loaded engine, registered, asked and changed."""

from __future__ import annotations

import ctypes as c
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import EngineProblem
from runtime.cache import libraries
from runtime.engine.ggml import Ggml, Handle
from runtime.engine.prototypes import bind
from runtime.hybrid import build
from runtime.hybrid.build import HybridRefused
from runtime.hybrid.config import Config

_VERSION = 1
ROWS = 16  # tokens of a step that are counted one by one
_ROOM = 1000  # bytes of a message
_PROTOTYPES = {
    "atsplan_hybrid_version": "i",
    "atsplan_hybrid_open": "pppspzpz",
    "atsplan_hybrid_registry": "pp",
    "atsplan_hybrid_device": "pp",
    "atsplan_hybrid_buffer_type": "pp",
    "atsplan_hybrid_report": "zppz",
    "atsplan_hybrid_set_residents": "ipiispzpz",
    "atsplan_hybrid_fault": "vppz",
    "atsplan_hybrid_faults": "qp",
    "atsplan_hybrid_close": "vp",
}


@dataclass(frozen=True, slots=True)
class Block:
    """What became of one block's choices; counts since the model was loaded."""

    model: int  # number in the order of loading
    block: int
    kind: str  # "exps", "chexps"
    experts: int
    slots: int
    guests: int
    resident: tuple[int, ...]
    expert_bytes: int
    device_bytes: int  # of slots and guests
    steps: int  # products, or whole blocks, computed
    hits: int  # choices whose expert had a slot
    uploaded: int  # choices whose expert was uploaded for the step
    cpu: int  # choices that the CPU computed
    all_at_once: int  # choices of all experts together: warm-up
    uploads: int
    upload_bytes: int
    staged: int
    wait_ns: int  # for the router's choices
    cpu_ns: int
    launch_ns: int  # the host queueing work while the CPU lane runs
    lane_ns: int  # then waiting for the lane, or helping it
    ahead_ns: int  # the host queueing what leads to the choices, and their way to the host
    decide_ns: int  # dividing the choices, until the lane begins
    rows_ns: int  # queueing the lane's rows
    admitted: int  # experts that took a slot; each evicted another
    admitted_bytes: int
    waited: int  # steps in lockstep that waited for one
    late: int  # steps that went on without one that was sent
    chosen: tuple[int, ...]  # by expert
    # Of steps of 2 to 16 tokens, by a token's place in its step: choices, and those whose expert had a slot.
    # Sequences that decode together have a token each, in the order of the server's slots: the place is the
    # rank among those that decode in the step. Short prompts and checked drafts are such steps too.
    row_choices: tuple[int, ...] = ()
    row_hits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Memory and work of a hybrid device."""

    name: str
    wraps: str
    host_bytes: int  # experts
    stage_bytes: int
    stream_device_bytes: int
    stream_host_bytes: int
    streams: int
    cpu_bytes_us: int  # measured or given, 0: not known yet
    bus_bytes_us: int
    cpu_start_ns: int  # what a step costs besides, as soon as the lane is used
    bus_start_ns: int
    device_ns: int  # a layer's resident experts on the device
    ring: str  # how prompts bring unlocked pages: "unused" (few yet), "refused", "slower", "taken"
    ring_bytes: int  # of locked host memory that they go through
    ring_bytes_us: int  # what was measured in a microsecond that way, 0: not measured
    paged_bytes_us: int  # and by the driver's own
    order: int  # that came last, of those that change the residents while it runs; 0: none
    order_fault: str  # why it, or what was read since, was not followed; "": it was
    contexts: tuple[tuple[int, int], ...]  # choices and hits of each
    blocks: tuple[Block, ...]
    freed: tuple[Block, ...]


class HybridDevice:
    """A wrapper of one device. `name` is what devices lists take, `buffer_name` what overrides take.

    It lives as long as the process: an engine keeps what was registered.
    """

    def __init__(self, ggml: Ggml, wraps: str, config: Config, options: Sequence[str] = ()) -> None:
        """Open and register; `options` are the compiler's (tests). Raises HybridRefused, EngineProblem."""
        self._lib = load(build.library(options))
        inner, cpu = ggml.device(wraps), _cpu(ggml)
        error = c.create_string_buffer(_ROOM)
        opened = self._lib.atsplan_hybrid_open(
            inner.handle, cpu, config.text(), None, 0, c.addressof(error), _ROOM
        )
        if not opened:
            raise HybridRefused(f"{wraps}: {_text(error)}")
        self._opened: Handle = opened
        self.device: Handle = self._lib.atsplan_hybrid_device(opened)
        self.buffer_type: Handle = self._lib.atsplan_hybrid_buffer_type(opened)
        ggml.lib.ggml_backend_register(self._lib.atsplan_hybrid_registry(opened))
        self.name = str(ggml.lib.ggml_backend_dev_name(self.device).decode())
        self.buffer_name = ggml.buft_name(self.buffer_type)

    def report(self) -> Report:
        """Memory and work so far. Raises HybridRefused where there is no memory for it."""
        size = self._lib.atsplan_hybrid_report(self._opened, None, 0)
        while True:
            room = c.create_string_buffer(size)
            needed = self._lib.atsplan_hybrid_report(self._opened, c.addressof(room), size)
            if not needed:
                raise HybridRefused("no memory for a report")
            if needed <= size:
                return read_report(room.value.decode())
            size = needed

    def set_residents(self, block: int, experts: Sequence[int], model: int = 0, kind: str = "exps") -> None:
        """Put these experts into the slots of a block, in this order, between two steps of all contexts.

        Raises HybridRefused when they do not fit.
        """
        error = c.create_string_buffer(_ROOM)
        array = (c.c_int32 * len(experts))(*experts)
        if self._lib.atsplan_hybrid_set_residents(
            self._opened, model, block, kind.encode(), array, len(experts), c.addressof(error), _ROOM
        ):
            raise HybridRefused(_text(error))

    @property
    def faults(self) -> int:
        """How many times work was stopped so far, by the same fault or another."""
        return int(self._lib.atsplan_hybrid_faults(self._opened))

    @property
    def fault(self) -> str:
        """What stopped a computation last; "" when nothing did."""
        text = c.create_string_buffer(_ROOM)
        self._lib.atsplan_hybrid_fault(self._opened, c.addressof(text), _ROOM)
        return _text(text)


def load(path: Path) -> Any:
    """The native library with its prototypes; HybridRefused when it is not the one that is known here.

    UntrustedLibrary for one in the cache that somebody has touched.
    """
    libraries.check(path)
    try:
        lib = c.CDLL(str(path))
    except OSError as problem:
        raise HybridRefused(str(problem)) from None
    if bind(lib, _PROTOTYPES) or lib.atsplan_hybrid_version() != _VERSION:
        raise HybridRefused(f"{path} is another version of the native library")
    return lib


def read_report(text: str) -> Report:
    """A report as the library writes it, also into files."""
    return report_of(json.loads(text))


def report_of(said: dict[str, Any]) -> Report:
    """A report from plain data."""
    blocks = {name: tuple(_block(block) for block in said[name]) for name in ("blocks", "freed")}
    contexts = tuple((asked, hits) for asked, hits in said["contexts"])
    return Report(**{**said, **blocks, "contexts": contexts})


def read_blocks(text: str) -> tuple[Block, ...]:
    """Blocks of the models that were freed, in a report file."""
    return tuple(_block(block) for block in json.loads(text)["freed"])


def _block(said: dict[str, Any]) -> Block:
    lists: dict[str, Any] = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
    return Block(**{**said, **lists})


def _cpu(ggml: Ggml) -> Handle:
    for device in ggml.devices():
        if device.kind == "cpu":
            return device.handle
    raise EngineProblem(ggml.name, "no CPU device")


def _text(room: c.Array[c.c_char]) -> str:
    return bytes(room.value).decode(errors="replace")
