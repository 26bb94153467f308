"""Finds what plans were made from: inventories and profiles by digest, in `inputs/` beside the plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from commands.console import read_text
from planner.errors import FileProblem

if TYPE_CHECKING:
    from planner.check import Inputs
    from planner.inventory import Inventory
    from planner.plan import Plan
    from planner.profile import Profile


class InputLibrary:
    """Inventories and profiles of some folders and files, each read once."""

    def __init__(self, models: tuple[Path, ...] = (), profiles: tuple[Path, ...] = ()) -> None:
        self._inventories: dict[str, Inventory] = {}
        self._profiles: dict[str, Profile] = {}
        self._seen: set[Path] = set()
        self._models, self._given_profiles = models, profiles
        for path in models:
            self._add_model(path)
        for path in profiles:
            self._add_profile(path)

    def of(self, plan: Plan, path: Path) -> Inputs:
        """The inputs with the digests that the plan names; None for those that are not there."""
        from planner.check import Inputs

        self._read_folder(path.parent / "inputs", plan)
        if self._models and plan.model.table_digest not in self._inventories:
            given = ", ".join(str(model) for model in self._models)
            raise FileProblem(str(path), f"is a plan for another model than {given}: {plan.model.name}")
        return Inputs(self._inventories.get(plan.model.table_digest), self._profile(plan))

    def _read_folder(self, folder: Path, plan: Plan) -> None:
        """Files named after the plan's model and machine; their digests decide. Files given by hand win."""
        model, machine = plan.model.name, plan.machine.name
        if not self._models and self._is_new(folder, f"{model}.inventory.yaml"):
            self._add_model(folder / f"{model}.inventory.yaml")
        if not self._given_profiles and self._is_new(folder, f"{machine}.profile.yaml"):
            self._add_profile(folder / f"{machine}.profile.yaml")

    def _is_new(self, folder: Path, name: str) -> bool:
        path = folder / name
        if "/" in name or path in self._seen or not path.is_file():
            return False
        self._seen.add(path)
        return True

    def _profile(self, plan: Plan) -> Profile | None:
        wanted = plan.machine.profile_digest
        if wanted not in self._profiles:
            self._add_shipped(plan.machine.name)
        return self._profiles.get(wanted)

    def _add_model(self, path: Path) -> None:
        from commands.models import load_inventory

        inventory = load_inventory(path)
        self._inventories[inventory.table_digest()] = inventory

    def _add_profile(self, path: Path) -> None:
        from planner.profile import from_text

        self._keep(from_text(read_text(path), str(path)))

    def _add_shipped(self, name: str) -> None:
        from planner.machines import load, names

        if name in names():
            self._keep(load(name))

    def _keep(self, profile: Profile) -> None:
        from planner.profile import to_text
        from planner.records import digest

        self._profiles[digest(to_text(profile))] = profile
