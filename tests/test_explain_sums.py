"""What explain prints can be added up by hand: every part is named, and together they are the prediction."""

from __future__ import annotations

import re

import pytest
from planning_models import dense, machine, moe, plan, real

from planner.check.explain import as_data, kept_of, sentences, slices
from planner.check.reprice import reprice
from planner.constants import GIB
from planner.memory import server_memory
from planner.passes.predict import predict
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.site import ON_CPU

PLANS = {
    "experts on the CPU": lambda: (moe(16), machine(), plan(moe(16), "2500")),
    "all on the GPU": lambda: (moe(), machine(), plan(moe(), "8000")),
    "the CPU alone": lambda: (moe(), machine(), plan(moe(), "50")),
    "dense in part": lambda: (dense([8192] * 12), machine(), plan(dense([8192] * 12), "600")),
    "two cards": lambda: (
        moe(16),
        machine("2x-rtx4060ti-16gb"),
        plan(moe(16), "CUDA0=2600,CUDA1=2300", on=machine("2x-rtx4060ti-16gb")),
    ),
    "recurrent layers": lambda: (
        real("Qwen3-Next-80B-A3B-Q4_K_M"),
        machine(),
        plan(real("Qwen3-Next-80B-A3B-Q4_K_M"), "20000"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_printed_terms_add_up_to_the_prediction(name: str) -> None:
    inventory, profile, made = PLANS[name]()
    parts = reprice(made, inventory, profile, Known()).breakdown()
    assert parts.tpot_ns == made.predicted.tpot_ns
    whole = sum(parts.units_ns.values()) + parts.inside_ns + parts.edges_ns + parts.mixed_ns + parts.token_ns
    assert whole == parts.tpot_ns
    for known in (None, parts):
        assert sum(s.time_ns for s in slices(made, known)) == made.predicted.tpot_ns
        line = next(s for s in sentences(made, None, known) if s.startswith("Added up: "))
        terms, total = re.fullmatch(r"Added up: (.*) = ([\d.]+) ms.*\.", line).groups()  # type: ignore[union-attr]
        assert sum(round(float(t) * 100) for t in terms.split(" + ")) == round(float(total) * 100)
        each = [re.search(r"% of it, ([\d.]+) ms", s) for s in sentences(made, None, known)]
        assert [m[1] for m in each if m] == terms.split(" + ")[: sum(m is not None for m in each)]
        assert total == f"{made.predicted.tpot_ns / 1e6:.2f}"


def test_changes_of_device_are_counted_and_apart_from_the_rest() -> None:
    inventory, profile, made = PLANS["experts on the CPU"]()
    parts = reprice(made, inventory, profile, Known()).breakdown()
    named = {s.what: s.time_ns for s in slices(made, parts)}
    changes = named[f"{made.predicted.splits - 1} changes of device"]
    assert changes == parts.inside_ns + parts.edges_ns > 0
    assert named["sampling and launch"] == parts.token_ns
    data = as_data(made, None, parts)
    assert {s["what"] for s in data["slices"]} == named.keys()  # type: ignore[attr-defined]


def test_one_change_of_device_is_one() -> None:
    made = plan(moe(), "8000")
    parts = reprice(made, moe(), machine(), Known()).breakdown()
    one = made.model_copy(update={"predicted": made.predicted.model_copy(update={"splits": 2})})
    named = {s.what for s in slices(one, parts)}
    assert "1 change of device" in named and "1 changes of device" not in named


def test_predict_and_explain_say_the_same() -> None:
    inventory, profile, made = PLANS["experts on the CPU"]()
    moved = {p.unit: p.site for p in made.units if p.site == ON_CPU and p.unit.endswith("experts")}
    again = predict(inventory, profile, made.workload, _devices(made), moved)
    assert again.tpot_ns == made.predicted.tpot_ns
    for placed in made.units:
        assert again.units_ns.get(placed.unit, 0) == placed.time_ns


def _devices(made: Plan) -> tuple[str, ...]:
    return tuple(r.device for r in made.layers for _ in range(r.first, r.last + 1))


def test_checkpoints_of_a_server_are_in_the_sentences_and_fit() -> None:
    """Qwen3-Next: states of 75.4 MiB; half of what the plan leaves of the host but 1 GiB, and 32 at most."""
    model = real("Qwen3-Next-80B-A3B-Q4_K_M")
    made = plan(model, "20000")
    server = kept_of(made, model)
    assert server is not None and (server.checkpoints, server.n_seq) == (32, 1)
    assert server.checkpoint_bytes == sum(use.state_bytes for use in made.devices)  # one sequence, no drafts
    told = [line for line in sentences(made, server=server) if "checkpoints" in line]
    assert len(told) == 1 and "room for 32, 75 MiB each of every sequence, 2 412 MiB in all" in told[0]
    tight = server_memory.kept(4 * GIB, server.checkpoint_bytes, 4)
    assert (
        tight.checkpoints == 5
        and tight.checkpoints_bytes <= 3 * GIB // 2 < tight.checkpoints_bytes + 4 * 2**27
    )
    assert tight.prompts_bytes + tight.checkpoints_bytes <= 3 * GIB
    assert server_memory.kept(0, 1, 1).checkpoints == 0
    whole = server_memory.kept(GIB, 0, 1)
    assert not any("checkpoints" in line for line in sentences(made, server=whole))
