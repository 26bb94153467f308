"""What a child inherits: nothing that has code looked for in the folder where this program happens to run.

People start it inside downloads. An empty or relative entry of a search path means the current folder, and so
does Python's own habit of putting that folder first for `-m` and `-c`: there `json.py` or `libggml.so` of a
stranger would be run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Variables that lead to code: folders of programs, libraries, modules and drivers, and single files of them.
SEARCHED = (
    "PATH",
    "PYTHONPATH",
    "PYTHONPYCACHEPREFIX",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "DYLD_FALLBACK_LIBRARY_PATH",
    "DYLD_FRAMEWORK_PATH",
    "DYLD_FALLBACK_FRAMEWORK_PATH",
    "GGML_BACKEND_PATH",
    "GGML_METAL_PATH_RESOURCES",
    "PYTHONHOME",
    "PYTHONUSERBASE",
    "GCONV_PATH",  # of the C library's converters, which are libraries
    "OPENSSL_CONF",  # names libraries to load
    "OPENSSL_MODULES",
    "OPENSSL_ENGINES",
    "CPATH",  # of compilers, as the next ones
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "OBJC_INCLUDE_PATH",
    "OCL_ICD_VENDORS",
    "OCL_ICD_FILENAMES",
    "ROCM_PATH",
    "HIP_PATH",
    "CUDA_PATH",
    "CUDA_HOME",
    "MPLCONFIGDIR",
    "CUDA_CACHE_PATH",
    "VK_ICD_FILENAMES",
    "VK_DRIVER_FILES",
    "VK_ADD_DRIVER_FILES",
    "VK_LAYER_PATH",
    "VK_ADD_LAYER_PATH",
    "VK_IMPLICIT_LAYER_PATH",
    "VK_ADD_IMPLICIT_LAYER_PATH",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_CONFIG_DIRS",
    "XDG_DATA_HOME",
    "XDG_DATA_DIRS",
)
_HERE = ("", ".", "./")  # left out without a word: mostly the empty entry of `$LD_LIBRARY_PATH:/opt/lib`
_SAFE_PATH = "PYTHONSAFEPATH"  # Python does not put the current folder first; its own children neither


def cleaned(variables: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables without the relative entries of search paths, and a sentence on each that was spelt out."""
    kept, sentences = dict(variables), []
    for name in SEARCHED:
        if name not in variables:
            continue
        between = "[:;]" if name.startswith("LD_") else re.escape(os.pathsep)
        entries = re.split(between, variables[name])
        absolute = [entry for entry in entries if _absolute(entry)]
        if len(absolute) == len(entries):
            continue
        if absolute:
            kept[name] = os.pathsep.join(absolute)
        else:
            del kept[name]
        left_out = [entry for entry in entries if not _absolute(entry) and entry not in _HERE]
        sentences += [f"{name}: {entry} is left out: only absolute paths lead to code" for entry in left_out]
    return kept, tuple(sentences)


def import_path() -> list[str]:
    """Where children find modules: as this process does, without the current folder unless it was named.

    Named is a folder that PYTHONPATH spells out, and the one that holds this program itself.
    """
    root = str(Path(__file__).absolute().parents[2])
    named = {root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    found = [entry for entry in sys.path if _passed_on(entry) and (entry in named or not _is_here(entry))]
    return found if root in found else [root, *found]


def environment() -> dict[str, str]:
    """The variables of a child: clean search paths, this import path, no debugger on aborts of an engine."""
    ours = {"GGML_NO_BACKTRACE": "1", _SAFE_PATH: "1", "PYTHONPATH": os.pathsep.join(import_path())}
    return cleaned(os.environ)[0] | ours


def python_program() -> Path:
    """This Python."""
    return Path(sys.executable)


def python(*words: str) -> list[str]:
    """A command for this Python that leaves the current folder off its import path."""
    return [sys.executable, "-P", *words]


@contextmanager
def isolated() -> Iterator[None]:
    """Inside the block this process's own variables and import path are those of `environment`.

    For libraries that start Python by themselves.
    """
    variables, path = dict(os.environ), list(sys.path)
    _become(environment(), import_path())
    try:
        yield
    finally:
        _become(variables, path)


def _become(variables: Mapping[str, str], path: list[str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    sys.path[:] = path


def _absolute(entry: str) -> bool:
    # The loader's own word for the folder of the program or library that is loading.
    return Path(entry).is_absolute() or entry.startswith(("$ORIGIN", "${ORIGIN}"))


def _passed_on(entry: str) -> bool:
    # A separator inside a name would cut it into two entries, the second of them relative.
    return Path(entry).is_absolute() and os.pathsep not in entry


def _is_here(entry: str) -> bool:
    try:
        return Path(entry).samefile(Path.cwd())
    except OSError:  # no such folder, or the current one is gone
        return False
