"""Striped experts: refused with a reason elsewhere; on CUDA the same logits, no growth, several at once."""

from __future__ import annotations

import ctypes as c
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, device_names, python

from planner.model.gguf.reader import read_model
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.engine.libllama import Engine
from runtime.session.session import Session
from runtime.stripes import ggml_structs as layout
from runtime.stripes.buffer_type import Stripes, find_gpu
from runtime.stripes.cuda_driver import CudaMissing, Driver
from runtime.stripes.ggml_structs import StripesRefused
from runtime.stripes.mapped_range import GRANULE, rounded
from runtime.stripes.probe import check
from runtime.stripes.server_hook import diverted
from runtime.stripes.widths import host_bytes

CUDA_ENGINE = os.environ.get("ATSPLAN_CUDA_ENGINE", "")
HAS_DRIVER = Path("/dev/nvidiactl").exists()


@pytest.fixture(scope="module")
def cuda_engine() -> str:
    """Folder of a build with CUDA, on a machine with an NVIDIA GPU."""
    if not CUDA_ENGINE or "CUDA0" not in device_names(CUDA_ENGINE):
        pytest.skip("set ATSPLAN_CUDA_ENGINE to a CUDA build on a machine with an NVIDIA GPU")
    return CUDA_ENGINE


@pytest.fixture(scope="module")
def routed_model(models: Path) -> Path:
    """Two layers of 32 experts, 34 MiB each tensor: the hot boundary falls inside a granule."""
    spec = SynthSpec("qwen3moe", n_layers=2, n_embd=1024, n_expert=32, n_used=4, n_ff_exp=1056)
    return write(models / "striped.gguf", spec)


def work(request: dict[str, object]) -> dict[str, Any]:
    """Run stripe_work.py in a process of its own."""
    done = python(ROOT / "tests" / "stripe_work.py", given=json.dumps(request), limit_s=300)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_planner_and_runtime_cut_memory_alike() -> None:
    assert [rounded(size) for size in (0, 1, GRANULE, GRANULE + 1)] == [0, GRANULE, GRANULE, 2 * GRANULE]


def test_host_part_of_a_spec_is_what_the_planner_counted(routed_model: Path) -> None:
    inventory = read_model(routed_model).inventory
    spec = LoadSpec(
        devices=("CUDA0",),
        tensor_split=(3,),
        n_gpu_layers=3,
        overrides=((r"^blk\.1\.ffn_(gate|up|down)_exps\.weight$", "stripe:CUDA0:5"),),
        workload=Workload(),
    )
    slab = 1056 * 1024 // 32 * 34
    assert host_bytes(inventory, spec) == {"CUDA0": 3 * (32 * slab - rounded(5 * slab))}


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")
def test_refused_without_a_cuda_driver() -> None:
    with pytest.raises(StripesRefused, match=r"libcuda\.so\.1"):
        _ = Stripes(Engine.find().ggml).driver


def test_a_library_that_is_no_driver_is_refused() -> None:
    with pytest.raises(CudaMissing, match="no cuInit"):
        Driver("libc.so.6")


def test_other_gpus_are_refused_with_the_reason(vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    found = check(Engine.find(str(vulkan_engine)))
    assert [one.device for one in found] == ["Vulkan0"]
    assert found[0].why_not == "it is a Vulkan device, CUDA is needed"


def test_proof_on_a_small_tensor(cuda_engine: str) -> None:
    found = check(Engine.find(cuda_engine))
    assert [one.why_not for one in found] == [""] * len(found)


def test_wrong_device_is_refused(cuda_engine: str) -> None:
    with pytest.raises(StripesRefused):
        find_gpu(Driver(), "CUDA9", "ffff:ff:1f.7")


def test_logits_are_those_of_plain_vram_bit_for_bit(cuda_engine: str, routed_model: Path) -> None:
    for read in ("mmap", "read"):
        plain = work({"engine": cuda_engine, "model": str(routed_model), "k": [32], "read": read})
        for k in (0, 1, 13, 31):
            found = work({"engine": cuda_engine, "model": str(routed_model), "k": [k], "read": read})
            assert found["logits"] == plain["logits"]
            assert found["memory"]["CUDA0"] - found["dry"]["CUDA0"] in range(-4096, 4096)
            assert found["device_bytes"] == 6 * rounded(k * 1056 * 1024 // 32 * 34)


def test_twenty_loads_leave_nothing(cuda_engine: str, routed_model: Path) -> None:
    found = work({"engine": cuda_engine, "model": str(routed_model), "k": [16], "times": 20})
    vram, resident = found["vram_after"], found["resident_after"]
    assert vram[-1] == vram[1]
    assert resident[-1] - resident[3] < 8 * 2**20


def test_several_models_at_once_and_freed_in_any_order(cuda_engine: str, routed_model: Path) -> None:
    alone = work({"engine": cuda_engine, "model": str(routed_model), "k": [9]})
    found = work({"engine": cuda_engine, "model": str(routed_model), "k": [9, 20, 9], "together": True})
    assert found["logits"] == [alone["logits"][0]] * 3


def test_missing_device_memory_is_one_line_and_leaves_nothing(cuda_engine: str, routed_model: Path) -> None:
    found = work({"engine": cuda_engine, "model": str(routed_model), "k": [16], "starve": True})
    assert "has no room for another" in str(found["problem"])
    assert found["vram_lost"] == 0


def test_missing_host_memory_is_one_line_and_leaves_nothing(cuda_engine: str, routed_model: Path) -> None:
    found = work({"engine": cuda_engine, "model": str(routed_model), "k": [16], "no_host_memory": True})
    assert "of host memory must be pinned" in found["problem"]
    assert found["vram_lost"] == 0


def test_without_overrides_the_hook_gives_the_same_logits(cuda_engine: str, routed_model: Path) -> None:
    plain = work({"engine": cuda_engine, "model": str(routed_model), "k": [32]})
    found = work({"engine": cuda_engine, "model": str(routed_model), "k": [9], "hook": True})
    assert found == {"logits": plain["logits"], "tensors": 6}


def test_hook_diverts_named_tensors_and_is_gone_afterwards(moe_model: Path) -> None:
    engine = Engine.find()
    buft = engine.lib.ggml_backend_cpu_buffer_type()
    twin = (c.c_uint64 * 10)(*[layout.read(buft, index) for index in range(10)])
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=256), use_mmap=False, use_extra_bufts=False)
    seen: list[str] = []

    def choose(name: str) -> int | None:
        if "_exps" not in name:
            return None
        seen.append(name)
        return c.addressof(twin)

    with Session(engine, moe_model, spec) as session:
        plain = session.logits([1, 2, 3])
    with diverted(engine.ggml, buft, choose), Session(engine, moe_model, spec) as session:
        assert (session.logits([1, 2, 3]) == plain).all()
    assert len(seen) == 12
    with Session(engine, moe_model, spec) as session:
        assert (session.logits([1, 2, 3]) == plain).all()
    assert len(seen) == 12
