"""What commands wrote of damaged files, read by parsers of their formats: names are data there too."""

from __future__ import annotations

import configparser
import json
import shlex
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import yaml

PAGE_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "script", "header", "main", "section", "footer"),
    *("div", "p", "h1", "h2", "ul", "li", "span", "strong", "b", "code", "pre", "button", "details"),
    *("summary", "label", "input", "output", "figure", "figcaption", "svg", "defs", "pattern", "rect"),
    *("line", "circle", "path", "g", "text"),
}
_HANDS_ON = {"href", "src", "style", "srcdoc", "action", "formaction", "xlink:href", "data"}
_PAGE = Path(__file__).parent.parent / "commands" / "page"


class PageReader(HTMLParser):
    """The elements of a page in order, what stands in its scripts and styles, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []  # tag, names of its attributes
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.texts: dict[str, list[str]] = {}  # by tag: what stands directly in each
        self.leading: set[str] = set()
        self.comments = 0
        self._open: list[str] = []
        self.feed(text)
        self.close()

    @property
    def tags(self) -> set[str]:
        """The names of all elements."""
        return {tag for tag, _ in self.elements}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = tuple(sorted(name for name, _ in attrs))
        self.elements.append((tag, names))
        self.leading |= {name for name in names if name in _HANDS_ON or name.startswith("on")}
        if tag not in ("meta", "input"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
            if tag in self.raw:
                self.raw[tag].append(self.texts[tag][-1])

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def page_fault(text: str) -> str:
    """What a page holds that is not ours; "" for nothing."""
    found = PageReader(text)
    ours = {"script": [(_PAGE / "page.js").read_text()], "style": [(_PAGE / "page.css").read_text()]}
    if odd := found.tags - PAGE_TAGS:
        return f"the page has a {min(odd)}"
    if found.leading:
        return f"the page has {min(found.leading)}"
    return "" if found.raw == ours and found.comments == 1 else "another script, style or comment in the page"


def _swap_fault(text: str) -> str:
    ((entry),) = yaml.safe_load(text)["models"].values()
    words = shlex.split(entry["cmd"])
    wanted = words[0] == "llama-server" and words[-4:] == ["--host", "127.0.0.1", "--port", "${PORT}"]
    return "" if wanted and set(entry) == {"cmd"} else f"llama-swap runs {words}"


def _compose_fault(text: str) -> str:
    services = yaml.safe_load(text)["services"]
    return "" if services["llama"]["ports"] == ["127.0.0.1:8080:8080"] and len(services) == 1 else "ports"


def _preset_fault(text: str) -> str:
    parser = configparser.RawConfigParser(default_section="\0", delimiters="=", strict=True)
    parser.read_string(text)
    return "" if len(parser.sections()) == 1 else f"sections {parser.sections()}"


def _json_fault(text: str) -> str:
    json.loads(text)
    return ""


def _python_fault(text: str) -> str:
    compile(text, "x.py", "exec")
    return ""


def _xml_fault(text: str) -> str:
    ElementTree.fromstring(text)
    return ""


def _script_fault(text: str) -> str:
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    return "" if len(lines) == 1 and shlex.split(lines[0]) else f"{len(lines)} commands"


_PRINTED: dict[str, Callable[[str], str]] = {
    "llama-swap": _swap_fault,
    "docker-compose": _compose_fault,
    "preset": _preset_fault,
    "json": _json_fault,
    "llama-cpp-python": _python_fault,
    "llama-bench": _script_fault,
    "--json": _json_fault,
}
_WRITTEN: dict[str, Callable[[str], str]] = {
    ".html": page_fault,
    ".sarif": _json_fault,
    ".xml": _xml_fault,
}


def output_fault(command: Sequence[str], answered: str, folder: Path) -> str:
    """What is wrong with the answer of a command and with the files it names; "" for nothing."""
    readers = [(_PRINTED[word], answered) for word in command if word in _PRINTED]
    for word in command:
        path = folder / word
        if path.suffix in _WRITTEN and path.is_file():
            readers.append((_WRITTEN[path.suffix], path.read_text(encoding="utf-8")))
    for read, text in readers:
        try:
            why = read(text)
        except Exception as problem:
            why = f"{type(problem).__name__}: {problem}"
        if why:
            return f"wrong output, {read.__name__.strip('_')}: {why}"
    return ""
