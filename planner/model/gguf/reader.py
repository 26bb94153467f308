"""The reader of model files: path to inventory and byte spans. The only place that opens a model.

Tensor sizes come from the gaps between offsets (the last one: up to the end of the file). Where
the type is known, the padding after the payload is left out; an unknown type is
carried as the bytes of its whole gap.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.constants import SIZE_KEY
from planner.errors import FileProblem, InputError
from planner.files import regular, why_not
from planner.model.ggml_types import FORK_TYPES, is_known, least_bytes, tensor_bytes, type_name
from planner.model.gguf.half_published import half_published
from planner.model.gguf.header import Bytes, Header, KeyValue, TensorInfo, pad, parse_header
from planner.model.gguf.magic import MAGIC, part_advice
from planner.model.gguf.sanity import check_counts, check_layers, unread, vocabulary_faults, wrong_types
from planner.model.gguf.shards import (
    ShardProblems,
    check_set,
    find_first,
    output_name,
    parse_name,
    shard_paths,
)
from planner.model.inventory import Hparam, Inventory, Shard, Tensor, is_count
from planner.quoting import short, utf8

_OTHERS = frozenset({"adapter", "imatrix", "mmproj", "vocab", "controlvector", "control_vector"})


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One file of a model: its parsed header, sizes, and the digest of its header bytes."""

    path: Path
    size_bytes: int
    header: Header
    sizes: tuple[int, ...]  # payload bytes per tensor, in the order of header.infos
    trailing_bytes: int  # after the padded end of the last tensor, when its size is known
    sha256: str  # of the header bytes, hex


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model as it lies on disk."""

    inventory: Inventory
    paths: tuple[Path, ...]  # in shard order
    headers: tuple[ShardHeader, ...]
    notes: tuple[str, ...]  # what a person should know, none of it wrong
    refused: tuple[str, ...] = ()  # why stock llama.cpp would not load it, beside what its table says

    def get(self, key: str) -> KeyValue | None:
        """A metadata entry of the first shard."""
        return self.headers[0].header.get(key)


@dataclass(eq=False)
class TruncatedTensor(InputError):
    """The file ends before the data of a tensor does."""

    path: str
    tensor: str
    missing_bytes: int  # of this tensor; at least, when its type is unknown
    others: int  # further tensors cut off
    advice: str

    def message(self) -> str:
        more = "1 more tensor is" if self.others == 1 else f"{self.others} more tensors are"
        others = f", and {more} cut off" if self.others else ""
        lacks = "1 byte" if self.missing_bytes == 1 else f"{self.missing_bytes} bytes"
        return f"{self.path}: truncated: tensor {short(self.tensor)} lacks {lacks}{others}{self.advice}"


def read_model(path: Path) -> ModelFile:
    """Read the headers of a model.

    `path` is a file, any shard of a split model, a folder or a glob pattern with one model.
    Raises FileProblem, TruncatedTensor or ShardProblems; weights are not read.
    """
    first = find_first(path)
    start = read_shard(first)
    paths = shard_paths(first, start.header)
    shards = (start,) if len(paths) == 1 else _read_set(path, paths, start)
    other = len(paths) > 1 and first != paths[0]
    said = f"{first.name} is not the first shard: starting from {paths[0].name}"
    return model_of(paths, shards, (said,) if other else ())


def model_of(
    paths: tuple[Path, ...], shards: tuple[ShardHeader, ...], said: tuple[str, ...] = ()
) -> ModelFile:
    """A model from the headers of all its shards; `said`: notes of the caller's own."""
    notes = [
        f"{s.path.name}: {s.trailing_bytes} bytes after the last tensor" for s in shards if s.trailing_bytes
    ]
    notes += said
    notes += _unknown_types(shards)
    notes += _holes(shards)
    notes += [f"{key}: no u32 as counts are; stock llama.cpp does not read it" for key in _unread(shards)]
    refused = (*_no_model(shards[0]), *_wrong_types(shards), *vocabulary_faults(shards[0].header))
    return ModelFile(_inventory(shards), paths, shards, tuple(notes), refused)


def read_shard(path: Path) -> ShardHeader:
    """Read the header of one file and check its offsets against its length."""
    try:
        with mapped(path) as data:
            return shard_of(path, data, len(data))
    except OSError as problem:
        if problem.errno == errno.ENOMEM:  # no fault of the file
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise FileProblem(str(path), why_not(problem)) from None


