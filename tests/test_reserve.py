"""What is reserved beside the model, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning_models import findings, machine, moe, plan
from small_tables import attention, dense, ends, table

from benchmarks.projector import Eyes, write_projector
from planner.memory.compute_buffer import compute_bytes, staging_bytes
from planner.memory.kv_cache import KvTypeProblem, kv_bytes, state_bytes
from planner.memory.projector import projector_compute_bytes, projector_inputs_bytes
from planner.memory.reserves import (
    Extras,
    estimates,
    reserves,
)
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.refusal import Infeasible
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

MIB = 2**20


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    path = tmp_path_factory.mktemp("reserve") / "qwen35.gguf"
    return read_model(write(path, SynthSpec("qwen35", n_nextn=1, n_vocab=8192))).inventory


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    path = tmp_path_factory.mktemp("reserve") / "draft.gguf"
    return read_model(write(path, SynthSpec("qwen3", n_layers=2, tied=True))).inventory


def projector(**vision: int | str) -> Inventory:
    hparams = {f"vision__{k}": v for k, v in vision.items()}
    return table("clip", "v.blk.0.attn_q.weight 1152x1152\nmm.0.weight 4608x2048", **hparams)


def lines(model: Inventory, workload: Workload, extras: Extras) -> dict[str, int]:
    return {r.name: r.size_bytes for r in reserves(structure_of(model), workload, extras, gpu="CUDA0")}


def test_nothing_beside_the_model_takes_nothing(hybrid: Inventory) -> None:
    assert reserves(structure_of(hybrid), Workload(), Extras(), gpu="CUDA0") == ()
    assert reserves(structure_of(hybrid), Workload(mtp=False), Extras(rollback=4), gpu="CUDA0") == ()


def test_a_projector_takes_its_weights_and_a_compute_buffer_of_its_own(hybrid: Inventory) -> None:
    mmproj = projector(
        embedding_length=1152,
        feed_forward_length=4304,
        patch_size=16,
        image_size=768,
        projector_type="qwen3vl_merger",
        attention__head_count=16,
    )
    found = lines(hybrid, Workload(), Extras(mmproj=mmproj))
    assert found["projector"] == mmproj.size_bytes
    # Of its graph too little is there to follow it: an estimate from above.
    assert 274 * MIB < found["projector compute"] < 330 * MIB
    assert projector_compute_bytes(mmproj, flash_attn=False) > 10 * found["projector compute"]
    on_cpu = reserves(
        structure_of(hybrid), Workload(), Extras(mmproj=mmproj, mmproj_device="CPU"), gpu="CUDA0"
    )
    assert {line.device for line in on_cpu} == {"CPU"}


def test_a_projector_of_fixed_resolution_needs_less(hybrid: Inventory) -> None:
    fixed = projector(embedding_length=1152, feed_forward_length=4304, patch_size=16, image_size=768)
    assert projector_compute_bytes(fixed) == 4 * 48**2 * (4304 + 4 * 1152)


@pytest.mark.parametrize(
    ("eyes", "took", "inputs"),
    [
        (Eyes("qwen3vl_merger", 1024, 4096, 16, 16, 768), 223.30, 24.93),
        (Eyes("qwen3vl_merger", 1024, 4096, 16, 16, 768, 4, (0, 1, 2)), 322.49, 24.93),
        (Eyes("qwen3vl_merger", 1152, 4304, 16, 16, 768), 248.10, 24.93),
        (Eyes("qwen2.5vl_merger", 1280, 3420, 16, 14, 560, 4), 704.79, 292.41),
        (Eyes("qwen2vl_merger", 768, 3072, 12, 14, 560, 4), 205.09, 19.11),
        (Eyes("mlp", 1024, 4096, 16), 17.05, 1.30),
    ],
    ids=lambda value: value.kind if isinstance(value, Eyes) else "",
)
def test_a_projector_s_buffer_is_the_engine_s(eyes: Eyes, took: float, inputs: float, tmp_path: Path) -> None:
    """What llama-server b10434 took on the CPU: 223 and 323 MiB of one width, without and with the outputs of
    three layers beside that of the last; a CUDA device took 223 of the first too, by a public report.
    """
    model = read_model(write_projector(tmp_path / "eyes.gguf", 2048, eyes)).inventory
    assert projector_compute_bytes(model) / MIB == pytest.approx(took, abs=0.01)
    assert projector_inputs_bytes(model) / MIB == pytest.approx(inputs, abs=0.01)
    assert projector_compute_bytes(model, flash_attn=False) > projector_compute_bytes(model)
    assert 1 < projector_compute_bytes(model, "Vulkan0") / projector_compute_bytes(model) < 1.3


def test_the_nextn_head_computes_and_is_rolled_back_only_on_request(hybrid: Inventory) -> None:
    work = Workload(mtp=True)
    found = lines(hybrid, work, Extras(rollback=2))
    assert set(found) == {"MTP compute", "MTP state", "MTP inputs"}
    assert found["MTP state"] == 2 * sum(state_bytes(structure_of(hybrid), Workload()))
    # Its context asks for one row of logits a sequence, so the vocabulary times the batch is not in it.
    assert found["MTP compute"] < compute_bytes(structure_of(hybrid), work, layers=[4])
    assert set(lines(hybrid, work, Extras())) == {"MTP compute", "MTP inputs"}
    assert lines(hybrid, Workload(), Extras(rollback=2)) == {}


def test_a_draft_model_takes_weights_cache_and_compute(hybrid: Inventory, draft: Inventory) -> None:
    work = Workload(n_ctx=8192)
    found = reserves(structure_of(hybrid), work, Extras(draft=draft, draft_device="CUDA1"), gpu="CUDA0")
    sizes = {line.name: line.size_bytes for line in found}
    embedding = draft.tensor("token_embd.weight").size_bytes
    assert sizes["draft"] >= draft.size_bytes  # its head is a second copy of the embedding
    assert sizes["draft KV"] == sum(kv_bytes(structure_of(draft), work))
    assert sizes["draft embedding"] == embedding
    assert {line.name: line.device for line in found}["draft"] == "CUDA1"
    assert {line.name for line in found if line.device == "CPU"} == {"draft embedding", "draft inputs"}


def test_other_users(hybrid: Inventory) -> None:
    extras = Extras(reserved={"": 512 * MIB, "CUDA1": MIB})
    found = reserves(structure_of(hybrid), Workload(n_seq=2), extras, gpu="CUDA0")
    assert [(line.name, line.device, line.size_bytes) for line in found] == [
        ("other users", "CUDA0", 512 * MIB),
        ("other users", "CUDA1", MIB),
    ]


def test_state_follows_sequences_and_speculation_but_not_the_context(hybrid: Inventory) -> None:
    one = sum(state_bytes(structure_of(hybrid), Workload()))
    assert sum(state_bytes(structure_of(hybrid), Workload(n_ctx=262144))) == one
    assert sum(state_bytes(structure_of(hybrid), Workload(n_seq=4))) == 4 * one
    assert sum(state_bytes(structure_of(hybrid), Workload(n_seq=4), rollback=4)) == 20 * one


def test_no_copies_of_state_where_the_engine_cannot_take_it_back() -> None:
    text = f"{ends()}\nblk.0.ssm_in.weight 64x300\nblk.0.ssm_out.weight 128x64"
    model = table("mamba2", text, block_count=1, ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=16)
    assert state_bytes(structure_of(model), Workload(), rollback=4) == state_bytes(
        structure_of(model), Workload()
    )


def test_caches_grow_with_context_sequences_and_type() -> None:
    model = table(
        "llama", f"{ends()}\n{attention(0)}\n{dense(0)}", embedding_length=64, attention__head_count=2
    )
    sizes = {n: kv_bytes(structure_of(model), Workload(n_ctx=n))[0] for n in (2048, 32768, 131072)}
    assert sizes == {n: n * 64 * 2 * 2 for n in sizes}
    assert (
        kv_bytes(structure_of(model), Workload(n_ctx=2048, type_k="q8_0", type_v="q8_0"))[0] * 32
        == sizes[2048] * 17
    )
    assert kv_bytes(structure_of(model), Workload(n_ctx=2049))[0] == 2304 * 64 * 2 * 2


@pytest.mark.parametrize(
    ("arch", "hparams", "workload", "why"),
    [
        (
            "deepseek2",
            {"key_length_mla": 48, "value_length_mla": 32},
            {"type_k": "q8_0"},
            "same type for both",
        ),
        ("llama", {"key_length": 40}, {"type_k": "q8_0"}, "blocks of 32 values do not divide heads of 40"),
        ("llama", {}, {"type_v": "q8_0", "flash_attn": False}, "flash attention"),
    ],
)
def test_cache_types_that_the_engine_refuses(
    arch: str, hparams: dict[str, int], workload: dict[str, str | bool], why: str
) -> None:
    keys = {f"attention__{key}": value for key, value in hparams.items()}
    text = f"{ends()}\n{attention(0)}\n{dense(0)}"
    model = table(arch, text, embedding_length=64, attention__head_count=2, **keys)
    with pytest.raises(KvTypeProblem, match=why):
        kv_bytes(structure_of(model), Workload.model_validate(workload))


def test_host_weights_are_staged_from_32_tokens_on() -> None:
    seven_gib = 7 << 30
    assert staging_bytes([seven_gib, 5], Workload(n_ubatch=16)) == 0
    assert staging_bytes([seven_gib, 5], Workload(n_ubatch=32)) == seven_gib
    assert staging_bytes([seven_gib, 5], Workload(n_ubatch=512)) == seven_gib
    assert staging_bytes([seven_gib], Workload(), op_offload=False) == 0
    assert staging_bytes([], Workload()) == 0


def test_a_draft_of_a_foreign_architecture_is_said_to_be_an_estimate(draft: Inventory) -> None:
    foreign = draft.model_copy(update={"architecture": "novel-net"})
    (note,) = estimates(Extras(draft=foreign))
    assert "architecture novel-net is not known" in note and "estimate" in note
    assert list(estimates(Extras(draft=draft))) == list(estimates(Extras())) == []


def test_weights_are_paged_beside_an_integrated_gpu_too() -> None:
    """What both take of the one memory, the host's weights apart, is held to it."""
    small = {"memory_bytes": 3 << 30, "free_bytes": 5 << 29}
    apu = machine("apu-unified", Vulkan0=small, CPU=small)
    with pytest.raises(Infeasible, match="the one memory of Vulkan0 and CPU"):
        plan(moe(), "", on=apu)
    made = plan(moe(), "", on=apu, page=True)
    gpu, host = made.devices
    pool = (5 << 29) - (1 << 30)  # less what is left to others
    assert gpu.used_bytes + host.memory.unpaged <= pool < gpu.used_bytes + host.used_bytes
    assert any("will page from disk" in note for note in made.notes)
    assert findings(made, moe(), apu) == []
