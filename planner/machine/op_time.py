"""How long one operator takes on one device: measured if there is a case, else scaled, else a roofline.

The three answers, best first:

1. the measured case itself; between two measured depths or batches of one shape, the straight line;
2. the nearest measured case of the same operator, type, device and buffer, times the ratio of rooflines;
3. the roofline: overhead + max(bytes / bandwidth, operations / rate) from the device's own figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.constants import CELL_STEP, CPU, PPM
from planner.machine.profile import Device, OpTiming, Profile
from planner.model.ggml_types import BY_NAME, GgmlType

Basis = Literal["measured", "between", "scaled", "roofline"]
NS_PER_S = 10**9
_ATTENDS_ALONE, _ATTENDS = 10.0, 3.1  # of a CPU
_TILE, _METAL_TILE = 128, 32  # tokens of the widest tile of a product: an expert's few cost a whole one
_METAL = ("MTL", "Metal")
_CPU_ROWS = 32  # rows of an expert's product that cost a CPU as much as none would
_PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
_FEW_ROWS = 8  # up to here each row is a product of its own
# Recurrences go token by token, in FP32 and with sums over lanes between: of a token and layer 3.6 us on a
# Radeon 8060S (AMD-Ecosystem/llama.cpp#54) and 9 us on an MI50 (mxxm-t/mx-llama.cpp#2), 30 to 80 times what
# products of as many operations are assumed to take there.
_SCANNED = 40.0
# Operators of recurrent mixers: the shape is that of the state, kept in f32 and read and written every token.
UNFUSED_DELTA_NET = "UNFUSED_DELTA_NET"  # not ggml's: the elementwise operators that do the fused one's work
STATE_OPS = frozenset(
    {"GATED_DELTA_NET", UNFUSED_DELTA_NET, "SSM_SCAN", "RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN"}
)

UNKNOWN = GgmlType(
    "unknown", 256, 144
)  # a type of a fork: priced as 4.5 bits a weight, the middle of the quants


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one size, without the place where it runs."""

    op: str
    type: str
    shape: tuple[int, ...]
    batch: int
    used: int = 0
    depth: int = 0

    @property
    def label(self) -> str:
        """As people read it: operator, type and shape."""
        return f"{self.op} {self.type} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class Time:
    """Nanoseconds, and how they are known."""

    ns: int
    measured: bool
    basis: Basis = "roofline"
    spread_ppm: int = 0  # of the measurements it rests on: quartile range over median


def lookup(
    profile: Profile,
    op: str,
    type: str,
    shape: tuple[int, ...],
    batch: int,
    device: str,
    buffer: str = "",
    used: int = 0,
    depth: int = 0,
) -> Time:
    """Time of one operator; arguments as in OpTiming.

    `buffer` "" means the device's own buffer; a host buffer named for a GPU means that its kernels
    read host memory directly. Raises KeyError when the profile has no such device.
    """
    case = Case(op, type, shape, batch, used, depth)
    known = _own_buffer([t for t in profile.timings if t.op == op and t.device == device], device, buffer)
    same = [t for t in known if t.type == type and t.shape == shape and t.used == used]
    return (
        _between(case, same)
        or _scaled(profile, case, device, buffer, known)
        or _floor(profile, case, device, buffer)
    )


def roofline_ns(profile: Profile, case: Case, device: str, buffer: str = "") -> int:
    """Overhead + the larger of memory and arithmetic time, from the device's achieved figures."""
    figures = profile.device(device)
    return figures.op_overhead_ns + round(max(_limits(profile, case, figures, buffer)) * NS_PER_S)


def computes(profile: Profile, case: Case, device: str, buffer: str = "") -> bool:
    """Whether arithmetic takes longer than memory by the device's achieved figures."""
    memory, arithmetic = _limits(profile, case, profile.device(device), buffer)
    return arithmetic > memory


def _limits(profile: Profile, case: Case, figures: Device, buffer: str) -> tuple[float, float]:
    """Seconds that memory takes, and arithmetic."""
    return (
        bytes_read(case) / _bandwidth(profile, figures, buffer),
        operations(case) * _laboured(case, figures) / figures.flops_per_s,
    )


