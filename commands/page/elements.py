"""Elements of a page, as a tree: texts are data, and what writes the tree escapes them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources
from xml.etree import ElementTree

from planner.quoting import message, xml

Node = ElementTree.Element
FIRST_LINES = "<!doctype html>\n<!-- atsplan: page -->\n"


def element(tag: str, *children: Node | str | Iterable[Node] | None, **attributes: object) -> Node:
    """An element; `class_` is class, `aria_label` is aria-label; None among the children is left out."""
    names = {name.rstrip("_").replace("_", "-"): _text(str(value)) for name, value in attributes.items()}
    made = ElementTree.Element(tag, {k.replace("viewbox", "viewBox"): v for k, v in names.items()})
    for child in children:
        _add(made, child)
    return made


def _add(parent: Node, child: Node | str | Iterable[Node] | None) -> None:
    if child is None:
        return
    if isinstance(child, str):
        shown = _text(child)
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + shown
        else:
            parent.text = (parent.text or "") + shown
    elif isinstance(child, Node):
        parent.append(child)
    else:
        parent.extend(child)


def _text(text: str) -> str:
    """A text as it is shown: on one line, of bounded length, printable."""
    return xml(message(text))


def document(title: str, body: Iterable[Node]) -> str:
    """The whole file: no other file is asked for, and the policy in its head lets nothing be asked for."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = f"default-src 'none'; style-src {_allowed(style)}; script-src {_allowed(script)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        _raw("style", style),
    )
    whole = element("html", head, element("body", *body, _raw("script", script)), lang="en")
    return FIRST_LINES + ElementTree.tostring(whole, encoding="unicode", method="html") + "\n"


def _asset(name: str) -> str:
    return resources.files("commands.page").joinpath(name).read_text(encoding="utf-8")


def _raw(tag: str, text: str) -> Node:
    """A style or script of ours, which is not escaped."""
    made = ElementTree.Element(tag)
    made.text = text
    return made


def _allowed(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def percent(share: float) -> str:
    """A share of the width, as SVG takes it."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"
