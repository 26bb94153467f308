"""Damage to files: blindly, or with knowledge of what they hold. tests/fuzz.py gives them to the commands."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence

from planner.errors import AtsplanError
from planner.model.gguf.header import TensorInfo, parse_header

Dice = random.Random
EXTREMES = (0, 1, 3, 2**7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (
    *map(str, EXTREMES),
    *("-1", "-0", "1e999", "1.5", "NaN", "inf", "-9223372036854775809", "9" * 40, "9" * 5000, "0x10", "012"),
    *("12:30", "1_000", "\u0663", "\u00b2", "", "null", "true", '"1"', "[]", "{}", "1e-7", ".5"),
)
WORDS = (
    *("", "~", "null", "yes", "2026-11-30", "!!binary dGlueQ==", "&a x", "*a", "<<", "=", "\t", "\u202e"),
    *(
        "blk.x.attn_q.weight",
        "blk.\u00b2.ffn_up_exps.weight",
        "blk.999999999.attention",
        "blk.511.ffn_up.weight",
    ),
    *(
        "'a\\n b'",
        '"\\x1b[2J"',
        '"\\0"',
        "../../x",
        "CPU",
        "cpu",
        "gpu:CUDA9",
        "stripe:CUDA0:99",
        "cache:CUDA0:0",
    ),
    *(
        "hybrid:CUDA0:3",
        "q4_K",
        "type99999",
        "0x0",
        "1x" * 20 + "1",
        "^(a+)+$",
        "^(((((((((((((((",
        "(?=a)",
        "x" * 9000,
    ),
    *("'(a|a)*b'", "'.*.*.*.*.*.*=x'", "[" * 50, "{a: " * 50, "- " * 50, "decode", "prefill", "expert_count"),
)
_TOKEN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|[A-Za-z_][\w.:/*-]*|'[^'\n]*'|\"[^\"\n]*\"")


def damaged(data: bytes, dice: Dice, others: Sequence[bytes]) -> bytes:
    """One to three changes, of the kind that the file's content invites."""
    if data.startswith(b"GGUF"):
        kinds: tuple[Callable[..., bytes], ...] = (_entry, _entry, _blind)
    elif b"\0" in data[:200]:
        kinds = (_blind,)
    else:
        kinds = (_token, _token, _line, _blind)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        kind = dice.choice(kinds)
        data = kind(data, dice, others)
    return data


def _blind(data: bytes, dice: Dice, others: Sequence[bytes]) -> bytes:
    made = bytearray(data)
    at = dice.randrange(min(len(made), 4096) or 1)
    match dice.randrange(8):
        case 0:
            made[at : at + 1] = bytes([dice.randrange(256)])
        case 1:
            made[at : at + 8] = struct.pack("<Q", dice.choice(EXTREMES))
        case 2:
            made[at : at + 4] = struct.pack("<I", dice.choice(EXTREMES) % 2**32)
        case 3:
            del made[dice.randrange(len(made) + 1) :]
        case 4:
            del made[at : at + dice.randint(1, 40)]
        case 5:
            made[at:at] = made[at : at + dice.randint(1, 40)] * dice.choice((1, 1, 2, 500))
        case 6:
            made[at : at + 1] = bytes([made[at] ^ 1 << dice.randrange(8)]) if at < len(made) else b""
        case _:
            other = dice.choice(others)
            start = dice.randrange(len(other) or 1)
            made[at:at] = other[start : start + dice.randint(1, 200)]
    return bytes(made)


def _token(data: bytes, dice: Dice, _: Sequence[bytes]) -> bytes:
    """A number or word becomes another."""
    text = data.decode("utf-8", "surrogateescape")
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return data + dice.choice(WORDS).encode()
    token = dice.choice(tokens)
    new = dice.choice(NUMBERS if token[0].lstrip("-")[:1].isdigit() and dice.random() < 0.8 else WORDS)
    if dice.random() < 0.2:
        new = dice.choice(tokens)[0]
    return (text[: token.start()] + new + text[token.end() :]).encode("utf-8", "surrogateescape")