def _laboured(case: Case, device: Device) -> float:
    """How much longer arithmetic takes than in the product of two large matrices, which rates are of.

    A CPU attends for each query head anew: 92 GFLOP/s for one token and 290 for 512, where products reached
    907 (16 Xeon cores, heads of 128). Experts multiply few rows each.
    """
    cpu = device.kind == "cpu"
    if case.op == "FLASH_ATTN_EXT" and cpu:
        return _ATTENDS_ALONE if case.batch == 1 else _ATTENDS
    if case.op in STATE_OPS and not cpu:
        return _SCANNED
    if case.op == "MUL_MAT_ID" and case.batch > _FEW_ROWS:
        rows = case.batch * case.used / max(experts_touched(case.shape[2], case.used, case.batch), 1)
        return 1 + _CPU_ROWS / max(rows, 1) if cpu else _columns(case.batch, rows, device) / max(rows, 1)
    return 1.0


def _columns(batch: int, rows: float, device: Device) -> float:
    """Columns that a GPU computes for an expert with `rows` of them: whole tiles.

    ggml picks the width for all tokens of the batch, not for an expert's share of them (`ncols_max` in
    mmq.cuh; ggml-org/llama.cpp#26977): of 512 tokens that choose 8 of 128 experts a tile is a quarter full.
    """
    widest = _METAL_TILE if device.name.startswith(_METAL) else _TILE
    width = -(-batch // -(-batch // widest) // 8) * 8
    return max(rows / width + 0.5, 1.0) * width


def bytes_read(case: Case) -> int:
    """Bytes that must come from memory once: weights by *active* experts, the KV cache, or the state twice.

    Of the experts those that the batch touches: `experts_touched`.
    """
    if case.op == "GET_ROWS":
        return case.batch * _row_bytes(case.type, case.shape[0])
    if case.op == "FLASH_ATTN_EXT":
        head_dim, _, n_head_kv = case.shape[:3]
        return 2 * kv_cells(case) * n_head_kv * _row_bytes(case.type, head_dim)
    if case.op in STATE_OPS:
        return 2 * 4 * math.prod(case.shape)
    if case.op == "RMS_NORM":
        return 2 * 4 * case.shape[0] * case.batch
    rows = math.prod(case.shape[1:2])
    matrix = rows * _row_bytes(case.type, case.shape[0])
    if case.op == "MUL_MAT_ID":
        return round(matrix * experts_touched(case.shape[2], case.used, case.batch))
    return matrix * math.prod(case.shape[2:])


def operations(case: Case) -> int:
    """Multiplications and additions."""
    if case.op == "GET_ROWS":
        return case.batch * case.shape[0]
    if case.op == "FLASH_ATTN_EXT":
        head_dim, n_head = case.shape[:2]
        return 4 * head_dim * n_head * case.batch * kv_cells(case)
    if case.op in STATE_OPS:
        return 6 * math.prod(case.shape) * case.batch
    if case.op == "RMS_NORM":
        return 4 * case.shape[0] * case.batch
    if case.op == "MUL_MAT_ID":
        return 2 * case.shape[0] * case.shape[1] * case.used * case.batch
    return 2 * math.prod(case.shape) * case.batch


def kv_cells(case: Case) -> int:
    """Cells of the cache that attention reads: depth and batch together, rounded up as the engine does."""
    return -(-(case.depth + case.batch) // CELL_STEP) * CELL_STEP


def experts_touched(experts: int, used: int, batch: int) -> float:
    """Expected number of distinct experts that `batch` tokens use.

    Routers do not use experts alike. That an expert is used by a token is taken to be a chance of the beta
    law with parameters 1 and E/k - 1, whose mean is k/E; all of n tokens then miss it with the chance
    (1 - k/E) / (1 + (n - 1) k/E). Of published counts, 512 tokens touch 88 % (Gemma 4 26B, Qwen3-Next), 95 %
    (Qwen3-30B) and 99 % (DeepSeek-V3); this law says 97, 91, 97 and 94 %, equal use 100 % of all four.
    """
    if experts <= 0 or batch <= 0:
        return 0.0
    share = min(used, experts) / experts
    return experts * (1.0 - (1.0 - share) / (1.0 + (batch - 1) * share))


def _row_bytes(type_name: str, ne0: int) -> int:
    kind = BY_NAME.get(type_name, UNKNOWN)
    return -(-ne0 // kind.block) * kind.bytes


def _own_buffer(timings: Sequence[OpTiming], device: str, buffer: str) -> list[OpTiming]:
    """Cases of the wanted buffer; any buffer of the same memory when the wanted one was not measured."""
    wanted = buffer or device
    exact = [t for t in timings if t.buffer == wanted]
    if exact or (buffer and _is_host(buffer) and device != CPU):
        return exact
    return [t for t in timings if _is_host(t.buffer) == _is_host(wanted) and "REPACK" not in t.buffer]


def _is_host(buffer: str) -> bool:
    return buffer.startswith(CPU) or buffer.endswith("_Host")


def _between(case: Case, same: Sequence[OpTiming]) -> Time | None:
    """The case itself, or the straight line between its neighbours in depth or in batch."""
    for timing in same:
        if timing.batch == case.batch and timing.depth == case.depth:
            return Time(timing.time_ns, True, "measured", _spread_ppm(timing))
    by_depth = [(t.depth, t) for t in same if t.batch == case.batch]
    by_batch = [(t.batch, t) for t in same if t.depth == case.depth]
    for points, at in ((by_depth, case.depth), (by_batch, case.batch)):
        found = _line(points, at)
        if found is not None:
            return found
    return None


def _line(points: Iterable[tuple[int, OpTiming]], at: int) -> Time | None:
    ordered = sorted(points, key=lambda point: (point[0], point[1].time_ns))
    for (x0, one), (x1, two) in itertools.pairwise(ordered):
        if x0 <= at <= x1 and x0 != x1:
            y0, y1 = one.time_ns, two.time_ns
            ns = y0 + round((y1 - y0) * (at - x0) / (x1 - x0))
            return Time(ns, True, "between", max(_spread_ppm(one), _spread_ppm(two)))
    return None


def _spread_ppm(timing: OpTiming) -> int:
    return min(timing.spread_ns * PPM // timing.time_ns, 10 * PPM)


def _scaled(profile: Profile, case: Case, device: str, buffer: str, known: Sequence[OpTiming]) -> Time | None:
    """The nearest measured case of this operator and type, by the ratio of rooflines beyond the overhead."""
    known = [t for t in known if t.type == case.type]
    if not known:
        return None
    near = min(known, key=lambda t: _distance(case, _case(t)))
    overhead = profile.device(device).op_overhead_ns
    theirs = roofline_ns(profile, _case(near), device, buffer) - overhead
    ours = roofline_ns(profile, case, device, buffer) - overhead
    # A small operator in a graph may cost more than this case did alone: half of it grows at any rate.
    floor = min(overhead, near.time_ns // 2)
    ns = floor + round((near.time_ns - floor) * ours / max(theirs, 1))
    return Time(ns, False, "scaled", _spread_ppm(near))


def _floor(profile: Profile, case: Case, device: str, buffer: str) -> Time:
    return Time(roofline_ns(profile, case, device, buffer), False, "roofline")


def _case(timing: OpTiming) -> Case:
    return Case(timing.op, timing.type, timing.shape, timing.batch, timing.used, timing.depth)


def _distance(ours: Case, theirs: Case) -> tuple[float, float, float]:
    # The batch decides which kernel runs, so it counts before the size; the shape breaks ties. One token is a
    # sum for each output, whose length counts; many are tiles of outputs, whose number fills the device.
    batch = abs(math.log2(ours.batch) - math.log2(theirs.batch))
    work = abs(math.log2(max(bytes_read(ours), 1)) - math.log2(max(bytes_read(theirs), 1)))
    side = 1 if ours.batch > _FEW_ROWS and ours.op in _PRODUCTS else 0
    rows = abs(math.log2(max(ours.shape[side], 1)) - math.log2(max(theirs.shape[side], 1)))
    return (round(batch, 6), round(work, 6), rows)


def _bandwidth(profile: Profile, device: Device, buffer: str) -> int:
    """Bytes per second at which the device reads that buffer."""
    if device.kind == "cpu" or not buffer or not _is_host(buffer):
        return device.bandwidth_bytes_per_s
    for link in profile.links:
        if link.source == CPU and link.target == device.name and link.zero_copy_bytes_per_s:
            return link.zero_copy_bytes_per_s
    return device.bandwidth_bytes_per_s
