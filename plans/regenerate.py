"""Makes every plan of the library again: `make plans`. Same inputs, same bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from commands.shared.inputs import known_of_heat
from planner.errors import AnswerIsNo
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.presets import load
from planner.machine.profile import to_text as profile_text
from planner.memory.reserves import Extras
from planner.model.inventory import Inventory, from_text
from planner.passes.make_plan import make_plan
from planner.passes.settings_to_try import PUBLISHED_PPM
from planner.plan.known import Known
from planner.plan.plan import to_text
from planner.plan.request import ExtraModels, Request
from planner.records import Many, Record
from planner.records import load as load_record
from planner.solver.clock import Clock
from planner.workload import usual

HERE = Path(__file__).parent
WORK_S = 3600.0  # deterministic seconds a problem: what the solver can prove, it proves


class OnMachine(Record):
    """A machine and the memory a plan may take there."""

    machine: str
    budget: str


class OfModel(Record):
    """A model and the context it is planned for."""

    model: str
    ctx: int = Field(gt=0, le=2**31 - 1)
    heat: str = ""  # file of expert routing in inputs/: hot experts may live on the GPU
    hybrid: bool = False  # experts may have slots, the others computed by CPU and bus at the same time
    mtp: bool = False  # its NextN/MTP block drafts, as many tokens as pay at a published acceptance


class Group(Record):
    """Every model on every machine."""

    name: str
    machines: Many[OnMachine]
    models: Many[OfModel]


class Library(Record):
    """All plans of this folder."""

    schema_: int = Field(1, alias="schema", ge=1, le=1)
    groups: Many[Group]


@dataclass(frozen=True, slots=True)
class Task:
    """One plan to make."""

    model: OfModel
    place: OnMachine

    @property
    def path(self) -> Path:
        asked = {"+heat": self.model.heat, "+hybrid": self.model.hybrid, "+mtp": self.model.mtp}
        kinds = "".join(kind for kind, wanted in asked.items() if wanted)
        return HERE / f"{self.model.model}{kinds}--{self.place.machine}.yaml"

    @property
    def command(self) -> str:
        """What a person would type to make the plan."""
        heat = f" --heat plans/inputs/{self.model.heat}" if self.model.heat else ""
        more = " --hybrid" if self.model.hybrid else ""
        more += " --mtp --draft-accept auto" if self.model.mtp else ""
        return (
            f"atsplan solve plans/inputs/{self.model.model}.inventory.yaml --machine {self.place.machine}"
            f" --budget {self.place.budget} --ctx {self.model.ctx}{heat}{more} -o plans/{self.path.name}"
        )


def tasks() -> Iterator[Task]:
    """All plans of inputs/library.yaml, in its order."""
    path = HERE / "inputs" / "library.yaml"
    for group in load_record(path.read_text(), Library, str(path)).groups:
        for model in group.models:
            for place in group.machines:
                yield Task(model, place)


def plan_text(task: Task, inventory: Inventory) -> str:
    """The plan of a task, as text."""
    profile = load(task.place.machine)
    budgets = budgets_for(profile, parse_budget(task.place.budget))
    workload = usual(task.model.ctx, mtp=task.model.mtp)
    known = Known()
    if task.model.heat:
        known = known_of_heat(HERE / "inputs" / task.model.heat, inventory, workload)
    gpu = next(device.name for device in profile.devices if device.kind != "cpu")
    request = Request(
        budgets,
        workload,
        hybrid=task.model.hybrid,
        extra_models=ExtraModels(Extras(), gpu, PUBLISHED_PPM) if task.model.mtp else None,
        command=task.command,
    )
    return to_text(make_plan(inventory, profile, request, known, clock=Clock(WORK_S)))


def main() -> int:
    """Write all plans whose text changed; refusals are said and leave no plan."""
    wanted: set[Path] = set()
    inventories: dict[str, Inventory] = {}
    for task in tasks():
        path = HERE / "inputs" / f"{task.model.model}.inventory.yaml"
        if task.model.model not in inventories:
            inventories[task.model.model] = from_text(path.read_text(), str(path))
        machine = HERE / "inputs" / f"{task.place.machine}.profile.yaml"
        machine.write_text(profile_text(load(task.place.machine)))
        try:
            text = plan_text(task, inventories[task.model.model])
        except AnswerIsNo as problem:
            print(f"{task.path.name}: no plan: {problem}")
            continue
        wanted.add(task.path)
        changed = not task.path.exists() or task.path.read_text() != text
        task.path.write_text(text)
        print(f"{task.path.name}: {'written' if changed else 'the same'}", flush=True)
    for path in sorted(set(HERE.glob("*--*.yaml")) - wanted):
        path.unlink()
        print(f"{path.name}: removed, the library does not ask for it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
