"""Machines described by their parts: equal to the shipped ones, figures with sources, none guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atsplan import main
from planner.errors import FieldProblem, OptionProblem
from planner.machine import presets
from planner.machine.cards import UnknownCard, find, table
from planner.machine.described import Parts, described
from planner.machine.profile import from_text, to_text

GIB = 2**30
# card, VRAM, RAM, memory, slot, cores of shipped descriptions with one GPU
SHIPPED = {
    "rtx4060-8gb-ddr5": ("RTX 4060", 8, 32, "ddr5-6000", "4x16", 8),
    "rtx4060ti-16gb-ddr5": ("RTX 4060 Ti", 16, 64, "ddr5-6000", "", 8),
    "rtx4090-ddr5": ("GeForce RTX 4090", 24, 64, "DDR5-6000", "5x16", 16),
    "rtx4090-epyc": ("RTX 4090", 24, 768, "ddr5-4800x12", "", 32),
    "rtx5090-ddr5": ("rtx5090", 32, 96, "ddr5-6000", "5x16", 16),
    "rx9070xt-ddr5": ("RX 9070 XT", 16, 64, "ddr5-6000", "4x16", 8),
}


def made(card: str, vram: int, ram: int, memory: str, pcie: str, cores: int) -> Parts:
    return Parts(find(card, vram * GIB), vram * GIB, ram * GIB, memory, pcie, cores)


@pytest.mark.parametrize("name", SHIPPED)
def test_parts_give_the_shipped_description(name: str) -> None:
    shipped, new = presets.load(name), described(made(*SHIPPED[name]))
    for device in shipped.devices:
        mine = new.device(device.name)
        exact = ("kind", "memory_bytes", "free_bytes", "context_bytes", "max_alloc_bytes", "op_overhead_ns")
        assert all(getattr(mine, field) == getattr(device, field) for field in exact)
        assert mine.bandwidth_bytes_per_s == pytest.approx(device.bandwidth_bytes_per_s, rel=0.005)
        assert mine.flops_per_s == pytest.approx(device.flops_per_s, rel=0.15)  # scaled by FP32, not tensors
    for own, link in zip(new.links, shipped.links, strict=True):
        assert (own.source, own.target, own.latency_ns) == (link.source, link.target, link.latency_ns)
        assert own.bandwidth_bytes_per_s == link.bandwidth_bytes_per_s
        assert own.zero_copy_bytes_per_s == pytest.approx(link.zero_copy_bytes_per_s, rel=0.015)
    assert new.calibrations == shipped.calibrations
    assert not new.measured and new.source.startswith("assumed, not measured")


def test_every_card_says_where_its_figures_stand() -> None:
    known = table()
    assert len({card.name for card in known.cards}) == len(known.cards)
    assert all(card.sources and set(card.sources) <= set(known.sources) for card in known.cards)
    assert {key for card in known.cards for key in card.sources} == set(known.sources)
    assert all(url.startswith("https://") for url in known.sources.values())


def test_no_figure_is_guessed() -> None:
    with pytest.raises(UnknownCard, match=r"no figures of this card \(near: RTX 4070.*--gpu-bandwidth"):
        find("RTX 4071")
    with pytest.raises(UnknownCard, match="which of RTX 4060 Ti 8GB, RTX 4060 Ti 16GB"):
        find("RTX 4060 Ti")
    with pytest.raises(OptionProblem, match="no source says how the RTX 4080 Super is connected"):
        described(made("RTX 4080 Super", 16, 64, "ddr5-6000", "", 8))
    for memory, pcie in (("ddr6-6000", "4x16"), ("ddr5", "4x16"), ("ddr5-6000", "4x3"), ("ddr5-6000", "x16")):
        with pytest.raises(OptionProblem, match="expected"):
            described(made("RTX 4090", 24, 64, memory, pcie, 8))


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


MINE = ("--ram", "64GiB", "--memory", "ddr5-6000", "--cpu", "8")


def test_a_described_machine_is_written_the_same_each_time(tmp_path: Path) -> None:
    texts = []
    for name in ("a.yaml", "b.yaml"):
        found = run("machines", "--gpu", "RTX 4070", "--vram", "12GiB", *MINE, "-o", tmp_path / name)
        assert found.exit_code == 0, found.output
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] and from_text(texts[0], "a").device("CUDA0").memory_bytes == 12 * GIB


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "RTX 4070"), "say the rest too, for example --ram 64GiB --memory ddr5-6000 --cpu 8"),
        (("--gpu", "Foo 9", *MINE), "no figures of this card"),
        (("--gpu", "Foo 9", "--gpu-bandwidth", "500", *MINE), "needs all of --vram"),
        (("rtx4070",), "no machine named rtx4070"),
        (("rtx4090-ddr5", "--gpu", "RTX 4070"), "is a machine already"),
        (("--gpu", "RTX 4070", "--vram", "12", *MINE), "write 12GiB"),
    ],
)
def test_what_lacks_is_said_in_one_line(words: tuple[str, ...], said: str) -> None:
    found = run("machines", *words)
    assert (found.exit_code, found.stdout) == (2, "") and said in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_card_by_its_figures_and_none_at_all() -> None:
    figures = ("--vram", "12GiB", "--gpu-bandwidth", "500", "--gpu-tflops", "20", "--pcie", "4x8")
    gpu = json.loads(run("machines", "--gpu", "Foo 9", *figures, *MINE, "--json").stdout)
    assert gpu["devices"][0]["bandwidth_bytes_per_s"] == 425 * 10**9 and "(given)" in gpu["source"]
    assert [d["kind"] for d in json.loads(run("machines", *MINE, "--json").stdout)["devices"]] == ["cpu"]


def test_a_card_in_the_place_of_a_machine_is_named_in_the_answer() -> None:
    for asked, said in (("rtx5090", "--gpu 'RTX 5090' --ram"), ("RX 7800 XT", "'RX 7800 XT' --pcie 4x16")):
        found = run("machines", asked)
        assert found.exit_code == 2 and said in found.stderr


def test_two_cards_are_not_made_one() -> None:
    rest = ("--ram", "32GiB", "--memory", "ddr5-6000", "--cpu", "8")
    found = run("machines", "--gpu", "RTX 4070", "--gpu", "RTX 4090", *rest)
    assert (found.exit_code, found.stdout) == (2, "") and "has one card" in found.stderr


def test_a_card_of_a_laptop_has_the_name_that_its_driver_tells() -> None:
    told = find("NVIDIA GeForce RTX 4060 Laptop GPU")
    assert told == find("rtx 4060 laptop") and told.bandwidth < find("RTX 4060").bandwidth


def test_soldered_memory_is_that_of_the_shipped_description() -> None:
    """Of the APU: 0.58 of 120 GB/s for its cores; four channels have twice that."""
    rates = [
        described(Parts(None, 0, 32 << 30, memory, "", 8)).device("CPU").bandwidth_bytes_per_s
        for memory in ("lpddr5x-7500", "LPDDR5X-7500x4", "lpddr5-6400")
    ]
    shipped = presets.load("apu-unified").device("CPU").bandwidth_bytes_per_s
    assert abs(rates[0] - shipped) <= 10**9 and rates[1] == 2 * rates[0]
    assert rates[2] < rates[0]


def test_machines_and_cards_are_listed() -> None:
    told = run("machines").stdout
    assert all(name in told for name in presets.names())
    assert all(card.name in told for card in table().cards)


def test_a_machine_has_one_cpu_and_each_name_once() -> None:
    text = to_text(presets.load("rtx4060-8gb-ddr5"))
    for old, new, why in (
        ("name: CPU, kind: cpu", "name: host, kind: cpu", "one device of kind cpu, named CPU"),
        ("kind: gpu", "kind: cpu", "one device of kind cpu, named CPU"),
        ("kind: cpu", "kind: gpu", "one device of kind cpu, named CPU"),
        ("name: CUDA0", "name: CPU", "each name once"),
    ):
        with pytest.raises(FieldProblem, match=why) as caught:
            from_text(text.replace(old, new, 1), "p.yaml")
        assert caught.value.field == "devices"
