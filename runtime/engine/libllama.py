"""libllama through ctypes: found, loaded on request, its structs measured, nothing global.

`Engine.find()` gives an object that owns the library handle, the prototypes and the two parameter
layouts. A library that cannot be understood is refused with what was found and how to proceed.
"""

from __future__ import annotations

import ctypes as c
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.errors import EngineProblem, FileProblem
from planner.files import why_not
from planner.machine.engine_builds import build_number
from runtime.cache import libraries
from runtime.engine import locate, structs
from runtime.engine.ggml import Ggml
from runtime.engine.prototypes import bind


class Override(c.Structure):
    """struct llama_model_tensor_buft_override; a NULL pattern ends the array."""

    _fields_ = (("pattern", c.c_char_p), ("buft", c.c_void_p))


class Batch(c.Structure):
    """struct llama_batch."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.c_void_p),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.c_void_p),
    )


class ChatMessage(c.Structure):
    """struct llama_chat_message."""

    _fields_ = (("role", c.c_char_p), ("content", c.c_char_p))


class ChainParams(c.Structure):
    """struct llama_sampler_chain_params."""

    _fields_ = (("no_perf", c.c_bool),)


LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
EVAL = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)

# M and C are the model and context parameters of the loaded build, A a batch, S chain parameters.
PROTOTYPES: Mapping[str, str] = {
    "llama_backend_init": "v",
    "llama_version": "s",
    "llama_print_system_info": "s",
    "llama_log_set": "vpp",
    "llama_max_devices": "z",
    "llama_max_tensor_buft_overrides": "z",
    "llama_supports_gpu_offload": "b",
    "llama_supports_rpc": "b",
    "llama_model_load_from_file": "psM",
    "llama_model_load_from_splits": "ppzM",
    "llama_model_free": "vp",
    "llama_init_from_model": "ppC",
    "llama_free": "vp",
    "llama_get_model": "pp",
    "llama_model_get_vocab": "pp",
    "llama_model_n_layer": "ip",
    "llama_model_n_embd": "ip",
    "llama_model_size": "zp",
    "llama_model_n_params": "zp",
    "llama_model_desc": "ippz",
    "llama_model_chat_template": "sps",
    "llama_model_meta_val_str": "ipspz",
    "llama_model_has_encoder": "bp",
    "llama_n_ctx": "Ip",
    "llama_n_batch": "Ip",
    "llama_set_n_threads": "vpii",
    "llama_set_warmup": "vpb",
    "llama_synchronize": "vp",
    "llama_decode": "ipA",
    "llama_batch_init": "Aiii",
    "llama_batch_free": "vA",
    "llama_get_logits": "pp",
    "llama_get_logits_ith": "ppi",
    "llama_get_memory": "pp",
    "llama_memory_clear": "vpb",
    "llama_memory_seq_rm": "bpiii",
    "llama_vocab_n_tokens": "ip",
    "llama_vocab_is_eog": "bpi",
    "llama_vocab_get_add_bos": "bp",
    "llama_vocab_bos": "ip",
    "llama_vocab_type": "ip",
    "llama_vocab_get_text": "spi",
    "llama_tokenize": "ipsipibb",
    "llama_token_to_piece": "ipipiib",
    "llama_chat_apply_template": "isPzbpi",
    "llama_sampler_chain_init": "pS",
    "llama_sampler_chain_add": "vpp",
    "llama_sampler_init_greedy": "p",
    "llama_sampler_init_dist": "pI",
    "llama_sampler_init_temp": "pf",
    "llama_sampler_init_top_k": "pi",
    "llama_sampler_init_top_p": "pfz",
    "llama_sampler_sample": "ippi",
    "llama_sampler_free": "vp",
}

# C++ names of functions that the public header does not have; a build may lack them.
EXTENDED: Mapping[str, str] = {
    "_Z26llama_get_memory_breakdownPK13llama_context": "ppp",  # result through a hidden first pointer
    "_Z21llama_model_n_devicesPK11llama_model": "ip",
    "_Z22llama_model_get_devicePK11llama_modeli": "ppi",
    "_Z19llama_graph_reserveP13llama_contextjjj": "ppIII",
}


@dataclass(frozen=True, slots=True)
class Build:
    """What is known of a loaded library."""

    label: str  # package and version, or the given path
    path: str
    version: str  # llama_version(); the same for many builds
    commit: str  # ggml_commit(); "" when the build does not say
    model_params_bytes: int
    context_params_bytes: int
    stated: int = 0  # the number that the tools of the same build print; 0 when they do not know it

    @property
    def text(self) -> str:
        """One line for profiles, plans and messages: the build's number and commit where they are known."""
        commit = "" if self.commit == "unknown" else self.commit
        number = build_number(f"{self.label} {commit}") or self.stated
        told = "" if not number or str(number) in self.label else f"b{number}"
        more = ", ".join(filter(None, (told, commit)))
        return f"{self.label} ({more})" if more else self.label