def shard_of(path: Path, data: Bytes, size_bytes: int) -> ShardHeader:
    """The header of one file of that length from its bytes, wherever they are, its offsets checked."""
    header = parse_header(data, str(path))
    check_layers(header, str(path))
    digest = _sha256(data, header.end)
    sizes, trailing = _sizes(header, size_bytes, str(path))
    _refuse_joined(header, data, size_bytes - trailing, str(path))
    return ShardHeader(path, size_bytes, header, sizes, trailing, digest)


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """The bytes of a file as a read-only memory map; an empty file is `b""`."""
    with regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _read_set(path: Path, paths: tuple[Path, ...], start: ShardHeader) -> tuple[ShardHeader, ...]:
    problems: list[str] = []
    shards: list[ShardHeader] = []
    for shard in paths:
        try:
            shards.append(start if shard == start.path else read_shard(shard))
        except InputError as problem:
            missing = not shard.exists()
            problems.append(f"missing shard {shard.name}" if missing else _without_folder(problem, shard))
    if problems and (hint := half_published(start.path.parent, output_name(start.path.name))):
        problems.append(hint)
    if not problems:
        problems += check_set(paths, tuple(s.header for s in shards))
    if problems:
        raise ShardProblems(str(path), tuple(problems))
    return tuple(shards)


def _without_folder(problem: InputError, shard: Path) -> str:
    return str(problem).replace(str(shard), shard.name, 1)


def _sizes(header: Header, file_bytes: int, path: str) -> tuple[tuple[int, ...], int]:
    """Payload bytes per tensor, and what lies behind the last one."""
    exact = {kv.key[len(SIZE_KEY) :]: kv.value for kv in header.kvs if kv.key.startswith(SIZE_KEY)}
    order = sorted(range(len(header.infos)), key=lambda i: header.infos[i].offset)
    if not order:
        return (), max(0, file_bytes - header.data_offset)
    ends = [header.infos[i].offset for i in order[1:]] + [file_bytes - header.data_offset]
    _refuse_truncation(header, order, file_bytes, path)
    sizes = [0] * len(order)
    trailing = 0
    for position, (index, end) in enumerate(zip(order, ends, strict=True)):
        info = header.infos[index]
        last = position == len(order) - 1
        size = _size(header, info, end - info.offset, last, exact.get(info.name), path)
        sizes[index] = size
        if last:
            trailing = max(0, end - pad(info.offset + size, header.alignment))
    return tuple(sizes), trailing


def _size(header: Header, info: TensorInfo, gap: int, last: bool, exact: object, path: str) -> int:
    """Payload bytes of one tensor from its gap; FileProblem when the gap is too small."""
    name = short(info.name)
    if info.offset % header.alignment:
        raise FileProblem(
            path, f"damaged: tensor {name} at offset {info.offset}, not a multiple of {header.alignment}"
        )
    needed = arithmetic_bytes(info, path)
    if needed is None:
        if gap <= 0:
            raise FileProblem(path, f"damaged: tensor {name} shares its bytes with another")
        _refuse_overlap(name, _least(info), gap, path)
        if isinstance(exact, int) and 0 < exact <= gap and (last or gap <= pad(exact, header.alignment)):
            return exact  # behind the last one may lie bytes that are no tensor's
        return gap
    _refuse_overlap(name, needed, gap, path)
    # A hole behind a known type is not padding: it may be an unknown layout under a known number.
    return needed if last or pad(needed, header.alignment) >= gap else gap


def _refuse_overlap(name: str, needed: int, gap: int, path: str) -> None:
    if needed > gap:
        raise FileProblem(
            path, f"damaged: tensor {name} needs {needed} bytes, the next one starts after {gap}"
        )


def _least(info: TensorInfo) -> int:
    """The fewest bytes that a tensor of a type without a known layout can have."""
    return least_bytes(info.type, info.dims or (1,))


def arithmetic_bytes(info: TensorInfo, path: str) -> int | None:
    """Bytes by type and shape; None for an unknown type, FileProblem for a row that is not whole blocks."""
    kind = type_name(info.type)
    if not is_known(kind):
        return None
    try:
        return tensor_bytes(kind, info.dims or (1,))
    except ValueError as problem:
        raise FileProblem(path, f"damaged: tensor {short(info.name)}: {problem}") from None


def _refuse_truncation(header: Header, order: list[int], file_bytes: int, path: str) -> None:
    available = file_bytes - header.data_offset
    cut: list[tuple[TensorInfo, int]] = []
    for index in order:
        info = header.infos[index]
        missing = info.offset + (arithmetic_bytes(info, path) or _least(info)) - available
        if missing > 0:
            cut.append((info, missing))
    if cut:
        info, missing = cut[0]
        whole = arithmetic_bytes(info, path) or _least(info)
        raise TruncatedTensor(path, info.name, min(missing, whole), len(cut) - 1, part_advice(path))


def _sha256(data: Bytes, end: int) -> str:
    """Of the first `end` bytes; of a mapped file without a copy of them."""
    if isinstance(data, bytes | mmap.mmap):
        with memoryview(data) as view:
            return hashlib.sha256(view[:end]).hexdigest()
    return hashlib.sha256(data[:end]).hexdigest()


def _refuse_joined(header: Header, data: Bytes, end: int, path: str) -> None:
    """Shards joined with cat: another header behind the data of the first."""
    if header.infos and (header.number("split.count") or 0) > 1 and data[end : end + 4] == MAGIC:
        why = "shards joined with cat: another GGUF starts behind the first; use llama-gguf-split --merge"
        raise FileProblem(path, why)


