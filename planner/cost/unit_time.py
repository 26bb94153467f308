"""Time of one unit on one device: its operators one by one, from the profile, times the calibration.

Decode prices one step of `n_seq` sequences at the workload's depth; prefill the whole prompt in
ubatches. Everything is a sum that a person can follow: operators + small operators + attention or state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.constants import CPU, PPM
from planner.machine import op_time
from planner.machine.host_memory import OFFLOAD_BATCH, HostMemory, copy_rate
from planner.machine.profile import Calibration, Profile
from planner.machine.unknown_types import product_of
from planner.memory.kv_cache import head_widths, state_widths
from planner.model.heads import kv_heads
from planner.model.inventory import Inventory, Tensor
from planner.model.sliding_window import window
from planner.model.structure import Structure
from planner.model.tensor_roles import Role, parts_of
from planner.model.units import Kind, Unit, divisible, movable
from planner.plan.plan import Speculation
from planner.remember import remembered
from planner.workload import Workload

REPACKED = "CPU_REPACK"  # the buffer type of weights in the layout of the CPU's kernels
_FEW_TOKENS = 8  # the calibration of decode counts launches alone
# Operators without weights that a unit adds to the graph: rope, cache writes, softmax, top-k, residual …
_SMALL_OPS = {
    Kind.ATTENTION: 6,
    Kind.RECURRENT: 8,
    Kind.ROUTER: 4,
    Kind.FFN: 2,
    Kind.EXPERTS: 3,
    Kind.LAYER: 8,
    Kind.OUTPUT: 0,
    Kind.NEXTN: 8,
}
_DELTA_NET_OPS = 24  # norms of q and k, decay, beta, gates, convolution: counted in the graph of Qwen3.5
_PAST_ATTENTION = frozenset({Kind.ROUTER, Kind.FFN, Kind.EXPERTS})
_SMALL_ROLES = frozenset({Role.NORM, Role.EXPERT_SMALL})
_LAST_PRODUCT = re.compile(r"\.(ffn_down|channel_mix_value)")  # of a feed-forward part
# Two-dimensional, yet no matrix product: convolutions, decay tables, interpolation factors.
_NOT_MULTIPLIED = ("conv1d", "shortconv.conv", "ssm_a", "ssm_d.", "lerp", "rope_f", "time_mix_first", "r_k")


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of one decode step and of the whole prompt, and the share that was measured."""

    decode_ns: int
    prefill_ns: int
    measured_ns: int = 0  # of decode_ns

    def __add__(self, other: Times) -> Times:
        return Times(
            self.decode_ns + other.decode_ns,
            self.prefill_ns + other.prefill_ns,
            self.measured_ns + other.measured_ns,
        )


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a step, priced; `case` is None for one without weights of its own."""

    case: op_time.Case | None
    time: op_time.Time
    count: int = 1


@dataclass
class Timed:
    """What was looked up and added up for one model, profile, workload and speculation.

    Whatever else is tried leaves it as it is, but for the layout of the CPU's weights, which keys name.
    """

    operators: dict[object, Operator] = field(default_factory=dict)
    steps: dict[object, tuple[int, int]] = field(default_factory=dict)
    units: dict[object, Times] = field(default_factory=dict)
    likenesses: dict[str, int] = field(default_factory=dict)
    kinds: dict[tuple[object, ...], int] = field(default_factory=dict)


@dataclass
class Prices:
    """Times of the units of one model on the devices of one profile.

    With speculation a decode step checks several tokens of each sequence, and `Times.decode_ns` is the
    part of it that falls to one accepted token.
    """

    structure: Structure
    profile: Profile
    workload: Workload
    distinct: Mapping[int, float] = field(default_factory=dict)  # experts a ubatch touches, by layer
    repack: bool = False  # the engine changes the layout of the CPU's weights, where its kernels know how
    speculation: Speculation | None = None
    host_memory: HostMemory = HostMemory.PINNED
    timed: Timed = field(default_factory=Timed)  # may be of other prices of the same

    def __post_init__(self) -> None:
        self.inventory, self.tensors = self.structure.inventory, self.structure.tensors
        self._parts = parts_of(self.inventory)
        self._weights = _weights_of(self.inventory)
        self._layers, self._slides = self.structure.layers, self.structure.slides
        self._heads = kv_heads(self.inventory, max(self._layers.n_main, 1))
        self._state = state_case(self.structure, 1)
        self._repacked = {(t.op, t.type) for t in self.profile.timings if t.buffer == REPACKED}
        self.calibration = calibration_for(self.profile, self.inventory.table_digest())
        self.drafted = self.speculation.tokens if self.speculation else 0
        self.step_tokens = self.workload.n_seq * (1 + self.drafted)
        full, rest = divmod(self.workload.prompt, self.workload.n_ubatch)
        pieces = ((self.workload.n_ubatch, full), (rest, 1))
        self.batches = tuple((batch, count) for batch, count in pieces if batch and count)

    def on(self, unit: Unit, device: str, buffer: str = "") -> Times:
        """A unit computed on a device that holds it in `buffer` ("": its own memory)."""
        key, units = (self.likeness(unit), device, buffer, self.repack), self.timed.units
        if key not in units:
            units[key] = self._priced(unit, device, buffer)
        return units[key]

    def _priced(self, unit: Unit, device: str, buffer: str) -> Times:
        decode, measured = self._decode(unit, device, buffer)
        prefill = sum(
            count * self._step(unit, device, buffer, batch, self.before(batch))[0]
            for batch, count in self._batches(unit)
        )
        return Times(self.per_token(decode), prefill, self.per_token(measured))

    def _batches(self, unit: Unit) -> tuple[tuple[int, int], ...]:
        """Tokens and how often, as a prompt passes a unit: past the last attention only those with logits."""
        last = unit.layer == self._layers.n_main - 1 and unit.kind in _PAST_ATTENTION
        rows = min(self.workload.n_seq, self.workload.prompt)
        return ((rows, 1),) if last and rows else self.batches

    def before(self, batch: int) -> int:
        """Tokens of the prompt that the cache holds when batches of this size begin, in their mean."""
        full, rest = divmod(self.workload.prompt, self.workload.n_ubatch)
        if rest and batch == rest:
            return full * self.workload.n_ubatch
        return max(full - 1, 0) * self.workload.n_ubatch // 2

    def _decode(self, unit: Unit, device: str, buffer: str) -> tuple[int, int]:
        """One step; a NextN block runs once a drafted token, and the output head once more for each."""
        depth, runs = self.workload.depth, self._runs(unit)
        steps = [(self._step(unit, device, buffer, tokens, depth, tokens), count) for tokens, count in runs]
        return sum(ns * count for (ns, _), count in steps), sum(known * count for (_, known), count in steps)

    def _runs(self, unit: Unit) -> list[tuple[int, int]]:
        """Tokens of the passes over a unit in one step, and how often."""
        own = self.speculation is not None and self.speculation.own
        runs = [] if own and unit.kind is Kind.NEXTN else [(self.step_tokens, 1)]
        if own and unit.kind in (Kind.NEXTN, Kind.OUTPUT):
            runs.append((self.workload.n_seq, self.drafted))
        return runs

    def per_token(self, step_ns: int) -> int:
        """What one token takes of a decode step."""
        return self.speculation.per_token(step_ns) if self.speculation else step_ns

    @property
    def token_ns(self) -> int:
        """Sampling and launch, and the draft model's own time."""
        draft = self.drafted * self.speculation.draft_ns if self.speculation else 0
        return self.per_token(self.calibration.token_ns + draft)

    def on_host(self, unit: Unit, cpu: str, through: str | None) -> Times:
        """A unit in host memory: decoded by the CPU; prompts by the GPU `through`, if any."""
        here = self.on(unit, cpu)
        if through is None:
            return here
        batches = self._batches(unit)
        prefill = sum(count * self._streamed(unit, cpu, through, batch) for batch, count in batches)
        return Times(here.decode_ns, prefill, here.measured_ns)

    def _streamed(self, unit: Unit, cpu: str, through: str, batch: int) -> int:
        depth = self.before(batch)
        if batch < OFFLOAD_BATCH:
            return self._step(unit, cpu, "", batch, depth)[0]
        copied = self.stream_ns(cpu, through, self.touched_bytes(unit, batch))
        n = len(movable(unit))  # each tensor, a norm too, is a split: copied, awaited, computed with
        copied += (n - 1) * self.copy_ns(cpu, through, 0) + n * self.calibration.split_ns
        held = sum(self._cache_trip(case, cpu, through) for case in self._weightless(unit, batch, depth))
        return copied + held + self._step(unit, through, "", batch, depth)[0]

    def _cache_trip(self, case: op_time.Case, cpu: str, through: str) -> int:
        """Keys and values of a batch to a cache in host memory, and that cache to the GPU that attends."""
        if case.op != "FLASH_ATTN_EXT":
            return 0
        width = case.shape[0] * case.shape[2]
        small = self._small(cpu, case.batch, width).time.ns
        there = self.copy_ns(through, cpu, 4 * width * case.batch) + small
        back = self.copy_ns(cpu, through, op_time.bytes_read(case) // 2)
        return 2 * (self.calibration.split_ns + there + back)

    def touched_bytes(self, unit: Unit, batch: int) -> int:
        """Weight bytes that a batch reads: of routed experts only those it uses."""
        if not unit.experts:
            return unit.size_bytes
        touched = op_time.experts_touched(unit.experts, unit.used, batch)
        if unit.layer is not None and batch >= self.workload.n_ubatch:
            touched = min(touched, self.distinct.get(unit.layer, touched))
        return round(unit.size_bytes * touched / unit.experts)

    def moved_bytes(self, unit: Unit) -> int:
        """Weights of a unit that can live elsewhere than on its layer device."""
        return sum(self.tensors[name].size_bytes for name in movable(unit))

    def divisible_bytes(self, unit: Unit) -> int:
        """Weights of a unit that slots, stripes or a cache hold a part of; the rest stays on the device."""
        return sum(self.tensors[name].size_bytes for name in divisible(unit))

    def stream_ns(self, cpu: str, target: str, size_bytes: int) -> int:
        """Time of one copy of weights in host memory to a device that computes with them."""
        for link in self.profile.links:
            if link.source == cpu and link.target == target:
                return link.latency_ns + size_bytes * op_time.NS_PER_S // copy_rate(link, self.host_memory)
        return self.copy_ns(cpu, target, size_bytes)

    def copy_ns(self, source: str, target: str, size_bytes: int) -> int:
        """Time of one copy between two devices; through the host where they have no link of their own."""
        if source == target:
            return 0
        for link in self.profile.links:
            if link.source == source and link.target == target:
                return link.latency_ns + size_bytes * op_time.NS_PER_S // link.bandwidth_bytes_per_s
        cpu = next((d.name for d in self.profile.devices if d.kind == "cpu"), "")
        if cpu in (source, target) or not cpu:
            return 0
        return self.copy_ns(source, cpu, size_bytes) + self.copy_ns(cpu, target, size_bytes)

    def hand_over(self, source: str, target: str, size_bytes: int) -> int:
        """One change of device in the graph: the scheduler's overhead and the copy."""
        if source == target:
            return 0
        return self.calibration.split_ns + self.copy_ns(source, target, size_bytes)

    def computes(self, unit: Unit, device: str) -> bool:
        """Whether a device has kernels for the weights of a unit, as far as the profile says."""
        refused = {(one.op, one.type) for one in self.profile.unsupported if one.device == device}
        if not refused:
            return True
        found = [self.tensors[name] for name in unit.tensors if _is_matrix(self.tensors[name])]
        return not any((product_of(tensor), tensor.type) in refused for tensor in found)

    def zero_copy(self, device: str) -> int:
        """Bytes per second at which kernels of a device read host memory; 0 where they cannot."""
        return max((li.zero_copy_bytes_per_s for li in self.profile.links if li.target == device), default=0)

    def _step(
        self, unit: Unit, device: str, buffer: str, batch: int, depth: int, outputs: int = 0
    ) -> tuple[int, int]:
        """One pass over a unit: nanoseconds, and how many of them rest on measured cases.

        `outputs` tokens reach the head; 0: one a sequence. Layers are mostly alike: each kind is priced once.
        """
        key = (self.likeness(unit), device, buffer, batch, depth, outputs, self.repack)
        steps = self.timed.steps
        if key not in steps:
            steps[key] = self._priced_step(unit, device, buffer, batch, depth, outputs)
        return steps[key]

    def likeness(self, unit: Unit) -> int:
        """Units with the same number take the same time, and have tensors of the same sizes."""
        known = self.timed.likenesses
        if unit.name not in known:
            kind = (
                unit.kind,
                unit.experts,
                unit.used,
                unit.tied_bytes,
                tuple(self._weights[name] for name in unit.tensors),
                self._weightless(unit, 1, 1 << 60),  # so deep that a sliding window shows
                self._batches(unit),
            )
            known[unit.name] = self.timed.kinds.setdefault(kind, len(self.timed.kinds))
        return known[unit.name]

    def _priced_step(
        self, unit: Unit, device: str, buffer: str, batch: int, depth: int, outputs: int
    ) -> tuple[int, int]:
        found = self.operators(unit, device, buffer, batch, depth, outputs)
        total = sum(op.time.ns * op.count for op in found)
        measured = sum(op.time.ns * op.count for op in found if op.time.measured)
        # What products of a few rows take in a graph says nothing of large ones: each has its own.
        few, many = self.calibration.scale_ppm, self.calibration.prompt_scale_ppm or {}
        scale = (few if batch <= _FEW_TOKENS else many).get(device, PPM)
        return total * scale // PPM, measured * scale // PPM

    def operators(
        self, unit: Unit, device: str, buffer: str, batch: int, depth: int, outputs: int = 0
    ) -> list[Operator]:
        """The operators of one pass over a unit, before the calibration's scale of the device."""
        rows = batch if unit.kind is not Kind.OUTPUT else min(batch, outputs or self.workload.n_seq)
        small = self._small(device, batch, self._width(unit))
        tensors = [self.tensors[name] for name in unit.tensors]
        found = [self._tensor(unit, tensor, device, buffer, batch, rows) or small for tensor in tensors]
        found += [self._lookup(case, device, "") for case in self._weightless(unit, batch, depth)]
        if unit.kind is Kind.RECURRENT and found[-1].case == replace(self._state, batch=batch):
            # Read out of the cache's rows before the operator, and written back after it.
            found.append(replace(self._lookup(copied_state(self._state), device, ""), count=2))
        if unit.tied_bytes:
            table = self.tensors["token_embd.weight"]
            found.append(self._tensor(unit, table, device, buffer, batch, rows) or small)
        return [*found, Operator(None, small.time, self._small_ops(unit))]

    def _small_ops(self, unit: Unit) -> int:
        delta = unit.kind is Kind.RECURRENT and self._state.op == "GATED_DELTA_NET"
        return _DELTA_NET_OPS if delta else _SMALL_OPS.get(unit.kind, 0)

    def token_operators(self, unit: Unit, device: str) -> list[tuple[Operator, int]]:
        """What one decode step computes of a unit on its own device, each with how often."""
        depth = self.workload.depth
        return [
            (op, count)
            for tokens, count in self._runs(unit)
            for op in self.operators(unit, device, "", tokens, depth, tokens)
        ]

    def prompt_operators(self, unit: Unit, device: str) -> list[tuple[Operator, int]]:
        """What the prompt computes of a unit on a device, each with how often."""
        return [
            (op, count)
            for batch, count in self._batches(unit)
            for op in self.operators(unit, device, "", batch, self.before(batch))
        ]

    def _width(self, unit: Unit) -> int:
        """Values a token that a small operator of a unit reads and writes once each."""
        if unit.kind is Kind.EXPERTS:
            return self._experts_width(unit)
        if unit.kind is Kind.FFN:  # gate and up are read, their product is written: half as many again
            return max(self._inner(unit)[0] * 3 // 2, 1)
        return max(self.inventory.number("embedding_length"), 1)

    def _experts_width(self, unit: Unit) -> int:
        """The same of routed experts, where every token has a row for each that it uses.

        Gate and up are read and their product is written, rows are weighted, and added up in one kernel.
        """
        inner, model = self._inner(unit)
        values = unit.used * (3 * inner + 2 * model) + (unit.used + 1) * model
        return max(values // (2 * _SMALL_OPS[Kind.EXPERTS]), 1)

    def _inner(self, unit: Unit) -> tuple[int, int]:
        """Inner width of a feed-forward part and the width that it gives back: the shape of its last product.

        Not of the hyperparameters: files name the width of experts differently, or one for each layer.
        """
        last = (self.tensors[name] for name in unit.tensors if _LAST_PRODUCT.search(name))
        return max(((t.shape[0], t.shape[1]) for t in last if _is_matrix(t)), default=(1, 1))

    def _small(self, device: str, batch: int, width: int) -> Operator:
        """An operator without weights of its own: its launch for a few tokens, its bytes too for a prompt."""
        if batch <= _FEW_TOKENS:
            return Operator(None, op_time.Time(self.profile.device(device).op_overhead_ns, False))
        found = self._lookup(op_time.Case("RMS_NORM", "f32", (width,), batch), device, "")
        return Operator(None, replace(found.time, measured=False))

    def _tensor(
        self, unit: Unit, tensor: Tensor, device: str, buffer: str, batch: int, rows: int
    ) -> Operator | None:
        """The operator that a tensor belongs to; None of a small one, as norms and scales are."""
        part = self._parts[tensor.name]
        if unit.kind in (Kind.EMBEDDING, Kind.LOOKUP):
            return self._lookup(op_time.Case("GET_ROWS", tensor.type, tensor.shape, batch), device, buffer)
        if part.role in _SMALL_ROLES or not _is_matrix(tensor):
            return None
        if part.role is Role.EXPERTS:
            shape = (*tensor.shape[:2], unit.experts)
            case = op_time.Case("MUL_MAT_ID", tensor.type, shape, batch, unit.used)
            found = self._lookup(case, device, buffer)
            if len(tensor.shape) >= 3:
                return found
            each = found.time.ns // max(unit.experts, 1)  # one file tensor per expert
            return Operator(case, replace(found.time, ns=each, measured=False, basis="scaled"))
        return self._lookup(op_time.Case("MUL_MAT", tensor.type, tensor.shape, rows), device, buffer)

    def _weightless(self, unit: Unit, batch: int, depth: int) -> tuple[op_time.Case, ...]:
        """The operators that read the cache instead of weights."""
        layer = unit.layer
        if layer is None or layer >= self._layers.n_main:
            return ()
        if unit.kind is Kind.RECURRENT:
            return (op_time.Case(self._state.op, "f32", self._state.shape, batch),)
        if unit.kind in (Kind.ATTENTION, Kind.LAYER) and self._layers.attention[layer]:
            return (self._attention(layer, batch, depth),)
        return ()

    def _attention(self, layer: int, batch: int, depth: int) -> op_time.Case:
        slides = self._slides[layer]
        if slides:
            depth = min(depth, window(self.inventory))
        n_kv = max(self._heads[layer], 1)
        head_dim = max(head_widths(self.inventory, slides)[0], 1)
        n_head = self.inventory.per_layer("attention.head_count", layer + 1, n_kv)[layer]
        return op_time.Case(
            "FLASH_ATTN_EXT", self.workload.type_k, (head_dim, max(n_head, 1), n_kv), batch, 0, depth
        )

    def _lookup(self, case: op_time.Case, device: str, buffer: str) -> Operator:
        if self.repack and device == CPU and not buffer and (case.op, case.type) in self._repacked:
            buffer = REPACKED
        key, operators = (case, device, buffer), self.timed.operators
        if key not in operators:
            time = op_time.lookup(
                self.profile,
                case.op,
                case.type,
                case.shape,
                case.batch,
                device,
                buffer,
                case.used,
                case.depth,
            )
            operators[key] = Operator(case, time)
        return operators[key]


@remembered
def _weights_of(inventory: Inventory) -> Mapping[str, tuple[object, ...]]:
    """All that the time of each tensor depends on, and its size."""
    parts = parts_of(inventory)
    return {
        t.name: (parts[t.name].role, t.type, t.shape, t.size_bytes, _is_matrix(t)) for t in inventory.tensors
    }


def _is_matrix(tensor: Tensor) -> bool:
    if len(tensor.shape) < 2 or min(tensor.shape[:2]) < 2 or not tensor.name.endswith(".weight"):
        return False
    return not any(word in tensor.name for word in _NOT_MULTIPLIED)


def state_case(structure: Structure, batch: int) -> op_time.Case:
    """The recurrent operator of one layer; its shape is that of the state: (state, head_dim, heads)."""
    number, names = structure.inventory.number, structure.tensors
    state, inner = number("ssm.state_size"), number("ssm.inner_size")
    if not state or not inner:  # other mixers: the same bytes, read and written
        width = max(number("kda.head_dim", number("wkv.head_size", 64)), 1)
        return op_time.Case(
            "GATED_DELTA_NET", "f32", (width, max(state_widths(structure)[1] // width, 1), 1), batch
        )
    if any(".ssm_x." in name for name in names):
        return op_time.Case("SSM_SCAN", "f32", (state, 1, inner), batch)
    heads = max(number("ssm.time_step_rank"), 1)
    delta = any(".ssm_ba." in name or ".ssm_beta." in name for name in names)
    op = "GATED_DELTA_NET" if delta else "SSM_SCAN"
    return op_time.Case(op, "f32", (state, max(inner // heads, 1), heads), batch)


def copied_state(state: op_time.Case) -> op_time.Case:
    """One copy of a layer's state: read and written, so twice its rows."""
    return op_time.Case("CONT", "f32", (state.shape[0], 2 * math.prod(state.shape[1:])), 1)


def calibration_for(profile: Profile, model: str) -> Calibration:
    """The calibration of that model, else of the profiler's generated model, else a cautious guess."""
    by_model = {c.model: c for c in profile.calibrations}
    guess = Calibration(model="", split_ns=40_000, mixed_ns=500_000, token_ns=300_000)
    return by_model.get(model) or by_model.get("") or guess
