"""The header of a model that lies elsewhere, read by range requests: a few MiB, never the weights.

Followed are at most five redirects, from https to https only, and none from a public address to one of this
machine or its network. http is for addresses of this machine or its network. Nothing is sent but the request.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from planner.errors import FileProblem, MachineError, OptionProblem
from planner.quoting import short, uri

if TYPE_CHECKING:
    from planner.model.gguf.reader import ModelFile

MIB = 2**20
_FIRST, _MOST_AT_ONCE = MIB, 8 * MIB
MOST_HEADER = 64 * MIB  # the largest real ones have some 20
MOST_FILE = 1 << 44
MOST_SHARDS = 128
SECONDS = 60.0  # for all of one model
_SILENCE = 15.0
_REDIRECTS = 5
_HF = re.compile(
    r"hf:(?P<owner>\w[\w.-]*)/(?P<repo>\w[\w.-]*)/(?P<file>[^@]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """A model that lies elsewhere; `text` is what was typed."""

    text: str
    url: str
    words: tuple[str, ...] = ()  # by which llama-server fetches it itself

    @property
    def name(self) -> str:
        """The last part of its path: what it would be called here."""
        return self.url.partition("?")[0].rpartition("/")[2] or "model.gguf"


def reference(text: str) -> Reference | None:
    """What `https://…`, `http://…` or `hf:owner/repo/file` leads to; None for what is no reference."""
    if text.startswith("hf:"):
        match = _HF.fullmatch(text)
        if match is None or not match["file"].endswith(".gguf"):
            raise OptionProblem("MODEL", text, "expected hf:owner/repo/file.gguf, with @revision if need be")
        repo = f"{match['owner']}/{match['repo']}"
        site = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        path = uri(f"{repo}/resolve/{match['revision'] or 'main'}/{match['file']}")
        words = ("--hf-repo", repo, "--hf-file", match["file"]) if match["revision"] is None else ()
        return Reference(text, f"{site}/{path}", words)
    if text.lower().startswith(("https://", "http://")):
        return Reference(text, text)
    return None


def read_remote(found: Reference, tell: Callable[[int, int], None] = lambda come, wanted: None) -> ModelFile:
    """The headers of a model, all shards: FileProblem for what is no model, MachineError for the network.

    `tell` hears how many bytes have come, and how many are wanted as far as that is known.
    """
    from planner.model.gguf.reader import model_of, shard_of
    from planner.model.gguf.shards import ShardProblems, check_set, shard_paths

    ends = time.monotonic() + SECONDS
    with _told(found):
        own = _own(urlsplit(found.url).hostname or "")  # once: names may lead elsewhere the next time
        fetched = Fetched(tell)
        first = RemoteBytes(found.url, ends, own, fetched)
        start = shard_of(Path(found.name), first, len(first))
        paths = shard_paths(Path(found.name), start.header)
        if len(paths) > MOST_SHARDS:
            raise FileProblem(
                found.text, f"{len(paths)} shards: at most {MOST_SHARDS} are read from elsewhere"
            )
        fetched.wanted += (len(paths) - 1) * _FIRST
        shards = []
        for path in paths:
            if path == start.path:
                shards.append(start)
                continue
            fetched.wanted -= _FIRST  # asked for now
            data = RemoteBytes(urljoin(found.url, uri(path.name)), ends, own, fetched)
            shards.append(shard_of(path, data, len(data)))
        problems = check_set(paths, tuple(s.header for s in shards)) if len(paths) > 1 else ()
        if problems:
            raise ShardProblems(found.text, problems)
        return model_of(paths, tuple(shards))


@contextmanager
def _told(found: Reference) -> Iterator[None]:
    """Faults of the network as one line that names the reference."""
    try:
        yield
    except FileProblem as problem:
        raise FileProblem(found.text, problem.why) from None
    except Absent as problem:
        raise FileProblem(found.text, str(problem)) from None
    except (OSError, http.client.HTTPException) as problem:
        why = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or problem
        raise MachineError(f"{short(found.text, 200)}: {short(str(why), 200)}") from None


class Refused(OSError):
    """What a server answered is not taken."""


class Absent(Refused):
    """The server has no such file, or not for everybody."""


@dataclass
class Fetched:
    """Bytes of the headers of one model."""

    tell: Callable[[int, int], None] = lambda come, wanted: None
    come: int = 0
    wanted: int = 0  # asked for, and those of shards that will be at least

    def got(self, size: int) -> None:
        """Some of what is wanted has come."""
        self.come += size
        self.tell(self.come, self.wanted)


@dataclass
class RemoteBytes:
    """Bytes of a remote file as a parser reads them: what is asked for is fetched, its beginning once."""

    url: str
    ends: float  # on the monotonic clock
    own: bool  # what was typed is an address of this machine or its network
    fetched: Fetched = field(default_factory=Fetched)
    head: bytearray = field(default_factory=bytearray)
    size: int = -1

    def __post_init__(self) -> None:
        self._grow(1)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: slice) -> bytes:
        start, stop, _ = index.indices(self.size)
        if stop > len(self.head) and start >= max(len(self.head), MOST_HEADER):
            return self._fetch(start, stop - 1) if stop > start else b""
        self._grow(stop)
        return bytes(self.head[start:stop])

    def _grow(self, stop: int) -> None:
        """The head up to `stop`, and some more, so that few requests are made."""
        while len(self.head) < stop and (self.size < 0 or len(self.head) < self.size):
            if stop > MOST_HEADER:
                raise Refused(f"the header is longer than {MOST_HEADER // MIB} MiB")
            have = len(self.head)
            more = min(max(_FIRST, have, stop - have), _MOST_AT_ONCE)
            last = have + more - 1
            self.head += self._fetch(have, last if self.size < 0 else min(last, self.size - 1))

    def _fetch(self, first: int, last: int) -> bytes:
        """Bytes first to last, both included; Refused for any other answer than exactly these."""
        request = urllib.request.Request(
            self.url,
            headers={
                "Range": f"bytes={first}-{last}",
                "Accept-Encoding": "identity",
                "User-Agent": "atsplan",
            },
        )
        self.fetched.wanted += last - first + 1
        with _opened(request, self.ends, self.own) as (answer, url):
            start, end, whole = _answered(answer, first)
            if self.size >= 0 and whole != self.size:
                raise Refused("the file changed while it was read")
            if not first <= end <= last or start != first or end != min(last, whole - 1):
                raise Refused(f"asked for bytes {first} to {last}, the server sent {start} to {end}")
            self.size, self.url = whole, url
            self.fetched.wanted -= last - end  # a file may be shorter than the first request
            return _read(answer, end - first + 1, self.ends, self.fetched)


def _answered(answer: Any, first: int) -> tuple[int, int, int]:
    """Start, end and whole length of an answer; Refused where they are missing or absurd."""
    if answer.status == 200:
        raise Refused("the server knows no range requests: download the file, or ask for its inventory")
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
    if answer.status != 206 or match is None:
        raise Refused(f"answers {answer.status} without saying which bytes")
    start, end, whole = (int(each) for each in match.groups())
    if not (first <= end < whole <= MOST_FILE):
        raise Refused("says of its length what cannot be")
    return start, end, whole


def _read(answer: IO[bytes], size: int, ends: float, fetched: Fetched) -> bytes:
    """Exactly so many bytes; what comes beyond is not read."""
    found = bytearray()
    while len(found) < size:
        _in_time(ends)
        piece = answer.read1(min(size - len(found), MIB))  # type: ignore[attr-defined]
        if not piece:
            raise Refused(f"broke off after {len(found)} of {size} bytes")
        found += piece
        fetched.got(len(piece))
    return bytes(found)


def _in_time(ends: float) -> None:
    if time.monotonic() >= ends:
        raise Refused(f"took longer than {SECONDS:.0f} s")


@contextmanager
def _opened(request: urllib.request.Request, ends: float, own: bool) -> Iterator[tuple[Any, str]]:
    """The answer and where it came from. Whatever a server does, the connection ends when the time does."""
    _in_time(ends)
    guard = Guard(own, urlsplit(request.full_url).scheme)
    timer = threading.Timer(ends - time.monotonic(), guard.cut)
    timer.daemon = True
    opener = urllib.request.build_opener(_Http(guard), _Https(guard), _Redirects(guard))
    opener.addheaders = []
    timer.start()
    try:
        guard.check_scheme(request.full_url)
        with opener.open(request, timeout=_SILENCE) as answer:
            yield answer, answer.url
    except urllib.error.HTTPError as problem:
        if 300 <= problem.code < 400:
            raise Refused(f"redirects in a circle, or more than {_REDIRECTS} times") from None
        kind = Absent if 400 <= problem.code < 500 else Refused
        raise kind(_status(problem.code)) from None
    except OSError as problem:
        _in_time(ends)
        raise problem
    finally:
        timer.cancel()


def _status(code: int) -> str:
    known = {401: "needs a login", 403: "is not for everybody", 404: "is not there", 416: "is empty"}
    said = f" ({known[code]})" if code in known else ""
    return f"the server answers {code}{said}"


@dataclass
class Guard:
    """Where a request may go, and its connection, to be cut when the time is over."""

    own: bool  # what was typed is an address of this machine or its network
    scheme: str
    sockets: list[socket.socket] = field(default_factory=list)

    def check_scheme(self, url: str) -> None:
        """Refused for a scheme that may not follow."""
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise Refused(f"leads to {short(url, 100)}: only https is followed")
        if parts.scheme == "http" and not (self.own and self.scheme == "http"):
            raise Refused(f"leads to {short(url, 100)}: http is for this machine and its network, use https")
        if parts.username or parts.password:
            raise Refused("names and passwords in addresses are not sent")

    def check_peer(self, connected: socket.socket, through_proxy: bool) -> None:
        """Refused where a public address led to one of this machine or its network."""
        self.sockets.append(connected)
        if not through_proxy and not self.own and not _public(str(connected.getpeername()[0])):
            connected.close()
            raise Refused("leads to an address of this machine or its network")

    def cut(self) -> None:
        """End all connections: who waits for them is woken."""
        for each in self.sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_global


def _own(host: str) -> bool:
    """Whether every address of a typed host is of this machine or its network."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and not any(map(_public, found))


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _REDIRECTS
    max_repeats = 2

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        place = headers.get("Location")
        if place is not None:
            self.guard.check_scheme(urljoin(req.full_url, place))
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _Http(urllib.request.HTTPHandler):
    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def http_open(self, req: urllib.request.Request) -> Any:
        guard, proxied = self.guard, req.has_proxy()

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                guard.check_peer(self.sock, proxied)

        return self.do_open(Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def https_open(self, req: urllib.request.Request) -> Any:
        guard = self.guard

        class Connection(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                guard.check_peer(self.sock, self._tunnel_host is not None)  # type: ignore[attr-defined]

        return self.do_open(Connection, req)
