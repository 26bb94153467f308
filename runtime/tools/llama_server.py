"""llama-server as a child: started with a plan's options, watched until it answers, ended with its kin."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.errors import EngineProblem, MachineError
from runtime.child import process
from runtime.child.environment import environment, python_program
from runtime.child.process import Process
from runtime.child.taken_in import taking_in

LOOPBACK = "127.0.0.1"
_KEYS = ("--api-key", "--api-key-file")
_LINES = 2000
_PAUSE_S = 0.1
_BACKEND = re.compile(r"ggml-.*\.(so|dylib|dll)")
# Options of llama-server that take a path, and those that take several with commas between.
_PATHS = (
    *("-m", "--model", "-mm", "--mmproj", "-md", "--model-draft", "--spec-draft-model", "-mv"),
    *("--model-vocoder", "--models-dir", "--models-preset", "--grammar-file", "-jf", "--json-schema-file"),
    *("--chat-template-file", "--path", "--api-key-file", "--ssl-key-file", "--ssl-cert-file"),
    *("--slot-save-path", "--media-path", "--log-file", "--log-prompts-dir", "--mcp-servers-config"),
    *("--ui-config-file", "--webui-config-file", "-lcs", "--lookup-cache-static"),
    *("-lcd", "--lookup-cache-dynamic"),
)
_PATH_LISTS = ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled")


@dataclass(eq=False)
class NoPort(MachineError):
    """An address that cannot be listened on."""

    host: str
    port: int
    why: str

    def message(self) -> str:
        return f"cannot listen on {self.host}, port {self.port}: {self.why}: see --host and --port"


@dataclass(slots=True)
class Server:
    """A running llama-server."""

    process: Process
    host: str
    port: int
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    reader: threading.Thread | None = None  # fills the log

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def get(self, path: str) -> Mapping[str, Any]:
        """A JSON document of the server; OSError while it does not answer."""
        from urllib.request import urlopen

        with urlopen(self.url + path, timeout=10) as answer:
            found: Mapping[str, Any] = json.load(answer)
            return found

    def outlive(self) -> str:
        """Wait until it ends; why it did, with its most telling line."""
        code = self.process.wait()
        if self.reader:
            self.reader.join(5)
        return process.death(code, self.log)


def find_program(engine: str | None, name: str = "llama-server") -> Path:
    """The server program: beside the engine's library, below a build folder, or on PATH."""
    from shutil import which

    folders = []
    given = engine or os.environ.get("ATSPLAN_ENGINE")
    if given:
        path = Path(given).expanduser()
        folder = path.parent if path.is_file() else path
        folders = [folder, folder / "bin", folder / "build" / "bin"]
    for place in folders:
        if os.access(place / name, os.X_OK) and (place / name).is_file():
            return place / name
    found = which(name, path=environment().get("PATH", os.defpath))
    if found and not given:
        return Path(found)
    where = str(given) if given else "PATH"
    raise EngineProblem(
        name, f"not found in {where}: give the folder of a llama.cpp build with --engine PATH"
    )


@contextmanager
def serving(
    program: Path,
    arguments: Sequence[str],
    host: str = LOOPBACK,
    port: int = 0,
    on_line: Callable[[str], None] = lambda line: None,
    timeout_s: float = 600,
    more: Mapping[str, str] | None = None,
    on_loading: Callable[[int], None] = lambda taken: None,
) -> Iterator[Server]:
    """Start llama-server and wait until /health says ok; end its process group afterwards.

    `port` 0 takes a free one, `more` are variables for the program. `on_loading` hears, from another thread,
    how many bytes of files it has taken in, where the system tells. Raises NoPort when another program
    listens there, EngineProblem with the server's last message when it ends first or does not answer in time.
    """
    chosen = free_port(host, port)
    words = [*spelt(program, arguments), "--host", host, "--port", str(chosen)]
    folder = _folder(program)
    if folder is not None:
        words = _from(Path.cwd(), words)
    command = [str(program.absolute()), *words]
    child = process.start(command, one_log=True, cwd=folder, variables=_variables(program) | dict(more or {}))
    server = Server(child, host, chosen)
    server.reader = reader = threading.Thread(target=_read, args=(server, on_line), daemon=True)
    reader.start()
    try:
        with taking_in(child.pid, on_loading):
            _until_healthy(server, reader, timeout_s)
        yield server
    finally:
        process.end(child)
        reader.join(5)
        if child.stdout is not None:
            child.stdout.close()


def free_port(host: str, port: int = 0) -> int:
    """This TCP port, or any, if nobody listens on it now; NoPort says why not."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: connections of a former one that are still closing do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as problem:
        raise NoPort(host, port, problem.strerror or str(problem)) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on this address or name."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ip_address(each.partition("%")[0]).is_loopback for each in found)


def has_key(extra: Sequence[str]) -> bool:
    """Whether llama-server asks for a key: given by its options, or in the environment it inherits."""
    given = any(word in _KEYS and value for word, value in pairwise(extra))
    return given or bool(os.environ.get("LLAMA_API_KEY"))


def _until_healthy(server: Server, reader: threading.Thread, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = server.process.poll()
        if code is not None:
            reader.join(5)
            raise EngineProblem("llama-server", process.death(code, server.log))
        try:
            if server.get("/health").get("status") == "ok":
                return
        except (OSError, ValueError):
            time.sleep(_PAUSE_S)
    raise EngineProblem("llama-server", f"did not answer /health within {timeout_s:.0f} s")


def _read(server: Server, on_line: Callable[[str], None]) -> None:
    for raw in server.process.stdout or ():
        line = raw.decode(errors="replace").rstrip()
        server.log.append(line)
        on_line(line)


def spelt(program: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments as this build takes them: before --load-mode there was a switch for mapping the file,
    before --cache-ram no cache that needs a limit.
    """
    words = list(arguments)
    # Builds whose server can be loaded beside stripes are younger than that.
    if not {"--load-mode", "--cache-ram"} & set(words) or program == python_program():
        return words
    known = _help(program)
    if "--cache-ram" in words and "--cache-ram" not in known:
        at = words.index("--cache-ram")
        words = [*words[:at], *words[at + 2 :]]
    if "--load-mode" not in words or "--load-mode" in known:
        return words
    at = words.index("--load-mode")
    return [*words[:at], "--no-mmap" if words[at + 1] == "none" else "--mmap", *words[at + 2 :]]


def _help(program: Path) -> str:
    command = [str(program.absolute()), "--help"]
    return process.run(command, 60, _folder(program), _variables(program))[1]


def _folder(program: Path) -> Path | None:
    """Where the server is to run, when it may not run here.

    It looks for backends beside itself and in the current folder, and runs what it finds there.
    """
    strangers = any(_BACKEND.search(path.name) for path in Path.cwd().iterdir())
    return program.parent.absolute() if strangers else None


def _from(folder: Path, words: Sequence[str]) -> list[str]:
    """Arguments with the paths that are seen from `folder` made absolute."""
    made = []
    for before, word in zip(("", *words), words, strict=False):
        if before in _PATHS:
            word = str(folder / word)
        elif before in _PATH_LISTS:
            word = ",".join(str(folder / part) for part in word.split(","))
        made.append(word)
    return made


def _variables(program: Path) -> dict[str, str]:
    # Builds without a run path find their libraries beside the program.
    inherited = environment()
    path = filter(None, [str(program.parent.absolute()), inherited.get("LD_LIBRARY_PATH")])
    return inherited | {"LD_LIBRARY_PATH": os.pathsep.join(path)}
