"""bench with devices: rivals really measured at the plan's memory, memory awaited, GPUs watched."""

from __future__ import annotations

import ctypes as c
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rpc_servers import moved
from small_plans import server_plan

from atsplan import main
from commands.bench import _say_unequal, _unused
from planner.model.gguf.reader import read_model
from planner.plan.load_spec import LoadSpec, load_spec
from planner.plan.plan import to_text
from planner.workload import Workload
from profiler.operators import thermal
from runtime.bench import memory_settled
from runtime.bench.memory_settled import Settling
from runtime.bench.rivals import Rival, same_load
from runtime.engine import gpu_usage, nvml
from runtime.engine.gpu_usage import Watch
from runtime.engine.nvml import Reading

MIB = 2**20


def test_a_whole_bench_of_a_plan_with_a_device(
    moe_model: Path, computing_server: Path, rpc_server: str, tmp_path: Path
) -> None:
    device = f"RPC0[{rpc_server}]"
    path, metrics = tmp_path / "plan.yaml", tmp_path / "metrics.prom"
    path.write_text(to_text(moved(server_plan(moe_model), "Vulkan0", device)))
    options = [
        "--plan",
        str(path),
        "--engine",
        str(computing_server),
        "--against",
        "fit,ngl,n-cpu-moe,all-cpu",
    ]
    options += ["--rounds", "1", "--prompts", "20,50", "-n", "4", "--threads", "1", "--json"]
    done = CliRunner().invoke(main, ["bench", str(moe_model), *options, "--prometheus", str(metrics)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    by_name = {c["name"]: c for c in report["contenders"]}
    assert list(by_name) == ["plan", "fit", "ngl", "n-cpu-moe", "all-cpu"]
    given = sum(by_name["plan"]["memory"][device].values())
    for one in by_name.values():
        assert one["failures"] == [] and one["unsettled"] == []
        assert {n: t["samples"] for n, t in one["decode_ns"].items()} == {"20": 1, "50": 1}
        assert sum(one["memory"].get(device, {}).values()) <= given
    # The plan keeps all experts on the CPU: --n-cpu-moe 4 is the same load, the others are not.
    assert {n for n, c in by_name.items() if c["same_load_as_plan"]} == {"n-cpu-moe"}
    assert "n-cpu-moe is the plan's own load" in done.stderr
    assert "no verdict: it takes 3 rounds" in done.stderr
    assert len(report["comparisons"]) == 8
    text = metrics.read_text()
    for name in by_name:
        assert f'arm="{name}",prompt="50"' in text
        assert f'atsplan_failures_total{{model="{report["model"]}",arm="{name}"}} 0' in text


def test_what_makes_two_loads_the_same(moe_model: Path) -> None:
    inventory = read_model(moe_model).inventory
    spec = load_spec(server_plan(moe_model))
    spelt = replace(spec, overrides=((r"_exps\.weight$", "CPU"), *spec.overrides))
    assert spelt != spec and same_load(inventory, spec, spelt)
    for other in (
        replace(spec, overrides=()),
        replace(spec, n_gpu_layers=4, tensor_split=(4,)),
        replace(spec, threads=1 + spec.threads),
        replace(spec, op_offload=not spec.op_offload),
        replace(spec, overrides=((r"blk\.0\.ffn_up_exps\.weight$", "stripe:Vulkan0:3"), *spec.overrides)),
    ):
        assert not same_load(inventory, spec, other)


def test_memory_is_awaited_and_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_settled, "_PAUSE_S", 0)
    # 900 and 500 are waited for; 130 is free but for what drivers keep.
    uses = iter([100, 900, 500, 130])
    settling = Settling(lambda: {"CUDA0": next(uses) * MIB})
    assert settling.wait() == ""
    assert next(uses, None) is None
    # A server that somebody starts meanwhile is reported once and is then the state to come back to.
    somebody = iter([100, 700, 700])
    settling = Settling(lambda: {"CUDA0": next(somebody) * MIB}, patience_s=0)
    assert settling.wait() == "CUDA0: 600 MiB more in use than before, 0 s after the run has ended"
    assert settling.wait() == ""


def test_the_engine_tells_the_use_of_devices_that_no_driver_does(
    computing_server: Path, rpc_server: str
) -> None:
    device = f"RPC0[{rpc_server}]"
    read = memory_settled.reader(str(computing_server), None, ["CPU", device, device])
    found = read()
    assert list(found) == ["RPC0"] and 0 <= found["RPC0"] < 2**50
    assert memory_settled.reader(None, None, ["CPU"])() == {}


class Gpus:
    """Two GPUs, the second one computing; each reading a step further."""

    def __init__(self) -> None:
        self.steps = 0
        self.closed = False

    def count(self) -> int:
        return 2

    def read(self, index: int) -> Reading:
        self.steps += index
        return Reading(1000 + (500 * index if self.steps > 1 else 0), 40 * index)

    def name(self, index: int) -> str:
        return "NVIDIA H200"

    def at(self, pci_id: str) -> int:
        return int(pci_id[5:7], 16)

    def slowdown_bits(self, index: int) -> int:
        return 0x20 << index

    def close(self) -> None:
        self.closed = True


def test_gpus_are_watched_from_the_load_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus()
    monkeypatch.setattr(nvml, "_open", lambda: gpus)
    monkeypatch.setattr(gpu_usage, "_PAUSE_S", 0.001)
    with Watch(["CUDA0", "CUDA1", "CPU"]) as watch:
        while gpus.steps < 4:
            pass
        assert watch.percent is None
        watch.begin()
        seen = gpus.steps
        while gpus.steps < seen + 4:
            pass
    assert [watch.percent, watch.peak_bytes] == [40, 500]
    assert gpus.closed
    with Watch(["Vulkan0", "CPU"]) as other:
        other.begin()
    assert other.percent is None and other.peak_bytes is None


def test_a_gpu_that_is_lost_ends_the_watching_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus()

    def read(index: int) -> Reading:
        raise OSError("GPU is lost")

    monkeypatch.setattr(gpus, "read", read)
    monkeypatch.setattr(nvml, "_open", lambda: gpus)
    with Watch(["CUDA0"]) as watch:
        watch.begin()
    assert watch.percent is None and gpus.closed


def test_figures_through_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: int) -> None:
        raise NVMLError

    class NVMLError(Exception):
        pass

    package = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda device: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=100 + device),
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=7) if device else refused(device),
        nvmlDeviceGetHandleByPciBusId=lambda pci_id: int(pci_id[5:7], 16),
        nvmlDeviceGetIndex=lambda device: device,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda device: 0x04 << device,
    )
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert gpu_usage.available()
    assert gpu_usage.used() == {"GPU 0": 100, "GPU 1": 101}
    assert (gpu_usage.name_at("0000:01:00.0"), gpu_usage.slowdown_bits()) == ("GPU 1", 0x0C)
    with nvml.nvml() as library:
        assert library is not None
        assert gpu_usage.readings(library) == {0: Reading(100, 0), 1: Reading(101, 7)}


