"""The block sizes of ggml's tensor types, in ggml's own spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type whose layout is known: `block` values are stored in `bytes` bytes."""

    name: str
    block: int
    bytes: int


# As llama.cpp b11549 has them; a test holds this table to the library.
TYPES: Mapping[int, GgmlType] = MappingProxyType(
    {
        0: GgmlType("f32", 1, 4),
        1: GgmlType("f16", 1, 2),
        2: GgmlType("q4_0", 32, 18),
        3: GgmlType("q4_1", 32, 20),
        6: GgmlType("q5_0", 32, 22),
        7: GgmlType("q5_1", 32, 24),
        8: GgmlType("q8_0", 32, 34),
        9: GgmlType("q8_1", 32, 36),
        10: GgmlType("q2_K", 256, 84),
        11: GgmlType("q3_K", 256, 110),
        12: GgmlType("q4_K", 256, 144),
        13: GgmlType("q5_K", 256, 176),
        14: GgmlType("q6_K", 256, 210),
        15: GgmlType("q8_K", 256, 292),
        16: GgmlType("iq2_xxs", 256, 66),
        17: GgmlType("iq2_xs", 256, 74),
        18: GgmlType("iq3_xxs", 256, 98),
        19: GgmlType("iq1_s", 256, 50),
        20: GgmlType("iq4_nl", 32, 18),
        21: GgmlType("iq3_s", 256, 110),
        22: GgmlType("iq2_s", 256, 82),
        23: GgmlType("iq4_xs", 256, 136),
        24: GgmlType("i8", 1, 1),
        25: GgmlType("i16", 1, 2),
        26: GgmlType("i32", 1, 4),
        27: GgmlType("i64", 1, 8),
        28: GgmlType("f64", 1, 8),
        29: GgmlType("iq1_m", 256, 56),
        30: GgmlType("bf16", 1, 2),
        34: GgmlType("tq1_0", 256, 54),
        35: GgmlType("tq2_0", 256, 66),
        39: GgmlType("mxfp4", 32, 17),
        40: GgmlType("nvfp4", 64, 36),
        41: GgmlType("q1_0", 128, 18),
        42: GgmlType("q2_0", 64, 18),
    }
)


@dataclass(frozen=True, slots=True)
class ForkType:
    """A type of a fork: rows of blocks as above, with `header` bytes in front of each row."""

    name: str
    block: int
    bytes: int
    header: int


# Of ik_llama.cpp, whose numbers nobody else uses. Their tensors are carried as they are; the sizes
# say when a file has been cut short by a tool that did not know of the headers.
FORK_TYPES: Mapping[int, ForkType] = MappingProxyType(
    {
        133: ForkType("q6_0", 32, 26, 0),
        134: ForkType("iq1_bn", 64, 13, 2),
        135: ForkType("iq2_bn", 64, 16, 4),
        137: ForkType("iq2_k", 256, 76, 0),
        138: ForkType("iq3_k", 256, 110, 0),
        139: ForkType("iq4_k", 256, 144, 0),
        140: ForkType("iq5_k", 256, 176, 0),
        141: ForkType("iq6_k", 256, 212, 0),
        144: ForkType("iq4_ks", 256, 136, 4),
        145: ForkType("iq2_ks", 256, 70, 2),
        146: ForkType("iq4_kss", 256, 128, 4),
        152: ForkType("iq5_ks", 256, 168, 4),
        153: ForkType("iq2_kt", 256, 68, 4),
        154: ForkType("iq3_kt", 256, 100, 4),
        155: ForkType("iq4_kt", 256, 128, 4),
        156: ForkType("iq3_ks", 256, 102, 2),
        157: ForkType("iq2_kl", 256, 86, 2),
        158: ForkType("iq1_kt", 256, 56, 4),
        335: ForkType("iq2_bn_r4", 64, 16, 4),
        337: ForkType("iq2_k_r4", 256, 76, 0),
        338: ForkType("iq3_k_r4", 256, 110, 0),
        339: ForkType("iq4_k_r4", 256, 144, 0),
        340: ForkType("iq5_k_r4", 256, 176, 0),
        344: ForkType("iq4_ks_r4", 256, 136, 4),
        352: ForkType("iq5_ks_r4", 256, 168, 4),
    }
)

BY_NAME: Mapping[str, GgmlType] = MappingProxyType({t.name: t for t in TYPES.values()})


def type_name(number: int) -> str:
    """ggml's spelling of a type number; `type153` for one without a known name."""
    known = TYPES.get(number)
    return known.name if known else f"type{number}"


def is_known(name: str) -> bool:
    """Whether the layout of the type is known; unknown types are carried as opaque bytes."""
    return name in BY_NAME


def row_bytes(name: str, ne0: int) -> int:
    """Bytes of one row of `ne0` values.

    Raises KeyError for an unknown type, ValueError when the row is not whole blocks.
    """
    kind = BY_NAME[name]
    if ne0 % kind.block:
        raise ValueError(f"a row of {ne0} values is not whole {name} blocks of {kind.block}")
    return ne0 // kind.block * kind.bytes


def tensor_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor without padding; errors of `row_bytes`."""
    size = row_bytes(name, shape[0])
    for rows in shape[1:]:
        size *= rows
    return size


def least_bytes(number: int, shape: tuple[int, ...]) -> int:
    """What a tensor of a fork's type must have at the least; 1 for an unknown type."""
    kind = FORK_TYPES.get(number)
    if kind is None:
        return 1
    return max(1, math.prod(shape[1:]) * (kind.header + shape[0] // kind.block * kind.bytes))