def _line(data: bytes, dice: Dice, _: Sequence[bytes]) -> bytes:
    """A line goes, comes twice or very often, moves, or is indented."""
    lines = data.split(b"\n")
    at, to = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines[at:at] = [lines[at]]
        case 2:
            lines[at:at] = [lines[at]] * dice.choice(
                (10, 10, 10, 10, 3000)
            )  # tests/test_bombs.py has more of it
        case 3:
            lines[at], lines[to] = lines[to], lines[at]
        case 4:
            lines[at] = b" " * dice.randint(1, 4) + lines[at]
        case _:
            lines.insert(at, lines[to])
    return b"\n".join(lines)


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _value(dice: Dice) -> bytes:
    """Type and value of a metadata entry."""
    number = dice.choice(EXTREMES)
    match dice.randrange(7):
        case 0:
            return struct.pack("<IQ", 10, number)
        case 1:
            return struct.pack("<II", 4, number % 2**32)
        case 2:
            return struct.pack("<If", 6, dice.choice((0.0, -1.0, 1e38, float("nan"), float("inf"))))
        case 3:
            return struct.pack("<I", 8) + _string(dice.choice(WORDS).encode())
        case 4:
            length = dice.choice((0, 1, 3, 600, 5000))
            return struct.pack("<IIQ", 9, 4, length) + struct.pack("<I", number % 2**32) * length
        case 5:
            return struct.pack("<II?", 9, 7, True)[:8] + struct.pack("<Q", 3) + b"\1\0\2"
        case _:
            return struct.pack("<Iq", 11, -1)


def _entry(data: bytes, dice: Dice, others: Sequence[bytes]) -> bytes:
    """An entry of the header, of metadata or tensors, changes, goes, or comes twice; counts follow."""
    try:
        header = parse_header(data, "x")
    except AtsplanError:
        return _blind(data, dice, others)
    start = header.kvs[0].start if header.kvs else 24
    kvs = [data[kv.start : kv.end] for kv in header.kvs]
    infos = [data[info.start : info.end] for info in header.infos]
    which = dice.choice([entries for entries in (kvs, kvs, infos) if entries] or [kvs])
    at = dice.randrange(len(which) or 1)
    act = dice.randrange(6)
    if not which or act == 5:
        key = dice.choice(
            ("atsplan.source.alignment", "general.alignment", "split.count", "qwen3moe.block_count")
        )
        kvs = [raw for raw in kvs if key.encode() not in raw] + [_string(key.encode()) + _value(dice)]
    elif act == 0:
        del which[at]
    elif act == 1:
        which.append(which[at].replace(b"e", b"f", 1))
    elif which is kvs:
        kv = header.kvs[at]
        kvs[at] = data[kv.start : kv.value_start - 4] + _value(dice)
    else:
        infos[at] = _info(header.infos[at], dice)
    head = data[:8] + struct.pack("<QQ", len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    assert start == 24 or not header.kvs
    return head + bytes(-len(head) % header.alignment) + data[header.data_offset :]


def _info(info: object, dice: Dice) -> bytes:
    assert isinstance(info, TensorInfo)
    name, dims, kind, offset = info.name.encode(), list(info.dims), info.type, info.offset
    match dice.randrange(5):
        case 0:
            name = dice.choice(WORDS).encode()
        case 1:
            name = name.replace(
                b"blk.0", dice.choice((b"blk.x", b"blk.\xc2\xb2", b"blk.511", b"blk.99999999999", b"blk"))
            )
        case 2:
            dims[dice.randrange(len(dims) or 1) : 1] = [dice.choice(EXTREMES)]
        case 3:
            kind = dice.choice((0, 1, 8, 12, 39, 99, 2**31, *range(130, 160)))
        case _:
            offset = dice.choice(EXTREMES)
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