@pytest.mark.parametrize(
    ("devices", "shown", "mixed", "read"),
    [
        (["CUDA0", "CPU"], None, False, [0]),
        (["CUDA1", "CUDA0"], None, False, [0, 1]),
        (["CUDA0"], "1", False, [1]),
        (["CUDA0", "CUDA1"], "1, 0", False, [0, 1]),
        # Others may be busy with the second GPU; where it is not known which is which, all are read.
        (["CUDA0"], None, True, [0, 1]),
        (["CUDA0"], "GPU-8932f937", False, [0, 1]),
        (["CUDA5"], None, False, [0, 1]),
        ([], None, False, [0, 1]),
    ],
)
def test_only_the_gpus_in_use_are_read(
    devices: list[str], shown: str | None, mixed: bool, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus()
    monkeypatch.setattr(nvml, "_open", lambda: gpus)
    if mixed:
        monkeypatch.setattr(gpus, "name", lambda index: f"GPU of kind {index}")
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert list(gpu_usage.used(devices)) == [f"GPU {index}" for index in read]


def test_a_plan_that_takes_more_memory_is_no_equal_rival(capsys: pytest.CaptureFixture[str]) -> None:
    spec = LoadSpec((), (), 0, (), Workload())
    mine = Rival("plan", spec, "", {"CUDA0": 900 * MIB, "CUDA1": 5 * MIB})
    _say_unequal(mine, Rival("other", spec, "", {"CUDA0": 900 * MIB + 2**19, "CUDA1": 4 * MIB}))
    assert capsys.readouterr().err == ""
    _say_unequal(mine, Rival("other", spec, "", {"CUDA0": 800 * MIB, "CUDA2": 30 * MIB}))
    assert capsys.readouterr().err == "note: other takes 30 MiB more of CUDA2 than the plan\n"


def test_contenders_of_one_name_are_told_apart() -> None:
    assert _unused("other", ["plan", "fit"]) == "other"
    assert _unused("plan", ["plan", "plan-2"]) == "plan-3"


class DriverLibrary:
    """The functions of libnvidia-ml that are called, in C's terms: one GPU of 7 bytes in use, 42 % busy."""

    def __init__(self, name: str) -> None:
        assert name == "libnvidia-ml.so.1"
        number, sizes = c.POINTER(c.c_uint), c.POINTER(c.c_uint64)
        self.ended = False
        self.nvmlInit_v2 = c.CFUNCTYPE(c.c_int)(lambda: 0)
        self.nvmlShutdown = c.CFUNCTYPE(c.c_int)(self._end)
        self.nvmlDeviceGetCount_v2 = c.CFUNCTYPE(c.c_int, number)(lambda out: _put(out, 1))
        self.nvmlDeviceGetHandleByIndex_v2 = c.CFUNCTYPE(c.c_int, c.c_uint, c.POINTER(c.c_void_p))(
            lambda index, out: _put(out, 0x123) if index == 0 else 2
        )
        self.nvmlDeviceGetMemoryInfo = c.CFUNCTYPE(c.c_int, c.c_void_p, sizes)(
            lambda device, out: _put(out, 100, 93, 7) if device == 0x123 else 1
        )
        self.nvmlDeviceGetUtilizationRates = c.CFUNCTYPE(c.c_int, c.c_void_p, number)(
            lambda device, out: _put(out, 42, 10) if device == 0x123 else 1
        )
        self.nvmlDeviceGetHandleByPciBusId_v2 = c.CFUNCTYPE(c.c_int, c.c_char_p, c.POINTER(c.c_void_p))(
            lambda pci_id, out: _put(out, 0x123) if pci_id == b"0000:8a:00.0" else 6
        )
        self.nvmlDeviceGetIndex = c.CFUNCTYPE(c.c_int, c.c_void_p, number)(
            lambda device, out: _put(out, 0) if device == 0x123 else 1
        )
        self.nvmlDeviceGetCurrentClocksThrottleReasons = c.CFUNCTYPE(c.c_int, c.c_void_p, sizes)(
            lambda device, out: _put(out, 0x40) if device == 0x123 else 1
        )
        self.nvmlDeviceGetName = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_char), c.c_uint)(
            lambda device, out, room: _put(out, *b"NVIDIA H200\0") if room >= 96 else 7
        )

    def _end(self) -> int:
        self.ended = True
        return 0


def _put(out: Any, *values: int) -> int:
    for index, value in enumerate(values):
        out[index] = value
    return 0


def test_figures_through_the_driver_s_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    made: list[DriverLibrary] = []

    def load(name: str) -> DriverLibrary:
        made.append(DriverLibrary(name))
        return made[-1]

    monkeypatch.setattr(c, "CDLL", load)
    assert gpu_usage.available() and gpu_usage.used(["CUDA0"]) == {"GPU 0": 7}
    assert gpu_usage.name_at("0000:8a:00.0") == "GPU 0" and gpu_usage.name_at("0000:8b:00.0") == ""
    assert thermal.gpu_reasons() == ("heat",)
    with nvml.nvml() as library:
        assert library is not None
        assert library.name(0) == "NVIDIA H200"
        assert gpu_usage.readings(library) == {0: Reading(7, 42)}
        with pytest.raises(OSError, match="nvmlDeviceGetHandleByIndex_v2 returned 2"):
            library.read(1)
    assert all(each.ended for each in made)