def _no_model(first: ShardHeader) -> tuple[str, ...]:
    """A file that says it is something else; other words (`merge`) stand in files that are models."""
    kind = first.header.text("general.type")
    projector = first.header.text("general.architecture") == "clip"  # read beside its model
    if kind in _OTHERS and not projector:
        return (f"general.type is {kind}, not model",)
    adapter = first.header.text("adapter.type")  # of adapters older than general.type
    return (f"adapter.type is {short(adapter)}: an adapter, not a model",) if adapter else ()


def _wrong_types(shards: tuple[ShardHeader, ...]) -> list[str]:
    found = dict.fromkeys(key for shard in shards for key in wrong_types(shard.header))
    if not found:
        return []
    shown = ", ".join(list(found)[:3]) + (" …" if len(found) > 3 else "")
    return [f"{shown}: of a number type that stock llama.cpp does not read there"]


def _unread(shards: tuple[ShardHeader, ...]) -> dict[str, None]:
    return dict.fromkeys(key for shard in shards for key in unread(shard.header))


def _unknown_types(shards: tuple[ShardHeader, ...]) -> list[str]:
    found: dict[int, int] = {}
    for shard in shards:
        for info in shard.header.infos:
            if not is_known(type_name(info.type)):
                found[info.type] = found.get(info.type, 0) + 1
    return [_unknown_type(number, count) for number, count in sorted(found.items())]


def _unknown_type(number: int, count: int) -> str:
    fork = FORK_TYPES.get(number)
    if fork is None:
        what = f"{_so_many(count)} of unknown {type_name(number)}"
        return f"{what}: carried as opaque bytes, stock llama.cpp may not load them"
    what = f"{_so_many(count)} of {type_name(number)} ({fork.name} of ik_llama.cpp)"
    return f"{what}: carried as opaque bytes, stock llama.cpp does not load the file"


def _so_many(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _holes(shards: tuple[ShardHeader, ...]) -> list[str]:
    longer = [
        info.name
        for shard in shards
        for info, size in zip(shard.header.infos, shard.sizes, strict=True)
        if size > (arithmetic_bytes(info, str(shard.path)) or size)
    ]
    if not longer:
        return []
    first = short(longer[0])
    return [
        f"{_so_many(len(longer))} longer than type and shape say, {first} first: carried as they are, "
        "stock llama.cpp will not load the file"
    ]


def _inventory(shards: tuple[ShardHeader, ...]) -> Inventory:
    header = shards[0].header
    architecture = header.text("general.architecture")
    if not architecture:
        raise FileProblem(str(shards[0].path), "no general.architecture: not a model llama.cpp could load")
    hparams = dict(sorted(_hparams(header, architecture).items()))
    check_counts(hparams, str(shards[0].path))
    return Inventory(
        name=header.text("general.name") or _stem(shards[0].path),
        architecture=architecture,
        header_digest=_digest(shards),
        hparams=hparams,
        shards=tuple(_shard(s) for s in shards),
        tensors=tuple(t for index, s in enumerate(shards) for t in _tensors(index, s)),
    )


def _digest(shards: tuple[ShardHeader, ...]) -> str:
    """SHA-256 over the header digests of the shards, in order."""
    if len(shards) == 1:
        return f"sha256:{shards[0].sha256}"
    return "sha256:" + hashlib.sha256("".join(s.sha256 for s in shards).encode()).hexdigest()


def _stem(path: Path) -> str:
    name = parse_name(path.name)
    return utf8(name.prefix if name else path.stem)


def _shard(shard: ShardHeader) -> Shard:
    return Shard(
        file=utf8(shard.path.name),
        size_bytes=shard.size_bytes,
        data_offset=shard.header.data_offset,
        alignment=shard.header.alignment,
    )


def _tensors(index: int, shard: ShardHeader) -> Iterator[Tensor]:
    """The tensors of one shard in the order of their bytes."""
    infos = zip(shard.header.infos, shard.sizes, strict=True)
    for info, size in sorted(infos, key=lambda pair: pair[0].offset):
        yield Tensor(
            name=info.name,
            type=type_name(info.type),
            shape=info.dims or (1,),
            size_bytes=size,
            shard=index,
            offset=shard.header.data_offset + info.offset,
        )


def _hparams(header: Header, architecture: str) -> Mapping[str, Hparam]:
    prefix = architecture + "."
    found: dict[str, Hparam] = {}
    for kv in header.kvs:
        name = kv.key[len(prefix) :]
        if kv.key.startswith(prefix) and kv.value is not None and (_finite(kv.value) or is_count(name)):
            found[name] = kv.value
    tokens = header.get("tokenizer.ggml.tokens")
    if tokens is not None and tokens.length:
        found["vocab_size"] = tokens.length
    return found


def _finite(value: Hparam) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(math.isfinite(v) for v in values if isinstance(v, float))
