"""Host weights: read into pinned memory beside a GPU while they fit there, else mapped, and said so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from planning_models import MIB, machine, moe, plan
from test_run import plan_for

from atsplan import main
from planner.check import CheckOptions, Inputs, check_plan
from planner.loading import load_spec, map_devices
from planner.options import SolveOptions
from planner.plan import Plan, from_text, to_text
from planner.profile import Profile
from runtime.stock import options, stock

GIB = 1024 * MIB


def host_of(made: Plan) -> int:
    """Weights of the host in bytes."""
    return next(use.weights_bytes for use in made.devices if use.kind == "cpu")


def with_memory(size_bytes: int) -> Profile:
    """The usual machine with as much host memory."""
    return machine(CPU={"memory_bytes": size_bytes, "free_bytes": size_bytes - MIB})


@pytest.mark.parametrize(("share", "mode"), [(0.5, "read"), (0.59, "read"), (0.65, None), (0.8, None)])
def test_they_are_read_while_most_memory_stays_unpinned(share: float, mode: str | None) -> None:
    held = host_of(plan(moe(), "1500"))
    profile = with_memory(round(held / share))
    made = plan(moe(), "CUDA0=1500", on=profile)
    assert host_of(made) == held and made.host_weights == mode
    assert load_spec(made).use_mmap is (mode is None)
    notes = [note for note in made.notes if "stay mapped" in note]
    said = f"{held >> 20} MiB of host weights stay mapped: prompts may take longer than predicted"
    assert notes == ([] if mode else [said])


def test_weights_beyond_memory_are_paged_and_so_mapped() -> None:
    held = host_of(plan(moe(), "1500"))
    short = with_memory(round(held / 1.4))
    made = plan(moe(), "CUDA0=1500", on=short, options=SolveOptions(page=True))
    assert made.host_weights is None


@pytest.mark.parametrize("budget", ["9000", "10"])
def test_where_nothing_is_streamed_the_file_is_mapped(budget: str) -> None:
    made = plan(moe(), budget)
    assert {use.kind for use in made.devices if use.weights_bytes > 100 * MIB} <= {"gpu", "cpu"}
    assert made.host_weights is None
    assert "host_weights" not in to_text(made)
    assert not any("mapped" in note for note in made.notes)


@pytest.mark.parametrize(("told", "mode"), [("map", None), ("read", "read")])
def test_what_is_told_is_done_and_checked(told: str, mode: str | None) -> None:
    made = plan(moe(), "1500", options=SolveOptions(host_weights=told))  # type: ignore[arg-type]
    assert made.host_weights == mode and made.constraints.host_weights == told
    text = to_text(made)
    assert from_text(text, "p") == made
    inputs, quick = Inputs(moe(), machine()), CheckOptions(resolve=False)
    assert check_plan(made, text, "p", inputs, quick) == []
    other = made.model_copy(update={"host_weights": None if mode else "read"})
    found = check_plan(other, to_text(other), "p", inputs, quick)
    assert any("host_weights" in finding.message for finding in found)


def test_stock_tools_are_told() -> None:
    made = plan(moe(), "1500")
    given: Mapping[str, str] = dict(options(stock(load_spec(made), 8), "m.gguf"))
    assert given["--load-mode"] == "none"
    here = map_devices(load_spec(made), {"CUDA0": "CPU"})
    assert here.use_mmap and dict(options(stock(here, 8), "m.gguf"))["--load-mode"] == "mmap"


def test_the_command_line_has_the_last_word(moe_model: Path, tmp_path: Path) -> None:
    from commands.engines import open_job

    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model).model_copy(update={"host_weights": "read"})))
    assert [open_job(moe_model, path, (), 1, mmap).spec.use_mmap for mmap in (None, True, False)] == [
        False,
        True,
        False,
    ]
    for words in (("--mmap",), ("--no-mmap",), ()):
        done = CliRunner().invoke(
            main,
            [
                *("run", str(moe_model), "--plan", str(path), "--device-map", "CUDA0=CPU", "--threads", "1"),
                *("-p", "a", "-n", "2", "--ignore-eos", *words),
            ],
        )
        assert done.exit_code == 0, done.output
    refused = CliRunner().invoke(main, ["solve", str(moe_model), "--host-weights", "pinned"])
    assert refused.exit_code == 2 and "--host-weights" in refused.stderr
