"""How weights that the CPU computes lie in host memory: mapped from the file, or read into pinned memory.

A GPU that computes long prompts with such weights copies them over the bus for every batch. From pinned
memory that runs at the bus's speed; pages of a mapped file go through the driver's own buffer first, which
took seven times as long on a virtual server and a tenth longer on desktops. Pinned memory cannot be paged
out, and not every system gives much of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.machine.profile import Link, Profile

OFFLOAD_BATCH = 32  # tokens from which the engine copies host weights to a GPU and computes there
# Copies of mapped pages, where no profile measured them. CUDA's driver stages them, on desktops not far below
# the bus (fitted to published prompts: 10 to 31 GB/s; +10 % with pinned memory, ik_llama.cpp#2262), though
# a virtual server with an H200 reached 8 of 55 GB/s. Other backends copy through a buffer of their own.
_MAPPED_SHARE = (9, 10)
_MAPPED_BYTES_PER_S = {True: 24 * 10**9, False: 8 * 10**9}  # at most; by whether it is CUDA


class HostMemory(StrEnum):
    """How the engine loads host weights."""

    MAPPED = "mapped"  # mmap
    PINNED = "pinned"  # --no-mmap beside a GPU


def can_be_pinned(profile: Profile, budgets: Mapping[str, int], limit_bytes: int) -> int:
    """Bytes of host memory that may be pinned for a GPU of this machine; 0 where none copies from it.

    `limit_bytes` 0: half of the host's memory, which is what Windows lets a process lock.
    """
    host = next((d for d in profile.devices if d.kind == "cpu" and d.name in budgets), None)
    if host is None or not any(d.kind == "gpu" and d.name in budgets for d in profile.devices):
        return 0
    return limit_bytes or (host.memory_bytes or budgets[host.name]) // 2


def copy_rate(link: Link, memory: HostMemory) -> int:
    """Bytes per second at which weights in host memory are copied over a link."""
    if memory is HostMemory.PINNED:
        return link.bandwidth_bytes_per_s
    many, of = _MAPPED_SHARE
    most = _MAPPED_BYTES_PER_S[link.target.startswith("CUDA")]
    assumed = min(link.bandwidth_bytes_per_s * many // of, most)
    return link.mapped_bytes_per_s or max(assumed, 1)
