"""A measuring child process: one JSON request on stdin, one JSON line on stdout for each answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from planner.errors import AtsplanError
from runtime.child import die_with_parent

Line = dict[str, Any]


def answer_request(answers: Callable[[Line], Iterator[Line]]) -> int:
    """Answer one request; the exit code of atsplan for what went wrong, in words on stderr."""
    die_with_parent()
    request = json.load(sys.stdin)
    try:
        for line in answers(request):
            print(json.dumps(line), flush=True)
    except AtsplanError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    return 0
