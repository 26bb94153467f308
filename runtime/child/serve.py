"""The child's side: one request from stdin, events and the answer to stdout, the engine's log to stderr.

Messages are lines of JSON. Standard input stays open as long as somebody waits for the answer: when it ends,
so does this process, in whatever call into an engine it is.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from planner.errors import AtsplanError

Message = dict[str, Any]
Emit = Callable[[Message], None]

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_ALONE = 1  # the status of a child that nobody waits for


def serve(work: Callable[[Message], Message]) -> None:
    """Answer one request; for `if __name__ == "__main__"` of a module."""
    serve_events(lambda request, emit: work(request))


def serve_lines(work: Callable[[Message], Iterator[Message]]) -> None:
    """The same for work whose answer is its events."""

    def all_of(request: Message, emit: Emit) -> Message:
        for line in work(request):
            emit(line)
        return {}

    serve_events(all_of)


def serve_events(work: Callable[[Message, Emit], Message]) -> None:
    """The same for work that has something to tell on the way."""
    # The engine may print to stdout: keep the answer's channel to ourselves.
    channel = os.fdopen(os.dup(_STDOUT), "w")
    os.dup2(_STDERR, _STDOUT)
    request = _request()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def emit(event: Message) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    with channel:
        try:
            emit({"answer": work(request, emit)})
        except AtsplanError as problem:
            emit({"answer": {"problem": str(problem), "exit_code": problem.exit_code}})


def _request() -> Message:
    with os.fdopen(os.dup(_STDIN), "rb") as stream:
        request: Message = json.loads(stream.readline())
        return request


def _end_with_parent() -> None:
    # Not through sys.stdin: a thread that waits inside it stops the interpreter from ending.
    while os.read(_STDIN, 1):
        continue
    os._exit(_ALONE)
