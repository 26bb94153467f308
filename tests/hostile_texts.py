"""Texts that strangers may put where a name is expected, and what a terminal must never be sent."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, settings
from hypothesis import strategies as st
from sample_plan import sample_plan

from planner.plan.plan import Plan

# Each tries to end a value of some language, to begin another one, or to speak to the terminal.
CRAFTED = (
    'x"""\nopen("canary", "w")\n"""',
    "x'''\nopen('canary', 'w')\n#",
    "coding: utf-7 +AAo-open('canary', 'w')+AAo-",
    "$(touch canary) `touch canary`",
    "'; touch canary; '",
    "a\ntouch canary\n",
    "a\r\n[other]\r\nmodel = /etc/passwd",
    "name]\nmodel = /etc/passwd\n[b",
    "a\nLLAMA_ARG_HOST=0.0.0.0",
    "${HOME} $HOME $$ %HOME% %(x)s",
    'q", "--host", "0.0.0.0", "',
    "a: b # c",
    "- &a [*a, {b: !!python/object/apply:os.system [touch canary]}]",
    "<![CDATA[ ]]> &lt; <a b='c'/> <!-- -->",
    '{"a": "\\u0041"} {0} {{1}}',
    "[click](https://example.org/)",
    '"} 1\natsplan_evil{a="b',
    "\x1b[2J\x1b]0;title\x07\x1b[31mred\x9b31m",
    "[bold red]markup[/] :smile: [/]",
    "$\\frac{1}{2}$ $x_1$ \\input{/etc/passwd} _hidden",
    "user\u202egpj.exe\u2066\u2069\u200f",
    "line\u2028two\u2029three\x85four\x0bfive",
    "../../etc/cron.d/evil",
    "/etc/passwd",
    "C:\\Windows\\System32\\con",
    ".hidden",
    "-rf",
    "NUL",
    "com1.txt",
    "*",
    "..",
    " blank ends ",
    "back\\slash\\n",
    "emoji 👩‍👩‍👧 漢字 ｆｕｌｌ é",
    "bytes \udcff\udc80",
    "nul\0byte",
    "lone \ud800",
    "\ufeffmark\ufffe",
    "tag\U000e0041\U000e007f",
    "",
)
_SIGNS = "'\"`$\\;#=:[]{}()<>|&!*?%~^@,./-_ \t\n\r\0\x1b\x07\x7f\x85\x9b\xa0\u2028\u202e\u2066\ufeff\u200b"
ANY = st.one_of(
    st.sampled_from(CRAFTED),
    st.text(
        st.one_of(st.sampled_from(_SIGNS + "\ud800\udcff\U000e0041漢é😀ab1"), st.characters()), max_size=40
    ),
    st.builds(lambda piece, times: piece * times, st.sampled_from(CRAFTED), st.integers(1, 400)),
)


def unseemly(text: str) -> set[str]:
    """The letters of an output that move a cursor, turn its direction, or are no letters at all."""
    return {c for c in text if c not in "\n " and unicodedata.category(c)[0] in "CZ"}


often = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
seldom = settings(often, max_examples=40)


def crafted(*names: str) -> Callable[[Any], Any]:
    """Every crafted text as an explicit example for each of these arguments."""

    def wrapped(test: Any) -> Any:
        for text in CRAFTED:
            test = example(**{name: text or ("m" if name == "model" else "") for name in names})(test)
        return test

    return wrapped


def is_argument(text: str) -> bool:
    """Whether the system can give it to a program."""
    return "\0" not in text and not any("\ud800" <= c < "\udc80" or "\udcff" < c < "\ue000" for c in text)


def plan_of(name: str) -> Plan:
    """The sample plan of a model of this name."""
    plan = sample_plan()
    return plan.model_copy(
        update={"command": f"solve {name}", "model": plan.model.model_copy(update={"name": name})}
    )
