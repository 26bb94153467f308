"""Engines beyond the embedded one, where tests find them; `python tests/get_engines.py` puts them there."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("ATSPLAN_TEST_CACHE", ROOT / ".cache"))
SERVER_BUILD = CACHE / "engine-vulkan" / "bin"
PORTABLE_BUILD = CACHE / "engine-portable" / "bin"
NODE_BUILD = CACHE / "engine-node" / "bins" / "linux-x64-vulkan"
# A child process of its own for every question to an engine: they abort where others return an error.
ENVIRONMENT = {**os.environ, "GGML_NO_BACKTRACE": "1", "GGML_VK_VISIBLE_DEVICES": "0"}
_LIST_DEVICES = """
import sys
from runtime.engine.libllama import Engine
print(*(device.name for device in Engine.find(sys.argv[1]).ggml.devices()))
"""


def python(*words: object, given: str | None = None, limit_s: int = 120) -> subprocess.CompletedProcess[str]:
    """What a child process of this Python said, started in the checkout; `given` is its standard input."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        input=given,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        cwd=ROOT,
        timeout=limit_s,
        check=False,
    )


def missing(what: str, remedy: str = "python tests/get_engines.py fetches the engines") -> NoReturn:
    """Skip the test, or fail it where engines, and all that tests need beside them, are required."""
    text = f"{what}; {remedy}"
    if os.environ.get("ATSPLAN_REQUIRE_ENGINES") == "1":
        pytest.fail(text)
    pytest.skip(text)


@cache
def device_names(engine: str) -> tuple[str, ...]:
    """The devices an engine shows on this machine, asked in a child process."""
    asked = python("-c", _LIST_DEVICES, engine)
    if asked.returncode:
        missing(f"{engine} does not load: {(asked.stderr or str(asked.returncode)).strip().splitlines()[-1]}")
    return tuple(asked.stdout.split())


@cache
def computes(engine: str) -> bool:
    """Whether the processor here has every instruction a build uses: it decodes a small model."""
    import tempfile

    from decode_models import decode_all

    from profiler.synth.synth import SynthSpec, write

    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder) / "probe.gguf", SynthSpec("llama", n_layers=1, type="q8_0"))
        return "error" not in decode_all([{"engine": engine, "model": str(model)}])[0]


def server_help(engine: Path) -> str:
    """What the llama-server of an engine's folder says of its options."""
    from runtime.tools.llama_server import find_program

    command = [str(find_program(str(engine))), "--help"]
    own = {**ENVIRONMENT, "LD_LIBRARY_PATH": str(engine)}
    return subprocess.run(command, capture_output=True, text=True, env=own, timeout=60, check=False).stdout


def _with_vulkan(folder: Path) -> Path:
    if not folder.is_dir():
        missing(f"no engine in {folder}")
    if "Vulkan0" not in device_names(str(folder)):
        missing("no Vulkan driver: apt-get install mesa-vulkan-drivers libvulkan1")
    return folder


def _that_computes() -> Path:
    """The newer build with a server where this processor has all its instructions, else the portable one."""
    for folder in (SERVER_BUILD, PORTABLE_BUILD):
        if not os.access(folder / "llama-server", os.X_OK):
            missing(f"no llama-server in {folder}")
        if computes(str(folder)):
            return folder
    missing(f"neither {SERVER_BUILD} nor {PORTABLE_BUILD} computes on this processor")


@pytest.fixture(scope="session")
def vulkan_engine() -> Path:
    """Folder of a llama.cpp build that shows Vulkan0 here (in software when there is no GPU) and computes."""
    return _with_vulkan(_that_computes())


@pytest.fixture(scope="session")
def portable_engine() -> Path:
    """Folder of the oldest build here, with a struct layout of its own."""
    if not PORTABLE_BUILD.is_dir():
        missing(f"no engine in {PORTABLE_BUILD}")
    return PORTABLE_BUILD


@pytest.fixture(scope="session")
def node_engine() -> Path:
    """Folder of a build with Vulkan, loadable backends, and another struct layout than the embedded one."""
    return _with_vulkan(NODE_BUILD)


@pytest.fixture(scope="session")
def server_engine() -> Path:
    """The folder of a runnable llama-server and ggml-rpc-server.

    They start, list devices and parse arguments everywhere; one that computes is `computing_server`.
    """
    for program in ("llama-server", "ggml-rpc-server"):
        if not os.access(SERVER_BUILD / program, os.X_OK):
            missing(f"no {program} in {SERVER_BUILD}")
    return SERVER_BUILD


@pytest.fixture(scope="session")
def computing_server() -> Path:
    """The folder of a llama-server and ggml-rpc-server whose CPU backend this processor can run."""
    return _that_computes()
