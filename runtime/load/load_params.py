"""From a LoadSpec to a loaded model and context: the engine's parameters, and what must outlive them."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.constants import CPU
from planner.errors import EngineProblem, InputError
from planner.plan.load_spec import LoadSpec
from planner.site import Site
from planner.workload import Workload
from runtime.engine.ggml import TYPE_NUMBERS, Handle
from runtime.engine.libllama import EVAL, Engine, Override
from runtime.engine.logs import Tail

_MMAP, _READ = 1, 0  # llama_load_mode
_FA_ON, _FA_OFF = 1, 0  # llama_flash_attn_type; AUTO turns it off for all when one layer is off its device
_MAX_THREADS = 512  # GGML_MAX_N_THREADS; more end in a crash
_PLAIN_V = frozenset({"f32", "f16", "bf16"})


@dataclass(eq=False)
class MissingDevice(EngineProblem):
    """A plan for a device that is not here."""

    device: str
    here: tuple[str, ...]
    planned: tuple[str, ...] = ()  # the plan's devices that were mapped to it; (): the plan's own name
    draft: bool = False  # the draft was to be there, not the plan's model

    def message(self) -> str:
        there = ", ".join(self.here)
        maps = " ".join(f"--device-map {name}={self.here[0]}" for name in self.planned or (self.device,))
        remedy = f"to run the plan elsewhere give {maps}"
        if self.draft:
            remedy = f"give --draft-device {self.here[0]}"
        return f"no device {self.device} on this machine (there is {there}); {remedy}"


@dataclass(slots=True)
class Kept:
    """C objects that parameters point to; they live as long as the model does."""

    objects: list[Any] = field(default_factory=list)

    def __call__(self, made: Any) -> Any:
        self.objects.append(made)
        return made


def check(engine: Engine, spec: LoadSpec) -> None:
    """Refuse what the engine would abort on or silently ignore."""
    work = spec.workload
    if work.forks:
        raise EngineProblem(
            engine.label, f"has no KV cache of type {', '.join(work.forks)}: it is a fork's (atsplan export)"
        )
    if not work.flash_attn and work.type_v not in _PLAIN_V:
        raise InputError(
            f"workload: type_v {work.type_v} needs flash_attn: true (a quantised V cache aborts without it)"
        )
    if spec.cache_bytes and not engine.has_moe_cache:
        raise EngineProblem(engine.label, "has no MoE cache (moe_cache_size came with b11480)")
    if work.mtp and not engine.takes("load_mtp"):
        raise EngineProblem(
            engine.label, "cannot be asked for NextN blocks (it has no load_mtp: use a newer one)"
        )
    if len(spec.devices) > engine.max_devices:
        raise EngineProblem(engine.label, f"takes at most {engine.max_devices} devices")
    if spec.threads > _MAX_THREADS:
        raise InputError(f"{spec.threads} threads: the engine takes at most {_MAX_THREADS}")
    if spec.rollback > most_rollback(work):
        raise InputError(
            f"{spec.rollback} guesses at a time: a ubatch of {work.n_ubatch} takes at most "
            f"{most_rollback(work)}"
        )
    if any("\0" in pattern for pattern, _ in spec.overrides):
        raise InputError("an override pattern contains a NUL character")


def most_rollback(work: Workload) -> int:
    """Tokens that may be taken back; the engine aborts unless a ubatch holds two more."""
    return max(work.n_ubatch - 2, 0)


def model_params(
    engine: Engine,
    spec: LoadSpec,
    kept: Kept,
    no_alloc: bool = False,
    own: Mapping[str, Handle] | None = None,
) -> Any:
    """llama_model_params of a spec; `own` maps buffer names that ggml does not know (stripes) to handles."""
    params = engine.model_params()
    handles = [device_handle(engine, name, spec.mapped) for name in spec.devices]
    params.devices = _address(kept((c.c_void_p * (len(handles) + 1))(*handles, None)))
    params.tensor_split = _address(kept((c.c_float * max(16, engine.max_devices))(*spec.tensor_split)))
    params.n_gpu_layers = spec.n_gpu_layers
    params.main_gpu = spec.main_gpu
    params.tensor_buft_overrides = _address(kept(_override_array(engine, spec, own or {}, no_alloc)))
    mapped = spec.use_mmap and not no_alloc
    if engine.takes("load_mode"):
        params.load_mode = _MMAP if mapped else _READ
    else:
        params.use_mmap, params.use_direct_io = mapped, False
    params.use_extra_bufts = spec.use_extra_bufts
    if engine.takes("load_mtp"):
        params.load_mtp = spec.workload.mtp
    params.no_alloc = no_alloc
    return params


def context_params(engine: Engine, spec: LoadSpec, kept: Kept, observe: Any = None) -> Any:
    """llama_context_params of a spec; `observe(tensor address, ask) -> bool` sees every node computed."""
    params, work = engine.context_params(), spec.workload
    params.n_ctx = work.n_ctx
    params.n_batch = max(work.n_batch, work.n_ubatch)
    params.n_ubatch = work.n_ubatch
    params.n_seq_max = work.n_seq
    params.n_rs_seq = spec.rollback
    params.n_threads = params.n_threads_batch = spec.threads or usable_cores()
    params.flash_attn_type = _FA_ON if work.flash_attn else _FA_OFF
    params.swa_full = spec.swa_full
    params.op_offload = spec.op_offload
    params.type_k = TYPE_NUMBERS[work.type_k]
    params.type_v = TYPE_NUMBERS[work.type_v]
    if spec.cache_bytes:
        params.moe_cache_size = spec.cache_bytes
    if observe is not None:
        params.cb_eval = c.cast(kept(EVAL(observe)), c.c_void_p)
    return params


@contextmanager
def model(engine: Engine, path: Path, params: Any) -> Iterator[Handle]:
    """The loaded model, freed at the end; EngineProblem with the engine's own reason."""
    said = Tail()
    with engine.log(said.add):
        handle = engine.lib.llama_model_load_from_file(os.fsencode(path), params)
    if not handle:
        raise EngineProblem(engine.label, said.cause() or f"could not load {path}")
    try:
        yield handle
    finally:
        engine.lib.llama_model_free(handle)


