"""Timings that no kernel explains are found, whatever made them, and honest ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.machine import profile as profiles
from planner.machine.op_time import Case
from profiler import summarise
from profiler.operators.cases import Job, Place
from profiler.operators.doubtful import doubtful

ROOT = Path(__file__).resolve().parent.parent
OWN = Place("CUDA0", "CUDA0", "own")
DEVICE = {
    "kind": "device",
    "name": "CUDA0",
    "stream_bytes_per_s": 10**12,
    "flops_per_s": 10**14,
    "op_overhead_ns": 2000,
}


def product(batch: int) -> Job:
    return Job(Case("MUL_MAT", "q4_K", (4096, 4096), batch), OWN)


def attention(depth: int, batch: int = 1) -> Job:
    return Job(Case("FLASH_ATTN_EXT", "f16", (128, 32, 8), batch, 0, depth), OWN)


def line(job: Job, ns: int, spread: int = 0) -> dict[str, Any]:
    return {"kind": "case", "key": job.key, "time_ns": ns, "spread_ns": spread, "samples": 9}


def judged(*timed: tuple[Job, int]) -> dict[str, str]:
    return doubtful([job for job, _ in timed], [DEVICE, *(line(job, ns) for job, ns in timed)])


def test_a_stall_beside_a_case_of_more_work_is_named() -> None:
    found = judged((product(1), 24_000_000), (product(2), 1_700), (product(8), 2_500))
    assert list(found) == [product(1).key]
    assert found[product(1).key] == "24.0 ms for batch 1 beside 1.7 us for batch 2"


def test_sixteen_times_the_work_in_the_same_time_is_a_stall() -> None:
    found = judged((attention(256), 36_000_000), (attention(8192), 36_100_000))
    assert attention(256).key in found and "times the work" in found[attention(256).key]


def test_a_small_matrix_is_no_slower_than_a_larger_one() -> None:
    """Too short for the device's figures to say anything of it: 0.9 ms where 3 us were right."""
    small, large, long = (
        Job(Case("MUL_MAT", "q4_K", shape, 1), OWN) for shape in ((2048, 512), (2048, 4096), (4096, 256))
    )
    found = judged((small, 900_000), (large, 6_000), (long, 900_000))
    assert found == {small.key: "900.0 us for 2048x512 beside 6.0 us for 2048x4096"}
    few, many = (Job(Case("MUL_MAT_ID", "q4_K", (2048, 768, n), 1, 8), OWN) for n in (64, 128))
    assert list(judged((few, 90_000), (many, 8_000))) == [few.key]
    assert not judged((small, 5_000), (large, 6_000), (few, 8_500), (many, 8_600))


def test_a_case_alone_is_held_against_the_device() -> None:
    assert "50 times what CUDA0 needs" in judged((product(1), 24_000_000))[product(1).key]
    assert not judged((product(1), 12_000))


def test_passes_that_lie_apart_are_not_a_time() -> None:
    found = doubtful([product(1)], [DEVICE, line(product(1), 10_000, 25_000)])
    assert "2.5 times" in found[product(1).key]


@pytest.mark.parametrize(
    "path",
    [
        "plans/inputs/h200.profile.yaml",
        "benchmarks/data/h200-dense/profile.yaml",
        "benchmarks/results/h200-2026-11-30-pace.profile.yaml",
        "benchmarks/results/h200-2026-11-30-slots.profile.yaml",
        "benchmarks/results/h200-2026-12-01-cells.profile.yaml",
    ],
)
def test_a_quiet_machine_is_believed(path: str) -> None:
    """Every timing of an H200 stands: kernels change with the batch, and none of that looks like a stall."""
    profile = profiles.from_text((ROOT / path).read_text(), path)
    jobs, lines = [], []
    for t in profile.timings:
        kind = "own" if t.buffer == t.device else "zero-copy" if t.device != "CPU" else "host"
        place = Place(t.device, t.buffer, kind)
        jobs.append(Job(Case(t.op, t.type, t.shape, t.batch, t.used, t.depth), place))
        lines.append(line(jobs[-1], t.time_ns, t.spread_ns))
    devices = [
        DEVICE
        | {
            "name": d.name,
            "stream_bytes_per_s": d.bandwidth_bytes_per_s,
            "flops_per_s": d.flops_per_s,
            "op_overhead_ns": d.op_overhead_ns,
        }
        for d in profile.devices
    ]
    assert doubtful(jobs, [*devices, *lines]) == {}


def test_what_stays_doubtful_is_refused_and_not_priced() -> None:
    jobs = [product(1), product(2)]
    lines = [DEVICE, line(jobs[0], 24_000_000), line(jobs[1], 17_000)]
    refused, kept = summarise.verdicts(jobs, lines, {"CUDA0": 10**12})
    assert refused.timing is None and refused.dropped.startswith("not believed: 24.0 ms for batch 1")
    assert kept.timing is not None
    retaken = [*lines, line(jobs[0], 16_000), line(jobs[0], 90_000_000)]  # the fastest counts
    assert all(v.timing for v in summarise.verdicts(jobs, retaken, {"CUDA0": 10**12}))
