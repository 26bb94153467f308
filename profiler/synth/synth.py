"""Generated models: valid GGUF files of random weights, for measuring and for tests.

A file depends on its specification alone: the same one gives the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import InputError
from profiler.synth import archs as plain
from profiler.synth import hybrids as hybrid
from profiler.synth.build import ROLES, Builder, SynthSpec, TensorPlan
from profiler.synth.bytes import (
    PEAK,
    TYPES,
    Source,
    fitting_type,
    plain_bytes,
    raise_first,
    size_bytes,
    type_number,
)
from profiler.synth.routing import skew_for
from profiler.synth.vocab import vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # A tensor's bytes, from its plan and the bytes it would have.
    Payload = Callable[
        [Source, SynthSpec, TensorPlan, Iterator[NDArray[np.uint8]]], Iterator[NDArray[np.uint8]]
    ]

__all__ = ["ARCHITECTURES", "SynthProblem", "SynthSpec", "write"]


@dataclass(frozen=True, slots=True)
class Habit:
    """How to build an architecture, and what it does when the specification is silent."""

    build: Callable[[Builder], None]
    n_expert: int = 0
    n_shared: int = 0
    n_dense: int = 0
    n_group: int = 0
    exp_probs_b: bool = False
    expert_bias: bool = False
    tied: bool = False
    nextn: bool = False  # can have NextN blocks
    fusible: bool = False  # may keep gate and up of the experts in one tensor
    square: bool = False  # the heads together are as wide as the model


ARCHITECTURES = {
    "llama": Habit(plain.llama),
    "llama4": Habit(plain.llama4, n_expert=8, n_shared=1),
    "qwen2": Habit(plain.qwen2),
    "qwen3": Habit(plain.qwen3),
    "qwen3moe": Habit(plain.qwen3moe, n_expert=8),
    "qwen3next": Habit(hybrid.qwen3next, n_expert=8, n_shared=1, nextn=True, fusible=True),
    "qwen35": Habit(hybrid.qwen35, nextn=True),
    "qwen35moe": Habit(hybrid.qwen35, n_expert=8, n_shared=1, nextn=True, fusible=True),
    "gemma3": Habit(plain.gemma3, tied=True),
    "gemma3n": Habit(plain.gemma3n, tied=True),
    "gemma4": Habit(plain.gemma4, tied=True, fusible=True),
    "gpt-oss": Habit(plain.gpt_oss, n_expert=8, expert_bias=True),
    "glm4moe": Habit(plain.glm4moe, n_expert=8, n_shared=1, n_dense=1, exp_probs_b=True, nextn=True),
    "deepseek2": Habit(
        plain.deepseek2,
        n_expert=8,
        n_shared=1,
        n_dense=1,
        n_group=4,
        exp_probs_b=True,
        nextn=True,
        fusible=True,
    ),
    "kimi-linear": Habit(hybrid.kimi_linear, n_expert=8, n_shared=1, n_dense=1, exp_probs_b=True),
    "nemotron_h": Habit(hybrid.nemotron_h),
    "nemotron_h_moe": Habit(hybrid.nemotron_h, n_expert=8, n_shared=1, exp_probs_b=True),
    "granitehybrid": Habit(hybrid.granite_hybrid),
    "falcon-h1": Habit(hybrid.falcon_h1),
    "jamba": Habit(hybrid.jamba, n_expert=8, square=True),
    "lfm2": Habit(hybrid.lfm2, tied=True, square=True),
    "lfm2moe": Habit(hybrid.lfm2, n_expert=8, n_dense=1, exp_probs_b=True, tied=True, square=True),
    "mamba2": Habit(hybrid.mamba2),
    "rwkv7": Habit(hybrid.rwkv7),
}


@dataclass(eq=False)
class SynthProblem(InputError):
    """A specification no file can be made of."""

    field: str
    value: str
    why: str

    def message(self) -> str:
        return f"{self.field} {self.value}: {self.why}"


def write(
    path: Path,
    spec: SynthSpec,
    metadata: Mapping[str, Any] | None = None,
    payload: Payload | None = None,
) -> Path:
    """Write a GGUF of random weights; returns the path to load (the first shard of a split model).

    `metadata` adds to the file's own or replaces it; `payload` may give a tensor other bytes, as many.
    Raises SynthProblem for an unknown architecture, type or role. The file appears whole or not at all;
    shards of a split model are written in place.
    """
    spec = with_defaults(spec)
    builder = Builder(spec)
    ARCHITECTURES[spec.arch].build(builder)
    final = path
    working = path if spec.shard_tensors else path.with_name(f".{path.name}.partial")
    try:
        final = _write(working, builder, metadata or {}, payload)
        if working is not path:
            final = working.replace(path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise
    return final


def with_defaults(spec: SynthSpec) -> SynthSpec:
    """The specification with every default of its architecture filled in."""
    if spec.arch not in ARCHITECTURES:
        raise SynthProblem("arch", spec.arch, f"expected one of {', '.join(ARCHITECTURES)}")
    for role, type_ in [("", spec.type), *spec.types.items()]:
        if type_ not in TYPES:
            raise SynthProblem("type", type_, f"expected one of {', '.join(TYPES)}")
        if role and role not in ROLES:
            raise SynthProblem("role", role, f"expected one of {', '.join(ROLES)}")
    habit = ARCHITECTURES[spec.arch]
    _refuse_what_the_engine_refuses(spec, habit)
    n_expert = habit.n_expert if spec.n_expert is None else spec.n_expert
    n_used = min(spec.n_used, n_expert)
    return replace(
        spec,
        n_expert=n_expert,
        n_used=n_used,
        skew=skew_for(spec.coverage, n_expert, n_used) if spec.coverage and n_expert else spec.skew,
        n_shared=habit.n_shared if spec.n_shared is None else spec.n_shared,
        n_dense=habit.n_dense if spec.n_dense is None else spec.n_dense,
        n_group=spec.n_group or habit.n_group,
        n_group_used=spec.n_group_used or habit.n_group // 2,
        exp_probs_b=habit.exp_probs_b if spec.exp_probs_b is None else spec.exp_probs_b,
        expert_bias=spec.expert_bias or habit.expert_bias,
        tied=spec.tied or habit.tied,
        head_dim=spec.n_embd // spec.n_head if habit.square else spec.head_dim,
        name=spec.name or f"synth-{spec.arch}",
    )


def _refuse_what_the_engine_refuses(spec: SynthSpec, habit: Habit) -> None:
    """A file with a tensor that the engine's architecture does not know does not load."""
    wanted = {
        "n_nextn": spec.n_nextn > 0 and not habit.nextn,
        "fused_gate_up": spec.fused_gate_up and not habit.fusible,
        "expert_bias": spec.expert_bias and not habit.expert_bias,
        "exp_probs_b": bool(spec.exp_probs_b) and not habit.exp_probs_b,
        "n_vocab": spec.n_vocab < 257,
    }
    for field, wrong in wanted.items():
        if wrong:
            raise SynthProblem(field, str(getattr(spec, field)), f"not possible for {spec.arch}")


