"""Which files make up a model: one file, or the shards of a split model found from any of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from planner.constants import OWN_PREFIX
from planner.errors import FileProblem, InputError
from planner.model.ggml_types import type_name
from planner.model.gguf.half_published import half_published
from planner.model.gguf.header import Header

SET_KEY = OWN_PREFIX + "set"  # in every shard of a rewritten model: the same text, of this set alone

_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_WEIGHT = re.compile(r"blk\.(?P<layer>[0-9]+)\.(?P<role>.+\.weight)")
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # files that accompany a model


@dataclass(frozen=True, slots=True)
class ShardName:
    """The parts of `prefix-00002-of-00003.gguf`; `number` counts from 1."""

    prefix: str
    number: int
    count: int

    def sibling(self, number: int) -> str:
        """The file name of another shard of the same model."""
        return shard_file(self.prefix, number, self.count)


@dataclass(eq=False)
class ShardProblems(InputError):
    """Everything that is wrong with the set of shards, at once."""

    path: str
    problems: tuple[str, ...]

    def message(self) -> str:
        return f"{self.path}: {'; '.join(self.problems)}"


def shard_file(prefix: str, number: int, count: int) -> str:
    """The file name llama.cpp gives a shard; `number` counts from 1."""
    return f"{prefix}-{number:05d}-of-{count:05d}.gguf"


def output_name(name: str) -> str:
    """The name shards are numbered from: `out.gguf` for `out-00001-of-00003.gguf`."""
    shard = parse_name(name)
    return f"{shard.prefix}.gguf" if shard else name


def parse_name(name: str) -> ShardName | None:
    """The shard a file name speaks of, or None."""
    match = _NAME.fullmatch(name)
    if not match:
        return None
    return ShardName(match["prefix"], int(match["number"]), int(match["count"]))


def find_first(path: Path) -> Path:
    """The file to start from: `path` itself, or the one model of a folder or glob pattern.

    FileProblem when there is none, or more than one.
    """
    if path.is_dir():
        return _only_model(path, list(path.glob("*.gguf")))
    if not path.exists() and any(letter in path.name for letter in "*?["):
        return _only_model(path, list(path.parent.glob(path.name)) if path.parent.is_dir() else [])
    if not path.exists():
        hint = half_published(path.parent, output_name(path.name))
        raise FileProblem(str(path), "; ".join(filter(None, (_absent(path), hint))))
    if not path.is_file():
        raise FileProblem(str(path), "not a regular file")
    return path


def shard_paths(first: Path, header: Header) -> tuple[Path, ...]:
    """Where all shards must lie, in order, given any one of them; existing or not.

    FileProblem for a shard whose own name or split keys cannot be right.
    """
    name = parse_name(first.name)
    count = header.number("split.count") or 0
    if name is None:
        if count > 1:
            raise FileProblem(str(first), _not_a_shard_name(count))
        return (first,)
    if not 1 <= name.number <= name.count:
        raise FileProblem(str(first), f"shard {name.number} of {name.count} cannot be")
    if max(count, 1) != name.count:
        raise FileProblem(str(first), f"the name says {name.count} shards, split.count in the file {count}")
    return tuple(first.with_name(name.sibling(number + 1)) for number in range(name.count))


def check_set(paths: tuple[Path, ...], headers: tuple[Header, ...]) -> tuple[str, ...]:
    """What does not fit together in a complete set of shards."""
    problems = [text for index in range(len(paths)) for text in _foreign(paths, headers, index)]
    numbers = [header.number("split.no") for header in headers]
    for number in sorted({n for n in numbers if n is not None and numbers.count(n) > 1}):
        same = " and ".join(p.name for p, n in zip(paths, numbers, strict=True) if n == number)
        problems.append(f"{same} both say split.no {number}")
    problems += _repeated_tensors(paths, headers)
    problems += _other_quantisation(paths, headers)
    expected = headers[0].number("split.tensors.count")
    found = sum(len(header.infos) for header in headers)
    if expected is not None and expected != found:
        problems.append(f"split.tensors.count says {expected} tensors, the shards hold {found}")
    return tuple(problems)


def _foreign(paths: tuple[Path, ...], headers: tuple[Header, ...], index: int) -> list[str]:
    name, header, first = paths[index].name, headers[index], headers[0]
    problems = []
    for key, expected in (("split.no", index), ("split.count", len(paths))):
        found = header.number(key)
        if found != expected:
            problems.append(f"{name} has {key} {'missing' if found is None else found}, expected {expected}")
    total, said = first.number("split.tensors.count"), header.number("split.tensors.count")
    if said != total:
        problems.append(f"{name} belongs to a model of {said} tensors, the first shard to one of {total}")
    for key in ("general.architecture", "general.name", "general.file_type"):
        theirs, ours = header.get(key), first.get(key)
        if theirs and ours and theirs.value != ours.value:
            problems.append(f"{name} has {key} {theirs.value}, the first shard {ours.value}")
    if header.text(SET_KEY) != first.text(SET_KEY):
        problems.append(f"{name} is of another rewrite than the first shard")
    return problems


def _repeated_tensors(paths: tuple[Path, ...], headers: tuple[Header, ...]) -> list[str]:
    home: dict[str, int] = {}
    repeats: dict[tuple[int, int], list[str]] = {}
    for index, header in enumerate(headers):
        for info in header.infos:
            other = home.setdefault(info.name, index)
            if other != index:
                repeats.setdefault((other, index), []).append(info.name)
    return [
        f"{paths[a].name} and {paths[b].name} both hold tensor {names[0]}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for (a, b), names in repeats.items()
    ]


def _other_quantisation(paths: tuple[Path, ...], headers: tuple[Header, ...]) -> list[str]:
    """A shard, not the first, whose weights have none of the types that the other shards give them.

    Only the first shard of a split model tells of its quantisation, so types are all there is to see.
    One layer alone proves nothing: the last one is often of another type. Nor do files that a plan
    has sorted by device.
    """
    if any(kv.key.startswith(OWN_PREFIX) for kv in headers[0].kvs):
        return []
    tables = [_weights(header) for header in headers]
    problems = []
    for index, mine in enumerate(tables[1:], start=1):
        theirs = [weight for n, table in enumerate(tables) if n != index for weight in table]
        shared = {role for role, _, _ in mine} & {role for role, _, _ in theirs}
        types, other_types = (
            {(role, kind) for role, _, kind in table if role in shared} for table in (mine, theirs)
        )
        layers, other_layers = (
            {layer for role, layer, _ in table if role in shared} for table in (mine, theirs)
        )
        if len(shared) > 1 and min(len(layers), len(other_layers)) > 1 and not types & other_types:
            found, expected = (
                ", ".join(sorted({type_name(kind) for _, kind in each})) for each in (types, other_types)
            )
            problems.append(
                f"{paths[index].name} is of another quantisation: weights of {found}, expected {expected}"
            )
    return problems


def _weights(header: Header) -> list[tuple[str, str, int]]:
    """Role, layer and type of every quantised weight of a block."""
    matches = ((_WEIGHT.fullmatch(info.name), info.type) for info in header.infos)
    return [(match["role"], match["layer"], kind) for match, kind in matches if match and kind > 1]


def _only_model(path: Path, files: list[Path]) -> Path:
    files = sorted(file for file in files if file.is_file())
    texts = [file for file in files if not _BESIDE.search(file.name)] or files
    models: dict[str, Path] = {}
    for file in texts:
        name = parse_name(file.name)
        models.setdefault(f"{name.prefix} of {name.count}" if name else file.name, file)
    if not models:
        raise FileProblem(str(path), "; ".join(filter(None, ("no .gguf file there", _hint(path)))))
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        why = f"holds {len(models)} models, name one: {names}"
        raise FileProblem(str(path), "; ".join(filter(None, (why, _hint(path)))))
    return next(iter(models.values()))


def _hint(path: Path) -> str:
    """What a folder, or a pattern in one, has to say of rewrites that were interrupted there."""
    return half_published(path if path.is_dir() else path.parent)


def _absent(path: Path) -> str:
    name = parse_name(path.name)
    if path.is_symlink():
        return "a link that leads nowhere"
    if name and path.parent.is_dir():
        others = sorted(f.name for f in path.parent.glob("*.gguf") if _same_model(f, name))
        if others:
            return f"no such file, though {', '.join(others)} are there: the shard is missing"
    return "no such file"


def _same_model(file: Path, name: ShardName) -> bool:
    other = parse_name(file.name)
    return bool(other and other.prefix == name.prefix and other.count == name.count)


def _not_a_shard_name(count: int) -> str:
    return (
        f"one of {count} shards under a name without -00001-of-{count:05d}: give it its name back; "
        "if shards were joined with cat, get them apart or merge them with llama-gguf-split --merge"
    )
