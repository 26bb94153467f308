"""A small tokenizer for generated models: bytes, a few English merges, and padding tokens."""

from __future__ import annotations

from typing import Any

NORMAL, CONTROL, UNUSED = 1, 3, 5
END = "<|endoftext|>"
PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi"
)


def byte_letters() -> list[str]:
    """The letter for each byte in byte-level BPE: itself when printable, else one from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + hidden.index(byte)) for byte in range(256)]


def vocabulary(n_vocab: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer of exactly `n_vocab` tokens (at least 257)."""
    letters = byte_letters()
    room = max(0, n_vocab - 257)
    space = letters[ord(" ")]
    merges = [(space, letter) for letter in "tasoicpbwf"] + [(pair[0], pair[1]) for pair in PAIRS.split()]
    merges = merges[:room] or merges[:1]
    joined = [first + second for first, second in merges][:room]
    tokens = [*letters, END, *joined]
    spare = [f"<unused{index}>" for index in range(n_vocab - len(tokens))]
    kinds = [NORMAL] * 256 + [CONTROL] + [NORMAL] * len(joined) + [UNUSED] * len(spare)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *spare],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{first} {second}" for first, second in merges],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
    }