@contextmanager
def context(engine: Engine, loaded: Handle, params: Any, log: Tail | None = None) -> Iterator[Handle]:
    """A context of a loaded model, freed at the end; EngineProblem with the engine's own reason.

    `log` keeps what the engine says of it.
    """
    said = log or Tail()
    with engine.log(said.add):
        handle = engine.lib.llama_init_from_model(loaded, params)
    if not handle:
        raise EngineProblem(engine.label, said.cause() or "could not create a context")
    try:
        yield handle
    finally:
        engine.lib.llama_free(handle)


def device_handle(engine: Engine, name: str, mapped: Sequence[tuple[str, str]] = ()) -> Handle:
    """The device of that name; MissingDevice when it is not here.

    `mapped` pairs the plan's devices with those that were to take their place: the error names the former.
    """
    devices = engine.ggml.devices()
    for device in devices:
        if device.name.casefold() == name.casefold():
            return device.handle
    planned = tuple(of for of, there in mapped if there == name)
    raise MissingDevice(engine.label, "", name, tuple(d.name for d in devices), planned)


def usable_threads() -> int:
    """Hardware threads this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores this process may run on; two hardware threads of one core count once.

    The second thread of a core only adds waiting to matrix products.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    mine = os.sched_getaffinity(0)
    try:
        cores = {(topology / f"cpu{n}" / "topology" / "thread_siblings_list").read_text() for n in mine}
    except OSError:
        return len(mine)
    return len(cores)


def _override_array(engine: Engine, spec: LoadSpec, own: Mapping[str, Handle], no_alloc: bool) -> Any:
    known = {**engine.ggml.all_buffer_types(), **own}
    array = (Override * (len(spec.overrides) + 1))()  # the last entry stays NULL and ends the list
    for entry, (pattern, buffer) in zip(array, spec.overrides, strict=False):
        entry.pattern = pattern.encode()
        if no_alloc:
            buffer = Site.of_buffer(buffer).device  # what a stripe leaves on the host is not seen
        entry.buft = known.get(buffer) or _default_buffer(engine, buffer, spec.mapped)
    return array


def _default_buffer(engine: Engine, name: str, mapped: Sequence[tuple[str, str]]) -> Handle:
    if name == CPU:
        return int(engine.lib.ggml_backend_cpu_buffer_type())
    if Site.of_buffer(name).divided:
        raise EngineProblem(engine.label, f"{name}: striped experts are not possible here")
    return int(engine.lib.ggml_backend_dev_buffer_type(device_handle(engine, name, mapped)))


def _address(array: Any) -> int:
    return c.addressof(array)
