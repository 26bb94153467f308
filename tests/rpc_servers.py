"""A ggml-rpc-server as a device that computes on the CPU, and plans moved onto it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import ENVIRONMENT

from planner.plan.plan import Plan
from runtime.tools.llama_server import free_port


@contextmanager
def rpc_serving(folder: Path, threads: int = 1) -> Iterator[str]:
    """A running server of the build in `folder`; its host:port."""
    with rpc_process(folder, threads) as (endpoint, _):
        yield endpoint


@contextmanager
def rpc_process(
    folder: Path, threads: int = 1, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The same with its process; at another address, and started by `within`, as a host of its own."""
    port = 50052 if within else free_port(host)
    command = [*within, str(folder / "ggml-rpc-server"), "-H", host, "-p", str(port), "-d", "CPU"]
    process = subprocess.Popen(
        [*command, "-t", str(threads)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**ENVIRONMENT, "LD_LIBRARY_PATH": str(folder)},
    )
    try:
        deadline = time.monotonic() + 30
        while not answers(port, host):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield f"{host}:{port}", process
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether anybody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def moved(plan: Plan, old: str, new: str) -> Plan:
    """The plan with a device called otherwise wherever it is named."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [renamed(each) for each in value]
        return value.replace(old, new) if isinstance(value, str) else value

    return Plan.model_validate(renamed(plan.model_dump()))


@pytest.fixture(scope="module")
def rpc_server(computing_server: Path) -> Iterator[str]:
    """A running ggml-rpc-server whose CPU this processor can run; its host:port."""
    with rpc_serving(computing_server) as endpoint:
        yield endpoint
