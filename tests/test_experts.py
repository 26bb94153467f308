"""Which tensors an order of experts moves, which layers refuse, byte by byte on tiny models."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
from gguf_bytes import ARR, I32, U32, T, arch, gguf, kv, save
from hand_plans import hand_plan

from planner.model.gguf.reader import ModelFile, read_model
from rewriter.experts import OrderRefused, gathers
from rewriter.rewrite import RewriteOptions, rewrite

ORDER = (2, 0, 1, 3)
E = 4


def slices(name: str, dims: tuple[int, ...], kind: int = 0, count: int = E) -> T:
    """A tensor of `count` slices; every value of slice n is the number n."""
    values = 1
    for dim in dims:
        values *= dim
    each = values // count
    return T(name, dims, kind, b"".join(struct.pack("<f", n) * each for n in range(count)))


def layer(*more: T) -> list[T]:
    """One layer with everything that has an expert axis, and neighbours that have none."""
    p = "blk.0."
    return [
        slices(p + "attn_norm.weight", (8,)),
        slices(p + "ffn_gate_inp.weight", (8, E)),
        slices(p + "ffn_gate_inp.bias", (E,)),
        slices(p + "exp_probs_b.bias", (E,)),
        slices(p + "ffn_gate_exps.weight", (8, 6, E)),
        slices(p + "ffn_up_exps.weight", (8, 6, E)),
        slices(p + "ffn_down_exps.weight", (6, 8, E)),
        slices(p + "ffn_gate_exps.bias", (6, E)),
        slices(p + "ffn_up_exps.bias", (6, E)),
        slices(p + "ffn_down_exps.scale", (E,)),
        slices(p + "ffn_up_shexp.weight", (8, 8)),
        slices(p + "ffn_gate_inp_shexp.weight", (8,)),
        *more,
    ]


MOVES = {
    "blk.0.ffn_gate_inp.weight",
    "blk.0.ffn_gate_inp.bias",
    "blk.0.exp_probs_b.bias",
    "blk.0.ffn_gate_exps.weight",
    "blk.0.ffn_up_exps.weight",
    "blk.0.ffn_down_exps.weight",
    "blk.0.ffn_gate_exps.bias",
    "blk.0.ffn_up_exps.bias",
    "blk.0.ffn_down_exps.scale",
}


def model(folder: Path, tensors: Sequence[T], **hparams: int) -> ModelFile:
    name = "deepseek2"
    values = {"block_count": 1, "embedding_length": 8, "expert_count": E, **hparams}
    kvs = [arch(name), *(kv(f"{name}.{key}", U32, value) for key, value in values.items())]
    return read_model(save(folder, gguf(kvs, tensors)))


def payload(path: Path, name: str) -> tuple[float, ...]:
    tensor = read_model(path).inventory.tensor(name)
    raw = path.read_bytes()[tensor.offset : tensor.offset + tensor.size_bytes]
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def test_every_tensor_with_an_expert_axis_moves_and_no_other(tmp_path: Path) -> None:
    source = model(tmp_path, layer())
    out = tmp_path / "out.gguf"
    rewrite(source, hand_plan(source, experts={0: ORDER}), out, RewriteOptions())
    for tensor in source.inventory.tensors:
        before, after = (payload(path, tensor.name) for path in (source.paths[0], out))
        each = len(before) // E
        moved = tuple(value for n in ORDER for value in before[n * each : (n + 1) * each])
        assert after == (moved if tensor.name in MOVES else before), tensor.name


@pytest.mark.parametrize("spelling", ["exp_probs_b", "exp_probs_b.bias", "exp_probs_b_vl.bias"])
def test_the_selection_bias_moves_under_any_name_and_keeps_it(tmp_path: Path, spelling: str) -> None:
    tensors = [t for t in layer() if "exp_probs_b" not in t.name]
    source = model(tmp_path, [*tensors, slices(f"blk.0.{spelling}", (E,))])
    out = tmp_path / "out.gguf"
    rewrite(source, hand_plan(source, experts={0: ORDER}), out, RewriteOptions())
    assert payload(out, f"blk.0.{spelling}") == tuple(map(float, ORDER))


def test_fused_gate_up_moves(tmp_path: Path) -> None:
    fused = slices("blk.0.ffn_gate_up_exps.weight", (8, 12, E))
    found = gathers(model(tmp_path, layer(fused)).inventory, {0: ORDER}, {})
    assert found["blk.0.ffn_gate_up_exps.weight"] == ORDER


def test_scales_without_expert_axis_stay(tmp_path: Path) -> None:
    still = [slices("blk.0.ffn_gate_inp.scale", (8,)), slices("blk.0.ffn_up_exps.input_scale", (1,), count=1)]
    found = gathers(model(tmp_path, layer(*still)).inventory, {0: ORDER}, {})
    assert found.keys() == MOVES


def test_chunks_move_with_their_run_of_experts(tmp_path: Path) -> None:
    chunks = slices("blk.0.ffn_up_chexps.weight", (8, 6, 2), count=2)
    inventory = model(tmp_path, layer(chunks)).inventory
    assert gathers(inventory, {0: (2, 3, 1, 0)}, {})["blk.0.ffn_up_chexps.weight"] == (1, 0)
    with pytest.raises(OrderRefused, match="serves 2 neighbouring experts at a time"):
        gathers(inventory, {0: ORDER}, {})


def test_the_identity_moves_nothing(tmp_path: Path) -> None:
    assert gathers(model(tmp_path, layer()).inventory, {0: tuple(range(E))}, {}) == {}


def test_orders_compose_with_what_is_recorded(tmp_path: Path) -> None:
    """Source position p holds recorded[p]; output position p must hold wanted[p]."""
    inventory = model(tmp_path, layer()).inventory
    for wanted in permutations(range(E)):
        for recorded in permutations(range(E)):
            move = gathers(inventory, {0: wanted}, {0: recorded}).get("blk.0.ffn_up_exps.weight")
            positions = move or tuple(range(E))
            assert tuple(recorded[p] for p in positions) == wanted
    back = gathers(inventory, {}, {0: ORDER})["blk.0.exp_probs_b.bias"]
    assert tuple(ORDER[p] for p in back) == (0, 1, 2, 3)


def test_groups_move_whole_and_inside(tmp_path: Path) -> None:
    inventory = model(tmp_path, layer(), expert_group_count=2).inventory
    for order in ((1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 0, 1)):
        assert gathers(inventory, {0: order}, {})["blk.0.exp_probs_b.bias"] == order
    with pytest.raises(OrderRefused, match="limited to 2 groups, and expert 0 would leave"):
        gathers(inventory, {0: ORDER}, {})


def without(name: str) -> list[T]:
    return [t for t in layer() if name not in t.name]


REFUSED = {
    "hash-table": (layer(slices("blk.0.ffn_gate_tid2eid.weight", (8,))), {}, "routes tokens to experts by"),
    "hash-layers": (layer(), {"hash_layer_count": 1}, "its hash table routes"),
    "no-router": (without("ffn_gate_inp.weight"), {}, "no router was found"),
    "router-rows": (
        [*without("ffn_gate_inp"), slices("blk.0.ffn_gate_inp.weight", (8, 6), count=6)],
        {"expert_count": 0},
        "ffn_gate_inp.weight",
    ),
    "bias-length": (
        [*without("exp_probs_b"), slices("blk.0.exp_probs_b.bias", (6,), count=6)],
        {},
        "exp_probs_b.bias has 6 slices for 4 experts",
    ),
    "unknown-tensor": (layer(slices("blk.0.ffn_expert_map", (E,))), {}, "ffn_expert_map is not known"),
    "unknown-type": (
        [*without("up_exps.weight"), T("blk.0.ffn_up_exps.weight", (8, 6, E), 153, bytes(768))],
        {},
        "type type153, in which nobody knows",
    ),
    "dense": ([slices("blk.0.ffn_up.weight", (8, 8))], {"expert_count": 0}, "no routed experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_must_not_be_reordered(tmp_path: Path, case: str) -> None:
    tensors, hparams, message = REFUSED[case]
    inventory = model(tmp_path, tensors, **hparams).inventory
    with pytest.raises(OrderRefused) as problem:
        gathers(inventory, {0: ORDER}, {})
    assert message in str(problem.value)
    assert problem.value.exit_code == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 0, 1, 2), (0, 1, 2, 4), (-1, 0, 1, 2), (0, 1, 2, 3, 4)])
def test_what_is_no_permutation(tmp_path: Path, order: tuple[int, ...]) -> None:
    inventory = model(tmp_path, layer()).inventory
    with pytest.raises(OrderRefused, match="not a permutation of its 4 experts"):
        gathers(inventory, {0: order}, {})


def test_values_quantised_across_experts_stay_together(tmp_path: Path) -> None:
    tensors = [
        slices("blk.0.ffn_gate_inp.weight", (8, 32), count=32),
        slices("blk.0.ffn_up_exps.weight", (8, 2, 32), count=32),
        T("blk.0.ffn_up_exps.scale", (32,), 8, bytes(34)),
    ]
    inventory = model(tmp_path, tensors, expert_count=32).inventory
    with pytest.raises(OrderRefused, match="is quantised across experts"):
        gathers(inventory, {0: tuple(reversed(range(32)))}, {})


def test_separate_experts_are_refused(tmp_path: Path) -> None:
    alone = [
        slices(f"blk.0.ffn_{part}.{n}.weight", (8, 8)) for n in range(E) for part in ("gate", "up", "down")
    ]
    inventory = model(tmp_path, [slices("blk.0.ffn_gate_inp.weight", (8, E)), *alone]).inventory
    with pytest.raises(OrderRefused, match="separate tensors"):
        gathers(inventory, {0: ORDER}, {})


def test_a_refusal_leaves_no_file(tmp_path: Path) -> None:
    source = model(tmp_path, layer(), expert_group_count=2)
    with pytest.raises(OrderRefused):
        rewrite(source, hand_plan(source, experts={0: ORDER}), tmp_path / "out.gguf", RewriteOptions())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_two_orders_for_a_layer_are_refused(tmp_path: Path) -> None:
    source = model(tmp_path, layer())
    plan = hand_plan(source, experts={0: ORDER})
    twice = plan.model_copy(update={"experts": plan.experts * 2})
    with pytest.raises(OrderRefused, match="two orders"):
        rewrite(source, twice, tmp_path / "o.gguf", RewriteOptions())


def test_a_file_that_mbolt_reordered_is_refused(tmp_path: Path) -> None:
    values = {"block_count": 1, "embedding_length": 8, "expert_count": E}
    kvs = [arch("deepseek2"), *(kv(f"deepseek2.{key}", U32, value) for key, value in values.items())]
    kvs.append(kv("mbolt.perm", ARR, (I32, list(ORDER))))
    source = read_model(save(tmp_path, gguf(kvs, layer())))
    with pytest.raises(OrderRefused, match="mbolt has reordered this file"):
        rewrite(source, hand_plan(source, experts={0: ORDER}), tmp_path / "o.gguf", RewriteOptions())
    assert rewrite(source, hand_plan(source), tmp_path / "o.gguf", RewriteOptions()).verified
