"""Finding and understanding a llama.cpp library: search order, measured layouts, refusals in one line."""

from __future__ import annotations

import ctypes as c
import json
from pathlib import Path
from typing import Any

import pytest
from engines import python

from planner.errors import EngineProblem
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.engine import locate, structs
from runtime.engine.libllama import Engine, _why_not
from runtime.engine.structs import CONTEXT, MODEL, TABLES, layout_of, parse_header, probe, structure
from runtime.session.session import Session


def writer(raw: bytes, holes: frozenset[int] = frozenset()) -> Any:
    """A C function that returns a struct of these bytes through a hidden pointer, as the library's do."""

    def write(address: int) -> int:
        for at, value in enumerate(raw):
            if at not in holes:
                c.c_uint8.from_address(address + at).value = value
        return address

    return c.CFUNCTYPE(c.c_void_p, c.c_void_p)(write)


def defaults(struct: str, size: int, which: int = 0, **changed: int) -> bytes:
    """Default bytes of a known layout, with some fields changed."""
    values = structure(struct, TABLES[struct, size][which])()
    for name, value in {**structs.DEFAULTS[struct], **changed}.items():
        if hasattr(values, name):
            setattr(values, name, value)
    return bytes(values)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The embedded engine."""
    return Engine.find(str(next(locate.installed()).path))


def test_the_probe_finds_size_and_holes() -> None:
    raw = defaults(MODEL, 80)
    size, holes, seen = probe(writer(raw, frozenset({36, 37, 38, 39, 78, 79})))
    assert size == 80
    assert holes == frozenset({36, 37, 38, 39, 78, 79})
    assert seen[16:20] == b"\xff\xff\xff\xff"


LAYOUTS = [(struct, size, which) for (struct, size), same in TABLES.items() for which in range(len(same))]


def padding(struct: str, size: int, which: int) -> frozenset[int]:
    """The bytes of a layout that belong to no field."""
    kind = structure(struct, TABLES[struct, size][which])
    places = [getattr(kind, name) for name, _ in kind._fields_]
    return frozenset(range(size)) - {p.offset + n for p in places for n in range(p.size)}


@pytest.mark.parametrize(("struct", "size", "which"), LAYOUTS)
def test_every_known_layout_is_recognised(struct: str, size: int, which: int) -> None:
    library = writer(defaults(struct, size, which), padding(struct, size, which))
    layout, raw = layout_of(struct, library, "test")
    assert layout.type._fields_ == structure(struct, TABLES[struct, size][which])._fields_
    assert c.sizeof(layout.type) == layout.size_bytes == size
    values = layout.defaults(raw)
    first = "n_gpu_layers" if struct == MODEL else "n_ctx"
    assert getattr(values, first) == structs.DEFAULTS[struct][first]


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (defaults(CONTEXT, 160) + b"\1" * 24, "184 bytes"),
        (defaults(CONTEXT, 160, n_batch=7), "n_batch reads 7, expected 2048"),
        (defaults(CONTEXT, 168, op_offload=0), "op_offload reads False"),
        (b"", "0 bytes"),
        (defaults(CONTEXT, 160, 1, n_ubatch=64), "n_ubatch reads 64, expected 512"),
    ],
)
def test_an_unknown_layout_is_refused_with_what_was_found_and_how_to_proceed(raw: bytes, found: str) -> None:
    with pytest.raises(EngineProblem) as problem:
        layout_of(CONTEXT, writer(raw), "odd build")
    assert found in str(problem.value)
    assert "--llama-h" in str(problem.value)


def test_a_field_that_the_library_never_writes_is_no_field() -> None:
    raw, place = defaults(CONTEXT, 168), structure(CONTEXT, TABLES[CONTEXT, 168][0]).n_threads
    unwritten = frozenset(range(place.offset, place.offset + place.size))
    with pytest.raises(EngineProblem, match="never writes the bytes of n_threads"):
        layout_of(CONTEXT, writer(raw, unwritten), "odd build")


HEADER = """
    struct llama_model_params {
        // devices; a comment with a brace }
        ggml_backend_dev_t * devices;
        const struct llama_model_tensor_buft_override * tensor_buft_overrides;
        int32_t n_gpu_layers; /* many; of them */
        enum llama_split_mode split_mode;
        float new_field;
        llama_progress_callback progress_callback;
        size_t room;
        bool vocab_only;
        bool no_alloc;
    };
