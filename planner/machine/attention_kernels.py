"""Which KV types a device can compute attention on; elsewhere it falls back to the CPU without a word."""

from __future__ import annotations

from collections.abc import Iterable

from planner.machine.profile import Device, OpTiming
from planner.workload import Workload

# Kernels of default CUDA builds: equal K and V of these types (others need GGML_CUDA_FA_ALL_QUANTS).
CUDA_TYPES = ("f16", "bf16", "q8_0", "q4_0")
# Backends built from the same kernels; over the network nothing else is known to be there.
_CUDA_LIKE = ("CUDA", "ROCm", "HIP", "MUSA", "RPC")


def attends(device: Device, workload: Workload, timings: Iterable[OpTiming] = ()) -> bool:
    """Whether a device has attention kernels for the workload's KV types: by table, as stated, or timed.

    Without flash attention the engine needs V unquantised, which `kv_problem` refuses. A type of a fork is
    computed where the profile says so, and nowhere else.
    """
    if workload.forks:
        return all(device.name.startswith(one.devices) for one in workload.forks.values())
    if device.all_kv_types and workload.flash_attn:
        return True
    if device.kind == "cpu" or not device.name.startswith(_CUDA_LIKE):
        return True
    if not workload.flash_attn:
        return workload.type_k in CUDA_TYPES
    if workload.type_k != workload.type_v:
        return False
    return workload.type_k in CUDA_TYPES or any(
        (t.op, t.type, t.device) == ("FLASH_ATTN_EXT", workload.type_k, device.name) for t in timings
    )


def kv_note(devices: Iterable[Device], workload: Workload, timings: Iterable[OpTiming]) -> str:
    """What KV types that a GPU has no kernels for mean for a plan; "" where all have.

    The engine has one type of K and one of V in a context, so no layer can have others than the rest.
    """
    known = tuple(timings)
    lacks = [d.name for d in devices if not attends(d, workload, known)]
    if not lacks:
        return ""
    asked = " and ".join(dict.fromkeys((workload.type_k, workload.type_v)))
    if workload.forks:
        there = ", ".join(dict.fromkeys(d for one in workload.forks.values() for d in one.devices))
        return (
            f"no attention on KV of type {asked} on {', '.join(lacks)}: layers with a cache stay off it; "
            f"the profile says that {there} computes it, and every device takes {CUDA_TYPES[2]}"
        )
    return (
        f"no attention on KV of type {asked} on {', '.join(lacks)}: layers with a cache stay off it; "
        f"K and V of one type of {', '.join(CUDA_TYPES)} could be there (--kv-type q8_0), for all layers"
    )


def kv_problem(workload: Workload) -> str:
    """Why these KV types cannot work at all; "" when they can."""
    if not workload.flash_attn and workload.type_v not in ("f32", "f16", "bf16"):
        return f"type_v {workload.type_v} needs flash_attn: true (a quantised V cache aborts without it)"
    return ""
