"""Where a command gets its model table, profile and plan from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import read_text, say
from planner.errors import FileProblem, OptionProblem

if TYPE_CHECKING:
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.plan.plan import Plan

ELSEWHERE = ("hf:", "https:", "http:")
_WHICH = "say for which machine: a measured profile, or one of those of atsplan machines"


def load_inventory(path: Path, *, planned: bool = False) -> Inventory:
    """Inventory of a GGUF file (any shard, or a folder of shards) or of an inventory.yaml.

    What a person should know of the file is said on stderr. NotLoadable for one that is to be `planned` and
    that stock llama.cpp would refuse; of others it is said too.
    """
    from planner.model.nextn import check_not_alone
    from planner.model.validity import check_loadable, load_faults

    if str(path).startswith(ELSEWHERE) and not path.exists():
        typed = str(path).replace(":/", "://", 1)  # a path has lost a stroke of `https://`
        raise FileProblem(typed, "lies elsewhere, which only fit reads: download it for this command")
    told: tuple[str, ...] = ()
    if path.suffix in {".yaml", ".yml"}:
        from planner.model.inventory import from_text

        inventory = from_text(read_text(path), str(path))
    else:
        from planner.model.gguf.reader import read_model

        model = read_model(path)
        for note in model.notes:
            say(f"note: {note}")
        inventory, told = model.inventory, model.refused
    if planned:
        check_loadable(inventory, str(path), told)
        check_not_alone(inventory, str(path))
    elif whys := (*told, *load_faults(inventory)):
        say(f"note: stock llama.cpp would not load it: {'; '.join(whys[:3])}")
    return inventory


def load_profile(path: Path | None, machine: str | None) -> Profile:
    """Profile from a file, or a machine description that ships with the program; exactly one is needed."""
    if (path is None) == (machine is None):
        raise OptionProblem("--profile/--machine", "", _WHICH if path is None else "give only one of the two")
    if path is not None:
        from planner.machine.profile import from_text

        return from_text(read_text(path, "profile"), str(path))
    from planner.machine.presets import load

    assert machine is not None
    return load(machine)


def load_plan(path: Path) -> Plan:
    """Plan from its file."""
    from planner.plan.plan import from_text

    return from_text(read_text(path, "plan"), str(path))
