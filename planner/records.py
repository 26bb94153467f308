"""Records that live in files, and their one canonical YAML text.

Keys stand in the order of the record's fields, leaves are written in flow style, numbers are
plain integers where the meaning is bytes or nanoseconds; `load(dump(x)) == x` and
`dump(load(text)) == text` for every text that `dump` made. A text of an older schema is read as a
record of today's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationError,
)
from pydantic_core import CoreSchema
from yaml.representer import SafeRepresenter
from yaml.resolver import Resolver

from planner import quoting, yaml_reader
from planner.errors import FieldProblem
from planner.file_kinds import mistaken
from planner.yaml_reader import spell


class Record(BaseModel):
    """An immutable record: unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    instead: ClassVar[Mapping[str, str]] = {}  # keys that people expect in such a file: what says it here
    # From each older schema to the next: changes the plain values of a text, before they are validated.
    migrations: ClassVar[Mapping[int, Callable[[dict[str, Any]], None]]] = {}


def _shape(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not _SHAPE.fullmatch(value):
        raise ValueError("expected sizes such as 2048x768x128")
    return tuple(int(size) for size in value.split("x"))


# One line a tensor in the files: a shape is written as text, ne0 first.
Shape = Annotated[
    tuple[int, ...],
    BeforeValidator(_shape, json_schema_input_type=str),
    PlainSerializer(lambda sizes: "x".join(map(str, sizes)), return_type=str),
]


class _FirstOnly:
    """Ends a list at its first wrong entry: a million of them are one message, not a million."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


T = TypeVar("T")
Many = Annotated[tuple[T, ...], _FirstOnly()]

# Every number of a file has an upper bound: far above anything real, far below what the solver's sums
# (64 bits) and the engine's counts (32 bits) hold.
MAX_BYTES = 1 << 50  # a pebibyte
MAX_NS = 1 << 53  # 104 days; the largest whole number that every JSON reader holds
MAX_PPM = 10**9  # a thousandfold
MAX_COUNT = 2**31 - 1  # what the engine counts in
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Nanoseconds = Annotated[int, Field(ge=0, le=MAX_NS)]
Rate = Annotated[int, Field(ge=0, le=1 << 60)]  # bytes or operations a second
Ppm = Annotated[int, Field(ge=0, le=MAX_PPM)]  # a share or a factor in millionths
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

_TAG = "tag:yaml.org,2002:"
_WORDS = {"extra_forbidden": "unknown key", "missing": "is missing"}
_SHAPE = re.compile(r"[0-9]{1,18}(x[0-9]{1,18}){0,15}")

R = TypeVar("R", bound=Record)

try:  # libyaml is some twenty times faster and writes the same text
    _DUMPER: Any = yaml.CSafeDumper
except AttributeError:  # pragma: no cover - PyYAML without libyaml
    _DUMPER = yaml.SafeDumper
_tag: Any = Resolver().resolve  # that a reader would give a value


_BEGIN = (yaml.StreamStartEvent(), yaml.DocumentStartEvent(explicit=False))
_END = (yaml.DocumentEndEvent(explicit=False), yaml.StreamEndEvent())
_MAPPING, _SEQUENCE = (
    # By whether all parts are plain: then it stands on one line.
    {flat: start(None, f"{_TAG}{name}", True, flow_style=flat) for flat in (False, True)}
    for start, name in ((yaml.MappingStartEvent, "map"), (yaml.SequenceStartEvent, "seq"))
)
_MAPPING_END, _SEQUENCE_END = yaml.MappingEndEvent(), yaml.SequenceEndEvent()


def _put(value: Any, events: list[Any]) -> bool:
    """Append what the emitter is told of a plain value; whether it is a word or number without quotes."""
    at, flat = len(events), True
    if isinstance(value, dict):
        events.append(None)  # told when its parts are
        for key, each in value.items():
            flat &= _put(key, events)
            flat &= _put(each, events)
        events[at] = _MAPPING[flat]
        events.append(_MAPPING_END)
        return False
    if isinstance(value, list):
        events.append(None)
        for each in value:
            flat &= _put(each, events)
        events[at] = _SEQUENCE[flat]
        events.append(_SEQUENCE_END)
        return False
    event = _scalar(value)
    events.append(event)
    return not event.style


@lru_cache(maxsize=1 << 14, typed=True)
def _scalar(value: Any) -> yaml.ScalarEvent:
    """What the emitter is told of a text, a number, yes or no, or nothing; most values of a file recur.

    Texts with letters that are not printable stand in double quotes, where they can be spelt out.
    """
    if isinstance(value, str):
        text = quoting.utf8(value)
        node: Any = yaml.ScalarNode(f"{_TAG}str", text, style='"' if quoting.needs_escapes(text) else None)
    else:
        node = SafeRepresenter().represent_data(value)
    tags = [_tag(yaml.ScalarNode, node.value, way) for way in ((True, False), (False, True))]
    implicit = (tags[0] == node.tag, tags[1] == node.tag)  # without quotes, and in them
    return yaml.ScalarEvent(None, node.tag, implicit, node.value, style=node.style)


def dump(record: Record, header: str = "") -> str:
    """Canonical text of a record; `header` lines are written first as comments."""
    comments = "".join(quoting.comment("#", line) if line else "#\n" for line in header.splitlines())
    return comments + text_of(values_of(record))


def values_of(record: Record) -> dict[str, Any]:
    """The plain values of a record as its text has them, keys in order; what is None is left out."""
    return record.model_dump(mode="json", by_alias=True, exclude_none=True)


def text_of(values: Mapping[str, Any]) -> str:
    """Canonical YAML of plain values."""
    events: list[Any] = []
    _put(values, events)
    every = (*_BEGIN, *events, *_END)
    body: str = yaml.emit(every, Dumper=_DUMPER, width=2**31 - 1, allow_unicode=True)
    return quoting.yaml_escapes(body)


def load(text: str, kind: type[R], path: str) -> R:
    """Read a record from YAML text.

    Raises FieldProblem with the line for a syntax error, an unknown or missing key, a wrong type
    or value, a repeated key. Older schemas are brought to today's. `path` is only used in messages.
    """
    if not text.strip():
        raise FieldProblem(path, 0, "", "empty file")
    if why := mistaken(text, kind.__name__.lower()):
        raise FieldProblem(path, 1, "", why)
    data = yaml_reader.read(text, path)
    while (schema := schema_of(data)) in kind.migrations:
        kind.migrations[schema](data)
        data["schema"] = schema + 1
    try:
        # Strict validation from JSON accepts lists for tuples and strings for enums, and nothing else.
        return kind.model_validate_json(json.dumps(data, allow_nan=False), strict=True)
    except ValidationError as problem:
        raise _not_of_kind(problem, text, kind, path) from None
    except (TypeError, ValueError) as problem:
        raise FieldProblem(path, 0, "", str(problem)) from None


def schema_of(values: Mapping[str, Any]) -> int:
    """The number of the schema that plain values say they follow; 0 where they say none."""
    schema = values.get("schema")
    return schema if type(schema) is int else 0


def _not_of_kind(problem: ValidationError, text: str, kind: type[Record], path: str) -> FieldProblem:
    first = problem.errors(include_url=False)[0]
    where = tuple(first["loc"])
    line = yaml_reader.Lines(text).of(*where)
    if where == ("schema",) and first["type"] == "less_than_equal":
        why = f"{first['input']} was written by a newer atsplan; this one reads up to {first['ctx']['le']}"
        return FieldProblem(path, line, "schema", why)
    if where == ("schema",) and first["type"] == "greater_than_equal":
        why = f"{first['input']} is none; the oldest is {min(kind.migrations, default=first['ctx']['ge'])}"
        return FieldProblem(path, line, "schema", why)
    # A validator's own words are a sentence already, and may quote names.
    said = first["msg"].removeprefix("Value error, ")
    why = _WORDS.get(first["type"]) or (said if first["type"] == "value_error" else said.lower())
    if first["type"] == "extra_forbidden" and where[-1] in kind.instead:
        why += f": {kind.instead[str(where[-1])]}"
    return FieldProblem(path, line, spell(where), why)


def digest(*parts: str) -> str:
    """SHA-256 over text parts, as `sha256:` and 64 hex digits."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode())
        state.update(b"\0")
    return "sha256:" + state.hexdigest()
