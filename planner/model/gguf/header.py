"""The header of one GGUF file: key-values and tensor infos as byte spans, every length bounded first.

GGUF 2 and 3, little-endian: magic, version u32, tensor count u64, key-value count u64, the
key-values (key, type u32, value), the tensor infos (name, dimension count u32, dimensions u64
ne0 first, type u32, offset u64 from the start of the data), padding to the alignment, the data.
Strings are a u64 length and UTF-8; arrays an element type u32, a u64 length and the elements.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from planner.constants import OWN_PREFIX
from planner.errors import FileProblem
from planner.model.gguf.magic import MAGIC, not_gguf, part_advice
from planner.quoting import short

DEFAULT_ALIGNMENT = 32
MAX_KVS = 65_536  # real files have fewer than a hundred
MAX_TENSORS = 65_536  # the largest real files, of unmerged experts, have 47 thousand
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_DECODED_STRING = 1 << 20  # bytes; longer strings stay in the file
MAX_DECODED_ARRAY = 4096  # entries
MAX_ALIGNMENT = 1 << 30

STRING, ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALAR_BYTES = {number: struct.calcsize("<" + code) for number, code in _SCALARS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...] | None


class Bytes(Protocol):
    """What the parser reads from: bytes or a memory map."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One metadata entry; its bytes are `start:end` of the file, the value's `value_start:end`."""

    key: str
    type: int  # GGUF value type; ARRAY for arrays
    element: int  # element type of an array, else -1
    length: int  # elements of an array, bytes of a string, 1 for a scalar
    value: Value  # None when it was left in the file: long strings, string arrays, long arrays
    start: int
    value_start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table; its last eight bytes before `end` are the offset."""

    name: str
    type: int  # ggml type number
    dims: tuple[int, ...]  # as stored, ne0 first; may be empty for a scalar
    offset: int  # from the start of the data
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the data of one file."""

    version: int
    kvs: tuple[KeyValue, ...]
    infos: tuple[TensorInfo, ...]
    alignment: int
    kvs_end: int  # where the tensor table starts
    end: int  # of the tensor table, before padding
    data_offset: int
    by_key: Mapping[str, KeyValue]

    def get(self, key: str) -> KeyValue | None:
        """The entry of that key."""
        return self.by_key.get(key)

    def number(self, key: str) -> int | None:
        """An integer value; None when absent or of another type."""
        kv = self.get(key)
        value = kv.value if kv else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, key: str) -> str:
        """A string value; empty when absent or of another type."""
        kv = self.get(key)
        return kv.value if kv and isinstance(kv.value, str) else ""


def parse_header(data: Bytes, path: str) -> Header:
    """Read a header; FileProblem says what is wrong and where. `path` is only used in messages."""
    _check_magic(data, path)
    reader = _Reader(data, path)
    version = _check_version(reader)
    n_tensors = reader.u64("the tensor count")
    n_kvs = reader.u64("the key-value count")
    # The least entry: an empty name, no dimensions; a one-letter key with a one-byte value.
    reader.check_count("tensors", n_tensors, 24, MAX_TENSORS)
    reader.check_count("key-values", n_kvs, 14, MAX_KVS)
    kvs = tuple(_key_value(reader) for _ in range(n_kvs))
    _refuse_repeats(path, "key", [kv.key for kv in kvs])
    kvs_end = reader.position
    infos = tuple(_tensor_info(reader) for _ in range(n_tensors))
    _refuse_repeats(path, "tensor", [info.name for info in infos])
    alignment = _alignment(kvs, path)
    end = reader.position
    by_key = {kv.key: kv for kv in kvs}
    return Header(version, kvs, infos, alignment, kvs_end, end, pad(end, alignment), by_key)


