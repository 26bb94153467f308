"""Weights on the CPU: pinned where prompts copy them to a GPU and memory allows it, mapped otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from planning_models import machine, moe, plan, priced
from small_plans import plan_for

from atsplan import main
from commands.shared.plan_job import open_job
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.reprice import reprice
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.host_memory import HostMemory, can_be_pinned, copy_rate
from planner.machine.op_time import experts_touched
from planner.machine.profile import Link, Profile
from planner.model.units import units_of
from planner.passes.stock_rules import candidates
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.load_spec import load_spec, map_devices
from planner.plan.plan import Plan, from_text, to_text
from planner.plan.request import Request
from planner.site import ON_CPU
from planner.workload import Workload
from runtime.tools.options import options, stock

LONG = Workload(n_ctx=4096, prompt=512, gen=32)


def made(budget: str = "1500", profile: Profile | None = None, **asked: Any) -> Plan:
    """A plan for a mixture of experts that does not fit a card."""
    return plan(moe(), budget, on=profile, workload=LONG, **asked)


def host_bytes(found: Plan) -> int:
    return next(use.weights_bytes for use in found.devices if use.kind == "cpu")


def test_pinned_where_half_of_the_memory_holds_what_the_card_does_not() -> None:
    found = made()
    assert found.host_memory is HostMemory.PINNED and host_bytes(found) > 0
    assert not load_spec(found).use_mmap


def test_mapped_where_more_would_be_pinned_than_may_be() -> None:
    limit = host_bytes(made()) - 1
    found = made(pinned_limit_bytes=limit)
    assert found.host_memory is HostMemory.MAPPED and load_spec(found).use_mmap
    assert made(pinned_limit_bytes=limit + 1).host_memory is HostMemory.PINNED


def test_memory_decides_without_a_limit() -> None:
    small = machine(CPU={"memory_bytes": 2 * host_bytes(made()) - 2})
    assert made(profile=small).host_memory is HostMemory.MAPPED


def test_paged_weights_stay_mapped() -> None:
    assert made(page=True).host_memory is HostMemory.MAPPED


def test_only_a_gpu_of_this_machine_copies_from_pinned_memory() -> None:
    profile = machine()
    here = {"CPU": 2**35, "CUDA0": 2**30}
    assert can_be_pinned(profile, here, 0) == profile.device("CPU").memory_bytes // 2
    assert can_be_pinned(profile, {"CPU": 2**35}, 0) == 0
    for kind in ("igpu", "rpc"):
        assert can_be_pinned(machine(CUDA0={"kind": kind}), here, 0) == 0


def test_a_prompt_of_mapped_weights_is_priced_at_the_rate_of_mapped_pages() -> None:
    profile = machine()
    (link,) = [li for li in profile.links if (li.source, li.target) == ("CPU", "CUDA0")]
    slow = link.model_copy(update={"mapped_bytes_per_s": link.bandwidth_bytes_per_s // 7})
    others = tuple(li for li in profile.links if li is not link)
    profile = profile.model_copy(update={"links": (slow, *others)})
    request = Request(budgets_for(profile, parse_budget("1500MiB")), LONG)
    pinned, mapped = (
        next(c for c in candidates(priced(moe(), profile, request, settings=way)) if c.name == "n-cpu-moe")
        for way in (
            EngineSettings(host_memory=HostMemory.PINNED),
            EngineSettings(host_memory=HostMemory.MAPPED),
        )
    )
    assert pinned.evaluation is not None and mapped.evaluation is not None
    assert pinned.setting == mapped.setting and pinned.evaluation.decode_ns == mapped.evaluation.decode_ns
    n_moved = int(pinned.setting.rpartition(" ")[2])
    experts = next(p.size_bytes for p in made().units if p.unit == "blk.0.experts")
    unit = next(unit for unit in units_of(moe()).units if unit.experts)
    touched = experts_touched(unit.experts, unit.used, LONG.n_ubatch) / unit.experts
    longer = n_moved * touched * experts * (7 - 1) / (link.bandwidth_bytes_per_s / 1e9)
    assert mapped.evaluation.prefill_ns - pinned.evaluation.prefill_ns == pytest.approx(longer, rel=0.02)


def test_a_rate_that_nobody_measured_is_near_the_bus_with_cuda_and_8_gb_elsewhere() -> None:
    def rate(bus: int, mapped: int = 0, target: str = "CUDA0") -> int:
        link = Link(
            source="CPU", target=target, bandwidth_bytes_per_s=bus, latency_ns=1, mapped_bytes_per_s=mapped
        )
        assert copy_rate(link, HostMemory.PINNED) == bus
        return copy_rate(link, HostMemory.MAPPED)

    gb = 10**9
    assert [rate(10 * gb), rate(55 * gb), rate(55 * gb, 12 * gb)] == [9 * gb, 24 * gb, 12 * gb]
    assert [rate(5 * gb, target="Vulkan0"), rate(55 * gb, target="Vulkan0")] == [45 * gb // 10, 8 * gb]


def test_a_plan_without_work_on_the_host_maps_the_file() -> None:
    whole = made("20000")
    assert all(p.site != ON_CPU for p in whole.units if p.time_ns)
    assert load_spec(whole).use_mmap
    alone = made()
    assert map_devices(load_spec(alone), {"CUDA0": "CPU"}).use_mmap


@pytest.mark.parametrize("kind", list(HostMemory))
def test_every_value_of_either_kind_is_derived_again(kind: HostMemory) -> None:
    found = made(host_memory=kind)
    again = reprice(found, moe(), machine(), Known())
    assert again.plan == found and not again.violations


def test_the_command_line_decides_limits_and_refuses(tmp_path: Path, moe_model: Path) -> None:
    out = tmp_path / "plan.yaml"
    ask = ["solve", str(moe_model), "--machine", "rtx4090-ddr5", "--budget", "400", "-o", str(out)]
    ask += ["--pin", "blk.0.experts=cpu"]

    def asked(*more: str) -> HostMemory:
        done = CliRunner().invoke(main, [*ask, *more])
        assert done.exit_code == 0, done.output
        return from_text(out.read_text(), str(out)).host_memory

    assert asked() is HostMemory.PINNED
    assert asked("--host-memory", "mapped") is HostMemory.MAPPED
    assert asked("--pinned-limit", "1b") is HostMemory.MAPPED
    refused = CliRunner().invoke(main, [*ask, "--host-memory", "pinned", "--page"])
    assert refused.exit_code == 2 and "excludes --page" in refused.stderr
    exported = CliRunner().invoke(main, ["export", str(out), "--model", str(moe_model)])
    assert exported.exit_code == 0 and "mmap" in exported.stdout, exported.output


def test_another_kind_than_was_priced_is_drift() -> None:
    found = made()
    other = found.model_copy(update={"host_memory": HostMemory.MAPPED})
    inputs, quick = Inputs(moe(), machine()), CheckOptions(resolve=False)
    assert check_plan(found, to_text(found), "p", inputs, quick) == []
    assert check_plan(other, to_text(other), "p", inputs, quick)


def test_stock_tools_are_told() -> None:
    found = made()
    given: Mapping[str, str] = dict(options(stock(load_spec(found), 8), "m.gguf"))
    assert given["--load-mode"] == "none"
    here = map_devices(load_spec(found), {"CUDA0": "CPU"})
    assert dict(options(stock(here, 8), "m.gguf"))["--load-mode"] == "mmap"


def test_run_has_the_last_word(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_of = plan_for(moe_model)
    path.write_text(to_text(plan_of.model_copy(update={"host_memory": HostMemory.PINNED})))
    kept = load_spec(from_text(path.read_text(), str(path))).use_mmap
    asked = [open_job(moe_model, path, (), 1, mmap).spec.use_mmap for mmap in (None, True, False)]
    assert asked == [kept, True, False]
    for words in (("--mmap",), ("--no-mmap",), ()):
        given = ["run", str(moe_model), "--plan", str(path), "--device-map", "CUDA0=CPU", "--threads", "1"]
        done = CliRunner().invoke(main, [*given, "-p", "a", "-n", "2", "--ignore-eos", *words])
        assert done.exit_code == 0, done.output
