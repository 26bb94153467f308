"""Conversations at once on a running server, turn by turn: python -m benchmarks.load URL [--clients 8].

The long form of tests/test_load.py: start the server with `atsplan serve MODEL --plan P -np 8`, or any
llama-server. Prints, for each turn, the time until the first token and between tokens (median and worst over
clients), and how much of the prompt was computed and remembered; --json writes every turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

from runtime.bench.conversations import Conversation, Turn, together
from runtime.bench.prompts import text

_MS = 1e6


def conversations(clients: int, turns: int, words: int) -> list[Conversation]:
    """Texts that no two clients share, so that none is remembered for another."""
    return [
        Conversation([text(words, seed=1000 * client + turn) + "\n" for turn in range(turns)])
        for client in range(clients)
    ]


def table(found: list[list[Turn]], turns: int) -> list[str]:
    """One line a turn."""
    lines = ["turn  clients  first ms (worst)      ms a token (worst)  computed  remembered  lost"]
    for number in range(turns):
        here = [turn for one in found for turn in one if turn.number == number]
        good = [turn for turn in here if not turn.failure]
        if not good:
            lines.append(f"{number:4}  {0:7}  all {len(here)} lost")
            continue
        first, token = [t.first_ns / _MS for t in good], [t.token_ns / _MS for t in good]
        lines.append(
            f"{number:4}  {len(good):7}  {median(first):8.1f} ({max(first):8.1f})  "
            f"{median(token):8.2f} ({max(token):8.2f})  {median(t.prompt_tokens for t in good):8.0f}  "
            f"{median(t.remembered for t in good):10.0f}  {len(here) - len(good):4}"
        )
    return lines


def main() -> int:
    """Talk, print, and exit 1 where an answer was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--words", type=int, default=100, help="of what a client says")
    parser.add_argument("--json", type=Path, help="write every turn here")
    asked = parser.parse_args()
    told = conversations(asked.clients, asked.turns, asked.words)
    found = together(asked.url, told, asked.tokens, timeout_s=600)
    print("\n".join(table(found, asked.turns)))
    if asked.json:
        asked.json.write_text(json.dumps([[asdict(turn) for turn in one] for one in found], indent=1) + "\n")
    lost = [one for one in found if len(one) < asked.turns or any(turn.failure for turn in one)]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