def pad(position: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-position // alignment) * alignment


class _Reader:
    """A position in the file; every read is checked against the end first."""

    def __init__(self, data: Bytes, path: str) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = len(MAGIC)

    def wrong(self, why: str) -> FileProblem:
        return FileProblem(self.path, f"broken header at byte {self.position}: {why}")

    def cut(self, why: str, doubt: str = "") -> FileProblem:
        return FileProblem(self.path, f"truncated header{doubt}: {why}{part_advice(self.path)}")

    def take(self, length: int, what: str) -> bytes:
        if length > self.size - self.position:
            where = f"{length} bytes at byte {self.position}, the file has {self.size}"
            raise self.cut(f"{what} needs {where}")
        start = self.position
        self.position += length
        return self.data[start : self.position]

    def skip(self, length: int, what: str) -> None:
        if length > self.size - self.position:
            self.take(length, what)  # raises, reads nothing
        self.position += length

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def check_count(self, what: str, count: int, least_bytes: int, limit: int) -> None:
        if count > limit:
            raise self.wrong(f"{count} {what}, more than the {limit} this program accepts")
        if count * least_bytes > self.size - self.position:
            raise self.cut(
                f"{count} {what} announced, the file has no room for them", ", or a count that lies"
            )

    def text(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        if length > MAX_KEY_BYTES:
            raise self.wrong(f"{what} of {length} bytes, more than the {MAX_KEY_BYTES} the format allows")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8") from None


def _check_magic(data: Bytes, path: str) -> None:
    head = data[0:256]
    if head[:4] != MAGIC:
        raise FileProblem(path, not_gguf(head) + part_advice(path))


def _check_version(reader: _Reader) -> int:
    version = reader.u32("the version")
    if version and not version & 0xFFFF:
        raise FileProblem(reader.path, "big-endian GGUF: convert it to little-endian first")
    if version not in (2, 3):
        raise FileProblem(reader.path, f"unsupported GGUF version {version}: 2 and 3 are read")
    return version


def _key_value(reader: _Reader) -> KeyValue:
    start = reader.position
    key = reader.text("a key")
    if not key:
        raise reader.wrong("empty key")
    shown = short(key)
    kind = reader.u32(f"the type of {shown}")
    value_start = reader.position
    element, length = -1, 1
    value: Value = None
    if kind == STRING:
        length, value = _string(reader, shown)
    elif kind == ARRAY:
        element, length, value = _array(reader, shown)
    elif kind in _SCALARS:
        value = struct.unpack("<" + _SCALARS[kind], reader.take(SCALAR_BYTES[kind], shown))[0]
    else:
        raise reader.wrong(f"{shown} has unknown value type {kind}")
    return KeyValue(key, kind, element, length, value, start, value_start, reader.position)


def _string(reader: _Reader, key: str) -> tuple[int, str | None]:
    length = reader.u64(f"the length of {key}")
    if length > MAX_DECODED_STRING:
        reader.skip(length, key)
        return length, None
    return length, reader.take(length, key).decode("utf-8", errors="replace")


def _array(reader: _Reader, key: str) -> tuple[int, int, Value]:
    element = reader.u32(f"the element type of {key}")
    length = reader.u64(f"the length of {key}")
    if element == STRING:
        _skip_strings(reader, length, key)
        return element, length, None
    if element not in _SCALARS:
        what = "arrays inside an array" if element == ARRAY else f"unknown element type {element}"
        raise reader.wrong(f"{key} has {what}")
    size = length * SCALAR_BYTES[element]
    if length > (MAX_TENSORS if key.startswith(OWN_PREFIX) else MAX_DECODED_ARRAY):
        reader.skip(size, key)
        return element, length, None
    return element, length, struct.unpack(f"<{length}{_SCALARS[element]}", reader.take(size, key))


def _skip_strings(reader: _Reader, count: int, key: str) -> None:
    # Vocabularies have hundreds of thousands: only the lengths are read, no string object is made.
    if count * 8 > reader.size - reader.position:
        raise reader.wrong(f"{key} announces {count} strings, the file has no room for them")
    data, size, position, unpack = reader.data, reader.size, reader.position, _U64.unpack
    for _ in range(count):
        if position + 8 > size:
            break
        position += 8 + unpack(data[position : position + 8])[0]
    else:
        if position <= size:
            reader.position = position
            return
    raise reader.cut(f"the strings of {key} run past the end of the file")


def _tensor_info(reader: _Reader) -> TensorInfo:
    start = reader.position
    name = reader.text("a tensor name")
    if not name:
        raise reader.wrong("empty tensor name")
    shown = short(name)
    n_dims = reader.u32(f"the dimension count of {shown}")
    if n_dims > 4:
        raise reader.wrong(f"tensor {shown} has {n_dims} dimensions, at most 4 are allowed")
    dims = struct.unpack(f"<{n_dims}Q", reader.take(8 * n_dims, f"the dimensions of {shown}"))
    count = 1
    for dim in dims:
        count *= dim
    if not 0 < count < 1 << 63:
        shape = "x".join(map(str, dims))
        raise reader.wrong(f"tensor {shown} of shape {shape} has {'no' if not count else 'too many'} values")
    kind = reader.u32(f"the type of {shown}")
    offset = reader.u64(f"the offset of {shown}")
    return TensorInfo(name, kind, dims, offset, start, reader.position)


def _alignment(kvs: tuple[KeyValue, ...], path: str) -> int:
    for kv in kvs:
        if kv.key == "general.alignment":
            value = kv.value
            if kv.type != 4 or not isinstance(value, int):
                raise FileProblem(path, "general.alignment is not a 32-bit unsigned integer")
            if value <= 0 or value & (value - 1) or value > MAX_ALIGNMENT:
                raise FileProblem(path, f"general.alignment {value} is not a power of two up to 2^30")
            return value
    return DEFAULT_ALIGNMENT


def _refuse_repeats(path: str, what: str, names: list[str]) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FileProblem(path, f"{what} {short(name)} appears twice")
        seen.add(name)
