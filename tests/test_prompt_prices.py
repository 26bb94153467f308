"""What a prompt costs beyond its operators: where it need not go, what is copied and awaited on the way."""

from __future__ import annotations

import pytest
from planning_models import INNER, WIDTH, dense, machine, moe

from planner.cost.unit_time import Prices, calibration_for
from planner.model.inventory import Hparam, Inventory
from planner.model.structure import structure_of
from planner.model.units import Kind, Unit, movable, units_of
from planner.workload import Workload

WORK = Workload(n_ctx=2048, prompt=1024, gen=64, n_ubatch=512)


def unit(table: Inventory, kind: Kind, layer: int) -> Unit:
    return next(u for u in units_of(table).units if u.kind is kind and u.layer == layer)


def test_past_the_last_attention_only_tokens_with_logits_go_on() -> None:
    for table, kind in ((moe(), Kind.EXPERTS), (dense([8192] * 4), Kind.FFN)):
        last = table.number("block_count") - 1
        prices = Prices(structure_of(table), machine(), WORK)
        inner, final = (unit(table, kind, n) for n in (last - 1, last))
        assert prices.on(final, "CUDA0").prefill_ns < prices.on(inner, "CUDA0").prefill_ns / 4
        assert prices.on(final, "CUDA0").decode_ns == prices.on(inner, "CUDA0").decode_ns
        # One row is computed where its weights are: nothing is streamed.
        streamed = prices.on_host(final, "CPU", "CUDA0")
        assert streamed.prefill_ns == prices.on(final, "CPU").decode_ns
        attention = [unit(table, Kind.ATTENTION, n) for n in (last - 1, last)]
        assert len({prices.on(u, "CUDA0").prefill_ns for u in attention}) == 1


def test_without_a_prompt_nothing_is_paid_for_one() -> None:
    prices = Prices(structure_of(moe()), machine(), WORK.model_copy(update={"prompt": 0}))
    assert prices.on(unit(moe(), Kind.EXPERTS, 7), "CUDA0").prefill_ns == 0


def test_every_streamed_tensor_is_awaited() -> None:
    table = dense([8192] * 4)
    slow = machine()
    latency = 50_000
    links = tuple(li.model_copy(update={"latency_ns": li.latency_ns + latency}) for li in slow.links)
    ffn = unit(table, Kind.FFN, 0)
    before, after = (
        Prices(structure_of(table), p, WORK).on_host(ffn, "CPU", "CUDA0").prefill_ns
        for p in (slow, slow.model_copy(update={"links": links}))
    )
    assert after - before == 2 * len(movable(ffn)) * latency  # two ubatches


def test_every_streamed_tensor_is_a_split_of_the_graph() -> None:
    table, split = dense([8192] * 4), 70_000
    plain = machine()
    known = calibration_for(plain, "")
    slow = known.model_copy(update={"split_ns": known.split_ns + split})
    ffn = unit(table, Kind.FFN, 0)
    before, after = (
        Prices(structure_of(table), plain.model_copy(update={"calibrations": (each,)}), WORK)
        for each in (known, slow)
    )
    grown = [p.on_host(ffn, "CPU", "CUDA0").prefill_ns for p in (before, after)]
    assert grown[1] - grown[0] == 2 * len(movable(ffn)) * split  # two ubatches
    assert before.on(ffn, "CUDA0") == after.on(ffn, "CUDA0")  # where it lies it needs none


def test_a_host_layer_sends_its_keys_and_values_there_and_its_cache_back() -> None:
    table = dense([8192] * 4)
    prices = Prices(structure_of(table), machine(), WORK)
    attention = unit(table, Kind.ATTENTION, 0)
    weights = sum(
        count * (prices.copy_ns("CPU", "CUDA0", attention.size_bytes)) for _, count in prices.batches
    )
    extra = prices.on_host(attention, "CPU", "CUDA0").prefill_ns - prices.on(attention, "CUDA0").prefill_ns
    rows = 2 * prices.copy_ns("CUDA0", "CPU", 4 * 4 * 128 * 512)
    assert extra > weights + 2 * rows


def test_a_batch_begins_where_the_one_before_it_ended() -> None:
    prices = Prices(structure_of(moe()), machine(), WORK.model_copy(update={"prompt": 1100}))
    assert prices.batches == ((512, 2), (76, 1))
    assert prices.before(512) == 256  # 0 and 512
    assert prices.before(76) == 1024
    whole = Prices(structure_of(moe()), machine(), WORK.model_copy(update={"n_ubatch": 1024}))
    assert whole.before(1024) == 0


def test_every_expert_that_a_token_uses_has_a_row_of_its_own() -> None:
    table = moe()
    experts = unit(table, Kind.EXPERTS, 0)
    prices = Prices(structure_of(table), machine(), WORK)
    small = [op for op in prices.operators(experts, "CUDA0", "", 512, 0) if op.case is None]
    model, inner = WIDTH, INNER
    # Gate, up and their product; rows before and after their weight; rows and their sum.
    values = experts.used * (3 * inner + 2 * model + model) + model
    device = machine().device("CUDA0")
    moved_ns = sum((op.time.ns - device.op_overhead_ns) * op.count for op in small)
    assert moved_ns == pytest.approx(512 * 4 * values * 1e9 / device.bandwidth_bytes_per_s, rel=0.01)
    decode = [op for op in prices.operators(experts, "CUDA0", "", 1, 0) if op.case is None]
    assert all(op.time.ns == device.op_overhead_ns for op in decode)  # launches alone


@pytest.mark.parametrize(
    "said", [{}, {"expert_feed_forward_length": 768}, {"feed_forward_length": (1, 9999)}]
)
def test_a_feed_forward_part_is_as_wide_as_its_tensors(said: dict[str, Hparam]) -> None:
    """Mixtral and OLMoE name the width of experts as that of dense layers, others have a list of widths."""
    for table, kind in ((moe(), Kind.EXPERTS), (dense([4096, 8192, 4096]), Kind.FFN)):
        told = table.model_copy(update={"hparams": {**table.hparams, **said}})
        prices = [Prices(structure_of(each), machine(), WORK) for each in (table, told)]
        assert prices[0].on(unit(table, kind, 0), "CUDA0") == prices[1].on(unit(told, kind, 0), "CUDA0")
    narrow, wide = (prices[0].on(unit(dense([4096, 8192, 4096]), Kind.FFN, n), "CUDA0") for n in (0, 1))
    assert 1.9 < wide.prefill_ns / narrow.prefill_ns <= 2
