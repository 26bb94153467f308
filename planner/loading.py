"""What llama.cpp must be told to realise a plan: a plain record between plan and runtime."""

from __future__ import annotations

from dataclasses import dataclass

from planner.workload import Workload


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The load parameters of one model, in the engine's own terms."""

    devices: tuple[str, ...]  # explicit device list, repeats and CPU allowed, at most 16
    tensor_split: tuple[int, ...]  # layers per entry of `devices`; the output head is one layer
    n_gpu_layers: int
    overrides: tuple[tuple[str, str], ...]  # (pattern, buffer type name), first match wins
    workload: Workload
    main_gpu: int = 0
    use_mmap: bool = True
    use_extra_bufts: bool = True  # CPU_REPACK
    cache_bytes: int = 0
    threads: int = 0  # 0: the engine's default
