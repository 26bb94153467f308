"""The plan: where each unit lives, why, what it costs, and what llama.cpp must be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from planner.machine.engine_builds import EngineRange
from planner.machine.host_memory import HostMemory
from planner.memory.memory import Memory, Reserve
from planner.plan.adaptation import Adaptation, Policy
from planner.records import Bytes, Count, Many, Nanoseconds, Ppm, Record, dump, load, text_of, values_of
from planner.site import BufferField, SiteField
from planner.workload import Workload

# The longest pattern this program writes, of every layer and part of a model with 512 layers, has some 2,000.
MAX_PATTERN = 8192
MAX_DEVICES = 64  # the engine takes 16
MAX_RANGES = 1024  # the engine takes 512 layers
MAX_UNITS = 16_384  # a model of 512 layers has some 3,000 units, and as many striped tensors
MAX_EXPERTS = 4096  # of a layer; models have up to some 900
MAX_NOTES = 1024
NOT_LOADED = "not loaded"  # the reason of units that the engine leaves in the file


class ModelRef(Record):
    """The model a plan belongs to."""

    name: str
    architecture: str
    table_digest: str
    header_digest: str = ""
    tensors: Count
    size_bytes: Bytes


class MachineRef(Record):
    """The machine a plan was priced for."""

    name: str
    profile_digest: str
    measured: bool  # False: assumed, not measured
    engine: str
    threads: int = Field(0, ge=0, le=512)  # of the CPU at decode; 0: all cores
    measured_on: dict[str, str] | None = None  # what its timings belong to; absent: assumed, not measured


class DeviceUse(Record):
    """What fills a device, in bytes; the parts add up to at most the budget."""

    name: str
    kind: str
    budget_bytes: Bytes
    weights_bytes: Bytes
    kv_bytes: Bytes
    state_bytes: Bytes
    compute_bytes: Bytes
    cache_bytes: Bytes = 0
    reserve_bytes: Bytes = 0  # driver context, projector, draft, other users
    # Looked-up tables that stay mapped: read by rows through the page cache, no part of what is used.
    tables_bytes: Bytes | None = None

    @staticmethod
    def of(name: str, kind: str, budget_bytes: int, held: Memory) -> DeviceUse:
        """A device and what fills it."""
        sizes = {f"{part}_bytes": size for part, size in asdict(held).items()}
        tables = {"tables_bytes": sizes.pop("tables_bytes") or None}
        return DeviceUse(name=name, kind=kind, budget_bytes=budget_bytes, **sizes, **tables)

    @property
    def memory(self) -> Memory:
        """What fills it, by part."""
        return Memory(
            self.weights_bytes,
            self.kv_bytes,
            self.state_bytes,
            self.compute_bytes,
            self.cache_bytes,
            self.reserve_bytes,
            self.tables_bytes or 0,
        )

    @property
    def used_bytes(self) -> int:
        return self.memory.total

    def over_bytes(self, page: bool) -> int:
        """Bytes beyond the budget, negative where some are left; of host weights that may be paged none."""
        held = self.memory.unpaged if page and self.kind == "cpu" else self.used_bytes
        return held - self.budget_bytes


class LayerRange(Record):
    """Consecutive layers with one layer device; the output head counts as the layer after the last."""

    first: int = Field(ge=0, lt=10_000)
    last: int = Field(ge=0, lt=10_000)  # no model comes near; a slip must not fill the memory
    device: str = Field(min_length=1)


class Placement(Record):
    """One unit and its site."""

    unit: str
    site: SiteField
    size_bytes: Bytes
    time_ns: Nanoseconds
    why: str


class Override(Record):
    """One entry of tensor_buft_overrides, in the engine's first-match order."""

    pattern: str = Field(max_length=MAX_PATTERN)
    buffer: BufferField  # buffer type name: CPU, CUDA0 …
    tensors: int = Field(gt=0, le=2**31 - 1)  # how many it places


class Prediction(Record):
    """Predicted cost and how sure it is."""

    tpot_ns: Nanoseconds
    prefill_ns: Nanoseconds
    error_ppm: Ppm  # 80 % of runs take between tpot_ns / (1 + error) and tpot_ns * (1 + error)
    # Absent in plans made before they were recorded: the same of prefill_ns, and what shares of a token's
    # time are measured, interpolated, scaled from another shape, assumed.
    prefill_error_ppm: Ppm | None = None
    basis_ppm: dict[str, Ppm] | None = None
    splits: Count
    objective_ns: Nanoseconds
    bound_ns: Nanoseconds  # no placement under this budget, with this op_offload, has a lower objective
    gap_ppm: Ppm
    status: str  # optimal, feasible (the search ended before a proof), baseline, edited


class Search(Record):
    """How the search ended that a clock limited; a plan without this was limited by work alone."""

    ended_by: Literal["proof", "work", "clock"]  # clock: another run may find another plan
    time_limit_ms: int = Field(gt=0, le=2**31 - 1)  # for the whole of planning


