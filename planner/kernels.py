"""Which KV types a device can compute attention on; elsewhere it falls back to the CPU without a word."""

from __future__ import annotations

from planner.profile import Device
from planner.workload import Workload

# Kernels of default CUDA builds: equal K and V of these types (others need GGML_CUDA_FA_ALL_QUANTS).
_CUDA = frozenset({"f16", "bf16", "q8_0", "q4_0"})


def attends(device: Device, workload: Workload) -> bool:
    """Whether a device has attention kernels for the workload's KV types.

    Without flash attention the engine needs V unquantised, which `kv_problem` refuses.
    """
    if device.kind == "cpu" or not device.name.startswith("CUDA"):
        return True
    if not workload.flash_attn:
        return workload.type_k in _CUDA
    return workload.type_k == workload.type_v and workload.type_k in _CUDA


def kv_problem(workload: Workload) -> str:
    """Why these KV types cannot work at all; "" when they can."""
    if not workload.flash_attn and workload.type_v not in ("f32", "f16", "bf16"):
        return f"type_v {workload.type_v} needs flash_attn: true (a quantised V cache aborts without it)"
    return ""
