"""Work that runs away from its data, read from the scheduler's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.engine.libllama import Engine
from runtime.engine.scheduler_log import Listener, Stray, describe
from runtime.load import dry_run

LOG = """
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS):  embd (  16K) [  CPU ] use=1: token_embd.weight ( 136K) [  CPU ]
## SPLIT #1: Vulkan0 # 1 inputs: [embd (  16K)]
node #  1 (   MUL_MAT):  Qcur-0 (  16K) [Vulka ] use=1: Vulkan0#blk.0.attn_q (  68K) [ NULL ]
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS):  embd (   1K) [  CPU ] use=1: token_embd.weight ( 136K) [  CPU ]
node # 21 (FLASH_ATTN):  node_21 (   0K) [  CPU ] use=1: CPU#cache_k_l0 (view (  72K) [ NULL ]
node # 43 (MUL_MAT_ID):  ffn_moe_gate-0 (   2K) [Vulka ] use=1: Vulkan0#blk.3.ffn_ga ( 544K) [ NULL ]
node # 44 (MUL_MAT_ID): up-0 (   2K) [  CPU ] use=1: blk.0.ffn_up_exps.we ( 544K) [  CPU ]
"""


def test_the_graph_of_one_token_is_judged() -> None:
    listener = Listener()
    for at in range(0, len(LOG), 37):  # the engine logs in fragments
        listener.add(1, LOG[at : at + 37])
    assert [(g.first_kib, g.nodes) for g in listener.graphs] == [(16, 2), (1, 4)]
    strays = listener.decode().strays
    assert strays == [
        Stray("FLASH_ATTN", "0", "CPU", True),
        Stray("MUL_MAT_ID", "blk.3.ffn_ga", "Vulka", False),
    ]
    sentences = describe(strays)
    assert "attention of layer 0 runs on CPU, away from its KV cache" in sentences[0]
    assert "blk.3.ffn_ga is copied to Vulka for every token" in sentences[1]
    assert len(describe(strays, shared=[0])) == 1
    assert Listener().decode().nodes == 0


@pytest.mark.parametrize(("head_dim", "stray"), [(36, True), (64, False)])
def test_attention_that_a_device_cannot_run_is_found_before_loading(
    computing_server: Path,
    vulkan_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    stray: bool,
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    model = write(tmp_path / "m.gguf", SynthSpec("llama", head_dim=head_dim, n_layers=2, type="f16"))
    spec = LoadSpec(("Vulkan0",), (3,), 3, (), Workload(n_ctx=256))
    found = dry_run.measure(Engine.find(str(computing_server)), model, spec, watch=True)
    assert bool(found.strays) is stray
    assert (found.splits_decode > 2) is stray
    if stray:
        assert found.strays[0].startswith("attention of layers 0, 1 runs on CPU")
