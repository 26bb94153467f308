"""Small routing profiles as other tools write them, of the choices that `PREFILL` and `DECODE` list."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from planner.model.routed_layers import MoeShape
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import Phase
from planner.routing.formats import detect
from planner.routing.formats.detect import Imported

E, K = 8, 2
SHAPE = MoeShape("sha256:model", E, K, 1, {1: 1000, 2: 1000, 3: 3000})  # layer 0 is dense
# What the tool saw: (token ids of each layer 1..3) in a prefill of two tokens, then two decode steps.
PREFILL = {1: [[0, 1], [2, 1]], 2: [[5, 4], [5, 6]], 3: [[7, 0]]}
DECODE = [{1: [3, 1], 2: [5, 0], 3: [7, 6]}, {1: [1, 2], 2: [0, 5], 3: [6, 7]}]


def counts(*phases: Phase) -> dict[int, tuple[int, ...]]:
    want = {layer: [0] * E for layer in (1, 2, 3)}
    if Phase.PREFILL in phases:
        for layer, tokens in PREFILL.items():
            for ids in tokens:
                for i in ids:
                    want[layer][i] += 1
    if Phase.DECODE in phases:
        for step in DECODE:
            for layer, ids in step.items():
                for i in ids:
                    want[layer][i] += 1
    return {layer: tuple(row) for layer, row in want.items()}


def read(data: bytes | str, shape: MoeShape | None = SHAPE, n_expert: int = 0) -> Imported:
    return detect.read(data.encode() if isinstance(data, str) else data, "x", shape, n_expert)


def by_phase(found: Imported) -> dict[Phase, dict[int, tuple[int, ...]]]:
    """Counts of each phase, layers without any as zeros."""
    made: dict[Phase, dict[int, tuple[int, ...]]] = {}
    for phase in Phase:
        parts = [p for p in found.heat.parts if p.phase is phase]
        if parts:
            total = heats.make("", E, K, parts).total()
            made[phase] = {layer: total.get(layer, (0,) * E) for layer in (1, 2, 3)}
    return made


def whole() -> dict[Phase, dict[int, tuple[int, ...]]]:
    return {Phase.PREFILL: counts(Phase.PREFILL), Phase.DECODE: counts(Phase.DECODE)}


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def route_bin() -> bytes:
    data = b"MBLT" + words(1, E)
    for layer, tokens in PREFILL.items():
        data += words(layer, K, len(tokens), *(i for ids in tokens for i in ids))
    for step in DECODE:
        for layer, ids in step.items():
            data += words(layer, K, 1, *ids)
    return data


def longspear() -> bytes:
    data = (
        b"LONGSPEAR_ROUTE_TRACE v1 model=m experts=8 top_k=2 layers=3 main_layers=4 endian=little record=x\n"
    )
    for layer, tokens in PREFILL.items():
        data += struct.pack(
            f"<{2 + K * len(tokens)}H", layer, len(tokens), *(i for ids in tokens for i in ids)
        )
    for step in DECODE:
        for layer, ids in step.items():
            data += struct.pack(f"<{2 + K}H", layer, 1, *ids)
    return data


def positions() -> str:
    lines = [
        f"{row - len(t)},{la},{t[row][0]},{t[row][1]}" for la, t in PREFILL.items() for row in range(len(t))
    ]
    lines += [f"{n},{la},{ids[0]},{ids[1]}" for n, step in enumerate(DECODE) for la, ids in step.items()]
    return "pos,layer,ids\n" + "\n".join(lines) + "\n"


def route_trace() -> str:
    head = "# route_trace v1\n# model=m arch=x n_layer=4 n_expert=8 n_expert_used=2\n# expert_bytes=1,2,3\n"
    rows = ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"]
    for layer, tokens in PREFILL.items():
        rows += [
            f"0,0,{t},{layer},{s},{i},nan,0,9,0" for t, ids in enumerate(tokens) for s, i in enumerate(ids)
        ]
    for n, step in enumerate(DECODE):
        rows += [f"0,1,{2 + n},{la},{s},{i},0.5,1,9,0" for la, ids in step.items() for s, i in enumerate(ids)]
    return head + "\n".join(rows) + "\n"


def topk_export() -> str:
    layers = {
        str(la): {
            "executed_topk": [[9, 9]]
            + (PREFILL[la] if la < 3 else [[7, 0], [7, 0]])
            + [s[la] for s in DECODE]
        }
        for la in (1, 2, 3)
    }
    prompt = {"start_row": 1, "prefill_rows": 2, "decode_step_rows": 2, "end_row": 5, "category": "code"}
    root = {
        "schema": "glm52-routing-trace-export/v2",
        "routing": {"k": K, "n_expert_per_layer": E},
        "conditional": {"prompts": [prompt]},
        "layers": layers,
    }
    return json.dumps(root)


def demand() -> str:
    return "".join(
        f"step={n} layer={la - 1} ids={','.join(map(str, ids))}\n"
        for n, step in enumerate(DECODE)
        for la, ids in step.items()
    )


def plain() -> str:
    rows = [f"{la},{e},{c}" for la, row in counts(Phase.DECODE).items() for e, c in enumerate(row) if c]
    return "\n".join(rows) + "\n"


def choices() -> str:
    return "".join(f"{la},{i}\n" for step in DECODE for la, ids in step.items() for i in ids)


def perf(**layer: Any) -> str:
    entry = {"layer": 1, "calls": 2, "hot_slot_ratio": 1e-05, **layer}
    return json.dumps({"schema": "llama.cpp.moe_layer_perf.v1", "n_expert": E, "layers": [entry]})


def perms(**more: Any) -> str:
    layers = [
        {"layer": la, "heat": [float(c) for c in row], "heat_perm": list(range(E))[::-1], "lift": {}}
        for la, row in counts(Phase.DECODE).items()
    ]
    return json.dumps({"n_layers": 3, "n_expert": E, "n_tokens": 2, "layers": layers, **more})


def imatrix(path: Path, up: dict[int, tuple[int, ...]], tokens: int = 3) -> bytes:
    writer = gguf.GGUFWriter(path, "x")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    for layer, row in counts(Phase.PREFILL, Phase.DECODE).items():
        for matrix, values in (("gate", row), ("up", up.get(layer, row)), ("down", row)):
            name = f"blk.{layer}.ffn_{matrix}_exps.weight"
            writer.add_tensor(f"{name}.counts", np.array(values, dtype=np.float32).reshape(E, 1))
            writer.add_tensor(f"{name}.in_sum2", np.ones((E, 4), dtype=np.float32))
    writer.add_tensor("blk.1.attn_q.weight.counts", np.array([tokens], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def mbolt_model(path: Path, order: list[int]) -> bytes:
    rows = counts(Phase.DECODE)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint32("mbolt.n_layers", 4)
    writer.add_uint32("mbolt.n_experts", E)
    writer.add_array("mbolt.perm", order * 4)
    writer.add_array("mbolt.heat", [rows.get(la, (0,) * E)[e] for la in range(4) for e in order])
    writer.add_tensor("x", np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()
