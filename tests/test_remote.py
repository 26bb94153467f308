"""Remote devices over RPC: found by their server, refused in one line when it does not answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import AtsplanError
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.engine.libllama import Engine
from runtime.engine.rpc import endpoints
from runtime.load import dry_run
from runtime.tools.llama_server import free_port
from runtime.worker import Ask, work

SMALL = Workload(n_ctx=256, n_batch=64, n_ubatch=64)


def remote_spec(endpoint: str) -> LoadSpec:
    """Everything on the remote device, the experts on the CPU here."""
    name = f"RPC0[{endpoint}]"
    experts = (r"^blk\.\d+\.ffn_(?:down_exps|gate_exps|up_exps)\.weight$", "CPU")
    return LoadSpec((name,), (5,), 5, (experts, (r"^output\.weight$", name)), SMALL, threads=1)


def test_endpoints() -> None:
    assert endpoints(["CUDA0", "RPC0[a:1]", "RPC1[b.c:22]", "RPC0[a:1]"]) == ("a:1", "b.c:22")


def test_a_dry_run_counts_a_remote_device_under_the_plan_s_name(
    rpc_server: str, computing_server: Path, moe_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Vulkan backend looks for devices once a process: later tests of this worker need the software one.
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    engine = Engine.find(str(computing_server))
    found = dry_run.memory(engine, moe_model, remote_spec(rpc_server))
    assert set(found) == {f"RPC0[{rpc_server}]", "CPU"}
    assert found[f"RPC0[{rpc_server}]"].context > 0
    # The number is the engine's; the server is what counts.
    second = replace(remote_spec(rpc_server), devices=(f"RPC7[{rpc_server}]",), overrides=())
    assert f"RPC7[{rpc_server}]" in dry_run.memory(engine, moe_model, second)


def test_a_host_that_is_down_is_one_line(server_engine: Path, moe_model: Path) -> None:
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(AtsplanError, match=f"{endpoint}: no RPC server answers") as problem:
        work(str(server_engine), None, moe_model, remote_spec(endpoint), [Ask((1,), 1)])
    assert problem.value.exit_code == 3


def test_a_build_without_rpc(rpc_server: str, moe_model: Path) -> None:
    with pytest.raises(AtsplanError, match="has no RPC backend"):
        work(None, None, moe_model, remote_spec(rpc_server), [Ask((1,), 1)])
