"""The same plan as the server and as llama-bench spell it: other signs, the same placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_plans import plan_for

from atsplan import main
from planner.errors import InputError
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import to_text
from planner.workload import Workload
from runtime.tools.llama_bench import lacks, words
from runtime.tools.options import Inexpressible, options, stock

WORK = Workload(n_ctx=256, n_batch=64, n_ubatch=32, type_k="q8_0", type_v="q8_0")
EXPERTS = (r"^blk\.(?:1|3)\.(?:ffn_down_exps|ffn_up_exps)\.weight$", "CPU")
HEAD = (r"^output\.weight$", "CUDA1")


def spec(devices: tuple[str, ...], split: tuple[int, ...], *overrides: tuple[str, str]) -> LoadSpec:
    return LoadSpec(devices, split, sum(split), overrides, WORK)


def test_two_devices() -> None:
    placed = stock(spec(("CUDA0", "CUDA1"), (5, 5), EXPERTS, HEAD), 9)
    line = words(placed, "m.gguf", 512, 128, 0)
    assert line == [
        *("-m", "m.gguf", "-dev", "CUDA0/CUDA1", "-ngl", "10", "-ts", "5/5"),
        *("-ot", f"{EXPERTS[0]}=CPU;{HEAD[0]}=CUDA1"),
        *("-b", "64", "-ub", "32", "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-lm", "mmap"),
        *("-p", "512", "-n", "128", "-d", "0"),
    ]
    server = dict(options(placed, "m.gguf"))
    assert (server["--device"], server["--tensor-split"]) == ("CUDA0,CUDA1", "5,5")
    assert server["--override-tensor"] == f"{EXPERTS[0]}=CPU,{HEAD[0]}=CUDA1"
    # A comma would be two test points, each with all of the model on one device.
    assert not any("," in word for word in line)


def test_one_device_and_none() -> None:
    assert words(stock(spec(("Vulkan0",), (5,)), 4), "m", 1, 1, 0)[2:6] == ["-dev", "Vulkan0", "-ngl", "5"]
    assert "-ts" not in words(stock(spec(("Vulkan0",), (5,)), 4), "m", 1, 1, 0)
    assert words(stock(spec((), ()), 4), "m", 1, 1, 0)[2:6] == ["-dev", "none", "-ngl", "0"]


def test_switches() -> None:
    placed = stock(replace(spec(("CUDA0",), (5,)), threads=7, op_offload=False, use_mmap=False), 4)
    line = words(replace(placed, spec=replace(placed.spec, use_extra_bufts=False)), "m", 16, 8, 4096)
    for pair in (("-t", "7"), ("-nopo", "1"), ("-lm", "none"), ("--repack", "0"), ("-d", "4096")):
        assert line[line.index(pair[0]) + 1] == pair[1]


def test_remote_devices() -> None:
    placed = stock(spec(("RPC0[h:50052]", "CUDA0"), (2, 3)), 4)
    line = words(placed, "m", 1, 1, 0)
    assert line[:2] == ["-rpc", "h:50052"]
    assert line[line.index("-dev") + 1] == "RPC0/CUDA0"


@pytest.mark.parametrize("pattern", ["a;b", "a=b"])
def test_a_pattern_that_its_signs_would_cut(pattern: str) -> None:
    placed = replace(stock(spec(("CUDA0",), (5,)), 4), spec=spec(("CUDA0",), (5,), (pattern, "CPU")))
    with pytest.raises(Inexpressible):
        words(placed, "m", 1, 1, 0)


def test_a_device_that_its_signs_would_cut() -> None:
    with pytest.raises(InputError, match="a slash parts devices"):
        words(stock(spec(("GPU/0",), (5,)), 4), "m", 1, 1, 0)


def test_what_it_cannot_be_told_is_said() -> None:
    placed = stock(spec(("CUDA0",), (5,)), 4)
    assert lacks(placed) == []
    many = replace(
        placed, spec=replace(placed.spec, workload=WORK.model_copy(update={"n_seq": 4, "mtp": True}))
    )
    said = " ".join(lacks(replace(many, mmproj="eyes.gguf", draft="d.gguf")))
    for what in ("4 sequences", "projector", "draft", "NextN"):
        assert what in said


def test_the_exported_line(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))
    done = CliRunner().invoke(main, ["export", str(path), "--format", "llama-bench", "--model", "m.gguf"])
    assert done.exit_code == 0, done.output
    line = done.stdout.splitlines()[-1]
    assert line.startswith("llama-bench -m m.gguf -dev CUDA0 -ngl 5 -ncmoe 4 -b ")
    assert line.endswith("-p 512 -n 256 -d 0")
