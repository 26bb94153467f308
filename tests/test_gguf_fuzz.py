"""Ten thousand damaged files: an answer or one line, no traceback, no output, no memory."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

from gguf_bytes import ARR, F32, STR, U32, T, arch, f32, gguf, kv
from hand_plans import hand_plan

from planner.errors import AtsplanError
from planner.model.gguf_file import ModelFile, read_model
from rewriter.rewrite import RewriteOptions, rewrite

FILES = 10_000
REWRITES = 400  # of the damaged files that still read as models
GROWTH_BYTES = 100 << 20
EXTREMES = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def base() -> bytes:
    """A small model with every kind of value and some experts."""
    kvs = [
        arch("qwen3moe"),
        kv("general.alignment", U32, 32),
        kv("general.name", STR, "Fuzz"),
        kv("qwen3moe.block_count", U32, 1),
        kv("qwen3moe.expert_count", U32, 4),
        kv("qwen3moe.expert_used_count", U32, 2),
        kv("qwen3moe.attention.head_count", ARR, (U32, [1])),
        kv("qwen3moe.rope.freq_base", F32, 1e6),
        kv("tokenizer.ggml.tokens", ARR, (STR, ["a", "bc", ""])),
        kv("tokenizer.ggml.scores", ARR, (F32, [0.0, 1.0, 2.0])),
    ]
    tensors = [
        f32("token_embd.weight", *range(8)),
        T("blk.0.attn_q.weight", (256, 2), 12, bytes(288)),
        T("blk.0.ffn_gate_inp.weight", (8, 4), 0, bytes(128)),
        T("blk.0.ffn_gate_up_exps.weight", (8, 2, 4), 0, bytes(256)),
        T("output.weight", (256,), 153, bytes(100)),
    ]
    return gguf(kvs, tensors)


def damaged(data: bytes, header_end: int, dice: random.Random) -> bytes:
    """One to three faults, most of them in the header."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(min(header_end, len(made)) or 1)
        fault = dice.randrange(7)
        if fault == 0:
            made[at : at + 1] = bytes([dice.randrange(256)])
        elif fault == 1:
            made[at : at + 8] = struct.pack("<Q", dice.choice(EXTREMES))
        elif fault == 2:
            made[at : at + 4] = struct.pack("<I", dice.choice(EXTREMES) % 2**32)
        elif fault == 3:
            del made[dice.randrange(len(made) + 1) :]
        elif fault == 4:
            del made[at : at + dice.randint(1, 40)]
        elif fault == 5:
            made[at:at] = made[at : at + dice.randint(1, 40)]
        else:
            made[at : at + 1] = bytes([made[at] ^ 1 << dice.randrange(8)]) if at < len(made) else b""
    return bytes(made)


def attempt(path: Path) -> ModelFile | str:
    """The model, or the line a user would read."""
    try:
        return read_model(path)
    except AtsplanError as problem:
        return str(problem)


def rewritten(model: ModelFile, out: Path) -> bool:
    """Whether the damaged model could be rewritten; if not, nothing may be left."""
    try:
        rewrite(model, hand_plan(model, experts={0: (2, 0, 1, 3)}), out, RewriteOptions(force=True))
    except AtsplanError as problem:
        assert "\n" not in str(problem)
        return False
    return True


def test_damaged_files_are_answered_in_one_line(tmp_path: Path) -> None:
    dice = random.Random(20261129)
    data = base()
    path, out = tmp_path / "m.gguf", tmp_path / "o.gguf"
    path.write_bytes(data)
    clean = read_model(path)
    assert rewritten(clean, out)
    for made in (out, tmp_path / "o.gguf.manifest.yaml"):
        made.unlink()
    header_end = clean.headers[0].header.end
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines: set[str] = set()
    readable = done = 0
    for _ in range(FILES):
        path.write_bytes(damaged(data, header_end, dice))
        found = attempt(path)
        if isinstance(found, str):
            assert found.startswith(str(path)) and "\n" not in found and len(found) < 500, found
            lines.add(found)
        else:
            readable += 1
            if readable <= REWRITES and rewritten(found, out):
                done += 1
                out.unlink()
                (tmp_path / "o.gguf.manifest.yaml").unlink()
            assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GROWTH_BYTES, grown
    # The damage was of many kinds, and some files were still models.
    assert len(lines) > 500 and readable > REWRITES and done > 20
