"""Remote devices: `RPC0[host:port]` names become devices of the engine, if the host answers."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import EngineProblem, MachineError
from planner.plan.load_spec import LoadSpec, devices_of, map_devices
from runtime.engine.libllama import Engine

_REMOTE = re.compile(r"(RPC\d*)\[(?P<host>.+):(?P<port>\d+)\]")
_TIMEOUT_S = 5.0


@dataclass(eq=False)
class HostDown(MachineError):
    """A remote device whose server does not answer."""

    endpoint: str
    why: str

    def message(self) -> str:
        return f"{self.endpoint}: no RPC server answers ({self.why}): start ggml-rpc-server there"


def endpoints(names: Sequence[str]) -> tuple[str, ...]:
    """The servers that these device names stand for, each once, in order."""
    found = [f"{m['host']}:{m['port']}" for name in names if (m := _REMOTE.fullmatch(name))]
    return tuple(dict.fromkeys(found))


def connect(engine: Engine, spec: LoadSpec) -> tuple[LoadSpec, Mapping[str, str]]:
    """Register the servers a spec names; the spec in the engine's device names, and which became which.

    Raises HostDown before the engine is asked, which would abort, and EngineProblem for a build
    without RPC.
    """
    names = devices_of(spec)
    for endpoint in endpoints(names):
        _greet(endpoint)
        _register(engine, endpoint)
    here = dict(_registered(engine))
    mapping = {name: _match(name, here) for name in names if _REMOTE.fullmatch(name)}
    return (map_devices(spec, mapping) if mapping else spec), mapping


def register(engine: Engine, names: Iterable[str]) -> None:
    """Make the remote devices among these names known to the engine; raises as `connect` does."""
    for endpoint in endpoints(tuple(names)):
        _greet(endpoint)
        _register(engine, endpoint)


def _match(name: str, here: Mapping[str, str]) -> str:
    """The engine's name of a remote device: its number may have changed, its server has not."""
    endpoint = name[name.index("[") :]
    return here.get(name) or next(device for buffer, device in here.items() if buffer.endswith(endpoint))


def _greet(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S):
            return
    except OSError as problem:
        raise HostDown(endpoint, problem.strerror or str(problem)) from None


def _register(engine: Engine, endpoint: str) -> None:
    if not engine.has("ggml_backend_rpc_add_server"):
        raise EngineProblem(engine.label, f"has no RPC backend for {endpoint}")
    if any(name.endswith(f"[{endpoint}]") for name in dict(_registered(engine))):
        return
    reg = engine.lib.ggml_backend_rpc_add_server(endpoint.encode())
    if not reg:
        raise HostDown(endpoint, "it speaks another protocol")
    engine.lib.ggml_backend_register(reg)


def _registered(engine: Engine) -> list[tuple[str, str]]:
    """Plan name and engine name of the remote devices: the first is the name of their buffer type."""
    return [
        (buffer, device.name)
        for device in engine.ggml.devices()
        for buffer in engine.ggml.buffer_types(device)
        if _REMOTE.fullmatch(buffer)
    ]
