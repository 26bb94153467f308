"""A machine in the words of the person who owns it: measured, by name, or by its parts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import say
from commands.shared.models import load_profile
from commands.shared.spellings import Size, joined
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from planner.machine.cards import Card
    from planner.machine.profile import Profile
    from planner.workload import CacheType

_FILE = click.Path(path_type=Path)
# Of every command that makes plans.
PROFILE = click.option("--profile", "profile_path", type=_FILE, help="Profile of the machine.")
MACHINE = click.option("--machine", help="A machine description that ships with the program.")
BUDGET = click.option(
    "--budget",
    type=Size(),
    multiple=True,
    callback=joined,
    metavar="SIZE",
    help="On each GPU, all told: 21500 (MiB), 21.5GiB, 8G, CUDA0=21500,CUDA1=8000.",
)
_PARTS = (
    click.option(
        "--gpu",
        multiple=True,
        callback=lambda context, option, given: _one_card(given),
        metavar="CARD",
        help="A card of `atsplan machines`: 'RTX 4070'; none: no GPU.",
    ),
    click.option("--vram", type=Size(), metavar="SIZE", help="Its memory [the card's]."),
    click.option("--ram", type=Size(), metavar="SIZE", help="Memory of the machine: 64GiB."),
    click.option("--memory", "ddr", metavar="KIND", help="ddr5-6000, ddr5-4800x12 (channels), lpddr5x-7500."),
    click.option("--pcie", metavar="SLOT", help="Generation and lanes: 4x16 [the card's]."),
    click.option("--cpu", "cores", type=click.IntRange(1, 512), metavar="CORES", help="Cores: 8."),
    click.option("--gpu-bandwidth", type=click.IntRange(1, 100_000), metavar="GB/S", help="Of another card."),
    click.option("--gpu-tflops", type=click.IntRange(1, 10_000), metavar="FP32", help="Of another card."),
    click.option("--kv-kernels", type=click.Choice(["all"]), help="Of its engine's attention: all KV types."),
    click.option(
        "--kv-fork",
        "kv_forks",
        multiple=True,
        callback=lambda context, option, given: " ".join(given) or None,
        metavar="NAME=VALUES:BYTES:DEVICE,…",
        help="A KV type that its engine adds: turbo4=32:18:CUDA,CPU; repeatable.",
    ),
)


def _one_card(given: tuple[str, ...]) -> str | None:
    """The card of a command line; OptionProblem for two: the second would take the place of the first."""
    if len(given) > 1:
        two = "a machine by its parts has one card; with two: --machine 2x-rtx4060ti-16gb, or a profile"
        raise OptionProblem("--gpu", " --gpu ".join(given), two)
    return given[0] if given else None


@dataclass(frozen=True, slots=True)
class Described:
    """The parts of a command line, unread."""

    gpu: str | None
    vram: str | None
    ram: str | None
    ddr: str | None
    pcie: str | None
    cores: int | None
    gpu_bandwidth: int | None
    gpu_tflops: int | None
    kv_kernels: str | None = None
    kv_forks: str | None = None

    @property
    def other_machine(self) -> bool:
        """Whether a machine is described, and not only how fast the memory of this one is."""
        beside = ("ddr", "kv_kernels", "kv_forks")
        return any(getattr(self, name) is not None for name in self.__slots__ if name not in beside)

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__slots__)


def machine_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --gpu, --vram, --ram, --memory, --pcie, --cpu, handed over as one `parts`."""

    @functools.wraps(function)
    def wrapped(**values: Any) -> Any:
        own = {name: values.pop(name) for name in Described.__slots__}
        return function(parts=Described(**own), **values)

    for option in reversed(_PARTS):
        wrapped = option(wrapped)
    return wrapped


_WORDS = (
    *("--gpu", "--vram", "--ram", "--memory", "--pcie", "--cpu", "--gpu-bandwidth", "--gpu-tflops"),
    *("--kv-kernels", "--kv-fork"),
)


def words_of(parts: Described) -> list[str]:
    """The options again, as words of a command line."""
    found = zip(_WORDS, (getattr(parts, name) for name in parts.__slots__), strict=True)
    return [word for option, value in found if value is not None for word in (option, str(value))]


def profile_of(path: Path | None, machine: str | None, parts: Described) -> Profile:
    """The profile from a file, by name, or by parts; OptionProblem unless it is exactly one of them."""
    if not parts:
        return load_profile(path, machine)
    if path is not None or machine is not None:
        raise OptionProblem(
            "--gpu", parts.gpu or "", "describes a machine: leave out --profile and --machine"
        )
    return from_parts(parts)


