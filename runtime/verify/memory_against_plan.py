"""A plan against what the engine says a load takes: bytes per device, budgets, memory free right now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.constants import CPU, MIB
from planner.errors import MachineError
from planner.plan.plan import DeviceUse, Plan
from planner.site import Site
from runtime.engine.ggml import Device
from runtime.engine.host_memory_left import host_memory_left
from runtime.load.dry_run import Breakdown

_PER_TENSOR = 4096  # bytes of alignment and row padding a device buffer may add to each tensor
_SLACK, _SLACK_SHARE = 2**16, 1000  # rows of a cache are padded by some kernels: 64 KiB and a thousandth
_PRINTED = 2**16  # the log rounds each buffer to hundredths of a MiB
_COMPUTE_SLACK, _COMPUTE_SHARE = 4 * MIB, 20  # the formula's error on a GPU: 4 MiB and a twentieth


@dataclass(eq=False)
class OverBudget(MachineError):
    """The engine needs more of a device than the plan may use."""

    device: str
    needed_bytes: int
    budget_bytes: int
    planned_bytes: int

    def message(self) -> str:
        return (
            f"{self.device}: the engine needs {_mib(self.needed_bytes)}, the plan's budget is "
            f"{_mib(self.budget_bytes)} (planned {_mib(self.planned_bytes)}): "
            "solve again on this machine's profile, or with a smaller budget"
        )


@dataclass(eq=False)
class MemoryShort(MachineError):
    """A device has less free memory now than the plan needs."""

    device: str
    needed_bytes: int
    free_bytes: int
    total_bytes: int
    read: bool = False  # host weights that could be mapped instead

    def message(self) -> str:
        used = self.total_bytes - self.free_bytes
        mapping = ", map host weights from the file (--mmap)" if self.read else ""
        return (
            f"{self.device}: needs {_mib(self.needed_bytes)}, free are {_mib(self.free_bytes)} of "
            f"{_mib(self.total_bytes)} ({_mib(used)} in use): end what holds it{mapping} or solve for a "
            "smaller budget"
        )


@dataclass(eq=False)
class ItemDiffers(MachineError):
    """One item of a device that the engine counts otherwise than the plan."""

    device: str
    item: str
    engine_bytes: int
    planned_bytes: int
    loaded: bool  # measured after loading; else told by the dry run

    def message(self) -> str:
        how = "holds, now loaded," if self.loaded else "would hold"
        have, want = (f"{size} bytes ({_mib(size)})" for size in (self.engine_bytes, self.planned_bytes))
        return (
            f"{self.device}: {self.item}: the engine {how} {have}, the plan says {want}: "
            "the plan was edited or priced for another engine; solve it again"
        )


@dataclass(eq=False)
class StrayWork(MachineError):
    """Operators of the decode graph that would run away from their data."""

    engine: str
    sentences: tuple[str, ...]

    def message(self) -> str:
        return f"engine {self.engine}: {'; '.join(self.sentences)}"


@dataclass(eq=False)
class MoreThanDry(MachineError):
    """A loaded model that holds more of a device than its dry run said."""

    device: str
    real_bytes: int
    dry_bytes: int

    def message(self) -> str:
        return (
            f"{self.device}: loaded it holds {_mib(self.real_bytes)}, the dry run said {_mib(self.dry_bytes)}"
        )


def check_items(plan: Plan, found: Mapping[str, Breakdown], loaded: bool = False) -> None:
    """What the engine says of each device against the plan, item by item. Raises ItemDiffers.

    Weights and compute buffers of the host are not compared: how a mapped file is counted, and what the
    CPU needs beside its graph, differ between builds. Compute buffers may be smaller than planned.
    """
    striped = {s.device for o in plan.overrides if (s := Site.of_buffer(o.buffer)).divided}
    for use in plan.devices if found else ():  # some builds do not tell
        have, wanted = found.get(use.name, Breakdown(0, 0, 0)), planned(use)
        if use.name != CPU and use.name not in striped:
            slack = _PER_TENSOR * plan.model.tensors
            _compare(use, "weights", have.model, wanted.model, slack, slack, loaded)
        # A head that speculates keeps its cache in a context of its own, which the plan counts too.
        less = wanted.context if plan.workload.mtp or use.cache_bytes else 0
        _compare(use, "KV cache and state", have.context, wanted.context, less, 0, loaded)
        if use.name != CPU:
            more = wanted.compute // _COMPUTE_SHARE + _COMPUTE_SLACK
            _compare(use, "compute buffers", have.compute, wanted.compute, wanted.compute, more, loaded)


def check_caches(plan: Plan, found: Mapping[str, Mapping[str, int]]) -> None:
    """KV cache and recurrent state of a loaded model, each for itself. Raises ItemDiffers.

    `found` is what the engine printed; a build that prints nothing of an item is not judged by it.
    """
    for item, name in (("KV", "KV cache"), ("RS", "recurrent state")):
        for use in plan.devices if item in found else ():
            wanted = use.kv_bytes if item == "KV" else use.state_bytes
            less = wanted if plan.workload.mtp else 0
            have = found[item].get(use.name, 0)
            _compare(use, name, have, wanted, less, _PRINTED, loaded=True)


def _compare(use: DeviceUse, item: str, have: int, wanted: int, less: int, more: int, loaded: bool) -> None:
    """ItemDiffers unless `have` lies within `less` bytes below and `more` above what is wanted."""
    slack = _SLACK + wanted // _SLACK_SHARE
    if not wanted - less - slack <= have <= wanted + more + slack:
        raise ItemDiffers(use.name, item, have, wanted, loaded)


def check_budgets(plan: Plan, found: Mapping[str, Breakdown]) -> None:
    """The engine's bytes against the plan's budgets, device by device. Raises OverBudget.

    Host memory is not compared: how a mapped file is counted differs between builds.
    """
    striped = any(Site.of_buffer(o.buffer).divided for o in plan.overrides)
    for use in plan.devices:
        have = found.get(use.name)
        if use.name == CPU or have is None or striped:
            continue
        needed = have.total + use.reserve_bytes
        if needed > max(use.budget_bytes, use.used_bytes):
            raise OverBudget(use.name, needed, use.budget_bytes, use.used_bytes)


def check_loaded(dry: Mapping[str, Breakdown], real: Mapping[str, Breakdown]) -> None:
    """Memory after loading against the dry run, per device. Raises MoreThanDry.

    Host memory is not compared, and a stripe takes less of its device than the dry run sees.
    """
    for device, have in real.items():
        promised = dry.get(device, Breakdown(0, 0, 0)).total
        if device != CPU and have.total > promised + promised // 100 + MIB:
            raise MoreThanDry(device, have.total, promised)


def check_free_memory(
    found: Mapping[str, Breakdown], devices: tuple[Device, ...], mapped: bool = True
) -> None:
    """The engine's bytes against memory that is free now. Raises MemoryShort.

    Weights of the CPU may stay on disk when they are `mapped`: they do not count then. Of a GPU that
    shares the host's memory the smaller figure counts.
    """
    available = host_memory_left()
    for device in devices:
        have = found.get(device.name)
        if have is None or not device.total_bytes:
            continue
        shared = device.kind in ("cpu", "igpu") and available is not None
        free = min(device.free_bytes, available or 0) if shared else device.free_bytes
        needed = have.context + have.compute if device.name == CPU and mapped else have.total
        if needed > free:
            raise MemoryShort(
                device.name, needed, free, device.total_bytes, device.name == CPU and not mapped
            )


def planned(use: DeviceUse) -> Breakdown:
    """A device's use as the engine divides it."""
    return Breakdown(use.weights_bytes, use.kv_bytes + use.state_bytes + use.cache_bytes, use.compute_bytes)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB".replace(",", " ")
