"""A header of 1,109 tensors and a vocabulary of 250,000: read in little time and little memory."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_bytes import ARR, F32, I32, STR, U32, arch, info, kv, text

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, LAYERS, EXPERTS, WIDTH = 250_000, 79, 128, 64
MEMORY_KIB = 150 * 1024  # of the whole process, interpreter included
CPU_SECONDS = 4.0  # of a process that takes 0.3 s (the command: 0.6 s) where nothing else runs

_LAYER: dict[str, tuple[int, ...]] = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "attn_q_norm": (16,),
    "attn_k_norm": (16,),
    "ffn_gate_inp": (WIDTH, EXPERTS),
    "ffn_gate_exps": (WIDTH, 32, EXPERTS),
    "ffn_up_exps": (WIDTH, 32, EXPERTS),
    "ffn_down_exps": (32, WIDTH, EXPERTS),
    "ffn_gate_shexp": (WIDTH, 32),
    "ffn_down_shexp": (32, WIDTH),
}
_NUMBERS = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "expert_count": EXPERTS,
    "expert_used_count": 8,
    "attention.head_count": 4,
    "attention.head_count_kv": 4,
}

_READ = (
    "from pathlib import Path; from planner.model.gguf import reader; reader.read_model(Path(sys.argv[1]))"
)
_COMMAND = "from atsplan import main; main(['inventory', sys.argv[1], '--json'], standalone_mode=False)"
_TAKEN = """
import time
peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]
print(time.process_time(), peak, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file: 12 MB of header, and 390 MB of weights that take no room."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (WIDTH, VOCABULARY)}
    shapes |= {"output.weight": (WIDTH, VOCABULARY), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{stem}.weight": shape for stem, shape in _LAYER.items()}
    infos, end = [], 0
    for name, shape in shapes.items():
        infos.append(info(name, shape, 0, end))
        end += 4 * math.prod(shape)
    entries = [arch("qwen3moe"), *(kv(f"qwen3moe.{key}", U32, value) for key, value in _NUMBERS.items())]
    entries += [_words("tokens", "token"), _words("merges", "to ken"), _zeros("scores", F32)]
    entries.append(_zeros("token_type", I32))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(entries)) + b"".join(entries + infos)
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    with path.open("wb") as file:
        file.write(head.ljust(-(-len(head) // 32) * 32, b"\0"))
        file.truncate(file.tell() + end)
    return path


def _words(key: str, word: str) -> bytes:
    raw = b"".join(text(f"{word}{n:06d}") for n in range(VOCABULARY))
    return text(f"tokenizer.ggml.{key}") + struct.pack("<IIQ", ARR, STR, VOCABULARY) + raw


def _zeros(key: str, kind: int) -> bytes:
    return text(f"tokenizer.ggml.{key}") + struct.pack("<IIQ", ARR, kind, VOCABULARY) + bytes(4 * VOCABULARY)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize("what", [_READ, _COMMAND], ids=["header", "command"])
def test_a_large_header_is_read_in_little_time_and_memory(large: Path, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{what}{_TAKEN}", str(large)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    seconds, peak_kib = done.stderr.splitlines()[-1].split()
    assert int(peak_kib) < MEMORY_KIB
    assert float(seconds) < CPU_SECONDS
    if what == _COMMAND:
        assert f'"tensors": {3 + LAYERS * len(_LAYER)}' in done.stdout
