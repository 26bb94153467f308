"""Every kind of unfaithful output is found, by a reader that shares no code with the first."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import ARR, STR, U8, U32, T, arch, f32, gguf, kv, save
from hand_plans import hand_plan

from planner.errors import FileProblem
from planner.model.gguf.reader import ModelFile, read_model
from planner.plan.plan import Override, Plan
from planner.site import Site
from rewriter.manifest import from_text, manifest_path, to_text
from rewriter.payloads import Payload, PayloadCut, digests
from rewriter.rewrite import RewriteOptions, rewrite
from rewriter.second_reader import read_header
from rewriter.stamp import PlanMismatch, read_stamp
from rewriter.verify import LOGITS_CLOSE, LOGITS_EXACT, WEIGHTS_EXACT, WEIGHTS_PERMUTED, NotFaithful, verify

ORDERS = {0: (3, 1, 0, 2), 1: (1, 0, 2, 3)}


def small(folder: Path) -> ModelFile:
    """Two layers of four experts in f32, written by hand."""
    tensors = [f32("token_embd.weight", *range(8))]
    for n in range(2):
        p = f"blk.{n}."
        experts = struct.pack("<96f", *(n + v / 96 for v in range(96)))
        router = struct.pack("<32f", *range(32))
        tensors += [
            f32(p + "attn_norm.weight", *range(8)),
            T(p + "attn_q.weight", (8, 8), 0, bytes(range(256))),
            T(p + "ffn_gate_inp.weight", (8, 4), 0, router),
            T(p + "ffn_gate_up_exps.weight", (8, 3, 4), 0, experts),
        ]
    tensors.append(f32("output_norm.weight", *range(8)))
    kvs = [
        arch("qwen3moe"),
        kv("general.name", STR, "Small"),
        kv("qwen3moe.block_count", U32, 2),
        kv("qwen3moe.expert_count", U32, 4),
        kv("tokenizer.ggml.tokens", ARR, (STR, [])),
    ]
    return read_model(save(folder, gguf(kvs, tensors)))


@pytest.fixture
def made(tmp_path: Path) -> tuple[ModelFile, Path, Plan]:
    source = small(tmp_path)
    plan = hand_plan(source, experts=ORDERS)
    out = tmp_path / "o.gguf"
    rewrite(source, plan, out, RewriteOptions())
    return source, out, plan


def problems(source: ModelFile, out: Path, plan: Plan | None) -> str:
    with pytest.raises(NotFaithful) as found:
        verify(source, [out], plan)
    assert found.value.exit_code == 1
    return "; ".join(found.value.problems)


def test_a_faithful_output(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, plan = made
    proof = verify(source, [out], plan)
    assert proof.claims == (WEIGHTS_PERMUTED, LOGITS_CLOSE)
    assert proof.moved_layers == (0, 1)
    assert proof.size_bytes == source.inventory.size_bytes
    assert verify(source, source.paths, None).claims == (WEIGHTS_EXACT, LOGITS_EXACT)


def test_claims_speak_of_the_source_that_was_compared(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, plan = made
    again = out.with_name("again.gguf")
    assert rewrite(read_model(out), plan, again, RewriteOptions()).claims == (WEIGHTS_EXACT, LOGITS_EXACT)
    back = rewrite(read_model(out), hand_plan(source), out.with_name("b.gguf"), RewriteOptions())
    assert back.claims == (WEIGHTS_PERMUTED, LOGITS_CLOSE)


def test_names_cannot_break_the_line(tmp_path: Path) -> None:
    tensors = [f32("a\nb\x1b", 1.0), f32("c", 1.0)]
    source = read_model(save(tmp_path, gguf([arch("x"), kv("general.name", STR, "n\nm")], tensors)))
    other = read_model(save(tmp_path, gguf([arch("x")], tensors[1:]), "o.gguf"))
    with pytest.raises(NotFaithful) as found:
        verify(source, other.paths, None)
    assert str(found.value).isprintable()
    with pytest.raises(PlanMismatch) as refused:
        rewrite(source, hand_plan(other), tmp_path / "z.gguf", RewriteOptions())
    assert str(refused.value).isprintable()


def test_the_manifest_holds_the_digests_of_the_original(made: tuple[ModelFile, Path, Plan]) -> None:
    import hashlib

    source, out, _ = made
    text = manifest_path(out).read_text()
    manifest = from_text(text, "m")
    assert to_text(manifest) == text
    data = source.paths[0].read_bytes()
    for tensor, entry in zip(source.inventory.tensors, manifest.tensors, strict=True):
        raw = data[tensor.offset : tensor.offset + tensor.size_bytes]
        assert (entry.name, entry.sha256) == (tensor.name, hashlib.sha256(raw).hexdigest())
    assert manifest.files[0].size_bytes == out.stat().st_size


def test_every_flipped_payload_byte_is_found(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, plan = made
    good = out.read_bytes()
    for tensor in read_model(out).inventory.tensors:
        for at in (tensor.offset, tensor.offset + tensor.size_bytes - 1):
            out.write_bytes(good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :])
            assert f"tensor {tensor.name} has other bytes" in problems(source, out, plan)


def swap(first: bytes, second: bytes) -> Callable[[bytes], bytes]:
    assert len(first) == len(second)
    return lambda data: data.replace(first, second)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "value": (swap(b"Small", b"SmalL"), "metadata key general.name differs"),
    "key": (swap(b"general.name", b"general.nama"), "metadata key general.name is missing"),
    "element": (
        swap(
            kv("tokenizer.ggml.tokens", ARR, (STR, [])),
            kv("tokenizer.ggml.tokens", ARR, (U8, [])),
        ),
        "metadata key tokenizer.ggml.tokens differs",
    ),
    "tensor": (swap(b"output_norm.weight", b"output_norm.weighX"), "output_norm.weight is missing"),
    "plan": (swap(b"atsplan.plan_digest", b"atsplan.plan_digesX"), "made by another plan"),
    "source": (swap(b"source.header_digest", b"source.header_digesX"), "made from another source"),
    "order": (
        swap(struct.pack("<4I", *ORDERS[0]), struct.pack("<4I", 1, 3, 0, 2)),
        "experts of layer 0 are not in the order of the plan",
    ),
    "layer": (swap(b"atsplan.experts.1", b"atsplan.experts.9"), "experts of layer 1 are not in the order"),
    "record": (
        swap(b"atsplan.source.order", b"atsplan.source.ordeX"),
        "record of the original order is wrong",
    ),
    "shape": (
        swap(struct.pack("<I3QI", 3, 8, 3, 4, 0), struct.pack("<I3QI", 3, 3, 8, 4, 0)),
        "has another type or shape",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_to_the_header_is_found(made: tuple[ModelFile, Path, Plan], case: str) -> None:
    source, out, plan = made
    change, message = DAMAGE[case]
    before = out.read_bytes()
    out.write_bytes(change(before))
    assert out.read_bytes() != before
    assert message in problems(source, out, plan)


def test_a_wrong_record_of_the_experts_is_found_without_a_plan(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, _ = made
    out.write_bytes(DAMAGE["order"][0](out.read_bytes()))
    assert "blk.0.ffn_gate_up_exps.weight has other bytes" in problems(source, out, None)


def test_another_order_of_tensors_is_found(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, plan = made
    other = plan.model_copy(
        update={"units": tuple(p.model_copy(update={"site": Site.on("CUDA0")}) for p in plan.units)}
    )
    rewrite(source, other, out, RewriteOptions(force=True))
    found = problems(source, out, plan)
    assert "stands apart from the others" in found and "made by another plan" in found


def test_an_override_that_matches_other_tensors_is_found(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, plan = made
    pattern = r"^blk\.[01]\.ffn_gate_up_exps\.weight$"
    for tensors in (2, 3):
        other = plan.model_copy(
            update={"overrides": (Override(pattern=pattern, buffer="CPU", tensors=tensors),)}
        )
        if tensors == 2:
            assert rewrite(source, other, out, RewriteOptions(force=True)).verified
        else:
            with pytest.raises(NotFaithful, match="matches 2 tensors, the plan says 3"):
                rewrite(source, other, out, RewriteOptions(force=True))


def test_a_cut_output_is_found(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, plan = made
    out.write_bytes(out.read_bytes()[:-64])
    with pytest.raises(PayloadCut):
        verify(source, [out], plan)


def test_both_readers_and_gguf_py_see_the_same(made: tuple[ModelFile, Path, Plan], moe_model: Path) -> None:
    from gguf import GGUFReader

    for path in (made[1], moe_model):
        ours, second, theirs = read_model(path), read_header(path), GGUFReader(path)
        tensors = ours.inventory.tensors
        assert [t.name for t in tensors] == list(second.weights) == [t.name for t in theirs.tensors]
        assert [t.offset for t in tensors] == [t.data_offset for t in theirs.tensors]
        assert [t.offset for t in tensors] == [w.start for w in second.weights.values()]
        assert [t.size_bytes for t in tensors] == [t.n_bytes for t in theirs.tensors]
        assert [t.shape for t in tensors] == [tuple(map(int, t.shape)) for t in theirs.tensors]
        keys = [kv.key for kv in ours.headers[0].header.kvs]
        assert keys == list(second.entries) == [k for k in theirs.fields if not k.startswith("GGUF.")]
        for entry in ours.headers[0].header.kvs:
            raw = b"".join(part.tobytes() for part in theirs.fields[entry.key].parts)
            assert path.read_bytes()[entry.start : entry.end] == raw


def test_a_damaged_record_of_an_earlier_rewrite_is_refused(made: tuple[ModelFile, Path, Plan]) -> None:
    source, out, _ = made
    out.write_bytes(out.read_bytes().replace(struct.pack("<4I", *ORDERS[0]), struct.pack("<4I", 1, 1, 0, 2)))
    with pytest.raises(FileProblem, match="damaged record of an earlier rewrite"):
        read_stamp(read_model(out))
    assert read_stamp(source) is None


def test_digests_put_slices_back(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "f"
    path.write_bytes(b"--ccaabb--")
    whole, back, plain = digests(
        [Payload(path, 2, 6), Payload(path, 2, 6, (2, 0, 1)), Payload(path, 0, 2)], lambda _: None
    )
    assert back == hashlib.sha256(b"aabbcc").hexdigest() != whole
    assert plain == hashlib.sha256(b"--").hexdigest()
