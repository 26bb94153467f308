"""Layouts of the two parameter structs of llama.h, told apart by what the library itself writes.

`llama_*_default_params()` is called on a buffer filled with 0xAA and again with 0x55: bytes that
agree were written, which gives the struct's true size and its holes. The field table of that size
is then accepted only if the default values stand where the table says they are.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import EngineProblem
from runtime.engine.prototypes import CODES

Fields = tuple[tuple[str, str], ...]  # (name, code) in memory order; codes of runtime.engine.prototypes

MODEL = "llama_model_params"
CONTEXT = "llama_context_params"

_MODEL_HEAD: Fields = (
    ("devices", "p"),
    ("tensor_buft_overrides", "p"),
    ("n_gpu_layers", "i"),
    ("split_mode", "i"),
    ("load_mode", "i"),
)
_MODEL_TAIL: Fields = (
    ("main_gpu", "i"),
    ("tensor_split", "p"),
    ("progress_callback", "p"),
    ("progress_callback_user_data", "p"),
    ("kv_overrides", "p"),
    ("vocab_only", "b"),
    ("check_tensors", "b"),
    ("use_extra_bufts", "b"),
    ("no_host", "b"),
    ("no_alloc", "b"),
    ("load_mtp", "b"),
)
# Until load_mode came, three switches said how a file is read, and load_mtp did not exist.
_MODEL_SWITCHES: Fields = (
    ("devices", "p"),
    ("tensor_buft_overrides", "p"),
    ("n_gpu_layers", "i"),
    ("split_mode", "i"),
    ("main_gpu", "i"),
    ("tensor_split", "p"),
    ("progress_callback", "p"),
    ("progress_callback_user_data", "p"),
    ("kv_overrides", "p"),
    ("vocab_only", "b"),
    ("use_mmap", "b"),
    ("use_direct_io", "b"),
    ("use_mlock", "b"),
    ("check_tensors", "b"),
    ("use_extra_bufts", "b"),
    ("no_host", "b"),
    ("no_alloc", "b"),
)
_CONTEXT_SIZES: Fields = (
    ("n_ctx", "I"),
    ("n_batch", "I"),
    ("n_ubatch", "I"),
    ("n_seq_max", "I"),
    ("n_rs_seq", "I"),
    ("n_outputs_max", "I"),
)
_CONTEXT_MIDDLE: Fields = (
    ("n_threads", "i"),
    ("n_threads_batch", "i"),
    ("ctx_type", "i"),
    ("rope_scaling_type", "i"),
    ("pooling_type", "i"),
    ("attention_type", "i"),
    ("flash_attn_type", "i"),
    ("rope_freq_base", "f"),
    ("rope_freq_scale", "f"),
    ("yarn_ext_factor", "f"),
    ("yarn_attn_factor", "f"),
    ("yarn_beta_fast", "f"),
    ("yarn_beta_slow", "f"),
    ("yarn_orig_ctx", "I"),
    ("defrag_thold", "f"),
    ("cb_eval", "p"),
    ("cb_eval_user_data", "p"),
    ("type_k", "i"),
    ("type_v", "i"),
)
_CONTEXT_TAIL: Fields = (
    ("abort_callback", "p"),
    ("abort_callback_data", "p"),
    ("embeddings", "b"),
    ("offload_kqv", "b"),
    ("no_perf", "b"),
    ("op_offload", "b"),
    ("swa_full", "b"),
    ("kv_unified", "b"),
    ("samplers", "p"),
    ("n_samplers", "z"),
    ("ctx_other", "p"),
)

_CONTEXT_HEAD: Fields = (*_CONTEXT_SIZES, ("n_outputs_max_per_seq", "I"), *_CONTEXT_MIDDLE)

# Struct, size in bytes -> the layouts seen of that size; default values and holes tell which one it is.
# b10068 (72 with switches, 160 without n_outputs_max_per_seq); b10434 (72, 160); b11434 and v0.5.0 (80, 160);
# b11549 (80, 168).
TABLES: Mapping[tuple[str, int], tuple[Fields, ...]] = {
    (MODEL, 72): (_MODEL_HEAD + _MODEL_TAIL, _MODEL_SWITCHES),
    (MODEL, 80): ((*_MODEL_HEAD, ("lazy_mode", "i"), *_MODEL_TAIL),),
    (CONTEXT, 160): (_CONTEXT_HEAD + _CONTEXT_TAIL, _CONTEXT_SIZES + _CONTEXT_MIDDLE + _CONTEXT_TAIL),
    (CONTEXT, 168): ((*_CONTEXT_HEAD, ("moe_cache_size", "z"), *_CONTEXT_TAIL),),
}

# What llama.cpp has written for years; a field that moved shows another number.
DEFAULTS: Mapping[str, Mapping[str, int | float]] = {
    MODEL: {
        "n_gpu_layers": -1,
        "split_mode": 1,
        "load_mode": -1,
        "lazy_mode": 1,
        "main_gpu": 0,
        "vocab_only": 0,
        "use_mmap": 1,
        "use_mlock": 0,
        "check_tensors": 0,
        "use_extra_bufts": 1,
        "no_host": 0,
        "no_alloc": 0,
        "load_mtp": 0,
    },
    CONTEXT: {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "flash_attn_type": -1,
        "yarn_ext_factor": -1.0,
        "type_k": 1,
        "type_v": 1,
        "moe_cache_size": 0,
        "embeddings": 0,
        "offload_kqv": 1,
        "no_perf": 1,
        "op_offload": 1,
        "swa_full": 1,
    },
}

_ROOM = 1024  # bytes; several times the largest struct seen


@dataclass(frozen=True, slots=True)
class Layout:
    """A parameter struct as one library has it."""

    struct: str
    size_bytes: int
    holes: frozenset[int]  # padding bytes, never written
    type: Any  # the ctypes structure

    def defaults(self, raw: bytes) -> Any:
        """A structure filled with the library's own default values."""
        return self.type.from_buffer_copy(raw[: self.size_bytes])


