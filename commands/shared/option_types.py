"""Types of options: files to be written, checked before any work is done, and numbers that are numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from commands.shared.console import check_target
from planner.file_kinds import PAGE

BEGAN = "atsplan.began"  # of the contexts' common data, set by the program's own group


def whole(text: str) -> int | None:
    """A number of decimal digits, none of another script and at most 18; None for every other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


class Target(click.Path):
    """The path of a file to write; FileProblem at once where it cannot or must not be written."""

    def __init__(self, kind: str = "") -> None:
        super().__init__(path_type=Path)
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        check_target(Path(str(path)), self.kind)
        return path


_MOST = 1e9  # milliseconds, mebibytes, seconds, experts: far above anything real, far below what overflows


class Number(click.FloatRange):
    """A finite number within bounds, and none that nothing can be."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        if abs(number) > _MOST:
            self.fail(f"{value} is more than {_MOST:g}.", param, ctx)
        return number


html_option = click.option(
    "--html",
    "html",
    type=Target(PAGE),
    metavar="FILE",
    help="Write a page for a browser: one file, no network.",
)


def began() -> float | None:
    """When the command began, as the monotonic clock says: limits in seconds count what a person waits.

    None outside a command of the program.
    """
    context = click.get_current_context(silent=True)
    return context.meta.get(BEGAN) if context is not None else None
