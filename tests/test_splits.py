"""Pieces of a token's graph: as many as the engine's scheduler makes of a plan, wherever layers lie."""

from __future__ import annotations

import pytest
from planning_models import plan, twins
from twin_devices import Answer, Ask, ask

from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.model.units import Kind
from planner.plan.load_spec import load_spec
from planner.plan.plan import Plan
from planner.plan.request import Pin
from planner.workload import Workload
from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

WORK = Workload(n_ctx=512, depth=0, n_ubatch=16, n_batch=16, prompt=16, gen=16)
SPECS = {arch: SynthSpec(arch, n_layers=6) for arch in ARCHITECTURES}
SPECS["gemma4 with experts"] = SynthSpec("gemma4", n_layers=6, n_expert=8)
SPECS["qwen3 with a tied head"] = SynthSpec("qwen3", n_layers=6, tied=True)
DEVICES = {"A": "TWIN0", "B": "TWIN1", "C": "cpu"}
# A letter a layer, and the output head: its device. Small: its experts, or FFN, in host memory.
PLACES = (
    "AAAAAAA",  # all on one GPU
    "aaaAAAA",
    "aAaAaAA",
    "aaaaaaC",  # the CPU is listed for the head alone, and holds the experts too
    "CCAAAAA",
    "CCaaAAA",
    "AACAAAA",  # a layer of the CPU between layers of a GPU
    "AACACAA",
    "AaCaaAA",
    "AAAACCA",
    "AAACCCC",
    "AAABBBB",
    "aaabbbA",
    "BBBBBBA",
    "ABAbaBA",
    "CAABBBA",
    "AACBBCA",
)


def pins(model: Inventory, places: str) -> tuple[Pin, ...]:
    """Every unit where its letter says."""
    found = []
    for unit in structure_of(model).units:
        letter = places[-1] if unit.layer is None else places[unit.layer]
        apart = letter.islower() and unit.kind in (Kind.FFN, Kind.EXPERTS)
        if unit.kind not in (Kind.EMBEDDING, Kind.LOOKUP):
            found.append(Pin(unit.name, "cpu" if apart else DEVICES[letter.upper()]))
    return tuple(found)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Plan, Answer]]:
    """A plan of every model in every place, and what the engine makes of it."""
    folder, machine = tmp_path_factory.mktemp("splits"), twins(1024)
    asked: dict[tuple[str, str], tuple[Plan, Ask]] = {}
    for name, spec in SPECS.items():
        path = write(folder / f"{name}.gguf", spec)
        model = read_model(path).inventory
        for places in PLACES:
            made = plan(
                model, "TWIN0=900,TWIN1=900", on=machine, workload=WORK, pins=pins(model, places), limit_s=60
            )
            asked[name, places] = made, Ask(path, load_spec(made))
    said = ask([question for _, question in asked.values()], n_devices=2)
    return {key: (made, answer) for (key, (made, _)), answer in zip(asked.items(), said, strict=True)}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", SPECS)
def test_a_plan_counts_the_engine_s_splits(
    name: str, places: str, counted: dict[tuple[str, str], tuple[Plan, Answer]]
) -> None:
    made, engine = counted[name, places]
    assert not engine.problem
    assert made.predicted.splits == engine.splits_decode >= 2
