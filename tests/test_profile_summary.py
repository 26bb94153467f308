"""Samples become timings: medians, gates against impossible ones, warnings, continuation."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from planner.machine.fingerprint import differences, host_facts
from planner.machine.op_time import Case
from planner.machine.profile import Fingerprint
from profiler import host, session, summarise
from profiler.journal import MAX_AGE_S, Journal
from profiler.operators import thermal
from profiler.operators.cases import Job, Place
from profiler.operators.time_share import LONGEST_S, SHORTEST_S, Pace
from profiler.operators.timings import possible, reduce, repeat
from profiler.runner import Stop

CPU = Place("CPU", "CPU", "own")
MATRIX = Case("MUL_MAT", "q4_K", (4096, 4096), 1)  # 9.4 MB
HERE = Fingerprint(
    cpu="a", cores=8, memory_bytes=1, os="linux", engine="e", driver="", numa="0:0-7 1:8-15 default"
)


def line(case: Case, time_ns: int, place: Place = CPU, spread_ns: int = 10) -> dict[str, object]:
    key = Job(case, place).key
    return {"kind": "case", "key": key, "time_ns": time_ns, "spread_ns": spread_ns, "samples": 9}


def judged(case: Case, time_ns: int, place: Place = CPU, spread_ns: int = 10) -> summarise.Verdict:
    streams = {"CPU": 50 * 10**9, "CUDA0": 900 * 10**9, "CUDA0 CUDA_Host": 25 * 10**9}
    return summarise.verdicts([Job(case, place)], [line(case, time_ns, place, spread_ns)], streams)[0]


def test_a_pass_is_shared_by_its_nodes_and_the_launch_is_not_theirs() -> None:
    sample = reduce([1100, 1300, 1500, 1700, 9900], nodes=10, fixed_ns=100)
    assert (sample.time_ns, sample.samples, sample.best_ns) == (140, 5, 100)
    assert sample.spread_ns == 40  # the outlier does not widen it
    assert reduce([1000], nodes=1, fixed_ns=990).time_ns == 500  # a launch measured too long makes none fast


def test_the_first_passes_do_not_count() -> None:
    ran: list[int] = []
    times = repeat(lambda: ran.append(len(ran)), limit_s=0)
    assert len(ran) - len(times) == 3
    assert len(times) == 5


def test_the_306_gb_per_s_of_a_51_gb_per_s_laptop_are_rejected() -> None:
    """A published profile implies this for ffn_down; the whole matrix came from the cache."""
    down = Case("MUL_MAT", "q4_K", (17408, 5120), 1)
    moved = summarise.compulsory_bytes(down)
    assert not possible(moved, round(moved / 306), 51_200_000_000)
    assert possible(moved, round(moved / 43.7), 51_200_000_000)
    verdict = judged(down, round(moved / 306))
    assert verdict.timing is None
    assert "306.0 GB/s is more than the 50.0 GB/s" in verdict.dropped


def test_the_gate_of_a_zero_copy_case_is_the_bus_not_the_video_memory() -> None:
    experts = Case("MUL_MAT_ID", "q4_K", (2048, 768, 128), 1, used=8)
    far = Place("CUDA0", "CUDA_Host", "zero-copy")
    at_60 = round(summarise.compulsory_bytes(experts) / 60)
    assert judged(experts, at_60, Place("CUDA0", "CUDA0", "own")).timing is not None
    assert judged(experts, at_60, far).timing is None


def test_a_batch_is_gated_by_what_one_of_its_tokens_must_read() -> None:
    one = Case("MUL_MAT_ID", "q4_K", (2048, 768, 128), 1, used=8)
    many = Case("MUL_MAT_ID", "q4_K", (2048, 768, 128), 512, used=8)
    assert summarise.compulsory_bytes(many) == summarise.compulsory_bytes(one)


def test_warnings_name_contention_spread_impossible_and_paged_timings() -> None:
    paged = judged(MATRIX, 10_000_000, Place("CUDA0", "CUDA0", "own"))
    big = Case("MUL_MAT", "q6_K", (4096, 32000), 1)
    slow = judged(big, 10_000_000, Place("CUDA0", "CUDA0", "own"))
    verdicts = [judged(MATRIX, 400_000, spread_ns=200_000), judged(MATRIX, 1000), paged, slow]
    streams = {"CPU": 50 * 10**9, "CUDA0": 900 * 10**9}
    found = summarise.warnings(verdicts, streams, load=0.8, fingerprint=HERE)
    assert [text.split()[0] for text in found] == ["contended:", "unsteady:", "dropped", "1"]
    assert "paged" in found[-1]
    assert summarise.warnings(verdicts[2:3], streams, load=0.1, fingerprint=HERE) == ()
    wddm = HERE.model_copy(update={"driver": "wddm"})
    assert "WDDM" in summarise.warnings([], streams, 0.0, wddm)[0]


def test_strict_says_what_to_do() -> None:
    problem = summarise.Contended(("contended: other programs keep 0.8 of every core busy",))
    assert problem.exit_code == 3
    assert "stop other programs" in str(problem)


def test_an_interrupted_profile_continues_from_whole_lines(tmp_path: Path) -> None:
    first = Journal("machine", "engine", folder=tmp_path)
    first.add({"kind": "case", "key": "a", "skipped": "why"})
    first.add({"kind": "case", "key": "b", "time_ns": 1, "spread_ns": 0, "samples": 1})
    with first.path.open("a") as file:
        file.write('{"kind": "case", "ke')  # killed while writing
    again = Journal("machine", "engine", folder=tmp_path)
    assert ([entry["key"] for entry in again.lines], again.damage) == (["a", "b"], "")
    again.add({"kind": "case", "key": "c", "skipped": "why"})
    third = Journal("machine", "engine", folder=tmp_path)
    assert ([entry["key"] for entry in third.lines], third.damage) == (["a", "b", "c"], "")
    assert Journal("machine", "other engine", folder=tmp_path).lines == []
    old = time.time() - MAX_AGE_S - 60
    os.utime(first.path, (old, old))
    assert Journal("machine", "engine", folder=tmp_path).lines == []
    first.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_profile_of_another_numa_policy_is_recognised() -> None:
    known = host_facts(HERE)
    assert differences(known, host_facts(HERE.model_copy(update={"os": "linux 7"}))) == ()
    other = HERE.model_copy(update={"numa": "0:0-7 1:8-15 interleave:0-1", "cores": 4})
    assert differences(known, host_facts(other)) == (
        "cores was 8, is 4",
        "NUMA policy was 0:0-7 1:8-15 default, is 0:0-7 1:8-15 interleave:0-1",
    )


def test_the_host_describes_itself() -> None:
    cores = host.cores()
    assert 1 <= cores.physical <= cores.usable <= (os.cpu_count() or 1)
    total, free = host.memory_bytes()
    assert 0 < free <= total
    assert host.caches().last_bytes >= 2**20
    assert host.cpu_name()


@pytest.mark.parametrize("case", [MATRIX, Case("FLASH_ATTN_EXT", "f16", (128, 32, 4), 1, depth=4096)])
def test_a_kept_timing_carries_its_case(case: Case) -> None:
    timing = judged(case, 10_000_000).timing
    assert timing is not None
    assert {name: getattr(timing, name) for name in asdict(case)} == asdict(case)


def test_every_case_gets_its_share_of_the_time_and_none_less_than_makes_sense() -> None:
    plenty = Pace(time.monotonic() + 1000, 2)
    with plenty.case() as limit_s:
        assert limit_s == LONGEST_S
    late = Pace(time.monotonic() - 1, 2)
    with late.case() as limit_s:
        assert limit_s == SHORTEST_S
    some = Pace(time.monotonic() + 20.0, 100)
    with some.case() as limit_s:
        assert SHORTEST_S < limit_s < 0.2


def test_whole_model_runs_stop_when_another_would_end_too_late() -> None:
    now = time.monotonic()
    assert not Stop().now(1)
    assert not Stop(until_s=now - 1, least=2).now(1)
    assert Stop(until_s=now - 1, least=2).now(2)
    assert not Stop(until_s=now + 1000, least=0).now(2)


def test_an_interrupted_profile_of_another_machine_is_named_and_forgotten(tmp_path: Path) -> None:
    said: list[str] = []
    here = {**host_facts(HERE), "GPUs": "0000:01:00.0 10de:2684"}
    journal = Journal("m", folder=tmp_path)
    session.forget_another(journal, here, said.append)
    journal.add({"kind": "case", "key": "a", "skipped": "why"})
    session.forget_another(again := Journal("m", folder=tmp_path), here, said.append)
    assert [line["kind"] for line in again.lines] == ["machine", "case"]
    assert said == []
    changed = {**here, "driver": "nvidia 595.1", "GPUs": "0000:01:00.0 10de:2b85"}
    session.forget_another(other := Journal("m", folder=tmp_path), changed, said.append)
    assert [line["kind"] for line in other.lines] == ["machine"]
    assert "driver was none, is nvidia 595.1; GPUs was 0000:01:00.0 10de:2684" in said[0]
    assert [line["kind"] for line in Journal("m", folder=tmp_path).lines] == ["machine"]


def test_what_became_slower_while_it_was_measured_is_named() -> None:
    device = {"kind": "device", "name": "CPU", "stream_bytes_per_s": 50 * 10**9}
    steady = {"kind": "stream", "device": "CPU", "bytes_per_s": 48 * 10**9, "slowed": []}
    assert summarise.slowdowns([device, steady]) == ()
    faded = {**steady, "bytes_per_s": 30 * 10**9}
    assert "CPU streamed 50.0 GB/s at first and 30.0 at the end" in summarise.slowdowns([device, faded])[0]
    hot = summarise.slowdowns([device, {**steady, "slowed": ["heat"]}, {"kind": "heat", "events": 7}])
    assert hot[0] == "throttled: CPU was slowed down by heat"
    assert "slowed cores down 7 times" in hot[1]


def test_heat_is_read_from_the_kernel_and_from_the_driver_s_bits(tmp_path: Path) -> None:
    for core, count in enumerate((3, 4)):
        folder = tmp_path / f"cpu{core}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{count}\n")
    assert thermal.cpu_events(tmp_path) == 7
    assert thermal.reasons(0x04 | 0x01) == ()  # idle, at its power limit: ordinary
    assert thermal.reasons(0x60) == ("heat",)
    assert thermal.reasons(0x88) == ("hardware slowdown", "power brake")


@pytest.mark.parametrize(
    ("kind", "name", "pool"),
    [("igpu", "Vulkan0", "system"), ("gpu", "MTL0", "system"), ("gpu", "CUDA0", "")],
)
def test_a_gpu_without_memory_of_its_own_shares_that_of_the_host(kind: str, name: str, pool: str) -> None:
    measured = {
        "kind": "device",
        "description": "",
        "memory_bytes": 2**34,
        "free_bytes": 2**33,
        "bandwidth_bytes_per_s": 10**11,
        "flops_per_s": 10**12,
        "op_overhead_ns": 1,
    }
    lines = [
        {**measured, "name": name, "device_kind": kind},
        {**measured, "name": "CPU", "device_kind": "cpu"},
    ]
    assert [d.memory_pool for d in summarise.devices(lines)] == [pool, pool]
