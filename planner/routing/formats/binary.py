"""Binary profiles: mbolt route.bin, LONGSPEAR traces, importance matrices and stamped models in GGUF."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import FileProblem
from planner.model.gguf.header import Bytes, Header, KeyValue, parse_header
from planner.model.routed_layers import routed_weight
from planner.routing.expert_counts import MAX_EXPERTS, Phase
from planner.routing.found import Found, RawPart
from planner.routing.trace import Trace

Parser = Callable[[Bytes, str], Found]
Ints = NDArray[np.int32]
Words = NDArray[np.uint16] | NDArray[np.uint32]

_COUNTS = ".counts"  # of an importance matrix, behind the name of the weight
_RUN, _LOOK = 1 << 16, 16  # records looked at together: at most, at first
_EXACT_FLOAT = 2**24  # larger counts are rounded in a 32-bit float


def parser_for(head: bytes) -> Parser | None:
    """The parser for a file that starts with these bytes; None for text."""
    if head.startswith(b"MBLT"):
        return _route_bin
    if head.startswith(b"LONGSPEAR_ROUTE_TRACE"):
        return _longspear
    if head.startswith(b"GGUF"):
        return _gguf
    if head.startswith(b"MBPF"):
        return _refuse("a prefetch table, which lists where experts are stored and counts nothing")
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return _refuse("a pickle, which can run code when it is read: convert it to layer,expert,count")
    if _is_legacy_imatrix(head):
        return _refuse(
            "a legacy importance matrix (.dat), which has no counts per expert: write it as GGUF "
            "(llama-imatrix --output-format gguf)"
        )
    return None


def _refuse(why: str) -> Parser:
    def parser(data: Bytes, path: str) -> Found:
        raise FileProblem(path, why)

    return parser


def _is_legacy_imatrix(head: bytes) -> bool:
    # i32 entries, i32 length of the first name, the name itself: a tensor.
    if len(head) < 12:
        return False
    entries, length = struct.unpack("<ii", head[:8])
    name = head[8 : 8 + max(0, min(length, 256))]
    return 0 < entries < 1 << 20 and re.fullmatch(rb"[\w.\-]+\.(weight|bias)", name) is not None


def _route_bin(data: Bytes, path: str) -> Found:
    """Header: magic, version 1, n_expert; records: layer, k, n_tokens, ids token by token.

    A pass ends when the layer falls back; passes with one token in every layer are decode steps. The
    last record may be cut.
    """
    words = np.frombuffer(bytes(data[0 : len(data) // 4 * 4]), dtype="<u4")
    if len(words) < 3 or words[1] != 1:
        raise FileProblem(path, "mbolt trace of a version other than 1")
    records = _records(words[3:], path, None)
    trace = _trace_of(records)
    return Found("mbolt route.bin", min(int(words[2]), MAX_EXPERTS), trace.n_used, trace=trace)


@dataclass(frozen=True, slots=True, eq=False)
class _Records:
    """Layer and tokens of each record, in graph order, and the ids of all their tokens (rows, k)."""

    layers: Ints
    tokens: Ints
    ids: Ints


def _records(words: Words, path: str, fixed_k: int | None) -> _Records:
    """Records of layer, k (when it is not fixed), tokens, ids; the last one may be cut.

    Runs of records with one token, which is what decoding writes, are taken together.
    """
    head = 2 if fixed_k else 3
    layers: list[Words] = []
    tokens: list[NDArray[np.int64]] = []
    ids: list[Words] = []
    at, k, reach = 0, fixed_k or 0, _LOOK
    while at + head <= len(words):
        n_tokens = int(words[at + head - 1])
        k = fixed_k or int(words[at + 1])
        if not 0 < k <= MAX_EXPERTS or int(words[at]) > MAX_EXPERTS or (ids and ids[0].shape[1] != k):
            raise FileProblem(path, f"broken record at word {at}, after {len(layers)} good blocks")
        size = head + k * n_tokens
        fit = (len(words) - at) // size
        if not fit:
            break
        alike = words[at : at + size * min(fit, reach)].reshape(-1, size)
        same = (alike[:, 1:head] == alike[0, 1:head]).all(axis=1)
        run = len(same) if same.all() else int(np.argmin(same))
        # Twice as far after a run of like records, so that unlike ones cost no more than their number.
        reach = min(2 * reach, _RUN) if run == reach else _LOOK
        layers.append(alike[:run, 0])
        tokens.append(np.full(run, n_tokens))
        ids.append(alike[:run, head:].reshape(-1, k))
        at += size * run
    if not sum(map(len, ids)):
        raise FileProblem(path, "routing trace without a whole record")
    every = np.concatenate(ids).astype(np.int32)
    if (every < 0).any():
        raise FileProblem(path, "routing trace with a negative expert id")
    return _Records(np.concatenate(layers).astype(np.int32), np.concatenate(tokens).astype(np.int32), every)


def _trace_of(records: _Records) -> Trace:
    """A trace from records: a pass ends when the layer falls back, one token in all layers is decode.

    A prefill pass after a decode pass starts the next prompt.
    """
    passes = np.concatenate([[0], np.cumsum(np.diff(records.layers) <= 0)])
    widest = np.zeros(passes[-1] + 1, dtype=int)
    np.maximum.at(widest, passes, records.tokens)
    decode = widest == 1
    prompt = np.concatenate([[0], np.cumsum(decode[:-1] & ~decode[1:])])
    step = np.array(_steps(prompt.tolist(), decode.tolist()), dtype=np.int32)
    of_row = np.repeat(passes, records.tokens)
    return Trace(
        "",
        0,
        tuple(f"prompt-{index + 1}" for index in range(prompt[-1] + 1)),
        prompt[of_row].astype(np.int32),
        decode[of_row],
        step[of_row],
        np.repeat(records.layers, records.tokens),
        records.ids,
    )


def _steps(prompt: Sequence[int], decode: Sequence[bool]) -> list[int]:
    """Number of each pass within its prompt and phase."""
    seen: Counter[tuple[int, bool]] = Counter()
    steps = []
    for key in zip(prompt, decode, strict=True):
        steps.append(seen[key])
        seen[key] += 1
    return steps


def _longspear(data: Bytes, path: str) -> Found:
    """One line of key=value, then records of u16: layer, rows, rows x top_k ids."""
    whole = bytes(data[0 : len(data)])
    line, _, body = whole.partition(b"\n")
    said = dict(re.findall(r"(\w+)=(\S+)", line.decode("ascii", errors="replace")))
    try:
        n_expert, k = int(said["experts"]), int(said["top_k"])
    except (KeyError, ValueError):
        raise FileProblem(path, "LONGSPEAR trace without experts= and top_k=") from None
    if said.get("endian", "little") != "little" or not 0 < k <= MAX_EXPERTS:
        raise FileProblem(path, "LONGSPEAR trace that is not little-endian, or without experts per token")
    words = np.frombuffer(body[: len(body) // 2 * 2], dtype="<u2")
    return Found("LONGSPEAR_ROUTE_TRACE v1", n_expert, k, trace=_trace_of(_records(words, path, k)))


def _gguf(data: Bytes, path: str) -> Found:
    header = parse_header(data, path)
    if header.text("general.type") == "imatrix" or any(_counted(i.name) is not None for i in header.infos):
        return _imatrix(data, header, path)
    if header.get("mbolt.heat"):
        return _mbolt_model(data, header, path)
    raise FileProblem(path, "a model, not a routing profile: trace it with `atsplan heat trace`")


def _counted(name: str) -> int | None:
    """The layer of whose experts an entry holds counts; None for all other entries."""
    weight = routed_weight(name.removesuffix(_COUNTS)) if name.endswith(_COUNTS) else None
    return weight[0] if weight else None


def _imatrix(data: Bytes, header: Header, path: str) -> Found:
    """Counts per expert, the same for all matrices of a layer; collected while reading prompts."""
    rows: dict[int, NDArray[np.float32]] = {}
    tokens = 0
    notes: list[str] = []
    for info in header.infos:
        if not info.name.endswith(".counts"):
            continue
        count = math.prod(info.dims)
        if count > MAX_EXPERTS:  # several entries may share the same bytes: each must be small
            raise FileProblem(path, f"{info.name} has {count} counts, at most {MAX_EXPERTS} experts can be")
        values = _floats(data, header.data_offset + info.offset, count, path, info.name)
        layer = _counted(info.name)
        if layer is None:
            tokens = max(tokens, int(values[0]))
        elif layer in rows and not np.array_equal(rows[layer], values):
            notes.append(f"layer {layer}: the matrices were not all used alike; the larger counts are taken")
            rows[layer] = np.maximum(rows[layer], values)
        else:
            rows[layer] = values
    if not rows:
        raise FileProblem(path, "an importance matrix without counts of experts: made from a dense model")
    if max(float(v.max()) for v in rows.values()) >= _EXACT_FLOAT:
        notes.append("counts above 2^24 are rounded in this format")
    total = max(int(v.sum()) for v in rows.values())
    counts = {la: {e: int(v) for e, v in enumerate(row) if v} for la, row in rows.items()}
    source = " ".join(_strings(data, header.get("imatrix.datasets"))) or "imatrix"
    n_expert = max(len(row) for row in rows.values())
    n_used = round(total / tokens) if tokens else 0
    if n_used > n_expert:  # what else is in the file was not counted over the same tokens
        n_used = tokens = 0
    return Found(
        "imatrix", n_expert, n_used, [RawPart(source, Phase.PREFILL, tokens, counts)], notes=tuple(notes)
    )


def _mbolt_model(data: Bytes, header: Header, path: str) -> Found:
    """Heat that mbolt stored, by position, in a model that it rewrote."""
    n_layers, n_expert = header.number("mbolt.n_layers"), header.number("mbolt.n_experts")
    heat = numbers(data, header.get("mbolt.heat"))
    if not n_layers or not n_expert or n_expert < 0 or heat is None or len(heat) != n_layers * n_expert:
        raise FileProblem(path, "broken record of mbolt: mbolt.heat does not have a count for each expert")
    by_layer = heat.reshape(n_layers, n_expert)
    counts = {la: {e: int(v) for e, v in enumerate(row) if v} for la, row in enumerate(by_layer)}
    part = RawPart("mbolt", Phase.DECODE, 0, counts)
    orders = mbolt_orders(data, header, path)
    return Found("mbolt model", n_expert, parts=[part], orders=orders)


def mbolt_orders(data: Bytes, header: Header, path: str) -> Mapping[int, Sequence[int]]:
    """Original expert id at each position, by layer, of a model that mbolt rewrote; empty for others."""
    order = numbers(data, header.get("mbolt.perm"))
    n_expert = header.number("mbolt.n_experts")
    if order is None or not n_expert or n_expert < 0:
        return {}
    if len(order) % n_expert:
        raise FileProblem(path, "broken record of mbolt: mbolt.perm is not layers times experts")
    return {la: [int(e) for e in row] for la, row in enumerate(order.reshape(-1, n_expert))}


def numbers(data: Bytes, kv: KeyValue | None) -> NDArray[np.int64] | None:
    """A 32-bit integer array of the metadata, however long; None when there is none."""
    kinds = {4: "<u4", 5: "<i4"}
    if kv is None or kv.element not in kinds:
        return None
    start = kv.value_start + 12
    return np.frombuffer(bytes(data[start : kv.end]), dtype=kinds[kv.element]).astype(np.int64)


def _floats(data: Bytes, start: int, count: int, path: str, name: str) -> NDArray[np.float32]:
    raw = bytes(data[start : start + 4 * count])
    if len(raw) != 4 * count:
        raise FileProblem(path, f"truncated: {name} needs {4 * count} bytes at byte {start}")
    values = np.frombuffer(raw, dtype="<f4")
    if not np.isfinite(values).all() or (values < 0).any():
        raise FileProblem(path, f"{name} holds values that are no counts")
    return values


def _strings(data: Bytes, kv: KeyValue | None) -> list[str]:
    if kv is None or kv.element != 8:
        return []
    raw = bytes(data[kv.value_start + 12 : kv.end])
    made, at = [], 0
    for _ in range(kv.length):
        length = struct.unpack_from("<Q", raw, at)[0]
        made.append(raw[at + 8 : at + 8 + length].decode(errors="replace"))
        at += 8 + length
    return made
