"""Routing profiles of other tools, byte by byte as they write them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_files import (
    DECODE,
    SHAPE,
    E,
    K,
    by_phase,
    choices,
    counts,
    demand,
    imatrix,
    longspear,
    mbolt_model,
    perf,
    perms,
    plain,
    positions,
    read,
    route_bin,
    route_trace,
    topk_export,
    whole,
    words,
)

from planner.errors import AtsplanError, FileProblem
from planner.routing import expert_counts as heats
from planner.routing import export
from planner.routing import trace as traces
from planner.routing.expert_counts import Part, Phase, WrongModel
from planner.routing.formats import detect
from planner.routing.formats import orders as expert_orders


@pytest.mark.parametrize(
    ("data", "format_"),
    [
        (route_bin(), "mbolt route.bin"),
        (route_bin() + words(1, K, 5, 0), "mbolt route.bin"),  # the last record is cut
        (longspear(), "LONGSPEAR_ROUTE_TRACE v1"),
        (positions(), "moe-trace positions"),
        (route_trace(), "route_trace v1"),
    ],
)
def test_traces_give_counts_of_both_phases(data: bytes | str, format_: str) -> None:
    found = read(data)
    assert found.format == format_
    assert by_phase(found) == whole()
    assert found.heat.model == SHAPE.digest and found.heat.n_used == K
    assert found.trace is not None
    decode = traces.select(found.trace, found.trace.decode)
    assert decode.ids.tolist() == [ids for step in DECODE for ids in step.values()]


def test_executed_topk_by_prompt_rows() -> None:
    found = read(topk_export())
    assert by_phase(found)[Phase.DECODE] == counts(Phase.DECODE)
    assert found.heat.sources == ("code-0",)
    assert by_phase(found)[Phase.PREFILL][1] == counts(Phase.PREFILL)[1]


def test_a_demand_trace_counts_routing_layers_only() -> None:
    text = "hello\n" + demand() + "step=0 need=6 resident=3 misses=3 ms=12.5\nx step=1 misses=1 ms=10\n"
    found = read(text)
    assert by_phase(found) == {Phase.DECODE: counts(Phase.DECODE)}
    assert [(c.step, c.misses, c.time_ns) for c in found.ledger] == [(0, 3, 12_500_000), (1, 1, 10_000_000)]
    assert read(text, None, E).heat.layers == (0, 1, 2)
    with pytest.raises(FileProblem, match="step 1 layer 2 is missing"):
        read(demand().replace("step=1 layer=2 ids=6,7\n", ""))
    assert (
        read(demand() + "step=1 layer=2 ids=6,7 \n").heat == read(demand()).heat
    )  # a repeat wins, blanks end
    with pytest.raises(WrongModel, match="4 routing layers"):
        read(demand() + "step=0 layer=3 ids=1\nstep=1 layer=3 ids=1\n")


@pytest.mark.parametrize(
    "data",
    [
        "layer,expert,count\n" + plain(),
        "\ufeffLayer, Expert, Count\r\n" + plain().replace("\n", "\r\n"),
        "# a note\nlayer,expert,count\n" + plain(),
        plain(),  # three columns, and the model uses two experts a token: not positions
        choices(),
        "layer,expert\n" + choices(),
        json.dumps({"logical_count": [[0.0] * E, *map(list, counts(Phase.DECODE).values())]}),
        json.dumps({"logical_count": [[[0] * E, *map(list, counts(Phase.DECODE).values())], [[0] * E] * 4]}),
    ],
)
def test_counts_of_no_known_phase(data: str) -> None:
    found = read(data)
    assert by_phase(found) == {Phase.MIXED: counts(Phase.DECODE)}
    assert found.heat.parts[0].tokens == len(DECODE)


def test_layer_performance_files() -> None:
    assert read(perf(experts=[[1, 5], [3, 2]])).heat.total()[1] == (0, 5, 0, 2, 0, 0, 0, 0)
    both = perf(experts=[[7, 99]], hot_experts=[[1, 5]], cold_experts=[[1, 1], [3, 2]])
    assert read(both).heat.total()[1] == (0, 6, 0, 2, 0, 0, 0, 0)
    zero = perf(experts=[[7, 9]], hot_experts=[[1, 0]], cold_experts=[])
    assert read(zero).heat.total()[1] == (0, 0, 0, 0, 0, 0, 0, 9)
    opt = json.dumps(
        {"schema": "llama.cpp.moe_layer_opt_perf.v1", "enabled": False, "mode": "off", "layers": []}
    )
    for broken in (perf(experts=[[1]]), perf(experts=[[1, -5]]), perf(experts=[[1, 2.5]]), perf(), opt):
        with pytest.raises(FileProblem):
            read(broken)


def test_mbolt_json() -> None:
    found = read(perms())
    assert found.format == "mbolt permutations" and by_phase(found) == {Phase.DECODE: counts(Phase.DECODE)}
    overlay = {
        "model": "glm",
        "k": K,
        "n_expert_per_layer": E,
        "n_decode_tokens": 2,
        "layers": [
            {"layer": 99, "abs_layer": la, "moe_order": la, "heat": list(row), "pairs": [[0, 1, 5, 1.5, 3]]}
            for la, row in counts(Phase.DECODE).items()
        ],
    }
    found = read(json.dumps(overlay))
    assert found.format == "mbolt co-activation" and by_phase(found) == {Phase.DECODE: counts(Phase.DECODE)}
    assert (found.heat.parts[0].source, found.heat.parts[0].tokens) == ("glm", 2)


def test_a_permutation_recorded_elsewhere() -> None:
    orders = expert_orders.read_orders(perms().encode(), "x")
    assert orders == {la: list(range(E))[::-1] for la in (1, 2, 3)}
    with pytest.raises(FileProblem, match="chain_perm"):
        expert_orders.read_orders(perms().encode(), "x", "chain")
    found = read(positions())
    assert found.trace is not None
    moved = heats.original(found.heat, orders)
    assert moved.total() == {la: row[::-1] for la, row in found.heat.total().items()}
    assert traces.heat_of(detect.original_ids(found.trace, orders)).total() == moved.total()


def test_route_lines_without_the_warm_up() -> None:
    rows: list[dict[str, Any]] = [{"type": "meta", "num_experts": E, "top_k": K}]
    rows += [
        {
            "type": "route",
            "req_id": "r",
            "token_idx": 0,
            "layer": 1,
            "topk_ids": [0, 1],
            "topk_weights": [0.5, 0.5],
        }
    ]
    rows += [
        {
            "type": "route",
            "req_id": "r",
            "token_idx": n,
            "layer": la,
            "topk_ids": ids,
            "topk_weights": [0.6, 0.4],
        }
        for n, step in enumerate(DECODE)
        for la, ids in step.items()
    ]
    found = read("".join(json.dumps(row) + "\n" for row in rows))
    assert by_phase(found) == {Phase.DECODE: counts(Phase.DECODE)}
    assert found.notes == ("1 warm-up rows with equal weights left out",)
    good = json.dumps(rows[-1])
    with pytest.raises(FileProblem, match="line 2"):
        read(f'{good}\n{{"type": "route"}}\n')


def test_importance_matrices(tmp_path: Path) -> None:
    found = read(imatrix(tmp_path / "a.gguf", {}), None)
    assert found.format == "imatrix" and found.heat.total() == counts(Phase.PREFILL, Phase.DECODE)
    part = found.heat.parts[0]
    assert (part.source, part.phase, part.tokens) == ("wiki.txt code.txt", Phase.PREFILL, 3)
    assert found.notes == ()
    uneven = read(imatrix(tmp_path / "b.gguf", {2: (99,) * E}), None)
    assert uneven.heat.total()[2] == (99,) * E
    assert "layer 2" in uneven.notes[0]


def test_a_legacy_importance_matrix_is_refused_with_the_reason() -> None:
    name = b"blk.0.ffn_up_exps.weight"
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii4f", 1, 4, 1, 1, 1, 1)
    with pytest.raises(FileProblem, match="no counts per expert"):
        read(data)


def test_heat_stored_in_a_permuted_model_is_mapped_back(tmp_path: Path) -> None:
    data = mbolt_model(tmp_path / "a.gguf", [3, 1, 0, 2, 7, 6, 5, 4])
    found = read(data)
    assert by_phase(found) == {Phase.DECODE: counts(Phase.DECODE)}
    assert "mapped back" in found.notes[0]


def route(**changed: Any) -> str:
    """One row of a serving engine."""
    row = {"type": "route", "req_id": "r", "token_idx": 0, "layer": 1, "topk_ids": [0, 1]}
    return json.dumps({"type": "meta", "num_experts": E}) + "\n" + json.dumps({**row, **changed})


def executed(layers: dict[str, list[list[int]]]) -> str:
    """Rows of executed choices, by layer."""
    prompts = [{"start_row": 0, "prefill_rows": 0, "end_row": 9}]
    rows = {name: {"executed_topk": chosen} for name, chosen in layers.items()}
    head = {"schema": "glm52-routing-trace-export/v2", "routing": {"n_expert_per_layer": E, "k": K}}
    return json.dumps({**head, "conditional": {"prompts": prompts}, "layers": rows})


def mbolt(**changed: Any) -> str:
    """Counts of one layer."""
    return json.dumps({"n_expert": E, "layers": [{"layer": 1, "heat": [5] * E}], **changed})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("rank,layer,expert\n0,1,2\n", "without counts"),
        ('{"0": {"hot_experts": [1], "cold_experts": [2]}}', "without counts"),
        (b"MBPF" + words(2, 3, 8, 2, 3, 0), "prefetch"),
        (b"PK\x03\x04 archive/data.pkl", "pickle"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"MBLT" + words(2, E), "version"),
        (b"MBLT" + words(1, E), "without a whole record"),
        (b"MBLT" + words(1, E, 0, 0, 0), "broken record"),
        (b"LONGSPEAR_ROUTE_TRACE v1 model=m\n", "experts="),
        (b"\xff\xfe\x00binary", "neither text"),
        (b"", "empty"),
        ("\n\n", "empty"),
        ("hello world", "hello world"),
        ("[1, 2]", "object"),
        ('{"a": 1}', "keys are a"),
        ('{"logical_count": [1, 2]}', "no layers"),
        ('{"logical_count": [[1, -2]]}', "non-negative"),
        ('{"logical_count": ', "not JSON"),
        ("[" * 100000, "nested|not JSON"),
        ("layer,expert,count\n1,2\n", "fields"),
        ("layer,expert,count\n1,2,x\n", "whole number"),
        ("layer,expert,count\n", "without a single"),
        ("1,2\n1,2,3,4\n", "neither"),
        (route(layer=-3), "layer -3"),
        (route(token_idx=-9), "step -9"),
        (route(topk_ids=[3, 2, 3]), "layer 1 that chose one expert twice"),
        (executed({"-3": [[0, 1]]}), "layer -3"),
        (executed({"1": [[0, 0]]}), "chose one expert twice"),
        (mbolt(n_tokens=-5), "a number of tokens"),
        (mbolt(n_tokens=1e300), "a number of tokens"),
        (mbolt(k=-3), "experts per token"),
        (mbolt(k=9), "experts per token"),
        (mbolt(n_expert=-8), "-8 experts|8 counts for -8"),
        (b"MBLT" + words(1, E, 1, 200, 1, *range(200)), "200 experts for a token|expert id"),
        ("turn,phase,step,layer,slot,expert\n0,1,0,1,0,3\n0,1,0,1,1,3\n", "chose one expert twice"),
    ],
)
def test_what_cannot_be_heat_is_refused_with_the_reason(data: bytes | str, why: str) -> None:
    """With a model and without one, which tells what is in the file itself."""
    with pytest.raises(AtsplanError, match=why):
        read(data, None, E)
    with pytest.raises(AtsplanError):
        read(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("layer,expert,count\n1,8,5\n", "expert id 8"),
        ("layer,expert,count\n0,1,5\n", "layer 0 routes"),
        ('{"logical_count": [[0,0,0,0],[1,2,3,4]]}', "4 experts a layer"),
        ("0,1,1,2,3\n", "3 experts a token"),
    ],
)
def test_ids_and_layers_must_be_the_model_s(data: str, why: str) -> None:
    with pytest.raises(WrongModel, match=why):
        read(data)


def test_three_columns_without_a_header_are_not_guessed() -> None:
    with pytest.raises(FileProblem, match="layer,expert,count"):
        read("0,1,5\n", None)


def test_a_missing_number_of_experts_is_said() -> None:
    found = read("layer,expert,count\n0,5,1\n0,1,1\n", None)
    assert found.heat.n_expert == 6 and "largest id" in found.notes[0]
    assert read("layer,expert,count\n0,5,1\n", None, 64).heat.n_expert == 64


def test_tokens_that_counts_add_up_to_can_be_written_and_read() -> None:
    with pytest.raises(FileProblem, match="a number of tokens that cannot be"):
        read("layer,expert,count\n" + "".join(f"1,{e},{heats.MAX_COUNT}\n" for e in range(E)))


def test_normalised_counts_are_not_taken_for_tokens() -> None:
    rows = "".join(f"{la},{e},{125000}\n" for la in (1, 2, 3) for e in range(E))
    found = read("layer,expert,count\n" + rows)
    assert found.heat.parts[0].tokens == 0 and "normalised" in found.notes[-1]


def test_runs_one_after_the_other_are_sources() -> None:
    run = "0,1,3,1\n0,2,5,0\n1,1,1,2\n1,2,0,5\n"
    found = read("-1,1,0,1\n" + run + "-2,1,0,1\n-1,1,2,3\n" + run + run)
    assert found.heat.sources == ("run-1", "run-2", "run-3")
    assert [p.tokens for p in found.heat.parts] == [2, 1, 2, 2, 2]


rows = st.lists(st.integers(0, 40), min_size=E, max_size=E).map(tuple)
some_heat = st.dictionaries(st.sampled_from([1, 2, 3]), rows, min_size=1).filter(
    lambda d: any(map(any, d.values()))
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(some_heat, st.integers(0, 20_000), st.integers(0, 4))
def test_exports_make_the_readers_choose_what_we_chose(
    table: dict[int, tuple[int, ...]], budget: int, cap: int
) -> None:
    heat = heats.make("", E, K, [Part("a", Phase.DECODE, 100, table)])
    chosen = export.choose(heat, SHAPE.expert_bytes, budget, cap)
    used = sum(len(experts) * SHAPE.expert_bytes[la] for la, experts in chosen.items())
    assert used <= budget
    assert all(len(experts) <= (cap or E) for experts in chosen.values())
    for layer, experts in chosen.items():  # nothing that still fits was left out
        assert len(experts) in (cap, E) or used + SHAPE.expert_bytes[layer] > budget
    for writer in (export.positions_csv, export.perf_json):
        if not any(chosen.values()):
            continue
        total = read(writer(heat, chosen)).heat.total()
        assert {la for la, experts in chosen.items() if experts} == set(total)
        for layer, row in total.items():
            ranked = sorted(range(E), key=lambda e, row=row: (-row[e], e))  # type: ignore[misc]
            kept = [e for e in ranked if row[e]]
            assert set(kept) == set(chosen[layer])
            if writer is export.positions_csv:
                assert kept == list(chosen[layer])


def test_uniform_slots_fill_every_layer_alike() -> None:
    heat = heats.make("", E, K, [Part("a", Phase.DECODE, 100, {la: tuple(range(E)) for la in (1, 2, 3)})])
    chosen = export.choose_uniform(heat, SHAPE, 14_999)
    assert {la: list(c) for la, c in chosen.items()} == {la: [7, 6] for la in (1, 2, 3)}


def test_large_counts_shrink_to_the_order() -> None:
    heat = heats.make("", E, K, [Part("a", Phase.DECODE, 10**8, {1: (5, 10**8, 10**7, 10**7, 1, 0, 9, 9)})])
    choice = export.all_experts(heat)
    text = export.positions_csv(heat, choice)
    assert len(text) < 1000
    row = read(text).heat.total()[1]
    assert sorted(range(E), key=lambda e: (-row[e], e)) == list(choice[1])


def test_perms_and_heat_come_back(tmp_path: Path) -> None:
    heat = read(positions()).heat
    assert read(export.perms_json(heat)).heat.total() == heat.total()
    assert read(heats.to_text(heat)).heat == read(heats.to_text(heat), None).heat == heat
    other = heats.make("sha256:other", E, K, heat.parts)
    for text in (
        heats.to_text(other),
        traces.to_text(traces.make("sha256:other", E, ["a"], [(0, True, 0, 1, (1, 2))])),
    ):
        with pytest.raises(WrongModel, match="recorded from sha256:other"):
            read(text)
    orders = expert_orders.read_orders(export.perms_json(heat).encode(), "x")
    assert orders == {la: list(order) for la, order in export.all_experts(heat).items()}


def test_our_own_trace_comes_back() -> None:
    trace = read(positions()).trace
    assert trace is not None
    text = traces.to_text(trace)
    again = read(text)
    assert again.trace is not None and traces.to_text(again.trace) == text
    assert again.heat.total() == traces.heat_of(trace).total()
    for broken in (
        "0,decode,0,1,3 99\n",
        "0,later,0,1,3\n",
        "1,decode,0,1,3\n",
        "0,decode,0,1,3 3\n",
        "0,decode\n",
    ):
        with pytest.raises(AtsplanError, match="x:6"):
            read("# trace: 1\n# model:\n# experts: 8\n# source: a\nsource,phase,step,layer,ids\n" + broken)