def with_found(parts: Described) -> Described:
    """The parts of this machine, its memory as given; OptionProblem where the system does not tell it."""
    from dataclasses import replace

    from profiler.found_machine import found_machine

    found = found_machine()
    memory = parts.ddr or found.memory
    size = f"{found.ram_bytes >> 20}MiB"
    gpu = found.gpu if found.gpu != "none" else "no GPU"
    told = f"{gpu}, {found.ram_bytes / 2**30:.1f} GiB, {found.cores} cores"
    if not memory:
        raise OptionProblem(
            "--machine",
            "",
            f"for which one? For this one ({told}) say what its memory is: --memory ddr5-6000. For another: "
            "--gpu 'RTX 4070' --ram 64GiB --memory ddr5-6000 --cpu 8, --machine NAME (atsplan machines), "
            "or --profile FILE",
        )
    say(f"found here: {told}, {memory}")
    return replace(parts, gpu=found.gpu, pcie=found.pcie or None, ram=size, ddr=memory, cores=found.cores)


def from_parts(parts: Described) -> Profile:
    """The assumed profile; OptionProblem names all that is missing at once."""
    from planner.machine.described import Parts, described

    lacking = [
        word
        for word, given in (
            ("--ram 64GiB", parts.ram),
            ("--memory ddr5-6000", parts.ddr),
            ("--cpu 8", parts.cores),
        )
        if given is None
    ]
    if lacking or parts.ram is None or parts.ddr is None or parts.cores is None:
        raise OptionProblem(
            "--gpu", parts.gpu or "none", f"say the rest too, for example {' '.join(lacking)}"
        )
    vram = _bytes(parts.vram, "--vram") if parts.vram else 0
    card = None if (parts.gpu or "none").lower() == "none" else _card(parts, vram)
    ram = _bytes(parts.ram, "--ram")
    memory = vram or (card.memory << 30 if card else 0)
    return _with_engine(described(Parts(card, memory, ram, parts.ddr, parts.pcie or "", parts.cores)), parts)


def _with_engine(profile: Profile, parts: Described) -> Profile:
    """The profile with what its engine computes attention on."""
    words = [
        words for words, given in (("kv-all", parts.kv_kernels), (parts.kv_forks, parts.kv_forks)) if given
    ]
    if not words:
        return profile
    devices = tuple(
        d.model_copy(update={"all_kv_types": True}) if parts.kv_kernels and d.kind != "cpu" else d
        for d in profile.devices
    )
    forks = tuple(_fork(text) for text in (parts.kv_forks or "").split()) or None
    name = "-".join([profile.name, *(re.sub(r"[^a-z0-9.]+", ".", str(word).lower()) for word in words)])
    return profile.model_copy(update={"name": name, "devices": devices, "cache_types": forks})


def _fork(text: str) -> CacheType:
    """One type of the KV cache, from NAME=VALUES:BYTES:DEVICE,DEVICE; OptionProblem for what is none."""
    from pydantic import ValidationError

    from planner.workload import KV_TYPES, CacheType

    name, _, layout = text.partition("=")
    values, _, rest = layout.partition(":")
    size, _, devices = rest.partition(":")
    whole = values.isascii() and values.isdecimal() and size.isascii() and size.isdecimal()
    if not (name and whole and devices and len(values) < 9 and len(size) < 9) or name in KV_TYPES:
        raise OptionProblem(
            "--kv-fork", text, "expected a new NAME=VALUES:BYTES:DEVICE, as turbo4=32:18:CUDA"
        )
    try:
        return CacheType(
            name=name, values=int(values), block_bytes=int(size), devices=tuple(devices.split(","))
        )
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        raise OptionProblem("--kv-fork", text, f"{first['loc'][0]}: {first['msg'].lower()}") from None


def _card(parts: Described, vram: int) -> Card:
    """A card of the table, or one of the figures given."""
    from planner.machine.cards import Card, find

    assert parts.gpu is not None
    if parts.gpu_bandwidth is None and parts.gpu_tflops is None:
        return find(parts.gpu, vram)
    if not (vram and parts.gpu_bandwidth and parts.gpu_tflops and parts.pcie):
        needed = "--vram 12GiB --gpu-bandwidth 504 --gpu-tflops 29 --pcie 4x16"
        raise OptionProblem("--gpu", parts.gpu, f"a card by its figures needs all of {needed}")
    family = "ada" if any(word in parts.gpu.lower() for word in ("rtx", "nvidia", "geforce")) else "radeon"
    return Card(
        name=parts.gpu,
        family=family,
        memory=max(vram >> 30, 1),
        bandwidth=parts.gpu_bandwidth,
        fp32=float(parts.gpu_tflops),
        pcie=parts.pcie,
        sources=(),
    )


def _bytes(text: str, option: str) -> int:
    from planner.machine.budgets import EVERY, parse_budget

    sizes = parse_budget(text, option)
    if set(sizes) != {EVERY}:
        raise OptionProblem(option, text, "expected one size, such as 12GiB")
    return sizes[EVERY]