class Engine:
    """One loaded llama.cpp: `lib` (C functions with types), `ggml`, and the parameter layouts."""

    def __init__(self, place: locate.Place, header: str = "") -> None:
        self.name = self.label = place.label
        self.path = place.path
        self.llama_h = place.llama_h
        library = load_library(place.path, place.label)
        self.lib: Any = library
        if not place.path.is_absolute():  # the system found it by its name; what lies beside it is needed too
            self.path = _loaded_from(library) or place.path
        self._model, self._model_raw = self._layout(structs.MODEL, "llama_model_default_params", header)
        self._context, self._context_raw = self._layout(
            structs.CONTEXT, "llama_context_default_params", header
        )
        self._bind(library)
        self.quiet()
        self.lib.llama_backend_init()
        self.ggml = Ggml(library, place.label)
        self._load_backends()
        self.label = self.build.text  # what goes wrong from here on is this build's doing

    @classmethod
    def find(cls, path: str | None = None, llama_h: Path | None = None) -> Engine:
        """Load an engine: `path` (library file or build folder), else ATSPLAN_ENGINE, else an installed one.

        `llama_h` names the header of a build whose struct layouts are not known here.
        Raises EngineProblem.
        """
        header = ""
        if llama_h is not None:
            try:
                header = llama_h.read_text(errors="replace")
            except OSError as problem:
                raise FileProblem(str(llama_h), why_not(problem)) from None
        return cls(replace(locate.find(path), llama_h=llama_h), header)

    @property
    def build(self) -> Build:
        """Name, version and struct sizes of the library."""
        return Build(
            label=self.name,
            path=str(self.path),
            version=_text(self.lib.llama_version()) if hasattr(self.lib, "llama_version") else "",
            commit="" if "ggml_commit" in self.ggml.missing else _text(self.lib.ggml_commit()),
            model_params_bytes=self._model.size_bytes,
            context_params_bytes=self._context.size_bytes,
            stated=_stated_number(self.path),
        )

    @property
    def has_moe_cache(self) -> bool:
        """Whether contexts take a MoE cache size (b11480 and later)."""
        return self.takes("moe_cache_size")

    def takes(self, field: str) -> bool:
        """Whether this build's parameter structs have a field; ctypes would set any other name silently."""
        return any(hasattr(layout.type, field) for layout in (self._model, self._context))

    @property
    def max_devices(self) -> int:
        """Most entries a device list and a tensor split may have."""
        return int(self.lib.llama_max_devices())

    def model_params(self) -> Any:
        """Fresh default model parameters."""
        return self._model.defaults(self._model_raw)

    def context_params(self) -> Any:
        """Fresh default context parameters."""
        return self._context.defaults(self._context_raw)

    def has(self, function: str) -> bool:
        """Whether the library exports a function."""
        return hasattr(self.lib, function)

    def quiet(self) -> None:
        """Send the library's log nowhere."""
        # getpagesize ignores its arguments and touches nothing: a sink that no thread can catch mid-way.
        self.lib.llama_log_set(c.cast(c.CDLL(None).getpagesize, c.c_void_p), None)

    @contextmanager
    def log(self, on_text: Callable[[int, str], None]) -> Iterator[None]:
        """Give every log fragment to `on_text(level, text)` inside the block; levels: 1 debug … 4 error."""

        def receive(level: int, text: bytes, _user: int | None) -> None:
            on_text(level, text.decode(errors="replace"))

        callback = LOG(receive)
        self.lib.llama_log_set(c.cast(callback, c.c_void_p), None)
        try:
            yield
        finally:
            self.quiet()

    def _layout(self, struct: str, function: str, header: str) -> tuple[structs.Layout, bytes]:
        try:
            default_params = getattr(self.lib, function)
        except AttributeError:
            raise EngineProblem(self.label, f"{self.path} is no libllama: it has no {function}") from None
        return structs.layout_of(struct, default_params, self.label, header)

    def _bind(self, library: c.CDLL) -> None:
        extra = {
            "M": self._model.type,
            "C": self._context.type,
            "A": Batch,
            "S": ChainParams,
            "P": c.POINTER(ChatMessage),
        }
        missing = set(bind(library, PROTOTYPES, extra)) - {"llama_version"}
        if missing:
            raise EngineProblem(self.label, f"this build lacks {', '.join(sorted(missing))}")
        bind(library, EXTENDED)

    def _load_backends(self) -> None:
        # Builds with loadable backends start with none; the others have theirs linked in.
        if self.lib.ggml_backend_dev_count() == 0 and self.path.is_absolute():
            self.lib.ggml_backend_load_all_from_path(os.fsencode(self.path.parent))
        if self.lib.ggml_backend_dev_count() == 0:
            raise EngineProblem(self.label, f"no backend could be loaded from {self.path.parent}")


