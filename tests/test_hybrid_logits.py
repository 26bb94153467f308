"""Hybrid experts compute what the engine computes: every architecture with experts, every lane, any slots."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hybrid_runs import Ran, Run, distance, run_all

from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

# Experts of 32 bits: the kernels of the lanes then differ in the order of sums alone.
EXACT = 2e-4
# The engine's CPU looks GELU up in a table of 16-bit floats; GPUs and the CPU lane compute it.
TABLE = 3e-3
# Eight-bit activations here, others there: what two placements of the stock engine differ by.
QUANTISED = 0.05
LANES = {
    "cpu": {"slots": 3, "stage": 0},
    "bus": {"slots": 3, "guests": 2, "cpu_bytes_us": 1000, "bus_bytes_us": 1500, "stage": 0},
    "stage": {"slots": 3, "guests": 2, "cpu_bytes_us": 1, "bus_bytes_us": 10**6},
    "nothing resident": {"slots": 0, "stage": 0},
    "all resident": {"slots": 99},
    "one by one": {"slots": 3, "regions": False, "stage": 0},
}


def specs() -> dict[str, SynthSpec]:
    """Every architecture that has experts, some with gate and up in one tensor too."""
    found = {}
    for arch, habit in ARCHITECTURES.items():
        experts = habit.n_expert or (8 if arch in ("llama", "gemma4") else 0)
        if experts:
            found[arch] = SynthSpec(arch, n_expert=experts, type="f32", skew=1.0)
            if habit.fusible:
                found[f"{arch} fused"] = SynthSpec(
                    arch, n_expert=experts, type="f32", skew=1.0, fused_gate_up=True
                )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.mark.parametrize("name", specs())
def test_every_architecture_in_every_lane(name: str, folder: Path) -> None:
    model = write(folder / f"{name}.gguf", specs()[name])
    plain = Run(model)
    runs = [plain, Run(model, observe=True)]
    for settings in LANES.values():
        runs += [plain.on(**settings), Run(model, observe=True).on(**settings)]
    ran = run_all(runs, folder)
    for n, lane in enumerate(LANES):
        whole, cut = ran[2 + 2 * n : 4 + 2 * n]
        assert distance(ran[0].logits, whole.logits) < (TABLE if "gemma" in name else EXACT), lane
        # Cut at every node the two engines run the very same slices.
        assert distance(ran[1].logits, cut.logits) < EXACT, lane
        assert_lane(lane, whole)
    model.unlink()


def assert_lane(lane: str, ran: Ran) -> None:
    """The lane did the work that the test is about."""
    assert ran.report is not None
    blocks = ran.report.freed
    hits, cpu, uploaded, staged = (
        sum(getattr(block, what) for block in blocks) for what in ("hits", "cpu", "uploaded", "staged")
    )
    assert blocks
    assert (cpu > 0) == (lane in ("cpu", "bus", "nothing resident", "one by one")), lane
    assert (uploaded > 0) == (lane in ("bus", "stage")), lane
    assert (staged > 0) == (lane == "stage"), lane
    assert (hits > 0) == (lane != "nothing resident"), lane


def test_any_resident_set_gives_the_same_logits(folder: Path) -> None:
    model = write(folder / "any.gguf", SynthSpec("qwen3moe", type="f32", skew=1.0))
    dice = random.Random(5)
    runs = [Run(model)]
    for _ in range(12):
        sets = {block: dice.sample(range(8), dice.randint(0, 8)) for block in range(4)}
        run = Run(
            model,
            {"guests": dice.randint(0, 3), "stage": dice.choice([0, -1])},
            sets,
            warm=dice.random() < 0.5,
        )
        runs.append(run)
    ran = run_all(runs, folder)
    for run, answer in zip(runs[1:], ran[1:], strict=True):
        assert distance(ran[0].logits, answer.logits) < EXACT
        assert answer.report is not None
        for block in answer.report.freed:
            wanted = sorted(run.residents[block.block])
            assert sorted(block.resident) == wanted
            assert block.slots == len(wanted)


def test_quantised_experts_stay_within_the_distance_of_placements(moe_model: Path, folder: Path) -> None:
    lanes = [Run(moe_model).on(**settings) for settings in LANES.values()]
    ran = run_all([Run(moe_model), *lanes], folder)
    for answer in ran[1:]:
        assert distance(ran[0].logits, answer.logits) < QUANTISED


@pytest.mark.parametrize("fault", ["wrong-slot", "stale-row", "exchanged", "bias"])
def test_a_seeded_fault_is_seen(fault: str, folder: Path) -> None:
    arch = "gpt-oss" if fault == "bias" else "qwen3moe"
    model = write(folder / f"{fault}.gguf", SynthSpec(arch, type="f32", skew=1.0))
    settings = {"slots": 4, "stage": 0}
    plain, right, wrong = run_all(
        [Run(model), Run(model).on(**settings), Run(model).on(**settings, fault=fault)], folder, faults=True
    )
    assert distance(plain.logits, right.logits) < EXACT
    assert distance(plain.logits, wrong.logits) > 5 * EXACT
