"""The profile of a machine: devices, links, operator timings, calibration; measured or assumed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from planner.constants import CPU
from planner.records import Bytes, Count, Many, Nanoseconds, Ppm, Rate, Record, Shape, digest, dump, load
from planner.remember import remembered
from planner.workload import CacheType


class Device(Record):
    """What ggml calls a device: CPU, CUDA0, Vulkan0, RPC0[host:port]."""

    name: str = Field(min_length=1)
    kind: Literal["cpu", "gpu", "igpu", "rpc"]
    description: str
    id: str = ""  # PCI id or UUID, to find the device again when the order changes
    memory_bytes: Bytes  # total; 0 when the device does not say
    free_bytes: Bytes  # when profiled
    bandwidth_bytes_per_s: int = Field(gt=0, le=1 << 60)  # of a matrix-vector product larger than all caches
    flops_per_s: int = Field(gt=0, le=1 << 62)  # achieved by a quantised matrix product at prefill batch
    op_overhead_ns: Nanoseconds  # cost of one small operator in a graph
    context_bytes: Bytes = 0  # memory the driver takes for a context on this device
    max_alloc_bytes: Bytes = 0  # largest single buffer; 0 = no limit known
    memory_pool: str = ""  # devices of one non-empty pool share one memory: iGPU, RPC on one host
    threads: int = Field(0, ge=0, le=4096)  # CPU: best count for decode
    # Whose memory this is, where `memory_bytes` is all of it and others need a part: a Mac's, or that of any
    # other machine with one memory (a phone, an APU). Told of a remote device, which cannot tell itself.
    shared: Literal["macos", "unified"] | None = None
    # True: attention kernels for every type of the KV cache, and any two of them (GGML_CUDA_FA_ALL_QUANTS).
    all_kv_types: bool | None = None


class Link(Record):
    """Copies between two devices, one direction."""

    source: str
    target: str
    bandwidth_bytes_per_s: int = Field(gt=0, le=1 << 60)
    latency_ns: Nanoseconds  # of one small copy, synchronisation included
    zero_copy_bytes_per_s: Rate = 0  # target kernels reading source memory directly; 0 = cannot
    mapped_bytes_per_s: Rate = 0  # copies of pages that are not pinned; 0 = not measured


class OpTiming(Record):
    """One measured case: an operator at its real type and shape."""

    op: str  # ggml's name: MUL_MAT, MUL_MAT_ID, GET_ROWS, FLASH_ATTN_EXT, GATED_DELTA_NET …
    type: str  # of the weight (or of K for attention)
    shape: Shape  # of the weight in ggml order; (head_dim, n_head, n_head_kv) for attention
    batch: int = Field(gt=0, le=2**31 - 1)  # tokens
    used: Count = 0  # experts used per token, for MUL_MAT_ID
    depth: Count = 0  # KV cells, for attention
    device: str
    buffer: str  # the weight's buffer type: CPU, CPU_REPACK, CUDA_Host, CUDA0 …
    time_ns: int = Field(gt=0, le=1 << 53)  # median
    spread_ns: Nanoseconds  # interquartile range
    samples: int = Field(gt=0, le=2**31 - 1)


class Unsupported(Record):
    """An operator that a device cannot compute with weights of a type in its own memory."""

    op: str
    type: str
    device: str


class Calibration(Record):
    """Whole-model corrections; `model` is a table digest, "" for the generated model of the profiler."""

    model: str
    split_ns: Nanoseconds  # one change of backend in the graph
    mixed_ns: Nanoseconds  # once per token as soon as any CPU split exists beside a GPU
    token_ns: Nanoseconds  # once per token: sampling, launch, output copy
    scale_ppm: dict[str, Ppm] = Field(default_factory=dict)  # per device: measured over summed operators
    prompt_scale_ppm: dict[str, Ppm] | None = None  # the same of prompts; absent: nothing was learnt of them
    residual_ppm: Ppm = 0  # worst relative error over the runs it was fitted from
    runs: Count = 0


class SlotCosts(Record):
    """Experts in slots of a device, the others by CPU and bus: times of a layer, measured by decoding."""

    device: str  # whose slots
    type: str  # of the experts that were measured; those of other types go by their bytes
    expert_bytes: int = Field(gt=0, le=1 << 40)
    sync_ns: Nanoseconds  # once a layer with slots: the choices waited for, what the host queues
    pair_ns: Nanoseconds  # the CPU computes an expert for a token, the bus idle
    beside_ns: Nanoseconds  # the same while the bus brings others: both read host memory
    pair_start_ns: Nanoseconds  # once a layer that the CPU has a part in
    upload_ns: Nanoseconds  # the bus brings an expert
    upload_start_ns: Nanoseconds  # once a layer that the bus has a part in
    ahead_ns: Nanoseconds | None = None  # less without guests, where nothing is missed; None: not measured
    joined_ns: Nanoseconds | None = None  # more without guests, where something is
    staged_bytes_per_s: Rate = 0  # a prompt's experts brought ahead, computation beside; 0: not measured
    residual_ppm: Ppm = 0  # how far off a token with both lanes is, of which only the CPU's part was taken


class Doubt(Record):
    """What is not known of a figure after it was fitted to runs of whole models."""

    figure: str = Field(max_length=256)  # as planner.cost.evidence names it: memory CPU, copies, token
    # Covariance of its logarithm with those of the figures before it and its own, in millionths.
    covariance: Many[Annotated[int, Field(ge=-(10**9), le=10**9)]] = Field(max_length=256)


class Fingerprint(Record):
    """What the timings belong to."""

    cpu: str
    cores: int = Field(ge=0, le=1 << 16)
    memory_bytes: Bytes
    os: str
    engine: str  # library and build
    driver: str = ""
    numa: str = ""  # node map and policy while profiling


class Profile(Record):
    """All that the solver knows about a machine."""

    schema_: int = Field(1, alias="schema", ge=1, le=1)
    name: str
    measured: bool  # False: a named machine description, assumed from public figures
    source: str  # the command, or where assumed figures come from
    created: str  # ISO date; "" for assumed machines
    fingerprint: Fingerprint
    devices: Many[Device] = Field(max_length=64)
    links: Many[Link] = Field(max_length=4096)
    timings: Many[OpTiming] = Field((), max_length=65_536)
    unsupported: Many[Unsupported] = Field((), max_length=65_536)
    calibrations: Many[Calibration] = Field((), max_length=1024)
    doubts: Annotated[Many[Doubt], Field(max_length=256)] | None = None  # absent: nothing was fitted
    slots: Annotated[Many[SlotCosts], Field(max_length=64)] | None = None  # absent: not measured
    warnings: Many[str] = Field((), max_length=1024)
    # Types of the KV cache that a fork of the engine adds; absent: the engine's own alone.
    cache_types: Annotated[Many[CacheType], Field(max_length=64)] | None = None

    @field_validator("devices")
    @classmethod
    def _one_host(cls, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        names = [device.name for device in devices]
        if len(set(names)) != len(names):
            raise ValueError("expected each name once")
        if [device.name for device in devices if device.kind == "cpu"] != [CPU]:
            raise ValueError(f"expected one device of kind cpu, named {CPU}")
        return devices

    @model_validator(mode="after")
    def _triangular(self) -> Profile:
        if any(len(one.covariance) != row + 1 for row, one in enumerate(self.doubts or ())):
            raise ValueError("expected in doubts one covariance more in each row")
        return self

    def device(self, name: str) -> Device:
        """The device of that name; KeyError when there is none."""
        for device in self.devices:
            if device.name == name:
                return device
        raise KeyError(name)


def to_text(profile: Profile) -> str:
    """Canonical YAML of a profile."""
    return dump(profile)


def from_text(text: str, path: str) -> Profile:
    """Profile from YAML text; FieldProblem names the line of what is wrong."""
    return load(text, Profile, path)


@remembered
def profile_digest(profile: Profile) -> str:
    """The digest of a profile's canonical text, by which a plan names it."""
    return digest(to_text(profile))
