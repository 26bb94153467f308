"""Models that lie elsewhere: real requests to servers of this machine, which answer as servers may."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from terminals import on_a_terminal

from atsplan import main
from commands.demo import write_moe
from commands.fit import remote
from commands.fit.remote import Guard, Refused, RemoteBytes, read_remote, reference
from planner.errors import AtsplanError, FileProblem
from planner.model.gguf.reader import read_model

Answer = Callable[["Handler", bytes, int, int], None]
MACHINE = ("--machine", "rtx4060-8gb-ddr5")


class Handler(BaseHTTPRequestHandler):
    """Answers by the first part of the path; the file is that of the server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.asked.append((self.path, dict(self.headers)))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(match[1]), int(match[2])) if match else (0, len(server.data) - 1)
        kind = self.path.split("/")[1]
        ANSWERS.get(kind, absent)(self, server.data, first, min(last, len(server.data) - 1))

    def head(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    data = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []

    def handle_error(self, *_: object) -> None:
        """Who hangs up on an endless answer is no error of this server."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def ranges(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first}-{last}/{len(data)}")
    handler.wfile.write(data[first : last + 1])


def whole(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(200, len(data))
    handler.wfile.write(data)


def broken(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first}-{last}/{len(data)}")
    handler.wfile.write(data[first : first + 1000])
    handler.close_connection = True


def longer(handler: Handler, data: bytes, first: int, last: int) -> None:
    """The length of the whole is another one each time."""
    size = len(data) + len(handler.server.asked)  # type: ignore[attr-defined]
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first}-{last}/{size}")
    handler.wfile.write(data[first : last + 1])


def other_bytes(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first + 7}-{last + 7}/{len(data)}")
    handler.wfile.write(data[first : last + 1])


def fewer(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, 10, Content_Range=f"bytes {first}-{first + 9}/{len(data)}")
    handler.wfile.write(data[first : first + 10])


def no_length(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first)
    handler.wfile.write(data[first : last + 1])


def absurd(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first}-{last}/{10**14}")
    handler.wfile.write(data[first : last + 1])


def endless(handler: Handler, data: bytes, first: int, last: int) -> None:
    """A body that never ends behind a header that is right: no more is read than was asked for."""
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
    handler.end_headers()
    handler.wfile.write(data[first : last + 1])
    while True:
        handler.wfile.write(b"x" * 65536)


def drip(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first}-{last}/{len(data)}")
    while True:
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def slowly(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(206, last + 1 - first, Content_Range=f"bytes {first}-{last}/{len(data)}")
    for at in range(first, last + 1, 1 << 18):
        handler.wfile.write(data[at : min(at + (1 << 18), last + 1)])
        handler.wfile.flush()
        time.sleep(0.1)


def slow_head(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.wfile.write(b"HTTP/1.1 206 Partial\r\n")
    while True:
        handler.wfile.write(b"X-More: 1\r\n")
        handler.wfile.flush()
        time.sleep(1)


def page(handler: Handler, data: bytes, first: int, last: int) -> None:
    text = b"<!doctype html><title>Log in</title>"
    handler.head(206, len(text), Content_Range=f"bytes 0-{len(text) - 1}/{len(text)}")
    handler.wfile.write(text)


def header_bomb(handler: Handler, data: bytes, first: int, last: int) -> None:
    """A header that says it goes on for a long time, of a file that says it is as long."""
    start = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    start += (1).to_bytes(8, "little") + b"a" + (8).to_bytes(4, "little") + (10**10).to_bytes(8, "little")
    body = (start + b"x" * (last + 1))[first : last + 1]
    handler.head(206, len(body), Content_Range=f"bytes {first}-{last}/{2 * 10**10}")
    handler.wfile.write(body)


def to(place: str) -> Answer:
    def answer(handler: Handler, data: bytes, first: int, last: int) -> None:
        handler.head(302, 0, Location=place)

    return answer


def absent(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(404, 0)


def secret(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(401, 0)


def ill(handler: Handler, data: bytes, first: int, last: int) -> None:
    handler.head(503, 0)


ANSWERS: dict[str, Answer] = {
    "ranges": ranges,
    "whole": whole,
    "broken": broken,
    "longer": longer,
    "other": other_bytes,
    "fewer": fewer,
    "nolength": no_length,
    "absurd": absurd,
    "endless": endless,
    "drip": drip,
    "slowhead": slow_head,
    "slowly": slowly,
    "page": page,
    "bomb": header_bomb,
    "secret": secret,
    "ill": ill,
    "owner": ranges,
    "moved": to("/ranges/model.gguf"),
    "circle": to("/circle/model.gguf"),
    "file": to("file:///etc/passwd"),
    "ftp": to("ftp://example.org/a"),
    "data": to("data:,GGUF"),
    "login": to("http://user:word@127.0.0.1:1/a"),
    **{f"hop{n}": to(f"/hop{n + 1}/model.gguf") for n in range(9)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("remote") / "model.gguf"
    write_moe(path)
    return path


@pytest.fixture
def server(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    opened = Server()
    opened.data = model.read_bytes()
    thread = threading.Thread(target=opened.serve_forever, daemon=True)
    thread.start()
    yield opened
    opened.shutdown()
    opened.server_close()


def fit(*words: str) -> Result:
    return CliRunner().invoke(main, ["fit", *words])


def read(url: str) -> AtsplanError | None:
    """What is wrong with the model at an address, if anything."""
    found = reference(url)
    assert found is not None
    try:
        read_remote(found)
    except AtsplanError as problem:
        return problem
    return None


@pytest.mark.parametrize("kind", ["ranges", "moved", "endless", "hop4"])
def test_the_header_is_that_of_the_file(
    server: Server, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "hop6", ranges)
    found = reference(f"{server.url}/{kind}/model.gguf")
    assert found is not None
    far, near = read_remote(found), read_model(model)
    assert far.inventory == near.inventory and far.notes == near.notes
    assert all("Authorization" not in headers and "Cookie" not in headers for _, headers in server.asked)


def test_only_the_beginning_is_fetched(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST", 4096)
    server.data += bytes(50 * 2**20)
    assert read(f"{server.url}/ranges/model.gguf") is None
    fetched = [re.findall(r"\d+", headers["Range"]) for _, headers in server.asked]
    assert max(int(last) for _, last in fetched) < 2**20


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("whole", 3, "knows no range requests: download the file"),
        ("broken", 3, "broke off after 1000 of "),
        ("longer", 3, "the file changed while it was read"),
        ("other", 3, "the server sent 7 to "),
        ("fewer", 3, "the server sent 0 to 9"),
        ("nolength", 3, "without saying which bytes"),
        ("absurd", 3, "of its length what cannot be"),
        ("page", 2, "not a GGUF but an HTML page"),
        ("bomb", 3, "the header is longer than 64 MiB"),
        ("circle", 3, "redirects in a circle, or more than 5 times"),
        ("hop0", 3, "redirects in a circle, or more than 5 times"),
        ("file", 3, "leads to file:///etc/passwd: only https is followed"),
        ("ftp", 3, "leads to ftp://example.org/a: only https is followed"),
        ("data", 3, "only https is followed"),
        ("login", 3, "names and passwords in addresses are not sent"),
        ("absent", 2, "the server answers 404 (is not there)"),
        ("secret", 2, "the server answers 401 (needs a login)"),
        ("ill", 3, "the server answers 503"),
    ],
)
def test_other_answers_are_one_line(
    server: Server, kind: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST", 4096)
    found = fit(f"{server.url}/{kind}/model.gguf", *MACHINE)
    assert (found.exit_code, found.stdout) == (code, ""), found.output
    assert said in found.stderr and len(found.stderr.splitlines()) == 1
    assert f"{server.url}/{kind}/model.gguf: " in found.stderr


def test_a_header_that_comes_slowly_is_watched(server: Server) -> None:
    """Bytes come of those that are wanted, with the rate and the time that is left."""
    seen = on_a_terminal("fit", f"{server.url}/slowly/model.gguf", *MACHINE, "--json")
    assert seen.status == 0 and json.loads(seen.out), seen.screen
    told = re.findall(r"reading the header .*?(\d) of (\d) MiB(?:, \d+ MiB/s)? +(\S+)", seen.screen)
    assert told and len({left for _, _, left in told}) > 1, seen.screen
    assert "reading" not in seen.screen.splitlines()[-1]


def test_shards_that_are_to_come_are_wanted(model: Path, split_model: Path, server: Server) -> None:
    """What is wanted never falls behind what has come, and in the end is what came."""
    told: list[tuple[int, int]] = []
    folder = {path.name: path.read_bytes() for path in split_model.parent.glob("*.gguf")}

    def by_name(handler: Handler, data: bytes, first: int, last: int) -> None:
        mine = folder[handler.path.rpartition("/")[2]]
        ranges(handler, mine, first, min(last, len(mine) - 1))

    server.data = b"x" * max(map(len, folder.values()))
    ANSWERS["named"] = by_name
    found = reference(f"{server.url}/named/{split_model.name}")
    assert found is not None
    read_remote(found, lambda come, wanted: told.append((come, wanted)))
    assert all(come <= wanted for come, wanted in told) and told[-1][0] == told[-1][1]
    assert [come for come, _ in told] == sorted(come for come, _ in told)


@pytest.mark.parametrize("kind", ["drip", "slowhead"])
def test_no_server_keeps_it_waiting(server: Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SECONDS", 1.0)
    problem = read(f"{server.url}/{kind}/model.gguf")
    assert problem is not None and "took longer than 1 s" in str(problem)


def test_nobody_listens() -> None:
    problem = read("http://127.0.0.1:9/model.gguf")
    assert problem is not None and problem.exit_code == 3 and "refused" in str(problem)


def test_a_public_address_does_not_lead_home() -> None:
    """The rule itself: tests have no public server."""
    public = Guard(own=False, scheme="https")
    for url in ("http://example.org/a", "file:///a", "gopher://a", "//a", "https:///a"):
        with pytest.raises(Refused):
            public.check_scheme(url)
    public.check_scheme("https://example.org/a")
    mine = Guard(own=True, scheme="https")
    with pytest.raises(Refused):
        mine.check_scheme("http://10.0.0.1/a")
    near = (
        "127.0.0.1",
        "10.1.2.3",
        "192.168.1.1",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
    )
    assert not any(map(remote._public, near)) and remote._public("1.1.1.1") and remote._public("2606:4700::1")


def test_a_connection_home_is_cut(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was typed counts as public: then this machine, found at the connection, is refused."""
    monkeypatch.setattr(Guard, "check_scheme", lambda self, url: None)
    with pytest.raises(OSError, match="this machine or its network"):
        RemoteBytes(f"{server.url}/ranges/model.gguf", time.monotonic() + 30, own=False)
    assert not server.asked


def test_a_repository_is_spelt_as_it_is_known(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    found = fit("hf:owner/a-repo/sub/model.gguf@v1.0", *MACHINE)
    assert found.exit_code == 0, found.output
    assert server.asked[0][0] == "/owner/a-repo/resolve/v1.0/sub/model.gguf"
    assert "next: download the model" in found.stderr and "largest context: " in found.stdout
    data = json.loads(fit("hf:owner/a-repo/model.gguf", *MACHINE, "--json").stdout)
    assert "--hf-repo owner/a-repo --hf-file model.gguf" in data["command"]


@pytest.mark.parametrize("text", ["hf:", "hf:owner/repo", "hf:owner/repo/model.bin", "hf:../../x/a.gguf"])
def test_what_is_no_reference_is_one_line(text: str) -> None:
    found = fit(text, *MACHINE)
    assert found.exit_code == 2 and "expected hf:owner/repo/file.gguf" in found.stderr


def test_shards_are_read_from_their_siblings(server: Server) -> None:
    problem = read(f"{server.url}/ranges/model-00001-of-00002.gguf")
    assert isinstance(problem, FileProblem) and "shards" in str(problem)