class Baseline(Record):
    """What a stock rule would have done under the same budget."""

    name: str  # all-cpu, ngl, n-cpu-moe, n-cpu-ffn, fit
    setting: str  # the llama.cpp flags
    feasible: bool
    tpot_ns: Nanoseconds  # 0 when infeasible
    prefill_ns: Nanoseconds
    vram_bytes: Bytes


class FitOverride(Record):
    """One tensor override of --fit: tensors that match, and where they go."""

    pattern: str = Field(max_length=MAX_PATTERN)
    buffer: str = Field(min_length=1)


class EngineFit(Record):
    """What llama.cpp's own --fit chose for these devices and budgets; the baseline `fit` follows from it."""

    engine: str  # library and build
    n_ctx: int = Field(gt=0, le=2**31 - 1)
    n_gpu_layers: Count | None = None  # absent: it found no placement
    devices: Many[str] = Field((), max_length=MAX_DEVICES)
    tensor_split: Many[Count] = Field((), max_length=MAX_DEVICES)  # layers a device, the head counted as one
    overrides: Many[FitOverride] = Field((), max_length=MAX_UNITS)

    @model_validator(mode="after")
    def _layers_add_up(self) -> EngineFit:
        if len(self.tensor_split) != len(self.devices) or sum(self.tensor_split) != (self.n_gpu_layers or 0):
            raise ValueError("expected in tensor_split the layers of each device, n_gpu_layers in all")
        return self


class Projector(Record):
    """The vision projector beside the model."""

    name: str
    device: str  # where it computes; its memory is among the reserves


class Speculation(Record):
    """Drafted tokens a step: one pass of the model checks them all and its own next one."""

    draft: str = ""  # name of the draft model; "": the model's own NextN/MTP block, or n-grams
    ngrams: bool | None = None  # True: what followed the last tokens before is guessed to follow again
    table_digest: str = ""  # of the draft model
    device: str = ""  # where the draft model computes
    experts_on_host: bool | None = None  # True: its routed experts lie in host memory, the CPU computes them
    # Of drafted tokens, each given that those before it are right; where accepted_ppm says more, beyond it.
    accept_ppm: int = Field(ge=0, le=1_000_000)
    # Of steps, those that accept at least 1, 2, … tokens; absent: powers of accept_ppm.
    accepted_ppm: Annotated[Many[Annotated[int, Field(ge=0, le=1_000_000)]], Field(max_length=64)] = ()
    tokens: int = Field(ge=0, le=63)  # drafted a step; 0: none, the draft is not loaded
    draft_ns: Nanoseconds  # of one drafted token, beside what the model's own units take for it
    # Of a step that drafts 0, 1, … tokens with this placement, for lengths that follow what is accepted.
    step_ns: Annotated[Many[Nanoseconds], Field(max_length=64)] = ()

    @model_validator(mode="after")
    def _never_more_than_before(self) -> Speculation:
        if list(self.accepted_ppm) != sorted(self.accepted_ppm, reverse=True):
            raise ValueError("expected in accepted_ppm shares that never rise")
        if self.ngrams and self.draft:
            raise ValueError("expected a draft or ngrams, not both")
        return self

    @property
    def own(self) -> bool:
        """Whether the model's own NextN/MTP block drafts."""
        return not self.draft and not self.ngrams

    @property
    def step(self) -> tuple[int, int]:
        """Expected tokens of a step as a fraction: 1 + a + a^2 + ... + a^tokens, or the counted shares."""
        known = self.accepted_ppm[: self.tokens]
        rest = self.tokens - len(known)
        last = known[-1] if known else 10**6
        # Over 10^(6 (rest + 1)): whole numbers all the way.
        ones = 10 ** (6 * (rest + 1))
        counted = (10**6 + sum(known)) * 10 ** (6 * rest)
        beyond = sum(last * self.accept_ppm**i * 10 ** (6 * (rest - i)) for i in range(1, rest + 1))
        return counted + beyond, ones

    def per_token(self, step_ns: int) -> int:
        """The share of one token in the time of a step."""
        tokens, ones = self.step
        return (2 * step_ns * ones + tokens) // (2 * tokens)


class ExpertOrder(Record):
    """The order in which the rewriter lays the experts of one layer: original ids, hot first."""

    layer: Count
    order: Many[Annotated[int, Field(ge=0, lt=MAX_EXPERTS)]] = Field(max_length=MAX_EXPERTS)


class CachePoint(Record):
    """One size of the engine's MoE cache: experts are kept for all cached layers together, last used last."""

    share_ppm: int = Field(gt=0, le=1_000_000)  # of the cached layers' experts it holds
    hit_ppm: int = Field(ge=0, le=1_000_000)  # of routed choices it serves


class FollowedLayer(Record):
    """What slots that follow the text serve in one layer, by their number: ascending, of equal length."""

    layer: Count
    slots: Many[Annotated[int, Field(gt=0, lt=MAX_EXPERTS)]] = Field(max_length=64)
    hit_ppm: Many[Annotated[int, Field(ge=0, le=1_000_000)]] = Field(max_length=64)  # of choices
    admitted_ppm: Many[Annotated[int, Field(ge=0, le=1_000_000_000)]] = Field(max_length=64)  # experts a step


