"""Overrides: sites become few patterns that place exactly the tensors they should, by the engine's rule."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.inventory import Inventory, Shard, Tensor, from_text
from planner.model.layers import layers_of
from planner.model.units import Kind, units_of
from planner.plan.override_match import disagreements, matches, placed
from planner.plan.overrides import UnplaceableUnit, collate, escape, numbers, overrides_of, wanted_buffers
from planner.plan.plan import Override
from planner.site import Site

INPUTS = sorted((Path(__file__).parent.parent / "plans" / "inputs").glob("*.inventory.yaml"))


def model(architecture: str, tensors: dict[str, tuple[int, ...]], **hparams: int) -> Inventory:
    """An inventory from a bare table; one byte a value."""
    made, offset = [], 0
    for name, shape in tensors.items():
        size = 1
        for n in shape:
            size *= n
        made.append(Tensor(name=name, type="q8_0", shape=shape, size_bytes=size, shard=0, offset=offset))
        offset += size
    shard = Shard(file="m.gguf", size_bytes=offset, data_offset=0, alignment=32)
    return Inventory(
        name="m",
        architecture=architecture,
        header_digest="",
        hparams=hparams,
        shards=(shard,),
        tensors=tuple(made),
    )


def moe(n_layers: int, **extra: tuple[int, ...]) -> Inventory:
    """A small MoE; `extra` adds tensors to every layer."""
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (8, 16), "output.weight": (8, 16)}
    for n in range(n_layers):
        tensors |= {
            f"blk.{n}.attn_q.weight": (8, 8),
            f"blk.{n}.attn_k.weight": (8, 8),
            f"blk.{n}.attn_output.weight": (8, 8),
            f"blk.{n}.ffn_gate_inp.weight": (8, 4),
            f"blk.{n}.ffn_gate_exps.weight": (8, 8, 4),
            f"blk.{n}.ffn_up_exps.weight": (8, 8, 4),
            f"blk.{n}.ffn_down_exps.weight": (8, 8, 4),
        }
        tensors |= {f"blk.{n}.{name}": shape for name, shape in extra.items()}
    return model("qwen3moe", tensors, block_count=n_layers, expert_count=4, expert_used_count=2)


def experts_on_cpu(inventory: Inventory, layers: set[int]) -> tuple[tuple[Override, ...], dict[str, str]]:
    """Overrides and intention of a plan that keeps these layers' experts on the CPU, all else on CUDA0."""
    units = units_of(inventory).units
    sites = [
        Site.on(
            "CPU" if u.kind is Kind.EMBEDDING or (u.kind is Kind.EXPERTS and u.layer in layers) else "CUDA0"
        )
        for u in units
    ]
    devices = ["CUDA0"] * (layers_of(inventory).n_all + 1)
    return overrides_of(inventory, units, sites, devices), wanted_buffers(inventory, units, sites, devices)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 299), min_size=1, max_size=60))
def test_numbers_match_exactly_their_set(values: set[int]) -> None:
    pattern = re.compile(f"(?:{numbers(values)})")
    assert {n for n in range(3000) if pattern.fullmatch(str(n))} == values


def test_numbers_are_short() -> None:
    assert numbers(range(24, 48)) == "2[4-9]|3[0-9]|4[0-7]"
    assert numbers([5]) == "5"
    assert numbers([10, 11]) == "1[01]"


def test_escape_reads_as_the_text_itself() -> None:
    for name in ("blk.1.ffn_up_exps.weight", "a+b(c)[d]{e}|f^g$h\\i*j?k", "v.patch-embd.weight"):
        assert re.fullmatch(escape(name), name)
        assert not re.fullmatch(escape(name), name.replace(".", "x") + "x")


def test_experts_of_many_layers_are_one_pattern_that_stops_at_its_layers() -> None:
    overrides, wanted = experts_on_cpu(moe(20), set(range(1, 20, 3)))
    assert [o.pattern for o in overrides] == [
        r"^blk\.(?:[147]|1[0369])\.(?:ffn_down_exps|ffn_gate_exps|ffn_up_exps)\.weight$"
    ]
    assert overrides[0].tensors == 21 == len(wanted)
    assert disagreements(moe(20), overrides, wanted) == ()


def test_layer_1_does_not_reach_layer_11() -> None:
    overrides, _ = experts_on_cpu(moe(20), {1})
    assert {name.split(".")[1] for name in placed(moe(20), [(o.pattern, o.buffer) for o in overrides])} == {
        "1"
    }


