"""What a stay on a machine is: its names, and the rates of its CPU and link as they are now.

Machines of one kind differed by half on the CPU side within minutes, so every visit measures anew; results
of two visits are never paired (rounds.py).
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import consumer
from runtime.load.load_params import usable_cores

if TYPE_CHECKING:
    from runtime.engine.libllama import Build

READ_BYTES = 128 * 2**20  # of each thread: far above any cache
SECONDS = 0.5


def facts(engine: str, link: str | None) -> dict[str, Any]:
    """The machine's names and rates; `link` as in link_stream, None for a machine without one.

    `cpu_gb_s`: what all usable cores together read of host memory; `core_gb_s`: what one does alone.
    """
    from runtime.engine.libllama import Engine

    build = Engine.find(engine or None).build
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": _gpu(),
        "cpu": _cpu(),
        "cores": usable_cores(),
        "system": platform.platform(terse=True),
        "engine": f"llama {build.version} ggml {build.commit}",
        "cpu_gb_s": round(read_rate(usable_cores()), 2),
        "core_gb_s": round(read_rate(1), 2),
        "link_gb_s": None if link is None else round(consumer.probe(link), 2),
    }


def engine_name(build: Build) -> str:
    """The package of a build, or its number and commit: never a folder of this machine."""
    if os.sep not in build.label:
        return build.text
    told = build.text.removeprefix(build.label).strip(" ()")
    return f"llama.cpp {told}" if told else f"llama {build.version}"


def read_rate(n_threads: int, seconds: float = SECONDS) -> float:
    """GB/s that so many threads read of host memory, each from a region of its own."""
    import numpy as np

    done = [0.0] * n_threads
    ready, go = threading.Barrier(n_threads + 1), threading.Event()

    def read(index: int) -> None:
        data = np.ones(READ_BYTES // 8, np.int64)
        ready.wait()
        go.wait()
        start, passes = time.perf_counter(), 0
        while (now := time.perf_counter()) - start < seconds:
            data.max()
            passes += 1
        done[index] = passes * READ_BYTES / (now - start) / 1e9

    threads = [threading.Thread(target=read, args=(index,)) for index in range(n_threads)]
    for thread in threads:
        thread.start()
    ready.wait()
    go.set()
    for thread in threads:
        thread.join()
    return sum(done)


def _gpu() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max",
    ]
    try:
        done = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
