"""Conversations with a llama-server: several at once, turn after turn, timed as their reader sees them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from planner.quoting import json_text


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, with all that was said before it, and its answer."""

    number: int  # from 0
    prompt_tokens: int  # computed for it; those that the server remembered are not
    remembered: int
    text: str
    tokens: int
    first_ns: int  # until the first token came
    token_ns: int  # between tokens after it
    failure: str = ""  # why there is no whole answer


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one client says, one text a turn; it leaves during turn `leaves`, after its first token."""

    texts: Sequence[str]
    leaves: int = -1


def together(
    url: str, conversations: Sequence[Conversation], tokens: int, timeout_s: float = 120
) -> list[list[Turn]]:
    """Hold all conversations at once, each answer greedy and of exactly `tokens` tokens; their turns."""
    found: list[list[Turn]] = [[] for _ in conversations]

    def talk(n: int) -> None:
        said = ""
        for number, text in enumerate(conversations[n].texts):
            said += text
            turn = ask(
                url, said, tokens, number, leave=number == conversations[n].leaves, timeout_s=timeout_s
            )
            found[n].append(turn)
            if turn.failure:
                return
            said += turn.text

    threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * max(len(c.texts) for c in conversations))
    return found


def ask(
    url: str, prompt: str, tokens: int, number: int = 0, *, leave: bool = False, timeout_s: float = 120
) -> Turn:
    """One turn, read as it comes; with `leave` the line is cut after the first token."""
    line = HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=timeout_s)
    wanted = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    start = time.perf_counter_ns()
    first = last = 0
    pieces: list[str] = []
    end: dict[str, Any] = {}
    failure = ""
    try:
        line.request("POST", "/completion", json_text(wanted), {"Content-Type": "application/json"})
        answer = line.getresponse()
        if answer.status != 200:
            failure = f"status {answer.status}"
        for raw in answer if not failure else ():
            if not raw.startswith(b"data: {"):
                continue
            event = json.loads(raw[6:])
            last = time.perf_counter_ns()
            first = first or last
            pieces.append(event.get("content", ""))
            if event.get("stop"):
                end = event
            if leave:
                failure = "left"
                break
        if not failure and not end:
            failure = "the answer broke off"
    except (OSError, HTTPException, ValueError) as problem:
        failure = str(problem) or type(problem).__name__
    finally:
        line.close()
    timings = end.get("timings", {})
    made = int(timings.get("predicted_n", 0))
    return Turn(
        number,
        int(timings.get("prompt_n", 0)),
        int(timings.get("cache_n", 0)),
        "".join(pieces),
        made,
        max(first - start, 0) if first else 0,
        (last - first) // (made - 1) if made > 1 else 0,
        failure,
    )
