"""Where every byte of the output comes from; computed whole before anything is written. Pure.

Metadata entries are copied as spans of the source, so that what nobody here understands stays as
it was; only the entries that speak of layout are encoded anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from planner.constants import SIZE_KEY
from planner.model.ggml_types import is_known
from planner.model.gguf.header import DEFAULT_ALIGNMENT, KeyValue, TensorInfo, pad
from planner.model.gguf.reader import ModelFile
from planner.model.gguf.shards import SET_KEY, shard_file
from planner.model.inventory import Tensor
from rewriter import encode
from rewriter.stamp import PREFIX


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes `start : start + length` of a source shard."""

    shard: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Equal slices of a source tensor in another order: output slice p is source slice positions[p]."""

    shard: int
    start: int
    slice_bytes: int
    positions: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.slice_bytes * len(self.positions)


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that no source file holds."""

    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding."""

    length: int


Segment = Copy | Gather | Literal | Zeros


@dataclass(frozen=True, slots=True)
class OutFile:
    """One file to write."""

    name: str
    segments: tuple[Segment, ...]
    tensors: tuple[str, ...]  # in the order of their bytes
    size_bytes: int
    padding_bytes: int  # between and after tensors


@dataclass(frozen=True, slots=True)
class Layout:
    """All files to write, in shard order."""

    files: tuple[OutFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Request:
    """What the output shall look like."""

    files: tuple[tuple[str, ...], ...]  # tensor names per file, in output order
    name: str  # of the output, `out.gguf`; shards are numbered from it
    alignment: int
    keep_alignment_key: bool  # False: write general.alignment only when it is not the default
    stamp: tuple[bytes, ...]  # encoded entries that record where the file comes from
    moves: Mapping[str, tuple[int, ...]]  # tensor -> source position of each slice
    tail_to: int = 0  # undo: the length the original file had, when it ended without padding
    set_digest: str = ""  # of a set of shards, told in each of them
    trailing: Copy | None = None  # what lies behind the source's last tensor, and shall again


def make_layout(model: ModelFile, request: Request) -> Layout:
    """Lay out the output of a rewrite."""
    names = file_names(request.name, len(request.files))
    total = len(model.inventory.tensors)
    infos = {info.name: info for shard in model.headers for info in shard.header.infos}
    tensors = {tensor.name: tensor for tensor in model.inventory.tensors}
    made = []
    for index, (name, members) in enumerate(zip(names, request.files, strict=True)):
        entries = _entries(model, request, index, total)
        chosen = tuple((tensors[n], infos[n]) for n in members)
        trailing = request.trailing if index == len(request.files) - 1 else None
        made.append(_file(model, request, name, entries, chosen, trailing))
    return Layout(tuple(made))


def file_names(name: str, count: int) -> tuple[str, ...]:
    """`out.gguf`, or llama.cpp's names for its shards."""
    if count == 1:
        return (name,)
    prefix = name.removesuffix(".gguf")
    return tuple(shard_file(prefix, index + 1, count) for index in range(count))


Entry = tuple[int, Segment]  # how many key-values a segment holds
Chosen = tuple[tuple[Tensor, TensorInfo], ...]


def _entries(model: ModelFile, request: Request, index: int, total: int) -> list[Entry]:
    """The metadata of one output file; only the first one carries the model's."""
    made: list[Entry] = []
    if index == 0:
        made += _copied(model, request)
    elif request.alignment != DEFAULT_ALIGNMENT:
        made.append(_own(encode.kv_u32("general.alignment", request.alignment)))
    if len(request.files) > 1:
        made.append(_own(encode.kv_u16("split.no", index)))
        made.append(_own(encode.kv_u16("split.count", len(request.files))))
        made.append(_own(encode.kv_i32("split.tensors.count", total)))
        if request.set_digest:
            made.append(_own(encode.kv_string(SET_KEY, request.set_digest)))
    if index == 0:
        made += [_own(entry) for entry in request.stamp]
    return made


def _own(data: bytes) -> Entry:
    return 1, Literal(data)


def _copied(model: ModelFile, request: Request) -> Iterator[Entry]:
    """The source's entries as spans, neighbours joined; the alignment is settled in its old place."""
    seen: set[str] = set()
    for shard, header in enumerate(h.header for h in model.headers):
        for kv in header.kvs:
            if kv.key in seen or _is_layout_key(kv.key):
                continue
            seen.add(kv.key)
            if kv.key == "general.alignment":
                yield from _alignment_entry(kv, shard, request)
            else:
                yield 1, Copy(shard, kv.start, kv.end - kv.start)
    if "general.alignment" not in seen and request.alignment != DEFAULT_ALIGNMENT:
        yield _own(encode.kv_u32("general.alignment", request.alignment))


