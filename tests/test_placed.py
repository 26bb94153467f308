"""What a placement costs: every piece of the engine's graph, those that the problem does not know of too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from planning_models import machine, moe, plan, priced

from planner.cost.build_problem import Priced
from planner.cost.graph_splits import graph_splits
from planner.cost.placed import evaluate_placed, layer_devices_of, sites_of
from planner.machine.profile import Calibration, Profile
from planner.model.gguf.reader import read_model
from planner.plan.engine_settings import EngineSettings
from planner.plan.request import Request
from planner.solver.evaluate import evaluate
from planner.solver.problem import Solution
from planner.workload import Workload
from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

SPECS = {arch: SynthSpec(arch, n_layers=6) for arch in sorted(ARCHITECTURES)}
SPECS["gemma4 with experts"] = SynthSpec("gemma4", n_layers=6, n_expert=8)
WORK = Workload(n_ctx=512, depth=0, n_ubatch=16, n_batch=16, prompt=16, gen=16)
STEP_NS = 10_000_000  # so much more that nothing which is rounded away counts


def with_split(profile: Profile, ns: int) -> Profile:
    """The machine with another time of a change of device."""
    made = Calibration(model="", split_ns=ns, mixed_ns=500_000, token_ns=300_000)
    return profile.model_copy(update={"calibrations": (made,)})


def random_placements(priced: Priced, count: int) -> Iterator[Solution]:
    """Placements of stretches of layers that lie alike, of any length."""
    random = Random(7)
    for _ in range(count):
        choices: list[int] = []
        last: tuple[object, ...] = ()
        for decision in priced.problem.decisions:
            same = [j for j, o in enumerate(decision.options) if (o.entry, len(o.sites)) == last]
            every = same if same and random.random() < 0.6 else range(len(decision.options))
            choices.append(random.choice(list(every)))
            chosen = decision.options[choices[-1]]
            last = chosen.entry, len(chosen.sites)
        solution = Solution(tuple(choices))
        if not any("exclude each other" in v for v in evaluate(priced.problem, solution).violations):
            yield solution


@pytest.mark.parametrize("gpus", (1, 2))
@pytest.mark.parametrize("name", SPECS)
def test_every_piece_of_the_graph_is_paid_once(name: str, gpus: int, tmp_path: Path) -> None:
    model = read_model(write(tmp_path / "m.gguf", SPECS[name])).inventory
    here = machine("rtx4090-ddr5" if gpus == 1 else "rtx3090-rtx3060-ddr4")
    request = Request({d.name: 2**60 for d in here.devices}, WORK, stripes=False)
    few, many = (priced(model, with_split(here, ns), request) for ns in (20_000, 20_000 + STEP_NS))
    beyond = 0
    for solution in random_placements(few, 120):
        found, dear = evaluate_placed(few, solution), evaluate_placed(many, solution)
        devices = layer_devices_of(few, solution)
        assert found.splits == graph_splits(few.model, devices, sites_of(few, solution, devices))
        assert round((dear.decode_ns - found.decode_ns) / STEP_NS, 1) == found.splits - 1
        assert found.objective_ns >= evaluate(few.problem, solution).objective_ns
        beyond += found.objective_ns > evaluate(few.problem, solution).objective_ns
    assert beyond  # of such placements some have more pieces than changes of device


def test_a_device_comes_twice_only_where_its_pieces_pay() -> None:
    """The problem alone would have the output head on the first GPU again, for one change more; its graph has
    six pieces more.
    """
    here, copies = with_split(machine("rtx3090-rtx3060-ddr4"), 30_000), EngineSettings(op_offload=False)
    made = plan(moe(), "CUDA0=500,CUDA1=700", on=here, workload=WORK, settings=copies)
    assert len({entry.device for entry in made.layers}) == len(made.layers)
    assert made.predicted.splits == 16
    assert made.predicted.gap_ppm < 100 and made.predicted.status == "feasible"