@pytest.mark.parametrize(
    ("names", "moved"),
    [
        (("ffn_gate_up_exps.weight",), {"ffn_gate_up_exps.weight"}),  # fused gate and up
        (("ffn_up_chexps.weight",), {"ffn_up_chexps.weight"}),  # chunked experts are experts
        (("ffn_gate_exps.bias",), {"ffn_gate_exps.bias"}),  # biases go with their experts
        (("ffn_up_shexp.weight", "ffn_down_shexp.weight"), set()),  # shared experts are not routed
        (("ffn_routed_up.weight", "ffn_routed_down.weight"), set()),  # latent projections read like experts
    ],
)
def test_look_alike_names(names: tuple[str, ...], moved: set[str]) -> None:
    shapes = {n: (8, 4) if n.endswith("bias") else (8, 8, 4) if "exps" in n else (8, 8) for n in names}
    inventory = moe(3, **shapes)
    overrides, _ = experts_on_cpu(inventory, {0, 2})
    found = set(placed(inventory, [(o.pattern, o.buffer) for o in overrides]))
    plain = {f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    assert found == {f"blk.{n}.{name}" for n in (0, 2) for name in plain | moved}


def test_bytes_of_a_move_are_the_bytes_the_pattern_matches() -> None:
    inventory = moe(12, **{"ffn_gate_up_exps.weight": (8, 16, 4)})
    overrides, _ = experts_on_cpu(inventory, set(range(4, 12)))
    units = [u for u in units_of(inventory).units if u.kind is Kind.EXPERTS and (u.layer or 0) >= 4]
    found = matches(inventory, [(o.pattern, o.buffer) for o in overrides])
    assert sum(m.size_bytes for m in found) == sum(u.size_bytes for u in units)


def test_a_tied_head_cannot_be_moved_away_from_its_embedding() -> None:
    inventory = model("llama", {"token_embd.weight": (8, 16), "blk.0.attn_q.weight": (8, 8)}, block_count=1)
    units = units_of(inventory).units
    on_gpu = [Site.on("CUDA0")] * len(units)
    with pytest.raises(UnplaceableUnit, match="token_embd"):
        overrides_of(inventory, units, on_gpu, ["CUDA0", "CPU"])
    assert len(overrides_of(inventory, units, on_gpu, ["CUDA0", "CUDA0"])) == 1


def test_patterns_hold_nothing_the_stock_parsers_split_at() -> None:
    overrides, _ = experts_on_cpu(moe(40), set(range(0, 40, 2)))
    assert not any(set(o.pattern) & set(",=;") for o in overrides)


def test_stripes_get_a_pattern_for_each_tensor() -> None:
    wanted = {f"blk.{n}.ffn_up_exps.weight": "stripe:CUDA0:2" for n in range(3)}
    assert [o.tensors for o in collate(wanted)] == [1, 1, 1]


@pytest.mark.parametrize("path", INPUTS, ids=lambda p: p.name.split(".")[0])
def test_any_placement_of_a_real_model_is_proven_and_short(path: Path) -> None:
    inventory = from_text(path.read_text(), path.name)
    units, layers = units_of(inventory).units, layers_of(inventory)
    chance = random.Random(path.name)
    for _ in range(3):
        devices = [chance.choice(["CPU", "CUDA0", "CUDA1"]) for _ in range(layers.n_all + 1)]
        sites = []
        for unit in units:
            home = devices[-1] if unit.layer is None else devices[unit.layer]
            stays = Site.on("CPU" if unit.kind in (Kind.EMBEDDING, Kind.LOOKUP) else home)
            free = unit.kind in (Kind.EXPERTS, Kind.FFN)
            sites.append(chance.choice([stays, Site.on("CPU"), Site.on("CUDA0")]) if free else stays)
        wanted = wanted_buffers(inventory, units, sites, devices)
        overrides = overrides_of(inventory, units, sites, devices)
        assert disagreements(inventory, overrides, wanted) == ()
        assert len(overrides) <= 24


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ([(r"blk\.99\.", "CPU")], "matches no tensor"),
        ([(r"blk.1", "CPU")], "not anchored: also reaches layers 10, 11"),
        ([(r"\.(1[0-9])\.*", "CPU")], "its tail may match nothing"),
        ([(r"^blk\.1\..*$", "CPU"), (r"^blk\.1\.ffn_up_exps\.weight$", "CUDA0")], "loses every tensor"),
        ([(r"^blk\.(1$", "CPU")], "not a regular expression"),
        ([(r"^blk\.1\.(?<=x)$", "CPU")], "read differently"),
    ],
)
def test_faults_of_hand_written_patterns_are_named(rules: list[tuple[str, str]], fault: str) -> None:
    found = matches(moe(12), rules)
    assert fault in "; ".join(f for m in found for f in m.faults)


def test_a_wrong_override_is_found() -> None:
    inventory = moe(4)
    overrides, wanted = experts_on_cpu(inventory, {1, 2})
    assert "blk.2.ffn_up_exps.weight" in "".join(disagreements(inventory, overrides[:0], wanted))
    short = (overrides[0].model_copy(update={"tensors": 5}),)
    assert "places 6 tensors, not 5" in "".join(disagreements(inventory, short, wanted))