def _write(path: Path, b: Builder, metadata: Mapping[str, Any], payload: Payload | None) -> Path:
    from gguf import GGUFWriter

    spec = b.spec
    writer = GGUFWriter(path, spec.arch, split_max_tensors=spec.shard_tensors)
    writer.add_name(spec.name)
    if spec.alignment != 32:
        writer.add_custom_alignment(spec.alignment)
    for key, value in {**b.kv, **vocabulary(spec.n_vocab), **metadata}.items():
        _add(writer, key, value)
    for tensor in b.tensors:
        _declare(writer, tensor, _type(spec, tensor))
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    _write_payloads(writer, b, payload)
    files = [Path(file.name) for file in writer.fout or []]
    writer.close()
    return files[0]


def _add(writer: Any, key: str, value: Any) -> None:
    """Metadata in the types llama.cpp reads: u32, f32, bool, string and arrays of them."""
    from gguf import GGUFValueType as Kind

    def kind(item: Any) -> Kind:
        if isinstance(item, bool):
            return Kind.BOOL
        if isinstance(item, str):
            return Kind.STRING
        return Kind.FLOAT32 if isinstance(item, float) else Kind.INT32 if item < 0 else Kind.UINT32

    if isinstance(value, (list, tuple)):
        inner = Kind.INT32 if key == "tokenizer.ggml.token_type" else kind(value[0])
        writer.add_key_value(key, value, Kind.ARRAY, inner)
    else:
        writer.add_key_value(key, value, kind(value))


def _type(spec: SynthSpec, tensor: TensorPlan) -> str:
    if tensor.role == "small":
        return "f32"
    return fitting_type(spec.types.get(tensor.role, spec.type), tensor.shape[0])


def _declare(writer: Any, tensor: TensorPlan, type_: str) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType

    writer.add_tensor_info(
        tensor.name,
        tensor.shape[::-1],
        np.dtype(np.float32),
        size_bytes(type_, tensor.shape),
        GGMLQuantizationType(type_number(type_)),
    )


def _write_payloads(writer: Any, b: Builder, payload: Payload | None) -> None:
    """Tensor data in the order of the table, padded, shard by shard."""
    source = Source(b.spec.seed)
    plans = iter(b.tensors)
    for file, tensors in zip(writer.fout, writer.tensors, strict=True):
        writer.write_padding(file, file.tell())
        for info in tensors.values():
            plan = next(plans)
            pieces = _payload(source, b.spec, plan)
            for piece in payload(source, b.spec, plan, pieces) if payload else pieces:
                file.write(piece)
            writer.write_padding(file, info.nbytes)


def _payload(source: Source, spec: SynthSpec, tensor: TensorPlan) -> Iterator[NDArray[np.uint8]]:
    deviation = tensor.gain / tensor.shape[0] ** 0.5
    if tensor.role == "embedding" and tensor.name == "token_embd.weight":
        rows = source.matrix(tensor.name, _type(spec, tensor), tensor.shape, deviation)
        if spec.skew:
            raise_first(rows, _type(spec, tensor), deviation)
        yield rows
    elif tensor.role != "small":
        yield from source.chunks(tensor.name, _type(spec, tensor), tensor.shape, deviation)
    else:
        yield plain_bytes(_small(source, spec, tensor, deviation), "f32")


def _small(source: Source, spec: SynthSpec, tensor: TensorPlan, deviation: float) -> NDArray[np.float32]:
    """Values of an f32 tensor by its fill."""
    import numpy as np

    draw = source.generator(tensor.name)
    shape = tensor.shape[::-1]
    if tensor.fill == "ones":
        return np.ones(shape, np.float32)
    if tensor.fill == "zeros":
        return np.zeros(shape, np.float32)
    if tensor.fill == "decay":  # the engine stores -exp(A_log)
        return -np.exp(draw.uniform(-2, 1, shape)).astype(np.float32)
    if tensor.fill == "step":  # a time step of about 0.01 after softplus
        return draw.uniform(-5, -3, shape).astype(np.float32)
    values = draw.standard_normal(shape, np.float32) * np.float32(deviation)
    if tensor.fill == "router" and spec.skew:
        # Element 0 of the residual stream is constant (see raise_first): its column is a bias per expert.
        values[:, 0] = draw.standard_normal(shape[0]) * spec.skew / PEAK
    return values
