"""Records that live in files, and their one canonical YAML text.

Keys stand in the order of the record's fields, leaves are written in flow style, numbers are
plain integers where the meaning is bytes or nanoseconds; `load(dump(x)) == x` and
`dump(load(text)) == text` for every text that `dump` made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from planner import quoting
from planner.errors import FieldProblem
from planner.texts import mistaken


class Record(BaseModel):
    """An immutable record: unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    instead: ClassVar[Mapping[str, str]] = {}  # keys that people expect in such a file: what says it here


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
_WORDS = {"extra_forbidden": "unknown key", "missing": "is missing"}
_SHAPE = re.compile(r"[0-9]{1,18}(x[0-9]{1,18})*")

R = TypeVar("R", bound=Record)
Location = tuple[str | int, ...]

try:  # libyaml is some twenty times faster and writes the same text
    _LOADER: Any = yaml.CSafeLoader
    _DUMPER_BASE: Any = yaml.CSafeDumper
except AttributeError:  # pragma: no cover - PyYAML without libyaml
    _LOADER = yaml.SafeLoader
    _DUMPER_BASE = yaml.SafeDumper


class _Dumper(_DUMPER_BASE):  # type: ignore[misc]
    """Texts with letters that are not printable stand in double quotes, where they can be spelt out."""


def _text_node(dumper: Any, text: str) -> yaml.Node:
    text = quoting.utf8(text)
    style = '"' if quoting.needs_escapes(text) else None
    node: yaml.Node = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


_Dumper.add_representer(str, _text_node)

# PyYAML reads YAML 1.1, where `012` is ten and `12:30` seven hundred and fifty: other spellings are refused.
_PLAIN_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")


def dump(record: Record, header: str = "") -> str:
    """Canonical text of a record; `header` lines are written first as comments."""
    comments = "".join(quoting.comment("#", line) if line else "#\n" for line in header.splitlines())
    data = record.model_dump(mode="json", by_alias=True, exclude_none=True)
    body: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=2**31 - 1, allow_unicode=True
    )
    return comments + quoting.yaml_escapes(body)


def load(text: str, kind: type[R], path: str) -> R:
    """Read a record from YAML text.

    Raises FieldProblem with the line for a syntax error, an unknown or missing key, a wrong type
    or value, a repeated key. `path` is only used in messages.
    """
    if not text.strip():
        raise FieldProblem(path, 0, "", "empty file")
    if why := mistaken(text, kind.__name__.lower()):
        raise FieldProblem(path, 1, "", why)
    node = _compose(text, path)
    _refuse_ambiguous(node, path, (), set())
    try:
        data = yaml.load(text, Loader=_LOADER)
        return kind.model_validate_json(_as_json(data), strict=True)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = tuple(first["loc"])
        if where == ("schema",) and first["type"] == "less_than_equal":
            why = (
                f"{first['input']} was written by a newer atsplan; this one reads up to {first['ctx']['le']}"
            )
            raise FieldProblem(path, _line_of(node, where), "schema", why) from None
        # A validator's own words are a sentence already, and may quote names.
        said = first["msg"].removeprefix("Value error, ")
        why = _WORDS.get(first["type"]) or (said if first["type"] == "value_error" else said.lower())
        if first["type"] == "extra_forbidden" and where[-1] in kind.instead:
            why += f": {kind.instead[str(where[-1])]}"
        raise FieldProblem(path, _line_of(node, where), _spell(where), why) from None
    except yaml.MarkedYAMLError as problem:
        raise _not_yaml(problem, text, path) from None
    except (TypeError, ValueError) as problem:
        raise FieldProblem(path, 0, "", str(problem)) from None


class Lines:
    """Line numbers of the values in one YAML text."""

    def __init__(self, text: str, path: str) -> None:
        self._root = _compose(text, path)

    def of(self, *where: str | int) -> int:
        """Line (from 1) of the value at that path; of the nearest parent when it is not there."""
        return _line_of(self._root, where)


def digest(*parts: str) -> str:
    """SHA-256 over text parts, as `sha256:` and 64 hex digits."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode())
        state.update(b"\0")
    return "sha256:" + state.hexdigest()


def _as_json(data: Any) -> str:
    # Strict validation from JSON accepts lists for tuples and strings for enums, and nothing else.
    return json.dumps(data, allow_nan=False, default=str)


def _compose(text: str, path: str) -> yaml.Node:
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as problem:
        raise _not_yaml(problem, text, path) from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise FieldProblem(path, 0, "", f"not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(node, yaml.MappingNode):
        raise FieldProblem(path, 1, "", "expected a mapping of keys at the top level")
    return node


def _not_yaml(problem: yaml.MarkedYAMLError, text: str, path: str) -> FieldProblem:
    line = problem.problem_mark.line + 1 if problem.problem_mark else 0
    lines = text.splitlines()
    tab = 0 < line <= len(lines) and "\t" in lines[line - 1]
    why = "a tab: YAML is indented with spaces" if tab else f"not YAML: {problem.problem}"
    return FieldProblem(path, line, "", why)


def _refuse_ambiguous(node: yaml.Node, path: str, where: Location, seen: set[int]) -> None:
    """Refuse aliases, repeated or compound keys, and integers that YAML 1.1 reads otherwise."""

    def refuse(at: yaml.Node, why: str, place: Location = where) -> None:
        raise FieldProblem(path, at.start_mark.line + 1, _spell(place), why)

    if id(node) in seen:
        refuse(node, "YAML aliases are not used here")
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                refuse(key, "a key must be a word")
            if key.value in names:
                refuse(key, "key appears twice", (*where, key.value))
            names.add(key.value)
            _refuse_ambiguous(value, path, (*where, key.value), seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _refuse_ambiguous(value, path, (*where, index), seen)
    elif node.tag == "tag:yaml.org,2002:int" and not _PLAIN_INTEGER.fullmatch(node.value):
        refuse(node, f"write {node.value} as a plain decimal integer")


def _line_of(node: yaml.Node, where: Location) -> int:
    line: int = node.start_mark.line + 1
    for step in where:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(step):
                    line, node = key.start_mark.line + 1, value
                    break
            else:
                return line
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            return line
    return line


def _spell(where: Location) -> str:
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