def _is_layout_key(key: str) -> bool:
    return key.startswith((PREFIX, "split."))


def _alignment_entry(kv: KeyValue, shard: int, request: Request) -> Iterator[Entry]:
    if kv.value == request.alignment and request.keep_alignment_key:
        yield 1, Copy(shard, kv.start, kv.end - kv.start)
    elif request.keep_alignment_key or request.alignment != DEFAULT_ALIGNMENT:
        yield _own(encode.kv_u32("general.alignment", request.alignment))


def _file(
    model: ModelFile,
    request: Request,
    name: str,
    entries: list[Entry],
    chosen: Chosen,
    trailing: Copy | None,
) -> OutFile:
    offsets, data_bytes = _offsets(chosen, request.alignment)
    # Bytes behind the last tensor are not its own, and a reader must be able to tell.
    exact = bool(request.tail_to) and trailing is None
    ends = data_bytes + (trailing.length if trailing else 0)
    entries = entries + _opaque_sizes(chosen, offsets, ends, exact)
    version = model.headers[0].header.version
    table = b"".join(
        encode.tensor_info(t.name, info.dims, info.type, offset)
        for (t, info), offset in zip(chosen, offsets, strict=True)
    )
    count = Literal(encode.head(version, len(chosen), sum(n for n, _ in entries)))
    head = [count, *(segment for _, segment in entries), Literal(table)]
    head_bytes = sum(segment.length for segment in head)
    data_start = pad(head_bytes, request.alignment)
    body = [Zeros(data_start - head_bytes), *_body(request, chosen)]
    surplus = data_start + data_bytes - request.tail_to if request.tail_to else 0
    if isinstance(body[-1], Zeros) and 0 < surplus <= body[-1].length:
        body[-1] = Zeros(body[-1].length - surplus)
    padding = sum(s.length for s in body[1:] if isinstance(s, Zeros))
    segments = _joined([*head, *body, *([trailing] if trailing else [])])
    size = sum(s.length for s in segments)
    return OutFile(name, segments, tuple(t.name for t, _ in chosen), size, padding)


def _offsets(chosen: Chosen, alignment: int) -> tuple[tuple[int, ...], int]:
    """Offsets from the start of the data, and the padded length of the data."""
    offsets = []
    end = 0
    for tensor, _ in chosen:
        offsets.append(end)
        end = pad(end + tensor.size_bytes, alignment)
    return tuple(offsets), end


def _opaque_sizes(chosen: Chosen, offsets: tuple[int, ...], end: int, tail_is_exact: bool) -> list[Entry]:
    """Exact sizes of opaque tensors that padding now follows, so that reading back finds the same size."""
    ends = [*offsets[1:], end]
    if tail_is_exact and chosen:
        ends[-1] = offsets[-1] + chosen[-1][0].size_bytes
    return [
        _own(encode.kv_u64(SIZE_KEY + tensor.name, tensor.size_bytes))
        for (tensor, _), start, end in zip(chosen, offsets, ends, strict=True)
        if not is_known(tensor.type) and end - start != tensor.size_bytes
    ]


def _body(request: Request, chosen: Chosen) -> Iterator[Segment]:
    for tensor, _ in chosen:
        yield _payload(tensor, request.moves.get(tensor.name))
        yield Zeros(pad(tensor.size_bytes, request.alignment) - tensor.size_bytes)


def _payload(tensor: Tensor, positions: tuple[int, ...] | None) -> Segment:
    if positions is None:
        return Copy(tensor.shard, tensor.offset, tensor.size_bytes)
    return Gather(tensor.shard, tensor.offset, tensor.size_bytes // len(positions), positions)


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbouring copies of neighbouring bytes become one, empty segments go."""
    made: list[Segment] = []
    for segment in segments:
        last = made[-1] if made else None
        if not segment.length:
            continue
        if isinstance(segment, Copy) and isinstance(last, Copy) and _follows(last, segment):
            made[-1] = Copy(last.shard, last.start, last.length + segment.length)
        elif isinstance(segment, Literal) and isinstance(last, Literal):
            made[-1] = Literal(last.data + segment.data)
        else:
            made.append(segment)
    return tuple(made)


def _follows(first: Copy, second: Copy) -> bool:
    return first.shard == second.shard and first.start + first.length == second.start
