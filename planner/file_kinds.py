"""Texts as files hold them: what kind of file one is, told by its beginning."""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGE = "page"
_HEAD_CHARS = 4096
_KEY = re.compile(r"^([a-z_]+):", re.MULTILINE)
# The first key of each record that no other one has.
_RECORDS: Mapping[str, str] = {
    "command": "plan",
    "architecture": "inventory",
    "measured": "profile",
    "source_header": "manifest",
}
_TABLES = {
    "# heat:": "heat file",
    "# trace:": "routing trace",
    "<!doctype html>\n<!-- atsplan: page -->": PAGE,
}


def kind_of(text: str) -> str:
    """plan, inventory, profile, manifest, heat file, routing trace or page; "" for everything else."""
    head = text[:_HEAD_CHARS]
    for start, kind in _TABLES.items():
        if head.startswith(start):
            return kind
    if not re.search(r"^schema:", head, re.MULTILINE):
        return ""
    return next((_RECORDS[key] for key in _KEY.findall(head) if key in _RECORDS), "")


def mistaken(text: str, wanted: str) -> str:
    """Why a text is not of the wanted kind, when it is plainly one of another; else ""."""
    found = kind_of(text)
    return f"is {named(found)}, {named(wanted)} is needed" if found not in ("", wanted) else ""


def named(kind: str) -> str:
    """The kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
