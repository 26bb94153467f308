"""What a platform does to memory: drivers that spill silently, working sets, one memory for all."""

from __future__ import annotations

import pytest
from planning_models import MIB, machine, moe, plan, real

from planner.check.check import CheckOptions, Inputs, check_plan
from planner.errors import OptionProblem
from planner.machine.budgets import budgets_for, headroom, spills, tight, working_set
from planner.machine.profile import Device, Profile
from planner.plan.plan import to_text
from planner.workload import Workload

GIB = 1024 * MIB


def windows(**known: str) -> Profile:
    """The usual machine under another system or driver."""
    made = machine()
    return made.model_copy(update={"fingerprint": made.fingerprint.model_copy(update=known)})


@pytest.mark.parametrize(
    ("known", "silent"),
    [
        ({"driver": "wddm"}, True),
        ({"driver": "WDDM 3.2", "os": "linux 6.8 (wsl)"}, True),
        ({"os": "windows 11"}, True),
        ({"os": "linux 6.8", "driver": "nvidia 580.1"}, False),
        ({"os": "darwin 24.1"}, False),
    ],
)
def test_a_driver_that_spills_gets_more_headroom(known: dict[str, str], silent: bool) -> None:
    profile, plain = windows(**known), machine()
    assert spills(profile) is silent
    left, usual = (p.device("CUDA0").free_bytes - budgets_for(p, {})["CUDA0"] for p in (profile, plain))
    assert usual == headroom(plain.device("CUDA0").free_bytes)
    assert (left > 2 * usual) is silent
    assert budgets_for(profile, {"CUDA0": 20 * GIB})["CUDA0"] == 20 * GIB  # the user's own word counts


