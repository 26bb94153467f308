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
# A child process of its own for every question to an engine: they abort where others return an error.
ENVIRONMENT = {**os.environ, "GGML_NO_BACKTRACE": "1", "GGML_VK_VISIBLE_DEVICES": "0"}
_LIST_DEVICES = """
import sys
from runtime.libllama import Engine
print(*(device.name for device in Engine.find(sys.argv[1]).ggml.devices()))
"""


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it where engines are required."""
    text = f"{what}; python tests/get_engines.py fetches the engines"
    if os.environ.get("ATSPLAN_REQUIRE_ENGINES") == "1":
        pytest.fail(text)
    pytest.skip(text)


@cache
def device_names(engine: str) -> tuple[str, ...]:
    """The devices an engine shows on this machine, asked in a child process."""
    asked = subprocess.run(
        [sys.executable, "-c", _LIST_DEVICES, engine],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    if asked.returncode:
        missing(f"{engine} does not load: {(asked.stderr or str(asked.returncode)).strip().splitlines()[-1]}")
    return tuple(asked.stdout.split())


def _with_vulkan(folder: Path) -> Path:
    if not folder.is_dir():
        missing(f"no engine in {folder}")
    if "Vulkan0" not in device_names(str(folder)):
        missing("no Vulkan driver: apt-get install mesa-vulkan-drivers libvulkan1")
    return folder


@pytest.fixture(scope="session")
def vulkan_engine() -> Path:
    """Folder of a llama.cpp build that shows Vulkan0 here (in software when there is no GPU)."""
    return _with_vulkan(CACHE / "engine-vulkan" / "bin")


@pytest.fixture(scope="session")
def node_engine() -> Path:
    """Folder of another build with Vulkan, with loadable backends and other struct layouts."""
    return _with_vulkan(CACHE / "engine-node" / "bins" / "linux-x64-vulkan")


@pytest.fixture(scope="session")
def server_engine() -> Path:
    """The folder that holds a runnable llama-server and ggml-rpc-server."""
    folder = CACHE / "engine-vulkan" / "bin"
    for program in ("llama-server", "ggml-rpc-server"):
        if not os.access(folder / program, os.X_OK):
            missing(f"no {program} in {folder}")
    return folder
