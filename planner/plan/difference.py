"""What moved between two plans of one model, what it costs, and whether a running server can take it over."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from planner.plan.plan import LayerRange, Plan

# What the engine is not told: who asked for what, and what was predicted and compared.
_SAID = (
    *("command", "version", "predicted", "baselines", "untuned", "search", "fit", "notes"),
    *("machine.profile_digest", "constraints.heat_digest", "following.layers"),
    *("speculation.draft_ns", "speculation.step_ns"),
    *("speculation.accept_ppm", "speculation.accepted_ppm"),
)
_OF_UNITS = (".time_ns", ".why")
_SLOTS = "experts"  # the first of a layer's order have its slots


@dataclass(frozen=True, slots=True)
class Move:
    """One unit at another site."""

    unit: str
    size_bytes: int
    before: str  # "" when the unit is new
    after: str  # "" when the unit is gone


@dataclass(frozen=True, slots=True)
class Change:
    """A recorded value that differs, by its path in the file."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Moves first, then every other value that differs; both empty when the plans are equal."""

    moves: tuple[Move, ...]
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.moves or self.changes)


def difference(before: Plan, after: Plan) -> Difference:
    """Compare two plans value by value; sites are reported as moves and not again as changes."""
    return Difference(_moves(before, after), tuple(_changes(before, after)))


def _by_layer(layers: tuple[LayerRange, ...]) -> dict[int, str]:
    """The layer device by layer number."""
    return {n: entry.device for entry in layers for n in range(entry.first, entry.last + 1)}


def _moves(before: Plan, after: Plan) -> tuple[Move, ...]:
    old = {p.unit: p for p in before.units}
    new = {p.unit: p for p in after.units}
    names = list(old) + [name for name in new if name not in old]
    moves = []
    for name in names:
        was = str(old[name].site) if name in old else ""
        now = str(new[name].site) if name in new else ""
        if was != now:
            size = (new.get(name) or old[name]).size_bytes
            moves.append(Move(name, size, was, now))
    return tuple(moves)


def _changes(before: Plan, after: Plan) -> list[Change]:
    def view(plan: Plan) -> dict[str, object]:
        data = plan.model_dump(mode="json", by_alias=True)
        data["layers"] = {str(n): d for n, d in _by_layer(plan.layers).items()}
        data["units"] = {p["unit"]: {k: v for k, v in p.items() if k != "site"} for p in data["units"]}
        data["devices"] = {d["name"]: d for d in data["devices"]}
        data["baselines"] = {b["name"]: b for b in data["baselines"]}
        data["experts"] = {str(e["layer"]): e["order"] for e in data["experts"]}
        return data

    return _compare("", view(before), view(after))


def _compare(where: str, before: object, after: object) -> list[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = list(before) + [key for key in after if key not in before]
        found: list[Change] = []
        for key in keys:
            found += _compare(f"{where}.{key}" if where else str(key), before.get(key), after.get(key))
        return found
    return [] if before == after else [Change(where, _short(before), _short(after))]


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


# ---- while it is served


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