def test_a_plan_at_the_brim_says_why_that_is_worse_there() -> None:
    profile = windows(driver="wddm")
    card = profile.device("CUDA0")
    said = tight(card, card.free_bytes * 99 // 100, profile)
    assert "moves memory to the host without a word" in said
    assert "without a word" not in tight(card, card.free_bytes * 99 // 100, machine())
    assert tight(card, card.free_bytes * 92 // 100, machine()) == ""
    assert tight(card, card.free_bytes * 92 // 100, profile) != ""
    small = machine(CUDA0={"memory_bytes": 1600 * MIB, "free_bytes": 1500 * MIB})
    small = small.model_copy(update={"fingerprint": profile.fingerprint})
    full = plan(moe(), "1450", on=small)
    assert any("without a word" in note for note in full.notes)
    found = check_plan(full, to_text(full), "p", Inputs(moe(), small), CheckOptions(resolve=False))
    assert [f.message for f in found] == [note for note in full.notes if "without a word" in note]


def mac(memory: int, gpu: int, name: str = "Metal") -> Profile:
    """A machine of one memory whose GPU states `gpu` bytes."""
    unified = machine("apu-unified")
    host = next(d for d in unified.devices if d.kind == "cpu")
    far = next(d for d in unified.devices if d.kind != "cpu")
    devices: tuple[Device, ...] = (
        far.model_copy(update={"name": name, "memory_bytes": gpu, "free_bytes": gpu}),
        host.model_copy(update={"memory_bytes": memory, "free_bytes": memory - 4 * GIB}),
    )
    known = unified.fingerprint.model_copy(update={"memory_bytes": memory, "os": "darwin 24.1"})
    return unified.model_copy(update={"devices": devices, "fingerprint": known})


@pytest.mark.parametrize(
    ("memory", "gpu", "ceiling"),
    [(32, 32, 21.33), (64, 64, 48), (36, 36, 24), (32, 21.33, 0), (64, 48, 0), (32, 28, 0)],
)
def test_the_working_set_of_a_gpu_that_shares_all_memory(memory: int, gpu: float, ceiling: float) -> None:
    profile = mac(memory * GIB, round(gpu * GIB))
    device = profile.device("Metal")
    assert working_set(device, profile) == pytest.approx(ceiling * GIB, rel=1e-3)
    most = ceiling or gpu
    assert budgets_for(profile, {})["Metal"] <= most * GIB - headroom(round(most * GIB)) + 8 * MIB


@pytest.mark.parametrize("name", ["Metal", "MTL0"])
def test_a_budget_above_the_working_set_names_the_setting_that_raises_it(name: str) -> None:
    profile = mac(32 * GIB, 32 * GIB, name)
    for given in ({name: 24 * GIB}, {"": 24 * GIB}):
        with pytest.raises(OptionProblem, match=r"21845 MiB of its 32768.*iogpu\.wired_limit_mb"):
            budgets_for(profile, given)
    assert budgets_for(profile, {name: 20 * GIB})[name] == 20 * GIB
    assert working_set(machine().device("CUDA0"), machine()) == 0


@pytest.mark.parametrize(
    ("what", "memory", "ceiling"),
    [
        ("Mac Studio, M3 Ultra, 512 GiB", 512, 384),
        ("ggml-rpc-server on an Apple M2", 24, 16),
        ("a phone with Adreno 830", 16, 12),
        ("APU of 128 GiB LPDDR5X", 128, 96),
        ("ggml-rpc-server with an NVIDIA GeForce RTX 3090 24GB", 24, 0),
        ("a Machine with a Radeon", 24, 0),
        ("Ryzen AI Max+ 395 with a Radeon 8060S", 128, 96),
        ("Intel(R) Arc(TM) Graphics", 32, 24),
        ("Intel Arc B580 Graphics", 12, 0),
        ("Intel(R) Arc(TM) A770 Graphics", 16, 0),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", 32, 24),
        ("Intel(R) Iris(R) Xe Graphics", 32, 24),
        ("AMD Radeon(TM) Graphics", 32, 24),
        ("AMD Radeon RX Vega 11 Graphics", 32, 24),
        ("AMD Radeon RX Vega 64", 8, 0),
        ("a Mac Pro of 2019 with a Radeon Pro W6800X", 32, 0),
        ("a Jetson AGX Thor", 128, 96),
        ("a server", 512, 384),
    ],
)
def test_a_remote_device_has_the_ceiling_of_what_it_is(what: str, memory: int, ceiling: int) -> None:
    profile = machine("rtx4090-rpc")
    far = next(d for d in profile.devices if d.kind == "rpc")
    size = memory * GIB
    new = far.model_copy(update={"description": what, "memory_bytes": size, "free_bytes": size})
    others = tuple(d for d in profile.devices if d is not far)
    described = profile.model_copy(update={"devices": (*others, new)})
    assert working_set(new, described) == ceiling * GIB
    most = (ceiling or memory) * GIB
    assert budgets_for(described, {})[new.name] <= most - headroom(most)
    if ceiling:
        with pytest.raises(OptionProblem, match=f"lets this GPU use {ceiling * 1024} MiB"):
            budgets_for(described, {new.name: size})
    measured = described.model_copy(update={"measured": True})
    assert working_set(new, measured) == 0  # it reports what it may use, unless the profile says otherwise
    told = new.model_copy(update={"shared": "unified"})
    assert working_set(told, measured) == size * 3 // 4


@pytest.mark.parametrize(("ubatch", "smaller"), [(4096, 2048), (8192, 2048), (512, 0)])
def test_a_compute_buffer_above_the_largest_one_asks_for_smaller_batches(ubatch: int, smaller: int) -> None:
    model, card = real("Qwen3.6-35B-A3B-q4_K"), machine("rx9070xt-ddr5")
    work = Workload(n_ctx=8192, n_ubatch=ubatch, n_batch=8192)
    made = plan(model, "15000", on=card, workload=work)
    said = [note for note in made.notes if "takes no layer" in note]
    on_card = any(use.name == "Vulkan0" and use.weights_bytes for use in made.devices)
    assert on_card is (not smaller)
    if not smaller:
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith("Vulkan0: takes no layer: its largest buffer has 4096 MiB")
    assert said[0].endswith(f"; --ubatch {smaller} fits")
    again = plan(model, "15000", on=card, workload=work.model_copy(update={"n_ubatch": smaller}))
    assert any(use.name == "Vulkan0" and use.weights_bytes for use in again.devices)


def test_quantised_v_without_flash_attention_names_both_fields_though_nothing_else_is_known() -> None:
    work = Workload(type_v="q4_0", flash_attn=False)
    bad = plan(moe(), "1500").model_copy(update={"workload": work})
    for inputs in (Inputs(None, None), Inputs(moe(), machine())):
        found = check_plan(bad, to_text(bad), "plan.yaml", inputs, CheckOptions(resolve=False))
        (named,) = [f for f in found if "flash_attn: true (a quantised" in f.message]
        assert "type_v q4_0" in named.message
        assert to_text(bad).splitlines()[named.line - 1].startswith("workload:")
