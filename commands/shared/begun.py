"""When the command began that is running: limits by the clock count what a person waits, from there."""

from __future__ import annotations

import click

KEY = "atsplan.began"  # of the contexts' common data, set by the program's own group


def began() -> float | None:
    """Seconds of the monotonic clock; None outside a command of the program."""
    context = click.get_current_context(silent=True)
    return context.meta.get(KEY) if context is not None else None