def probe(default_params: Any) -> tuple[int, frozenset[int], bytes]:
    """Size in bytes, holes, and default bytes of the struct that a `*_default_params` function returns."""
    call = c.CFUNCTYPE(c.c_void_p, c.c_void_p)(c.cast(default_params, c.c_void_p).value or 0)
    first, second = _fill(call, 0xAA), _fill(call, 0x55)
    written = [i for i in range(_ROOM) if first[i] == second[i]]
    size = (max(written, default=-1) // 8 + 1) * 8
    holes = frozenset(range(size)) - frozenset(written)
    # Holes read as zero, so that two probes of one library agree.
    return size, holes, bytes(0 if i in holes else first[i] for i in range(size))


def layout_of(struct: str, default_params: Any, engine: str, header: str = "") -> tuple[Layout, bytes]:
    """The layout of a struct and its default bytes; `header` is the text of a llama.h, "" for the tables.

    Raises EngineProblem for a layout that is not understood.
    """
    size, holes, raw = probe(default_params)
    known = (parse_header(header, struct, engine),) if header else TABLES.get((struct, size), ())
    if not known:
        raise EngineProblem(engine, _unknown(struct, f"it has {size} bytes"))
    faults = []
    for fields in known:
        layout = Layout(struct, size, holes, structure(struct, fields))
        if c.sizeof(layout.type) != size:
            given = (
                f"{struct} has {size} bytes in the library but {c.sizeof(layout.type)} in the given llama.h"
            )
            raise EngineProblem(engine, given)
        if not (fault := _fault(layout, raw)):
            return layout, raw
        faults.append(fault)
    raise EngineProblem(engine, _unknown(struct, faults[0]))


def structure(name: str, fields: Sequence[tuple[str, str]]) -> Any:
    """A ctypes structure of these fields."""
    return type(name, (c.Structure,), {"_fields_": [(field, CODES[code]) for field, code in fields]})


def parse_header(text: str, struct: str, engine: str) -> Fields:
    """The fields of a struct in the text of a llama.h; EngineProblem when it is not there or not plain."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    body = re.search(rf"struct\s+{struct}\s*\{{(.*?)\}}\s*(?:{struct})?\s*;", plain, flags=re.DOTALL)
    if body is None:
        raise EngineProblem(engine, f"the given llama.h has no struct {struct}")
    return tuple(_field(line, struct, engine) for line in body[1].split(";") if line.strip())


_SCALARS = {
    "bool": "b",
    "float": "f",
    "int": "i",
    "int32_t": "i",
    "uint32_t": "I",
    "int64_t": "q",
    "uint64_t": "z",
    "size_t": "z",
}


def _field(declaration: str, struct: str, engine: str) -> tuple[str, str]:
    words = declaration.replace("*", " * ").split()
    name, kind = words[-1], [w for w in words[:-1] if w != "const"]
    if "*" in kind or kind[-1].endswith(("_callback", "_dev_t")):
        return name, "p"
    if kind[0] == "enum":
        return name, "i"
    if len(kind) == 1 and kind[0] in _SCALARS:
        return name, _SCALARS[kind[0]]
    raise EngineProblem(engine, f"cannot read the field '{' '.join(words)}' of {struct} in the given llama.h")


def _fill(call: Any, value: int) -> bytes:
    buffer = c.create_string_buffer(bytes([value]) * _ROOM, _ROOM)
    call(c.addressof(buffer))
    return buffer.raw


def _fault(layout: Layout, raw: bytes) -> str:
    """Why a layout cannot be the library's; "" when all fields are written and the known defaults stand."""
    for name, _ in layout.type._fields_:
        place = getattr(layout.type, name)
        if not layout.holes.isdisjoint(range(place.offset, place.offset + place.size)):
            return f"it never writes the bytes of {name}"
    values = layout.defaults(raw)
    for name, want in DEFAULTS[layout.struct].items():
        have = getattr(values, name, want)
        if have != want:
            return f"its default {name} reads {have}, expected {want}"
    return ""


def _unknown(struct: str, found: str) -> str:
    return (
        f"{struct} has a layout not known here: {found}; "
        "give the header of this very build with --llama-h path/to/llama.h, or use another build"
    )
