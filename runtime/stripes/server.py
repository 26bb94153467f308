"""llama-server in this process, with striped experts: python -m runtime.stripes.server ENGINE WIDTHS ARGS…

ENGINE is a folder of a shared llama.cpp build with libllama-server-impl, WIDTHS a JSON object of device
names to tensors to hot experts, ARGS are llama-server's own. The server builds its load parameters
itself, so that the hook of runtime.stripes.server_hook tells it about stripes.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from planner.errors import AtsplanError, EngineProblem
from planner.quoting import terminal
from runtime.child.environment import python
from runtime.engine.libllama import Engine, load_library
from runtime.stripes.buffer_type import Stripes
from runtime.stripes.server_hook import striped_weights

_MAIN = "_Z12llama_serveriPPc"  # int llama_server(int, char **)
_NAMES = ("libllama-server-impl.so", "libllama-server-impl.so.0")


def serve(engine: Engine, widths: Mapping[str, Mapping[str, int]], arguments: Sequence[str]) -> int:
    """Run the server until it ends; its exit status.

    Raises EngineProblem when the build has no server library, StripesRefused without stripes.
    """
    main = _main(engine)
    words = [b"llama-server", *(os.fsencode(argument) for argument in arguments)]
    argv = (c.c_char_p * (len(words) + 1))(*words, None)
    with Stripes(engine.ggml) as stripes, ExitStack() as stack:
        for device, hot in widths.items():
            stack.enter_context(striped_weights(stripes, device, hot, on_made=lambda: _tell(stripes)))
        status: int = main(len(words), argv)
        stripes.check()
    return status


def command(folder: Path, widths: Mapping[str, Mapping[str, int]], arguments: Sequence[str]) -> list[str]:
    """The arguments of this Python that run `serve` with the build in `folder`."""
    return python("-m", "runtime.stripes.server", str(folder), json.dumps(widths), *arguments)[1:]


def server_library(folder: Path) -> Path | None:
    """The library of a build that holds llama-server, if any."""
    return next((folder / name for name in _NAMES if (folder / name).exists()), None)


def _main(engine: Engine) -> Any:
    path = server_library(engine.path.parent)
    if path is None:
        raise EngineProblem(engine.label, "has no libllama-server-impl: stripes cannot be served with it")
    try:
        main = getattr(load_library(path, engine.label), _MAIN)
    except AttributeError:
        raise EngineProblem(engine.label, f"{path.name} has no llama_server(int, char **)") from None
    main.argtypes, main.restype = (c.c_int, c.c_void_p), c.c_int
    return main


def _tell(stripes: Stripes) -> None:
    for held in stripes.held():
        sizes = f"{held.device_bytes >> 20} MiB there, {held.host_bytes >> 20} MiB pinned on the host"
        line = terminal(f"stripes on {held.device}: {held.tensors} tensors, {sizes}")
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(serve(Engine.find(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))
    except AtsplanError as problem:
        print(problem, file=sys.stderr)
        sys.exit(problem.exit_code)