"""


def test_a_header_gives_the_fields_of_a_new_layout() -> None:
    fields = parse_header(HEADER, MODEL, "test")
    assert fields == (
        ("devices", "p"),
        ("tensor_buft_overrides", "p"),
        ("n_gpu_layers", "i"),
        ("split_mode", "i"),
        ("new_field", "f"),
        ("progress_callback", "p"),
        ("room", "z"),
        ("vocab_only", "b"),
        ("no_alloc", "b"),
    )
    values = structure(MODEL, fields)()
    values.n_gpu_layers, values.split_mode = -1, 1
    layout, _ = layout_of(MODEL, writer(bytes(values)), "new build", HEADER)
    assert layout.size_bytes == 56
    with pytest.raises(EngineProblem, match="72 bytes in the library but 56"):
        layout_of(MODEL, writer(defaults(MODEL, 72)), "new build", HEADER)


_C = {"p": "void *", "i": "int32_t", "I": "uint32_t", "b": "bool", "f": "float", "z": "size_t"}


def header_of(*structs_: tuple[str, structs.Fields]) -> str:
    """The text of a llama.h with these structs."""
    bodies = (
        "\n".join(f"        {_C[code]} {name}; // of; many words" for name, code in fields)
        for _, fields in structs_
    )
    return "\n".join(
        f"    struct {name} {{\n{body}\n    }};" for (name, _), body in zip(structs_, bodies, strict=True)
    )


def test_a_build_of_unknown_layout_runs_by_its_own_header(
    dense_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded engine, with its layouts forgotten: only its header tells them."""
    path = str(next(locate.installed()).path)
    model, context = TABLES[MODEL, 80][0], TABLES[CONTEXT, 168][0]
    monkeypatch.setattr(structs, "TABLES", {})
    with pytest.raises(
        EngineProblem, match="llama_model_params has a layout not known here: it has 80 bytes"
    ):
        Engine.find(path)
    header = tmp_path / "llama.h"
    header.write_text(header_of((MODEL, model), (CONTEXT, context)))
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64), threads=1)
    with Session(Engine.find(path, header), dense_model, spec) as session:
        assert session.n_ctx == 256
        assert session.logits([1, 2, 3]).shape[0] == 3
    # A field more, or two fields in another order: not the header of this build.
    longer = (*context[:5], ("new_field", "z"), *context[5:])
    swapped = (context[1], context[0], *context[2:])
    for fields, why in ((longer, "168 bytes in the library but 184"), (swapped, "n_ctx reads 2048")):
        header.write_text(header_of((MODEL, model), (CONTEXT, fields)))
        with pytest.raises(EngineProblem, match=why):
            Engine.find(path, header)


@pytest.mark.parametrize(
    ("text", "why"),
    [("struct other { int a; };", "no struct"), (HEADER.replace("size_t", "widget"), "'widget room'")],
)
def test_a_header_that_does_not_help_is_refused(text: str, why: str) -> None:
    with pytest.raises(EngineProblem, match=why):
        parse_header(text, MODEL, "test")


def test_the_embedded_engine_is_understood(engine: Engine) -> None:
    assert engine.build.context_params_bytes == 168
    assert engine.has_moe_cache
    assert engine.context_params().n_batch == 2048
    assert engine.model_params().use_extra_bufts
    assert [d.name for d in engine.ggml.devices() if d.kind == "cpu"] == ["CPU"]


_DESCRIBE = """
import dataclasses, json, sys
from runtime.engine.libllama import Engine
engine = Engine.find(sys.argv[1])
found = {"devices": [d.name for d in engine.ggml.devices()]}
found["fields"] = [n for p in (engine.model_params(), engine.context_params()) for n, _ in p._fields_]
print(json.dumps({**dataclasses.asdict(engine.build), **found}))
"""


def describe(folder: Path) -> dict[str, Any]:
    """The build of another engine, asked in a process of its own."""
    asked = python("-c", _DESCRIBE, folder)
    assert asked.returncode == 0, asked.stderr
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def test_a_build_with_vulkan_and_a_shorter_layout(server_engine: Path) -> None:
    found = describe(server_engine)
    assert (found["model_params_bytes"], found["context_params_bytes"]) == (72, 160)
    assert "CPU" in found["devices"]
    assert found["commit"] == "7e4c0a9"


def test_a_build_from_before_the_load_modes(portable_engine: Path) -> None:
    found = describe(portable_engine)
    assert (found["model_params_bytes"], found["context_params_bytes"]) == (72, 160)
    assert found["commit"] == "571d0d5"

    assert {"use_mmap", "ctx_other"} <= set(found["fields"])
    assert not {"load_mode", "load_mtp", "n_outputs_max_per_seq"} & set(found["fields"])


def test_a_build_with_loadable_backends(node_engine: Path) -> None:
    found = describe(node_engine)
    assert (found["model_params_bytes"], found["context_params_bytes"]) == (80, 160)
    assert {"Vulkan0", "CPU"} <= set(found["devices"])


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = next(locate.installed()).path
    for name in ("given", "named"):
        (tmp_path / name / "build" / "bin").mkdir(parents=True)
        (tmp_path / name / "build" / "bin" / "libllama.so").symlink_to(library)
    monkeypatch.setenv(locate.ENVIRONMENT, str(tmp_path / "named"))
    assert locate.find(str(tmp_path / "given")).path.is_relative_to(tmp_path / "given")
    assert locate.find(None).path.is_relative_to(tmp_path / "named")
    monkeypatch.delenv(locate.ENVIRONMENT)
    assert locate.find(None).label.startswith("xllamacpp ")


def test_engines_that_cannot_be_used(tmp_path: Path) -> None:
    text = tmp_path / "libllama.so"
    text.write_text("not a library")
    other = tmp_path / "libllama.foreign.so"
    # An ELF header of a 32-bit ARM library.
    other.write_bytes(b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x03\x00\x28\x00" + bytes(60))
    empty = tmp_path / "empty"
    empty.mkdir()
    libm = next(
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "libm" in line
    )
    for path, why in [
        (tmp_path / "nothing", "no such file"),
        (empty, "no libllama"),
        (text, "not a library for this processor"),
        (other, "not a library for this processor"),
        (libm, "has no llama_model_default_params"),
    ]:
        with pytest.raises(EngineProblem, match=why):
            Engine.find(str(path))


def test_a_library_for_a_newer_system_is_named_as_such() -> None:
    said = "/lib/x86_64-linux-gnu/libm.so.6: version `GLIBC_2.38' not found (required by /x/libllama.so)"
    assert "needs GLIBC_2.38, this system has glibc" in _why_not(said)
