"""Operator times: the measured case, the line between cases, the scaled neighbour, the roofline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.machine import op_time, presets
from planner.machine.op_time import Case, bytes_read, experts_touched, lookup, operations
from planner.machine.profile import OpTiming, Profile

BASE = presets.load("rtx4090-ddr5")
EXPERTS = (2048, 768, 128)


def case(op: str = "MUL_MAT", time_ns: int = 1000, **changes: object) -> OpTiming:
    values: dict[str, object] = {
        "op": op, "type": "q4_K", "shape": (2048, 4096), "batch": 1, "device": "CPU", "buffer": "CPU",
        "time_ns": time_ns, "spread_ns": 10, "samples": 20,
    }  # fmt: skip
    return OpTiming.model_validate(values | changes)


def profile(*cases: OpTiming) -> Profile:
    return BASE.model_copy(update={"timings": cases})


def test_the_measured_case_is_returned_as_it_is() -> None:
    known = profile(case(time_ns=1234), case(time_ns=99, shape=(2048, 2048)), case(time_ns=77, batch=512))
    found = lookup(known, "MUL_MAT", "q4_K", (2048, 4096), 1, "CPU")
    assert found == op_time.Time(1234, True, "measured", spread_ppm=10 * 10**6 // 1234)


def test_between_two_measured_depths_the_straight_line_holds() -> None:
    flash = [
        case("FLASH_ATTN_EXT", ns, type="f16", shape=(128, 32, 4), depth=depth)
        for depth, ns in ((0, 1000), (4096, 5096), (16384, 17384))
    ]
    known = profile(*flash)
    assert lookup(known, "FLASH_ATTN_EXT", "f16", (128, 32, 4), 1, "CPU", depth=1024).ns == 2024
    assert lookup(known, "FLASH_ATTN_EXT", "f16", (128, 32, 4), 1, "CPU", depth=8192).ns == 9192


def test_attention_is_priced_by_the_cells_the_engine_reads() -> None:
    known = profile(case("FLASH_ATTN_EXT", 90_000, type="f16", shape=(128, 32, 4)))

    def ns(depth: int) -> int:
        return lookup(known, "FLASH_ATTN_EXT", "f16", (128, 32, 4), 1, "CPU", depth=depth).ns

    assert ns(0) == ns(72) == ns(255) == 90_000  # one step of 256 cells
    overhead = BASE.device("CPU").op_overhead_ns
    assert ns(1000) == pytest.approx(overhead + 4 * (90_000 - overhead), rel=1e-3)


def test_a_neighbour_is_scaled_by_bytes_beyond_the_overhead() -> None:
    overhead = BASE.device("CPU").op_overhead_ns
    known = profile(case(time_ns=overhead + 100_000))
    twice = lookup(known, "MUL_MAT", "q4_K", (2048, 8192), 1, "CPU")
    assert (twice.basis, twice.measured) == ("scaled", False)
    assert twice.ns == pytest.approx(overhead + 200_000, abs=2)


def test_a_case_below_the_overhead_still_grows_with_its_work() -> None:
    known = profile(case(time_ns=BASE.device("CPU").op_overhead_ns // 2))
    small, large = (lookup(known, "MUL_MAT", "q4_K", (2048, 4096), batch, "CPU").ns for batch in (1, 512))
    assert large > 20 * small


def test_buffers_are_separate_cases() -> None:
    known = profile(
        case(time_ns=500), case(time_ns=400, buffer="CPU_REPACK"), case(time_ns=450, buffer="CUDA_Host"),
        case(time_ns=90, device="CUDA0", buffer="CUDA0"),
        case(time_ns=900, device="CUDA0", buffer="CUDA_Host"),
    )  # fmt: skip

    def ns(device: str, buffer: str) -> int:
        return lookup(known, "MUL_MAT", "q4_K", (2048, 4096), 1, device, buffer).ns

    assert [ns("CPU", b) for b in ("", "CPU_REPACK", "CUDA_Host")] == [500, 400, 450]
    assert [ns("CUDA0", b) for b in ("", "CUDA0", "CUDA_Host")] == [90, 90, 900]


def test_zero_copy_without_a_case_is_bound_by_the_link_not_by_the_vram() -> None:
    link = next(link for link in BASE.links if link.target == "CUDA0")
    far = lookup(BASE, "MUL_MAT_ID", "q4_K", EXPERTS, 1, "CUDA0", "CUDA_Host", used=8)
    near = lookup(BASE, "MUL_MAT_ID", "q4_K", EXPERTS, 1, "CUDA0", used=8)
    moved = bytes_read(Case("MUL_MAT_ID", "q4_K", EXPERTS, 1, used=8))
    assert far.ns == pytest.approx(
        near.ns + moved * 1e9 * (1 / link.zero_copy_bytes_per_s - 1 / 857e9), rel=1e-3
    )


def test_a_decoded_token_is_charged_for_active_experts_only() -> None:
    one = bytes_read(Case("MUL_MAT_ID", "q4_K", EXPERTS, 1, used=8))
    assert one == 8 * 768 * 2048 // 256 * 144
    assert bytes_read(Case("MUL_MAT", "q4_K", EXPERTS, 1)) == one * 16
    assert operations(Case("MUL_MAT_ID", "q4_K", EXPERTS, 1, used=8)) == 2 * 2048 * 768 * 8


@settings(max_examples=60, derandomize=True, deadline=None)
@given(experts=st.integers(1, 512), used=st.integers(1, 16), batch=st.integers(1, 4096))
def test_experts_touched_grows_from_one_tokens_share_to_all(experts: int, used: int, batch: int) -> None:
    touched = experts_touched(experts, used, batch)
    assert min(used, experts) <= touched + 1e-9
    assert touched <= experts
    assert touched <= experts_touched(experts, used, batch + 1) + 1e-9


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    rows=st.integers(1, 64),
    batch=st.sampled_from([1, 2, 8, 64, 512]),
    kind=st.sampled_from(["q4_K", "q6_K", "type153"]),
)
def test_more_rows_never_cost_less(rows: int, batch: int, kind: str) -> None:
    known = profile(case(time_ns=40_000), case(time_ns=90_000, shape=(2048, 9000)))
    small, large = (
        lookup(known, "MUL_MAT", kind, (2048, 512 * n), batch, "CPU").ns for n in (rows, rows + 1)
    )
    assert 0 < small <= large


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(KeyError):
        lookup(BASE, "MUL_MAT", "q4_K", (256, 256), 1, "CUDA7")


def of_experts(experts: int, batch: int, used: int = 8, device: str = "CUDA0", known: Profile = BASE) -> int:
    return lookup(known, "MUL_MAT_ID", "q4_K", (2048, 768, experts), batch, device, used=used).ns


def test_an_expert_s_few_rows_cost_a_gpu_a_whole_tile() -> None:
    small = BASE.device("CUDA0").op_overhead_ns
    few, many = (of_experts(experts, 4096, used=1) - small for experts in (1, 64))
    assert many == pytest.approx(2 * few, rel=0.05)  # of one expert all tiles are full, of 64 half of each
    half, full = (of_experts(experts, 512) - small for experts in (64, 128))
    assert full == pytest.approx(2 * half, rel=0.05)  # 64 and 32 rows each: as many products, twice the tiles
    narrow, wide = (of_experts(128, batch) - small for batch in (64, 128))
    assert wide == pytest.approx(2 * narrow, rel=0.15)  # tiles are no wider than the batch


def test_tiles_of_metal_are_narrow_and_the_cpu_has_none() -> None:
    named = {"CUDA0": "MTL0"}
    devices = tuple(d.model_copy(update={"name": named.get(d.name, d.name)}) for d in BASE.devices)
    apple = BASE.model_copy(update={"devices": devices, "links": ()})
    assert of_experts(128, 512, device="MTL0", known=apple) < 0.6 * of_experts(128, 512)
    dense = lookup(BASE, "MUL_MAT", "q4_K", (2048, 768), 512 * 8, "CPU").ns
    assert dense < of_experts(128, 512, device="CPU") < 2.1 * dense


def test_measured_experts_are_scaled_by_their_tiles() -> None:
    """An H200: 512 tokens by 64 experts in 185.8 us, by 128 in 332.6."""
    base = {"type": "q4_K", "device": "CUDA0", "buffer": "CUDA0", "batch": 512, "used": 8}
    known = profile(case("MUL_MAT_ID", 185_763, shape=(2048, 768, 64), **base))
    assert of_experts(128, 512, known=known) == pytest.approx(332_643, rel=0.15)


def test_a_recurrence_goes_token_by_token_on_a_gpu() -> None:
    def ns(batch: int) -> int:
        return lookup(BASE, "GATED_DELTA_NET", "f32", (128, 128, 32), batch, "CUDA0").ns

    assert ns(1024) == pytest.approx(2 * ns(512), rel=0.02)
    assert (
        0.3e3 < (ns(1024) - ns(512)) / 512 < 3e3
    )  # ns a token: not what so many operations take in a product


def test_of_two_measured_shapes_the_one_with_as_many_outputs_counts_for_a_prompt() -> None:
    """As of an H200: transposed matrices, as much work, at other rates for one token and for many."""
    base = {"type": "q4_K", "device": "CUDA0", "buffer": "CUDA0"}
    known = profile(
        case(time_ns=9_522, shape=(8192, 3072), **base),
        case(time_ns=11_728, shape=(3072, 8192), **base),
        case(time_ns=182_198, shape=(8192, 3072), batch=512, **base),
        case(time_ns=148_477, shape=(3072, 8192), batch=512, **base),
    )
    work = 5120 * 25600 / (3072 * 8192)
    many = lookup(known, "MUL_MAT", "q4_K", (5120, 25600), 512, "CUDA0").ns
    one = lookup(known, "MUL_MAT", "q4_K", (5120, 25600), 1, "CUDA0").ns
    assert many == pytest.approx(148_477 * work, rel=0.02)
    assert one == pytest.approx(9_522 * work, rel=0.12)