_FEWEST = 1000  # real numbers are larger
_NOT_FOUND = re.compile(r"(?P<name>[\w.+-]+): cannot open shared object file")


def load_library(path: Path, label: str) -> c.CDLL:
    """dlopen, bringing libraries of the same folder along; EngineProblem says why it cannot be.

    One in our own cache must be as it was kept there: UntrustedLibrary otherwise.
    """
    libraries.check(path)
    _load_cxx_runtime()
    tried: set[str] = set()
    while True:
        try:
            return c.CDLL(str(path))
        except UnicodeDecodeError:  # of the loader's own message, which quotes the path
            raise EngineProblem(label, "cannot be loaded") from None
        except OSError as problem:
            missing = _NOT_FOUND.search(str(problem))
            sibling = path.parent / missing["name"] if missing else path
            # Beside a mere name is the current folder, where nothing is ours.
            known = path.is_absolute() and sibling.exists()
            if missing is None or missing["name"] in tried or not known:
                raise EngineProblem(label, _why_not(str(problem))) from None
            tried.add(missing["name"])
            load_library(sibling, label)


def _stated_number(library: Path) -> int:
    """LLAMA_BUILD_NUMBER of the library that the tools share; builds from an archive have 0 or 1 there."""
    for path in sorted(library.parent.glob("libllama-common.so*")) if library.is_absolute() else ():
        try:
            number = c.c_int.in_dll(load_library(path, path.name), "LLAMA_BUILD_NUMBER").value
        except (EngineProblem, ValueError):
            continue
        return number if number > _FEWEST else 0
    return 0


class _SymbolInfo(c.Structure):
    """Dl_info of dladdr."""

    _fields_ = (("file", c.c_char_p), ("base", c.c_void_p), ("symbol", c.c_char_p), ("address", c.c_void_p))


def _loaded_from(library: c.CDLL) -> Path | None:
    """The file that holds libllama's first function; None when the loader does not say."""
    found = _SymbolInfo()
    if not hasattr(library, "llama_backend_init"):
        return None
    address = c.cast(library.llama_backend_init, c.c_void_p)
    if not c.CDLL(None).dladdr(address, c.byref(found)) or not found.file:
        return None
    path = Path(os.fsdecode(found.file))
    return path if path.is_absolute() else None


def _load_cxx_runtime() -> None:
    # A backend that carries C++ runtime symbols of its own must not become the first to define them.
    try:
        c.CDLL("libstdc++.so.6", mode=c.RTLD_GLOBAL)
    except OSError:
        return


def _why_not(problem: str) -> str:
    needs = re.search(r"version `(GLIBC\w*_[\d.]+)' not found", problem)
    if needs:
        import platform

        here = " ".join(platform.libc_ver())
        return f"needs {needs[1]}, this system has {here}: use another build, e.g. pip install xllamacpp"
    if any(said in problem for said in ("wrong ELF class", "invalid ELF header", "file too short")):
        return f"not a library for this processor: {problem}"
    return f"cannot be loaded: {problem}"


def _text(value: bytes | None) -> str:
    return value.decode(errors="replace") if value else ""
