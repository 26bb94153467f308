"""What of another plan a running server can take over: which experts have slots, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from planner.plan.difference import difference
from planner.plan.plan import Plan

# What the engine is not told: who asked for what, and what was predicted and compared.
_SAID = (
    *("command", "version", "predicted", "baselines", "untuned", "search", "fit", "notes"),
    *("machine.profile_digest", "constraints.heat_digest", "following.layers"),
    *("speculation.draft_ns", "speculation.step_ns"),
    *("speculation.accept_ppm", "speculation.accepted_ppm"),
)
_OF_UNITS = (".time_ns", ".why")
_SLOTS = "experts"  # the first of a layer's order have its slots


@dataclass(eq=False)
class NeedsRestart(InputError):
    """A plan that differs from the one that runs in more than the experts in slots."""

    path: str
    what: str
    before: str
    after: str

    def message(self) -> str:
        return (
            f"{self.path}: {self.what}: {self.before or 'absent'} -> {self.after or 'absent'}: "
            "only other experts in as many slots are taken over; start the server again for this plan"
        )


def check_while_running(before: Plan, after: Plan, path: str) -> None:
    """NeedsRestart unless `after`, a plan from `path`, asks of the engine what `before` asks of it, but for
    the experts that have slots.
    """
    found = difference(before, after)
    for move in found.moves:
        raise NeedsRestart(path, move.unit, move.before, move.after)
    for change in found.changes:
        if not _free(change.field):
            raise NeedsRestart(path, change.field, change.before, change.after)


def _free(field: str) -> bool:
    if field.startswith("units."):
        return field.endswith(_OF_UNITS)
    return any(field == name or field.startswith(f"{name}.") for name in (*_SAID, _SLOTS))