class Following(Record):
    """Slots that follow the text: the rule, and what a routing trace says that it serves."""

    policy: Policy
    half_life: int = Field(gt=0, le=1 << 20)
    protect: int = Field(0, ge=0, lt=MAX_EXPERTS)
    upload_bytes: Bytes
    refill_bytes: Bytes = 0
    least_misses: int | None = Field(None, gt=0, lt=MAX_EXPERTS)  # experts come on demand, in such steps
    layers: Many[FollowedLayer] = Field(max_length=MAX_RANGES)

    @property
    def adaptation(self) -> Adaptation:
        return Adaptation(
            self.policy,
            self.half_life,
            self.protect,
            self.upload_bytes,
            self.refill_bytes,
            self.least_misses or 0,
        )


class Constraints(Record):
    """What the solver was asked to respect, so that a check can ask the same again."""

    budgets: dict[str, Bytes]  # by device, the CPU included, devices left unused too
    pins: Many[Annotated[str, Field(max_length=1024)]] = Field((), max_length=MAX_NOTES)  # PATTERN=SITE
    contiguous: bool = False
    no_cpu: bool = False
    page: bool = False  # host weights may exceed memory and are paged from disk
    reserves: Many[Reserve] = Field((), max_length=MAX_NOTES)
    heat_digest: str = ""  # of the heat file that expert coverage comes from
    stripes: bool = True  # hot experts may live on the GPU, given heat
    hybrid: bool | None = None  # experts may live in slots, the others with CPU and bus; absent: not asked
    # The engine has a MoE cache: sizes to choose from, concave.
    cache: Annotated[Many[CachePoint], Field(max_length=MAX_NOTES)] | None = None


_SITES = "the site of each unit says where its experts are"
_LAYERS = "layers says the device of each layer"
# What other tools' settings are here.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("n_cpu_moe", "cpu_moe", "cpu_experts"), _SITES),
    **dict.fromkeys(("n_gpu_layers", "tensor_split", "split_mode", "main_gpu"), _LAYERS),
    "kv_device": "the KV cache follows the device of its layer",
    "tiers": "one placement serves decoding and prompts; make a plan for each workload",
    "engine": "engines says which builds can load the plan",
    "host": "host_memory says how host weights are held",
    "margin": "constraints.reserves holds what is left to others",
    "memory_from": "a key of schema 1; memory is always counted by formula",
}


def _without_memory_from(values: dict[str, Any]) -> None:
    """Schema 1 to 2: no device says any more where its bytes are from, as it was always the formula."""
    devices = values.get("devices")
    for use in devices if isinstance(devices, list) else ():
        if isinstance(use, dict) and isinstance(use.get("memory_from"), str):
            del use["memory_from"]


class Plan(Record):
    """A decision that can be reviewed, checked without model or GPU, compiled and loaded."""

    instead: ClassVar[Mapping[str, str]] = INSTEAD
    migrations: ClassVar[Mapping[int, Callable[[dict[str, Any]], None]]] = {1: _without_memory_from}

    schema_: int = Field(2, alias="schema", ge=2, le=2)
    command: str
    version: str
    model: ModelRef
    machine: MachineRef
    engines: EngineRange | None = None  # builds that can load it; absent: nothing is known against any
    workload: Workload
    constraints: Constraints
    devices: Many[DeviceUse] = Field(max_length=MAX_DEVICES)
    layers: Many[LayerRange] = Field(max_length=MAX_RANGES)
    op_offload: bool = True  # for 32 tokens and more host weights are copied to a GPU and computed there
    repack: bool | None = None  # False: the CPU's weights keep the file's layout; absent: the engine's choice
    projector: Projector | None = None
    host_memory: HostMemory = HostMemory.MAPPED  # of weights that the CPU computes beside a GPU
    following: Following | None = None  # experts in slots change with the text; absent: they stay
    speculation: Speculation | None = None  # times of a token are then those of an accepted one
    predicted: Prediction
    baselines: Many[Baseline] = Field(max_length=MAX_DEVICES)
    untuned: Baseline | None = None  # the best as the engine runs it unless told; absent: no other way
    search: Search | None = None  # absent: no clock was looked at, so that every run gives this plan
    fit: EngineFit | None = None  # asked of an engine with solve --fit
    notes: Many[str] = Field((), max_length=MAX_NOTES)
    units: Many[Placement] = Field(max_length=MAX_UNITS)
    overrides: Many[Override] = Field(max_length=MAX_UNITS)
    experts: Many[ExpertOrder] = Field((), max_length=MAX_RANGES)


def to_text(plan: Plan) -> str:
    """Canonical YAML of a plan."""
    return dump(plan)


def to_text_of_schema_1(plan: Plan) -> str:
    """Canonical YAML of a plan as it was written in schema 1: what digests of that time are of."""
    values = values_of(plan)
    values["schema"] = 1
    for use in values["devices"]:
        use["memory_from"] = "formula"
    return text_of(values)


def from_text(text: str, path: str) -> Plan:
    """Plan from YAML text of any schema; FieldProblem names the line of what is wrong."""
    return load(text, Plan, path)
