"""The YAML that this program writes, read back: events of libyaml to plain values, in one pass.

Mappings, sequences and scalars only: no anchors, no tags, no dates, no second document, no key twice, at
most `MAX_DEPTH` levels. Plain values are read by the rules of YAML 1.1, as PyYAML writes them; spellings of
numbers that other readers take otherwise (`012`, `12:30`, `1_000`) are refused. Time and memory are linear
in the length of the text. Lines of values are looked up only when somebody asks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from planner.errors import FieldProblem

MAX_DEPTH = 16  # our own files have five levels
MAX_KEYS = 4096  # of one mapping; long lists are sequences
MAX_ITEMS = 1 << 17  # of one sequence; no field holds more than half of it
MAX_VALUES = 3 << 17  # in all sequences of a text; an inventory of 65536 tensors has fewer
MAX_DIGITS = 40  # of an integer; no field holds more than 19

Location = tuple[str | int, ...]
Plain = dict[str, Any] | list[Any] | str | int | float | bool | None

try:  # libyaml is some twenty times faster and gives the same events
    from yaml._yaml import CParser

    _parser: Callable[[str], Any] = CParser
except ImportError:  # pragma: no cover - PyYAML without libyaml
    _parser = yaml.SafeLoader

_SCALAR, _MAPPING_END, _SEQUENCE_END = yaml.ScalarEvent, yaml.MappingEndEvent, yaml.SequenceEndEvent
_RULES: dict[str, list[tuple[str, re.Pattern[str]]]] = yaml.SafeLoader.yaml_implicit_resolvers
_TAG = "tag:yaml.org,2002:"
_BOOLS = yaml.SafeLoader.bool_values
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?")


def read(text: str, path: str) -> dict[str, Any]:
    """The mapping that a text holds; FieldProblem names the line of what is wrong."""
    try:
        return _Reader(text, path).document()
    except yaml.MarkedYAMLError as problem:
        raise _not_yaml(problem, text, path) from None
    except (yaml.YAMLError, UnicodeError) as problem:
        raise FieldProblem(path, 0, "", f"not YAML: {' '.join(str(problem).split())}") from None


def spell(where: Location) -> str:
    """A place in a text as messages name it: `tensors[0].size_bytes`."""
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


class Lines:
    """Line numbers of the values in one YAML text.

    For the first question the text is read up to the answer, for the second as a whole, then no more.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._asked = False
        self._root: _Mark | None = None

    def of(self, *where: str | int) -> int:
        """Line (from 1) of the value at that path; of the nearest parent when it is not there."""
        if not self._asked:
            self._asked = True
            return _line_of(self._text, where)
        if self._root is None:
            events = _events(self._text)
            self._root = next((_mark(e, events) for e in events if isinstance(e, yaml.NodeEvent)), 1)
        line, node = _line(self._root), self._root
        for step in where:
            if isinstance(node, int):
                break
            children = node[1]
            if isinstance(children, dict) and str(step) in children:
                line, node = children[str(step)]
            elif isinstance(children, list) and isinstance(step, int) and step < len(children):
                node = children[step]
                line = _line(node)
            else:
                break
        return line


def _line_of(text: str, where: Location) -> int:
    """The line of one place: what lies behind it is not read."""
    events = _events(text)
    root: Any = next((e for e in events if isinstance(e, yaml.NodeEvent)), None)
    return 1 if root is None else _line_at(root, events, where, int(root.start_mark.line) + 1)


def _line_at(event: Any, events: Iterator[Any], where: Location, line: int) -> int:
    """The line of a place inside the value that `event` begins; `line`, its own, when it is not there."""
    if not where or not isinstance(event, yaml.CollectionStartEvent):
        return line
    mapping = isinstance(event, yaml.MappingStartEvent)
    for n, child in enumerate(events):
        if isinstance(child, yaml.CollectionEndEvent):
            break
        value = next(events) if mapping else child
        if (child.value == str(where[0])) if mapping else n == where[0]:
            return _line_at(value, events, where[1:], int(child.start_mark.line) + 1)
        _skip(value, events)
    return line


def _skip(event: Any, events: Iterator[Any]) -> None:
    """Pass what `event` begins."""
    depth = int(isinstance(event, yaml.CollectionStartEvent))
    while depth:
        inner = next(events)
        depth += isinstance(inner, yaml.CollectionStartEvent) - isinstance(inner, yaml.CollectionEndEvent)


# A scalar is its line; a sequence its line and items; a mapping its line and each key's line and value.
_Mark = int | tuple[int, list[Any] | dict[str, tuple[int, Any]]]


def _line(mark: _Mark) -> int:
    return mark if isinstance(mark, int) else mark[0]


def _events(text: str) -> Iterator[Any]:
    parser = _parser(text)
    while (event := parser.get_event()) is not None:
        yield event


