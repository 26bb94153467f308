"""Draws how data flows through the rooms of the planner, from the code: python -m benchmarks.draw_rooms.

The picture is Mermaid text between two marks of docs/architecture.md. An arrow from one room to another means
that the other imports it; of several ways the longest is drawn. Every edge is found in the code.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: made by python -m benchmarks.draw_rooms -->", "<!-- end of rooms -->"
PACKAGES = ("runtime", "rewriter", "profiler", "commands")


def places() -> dict[str, list[Path]]:
    """Every room of the planner, then every other package, and its files; what a room is: a folder."""
    rooms = sorted(p for p in (ROOT / "planner").iterdir() if p.is_dir() and (p / "__init__.py").exists())
    found = {room.name: sorted(room.rglob("*.py")) for room in rooms}
    return found | {name: sorted((ROOT / name).rglob("*.py")) for name in PACKAGES}


def sources(path: Path) -> Iterator[str]:
    """The rooms and packages that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            head, _, rest = node.module.partition(".")
            yield rest.split(".")[0] if head == "planner" and rest else head


def arrows() -> dict[str, frozenset[str]]:
    """Room to the rooms that it imports."""
    found = places()
    return {
        name: frozenset({s for path in files for s in sources(path)} & found.keys() - {name})
        for name, files in found.items()
    }


def longest_ways(graph: Mapping[str, frozenset[str]]) -> list[tuple[str, str]]:
    """Edges source, target without those that a longer way says too; the graph has no circle."""

    def reaches(start: str, end: str) -> bool:
        return any(end == step or reaches(step, end) for step in graph[start])

    return sorted(
        (source, target)
        for target, origins in graph.items()
        for source in origins
        if not any(reaches(other, source) for other in origins - {source})
    )


def title(name: str) -> str:
    """What a room holds, in the words of its own docstring."""
    folder = ROOT / name if name in PACKAGES else ROOT / "planner" / name
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].rstrip(".").replace('"', "'") if text else name


def picture() -> str:
    """The Mermaid text of the flow."""
    graph = arrows()
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {name}["<b>{name}</b><br/>{title(name)}"]' for name in graph]
    lines += [f"    {source} --> {target}" for source, target in longest_ways(graph)]
    return "\n".join([*lines, "```"])


def with_picture(page: str) -> str:
    """A page with the picture of today between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{picture()}\n{END}{after}"


def main() -> int:
    """Write the picture; with --check, only say whether the page has it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Exit 1 where the page is not what the code is.")
    asked = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    made = with_picture(page)
    if not asked.check:
        PAGE.write_text(made, encoding="utf-8")
    return int(asked.check and made != page)


if __name__ == "__main__":
    sys.exit(main())