def _mark(event: Any, events: Iterator[Any]) -> _Mark:
    """Lines of the value that `event` begins, of a text that `read` took or refused for what it says."""
    line: int = event.start_mark.line + 1
    if isinstance(event, yaml.MappingStartEvent):
        children: dict[str, tuple[int, Any]] = {}
        for key in events:
            at: int = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarEvent):
                break
            children.setdefault(key.value, (at, _mark(next(events), events)))
        return line, children
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        for item in events:
            if isinstance(item, yaml.SequenceEndEvent):
                break
            items.append(_mark(item, events))
        return line, items
    return line


class _Reader:
    """One text on its way to plain values."""

    def __init__(self, text: str, path: str) -> None:
        self._next = _parser(text).get_event
        self._path = path
        self._known: dict[str, Plain] = {}  # plain values recur a lot
        self._where: list[str | int] = []
        self._values = 0

    def document(self) -> dict[str, Any]:
        event = self._next()
        while isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
            event = self._next()
        if not isinstance(event, yaml.MappingStartEvent):
            if isinstance(event, yaml.NodeEvent):
                self._bare(event)
            raise FieldProblem(self._path, 1, "", "expected a mapping of keys at the top level")
        self._bare(event)
        found = self._mapping(event)
        while not isinstance(event, yaml.StreamEndEvent):
            event = self._next()
            if isinstance(event, yaml.DocumentStartEvent):
                raise self._wrong(event, "not YAML: but found another document")
        return found

    def _wrong(self, event: Any, why: str) -> FieldProblem:
        return FieldProblem(self._path, event.start_mark.line + 1, spell(tuple(self._where)), why)

    def _bare(self, event: Any) -> None:
        """Refuse what our own files never hold: aliases, anchors, tags."""
        if event.anchor is not None:
            raise self._wrong(event, "YAML aliases are not used here")
        if event.tag is not None:
            raise self._wrong(event, f"not YAML as it is read here: tags such as {event.tag} are not used")

    def _value(self, event: Any) -> Plain:
        kind = type(event)
        if kind is _SCALAR:
            if event.anchor is None and event.tag is None:
                text: str = event.value
                if not event.implicit[0] or text[:1] not in _RULES:
                    return text
                known = self._known
                if text not in known:
                    known[text] = self._resolved(event, text, _RULES[text[:1]])
                return known[text]
            self._bare(event)
        self._bare(event)
        if len(self._where) > MAX_DEPTH:
            raise self._wrong(event, f"more than {MAX_DEPTH} levels")
        return self._mapping(event) if kind is yaml.MappingStartEvent else self._sequence(event)

    def _mapping(self, start: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        get, where, value, end, scalar = self._next, self._where, self._value, _MAPPING_END, _SCALAR
        while type(key := get()) is not end:
            if type(key) is not scalar:
                raise self._wrong(key, "a key must be a word")
            name = key.value
            where.append(name)
            if name in found:
                raise self._wrong(key, "key appears twice")
            if key.anchor is not None or key.tag is not None:
                self._bare(key)
            found[name] = value(get())
            where.pop()
            if len(found) > MAX_KEYS:
                raise self._wrong(start, f"more than {MAX_KEYS} keys")
        return found

    def _sequence(self, start: Any) -> list[Any]:
        found: list[Any] = []
        get, where, value, end = self._next, self._where, self._value, _SEQUENCE_END
        while type(item := get()) is not end:
            where.append(len(found))
            found.append(value(item))
            where.pop()
            if len(found) > MAX_ITEMS:
                raise self._wrong(start, f"more than {MAX_ITEMS} entries")
        self._values += len(found)
        if self._values > MAX_VALUES:
            raise self._wrong(start, f"more than {MAX_VALUES} values in all")
        return found

    def _resolved(self, event: Any, text: str, rules: list[tuple[str, re.Pattern[str]]]) -> Plain:
        tag = next((tag.removeprefix(_TAG) for tag, rule in rules if rule.match(text)), "")
        if not tag:
            return text
        if tag == "null":
            return None
        if tag == "bool":
            return _BOOLS[text.lower()]
        if tag == "int":
            return self._integer(event, text)
        if tag == "float":
            return self._float(event, text)
        raise self._wrong(event, f"write {_short(text)} in quotes")  # a date, `=`, `<<`

    def _integer(self, event: Any, text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise self._wrong(event, f"write {_short(text)} as a plain decimal integer")
        if len(text) > MAX_DIGITS:
            raise self._wrong(event, f"a number of {len(text)} digits")
        return int(text)

    def _float(self, event: Any, text: str) -> float:
        if not _FLOAT.fullmatch(text):
            raise self._wrong(event, f"write {_short(text)} as a plain decimal number")
        value = float(text)
        if math.isinf(value):
            raise self._wrong(event, f"{_short(text)} is larger than any number here")
        return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}…"


def _not_yaml(problem: yaml.MarkedYAMLError, text: str, path: str) -> FieldProblem:
    line = problem.problem_mark.line + 1 if problem.problem_mark else 0
    lines = text.splitlines()
    tab = 0 < line <= len(lines) and "\t" in lines[line - 1]
    why = "a tab: YAML is indented with spaces" if tab else f"not YAML: {problem.problem}"
    return FieldProblem(path, line, "", why)
