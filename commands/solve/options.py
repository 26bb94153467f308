"""The options that `solve` and `sweep` share, declared once: for which machine, use and limits to plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from commands.shared.machine_options import BUDGET, MACHINE, PROFILE
from commands.shared.option_types import Number
from commands.shared.spellings import SOLVE, Size, answers, joined, kv_type, use_with_sequences
from commands.solve.use import CACHE, CONTEXT, REQUEST

_FILE = click.Path(path_type=Path)
UBATCH_AUTO = 0


class Ubatch(click.IntRange):
    """Tokens, or auto, which is UBATCH_AUTO."""

    def __init__(self) -> None:
        super().__init__(1, 65536)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = UBATCH_AUTO if value == "auto" else super().convert(value, param, ctx)
        return number


_OPTIONS = (
    click.argument("model", type=_FILE),
    PROFILE,
    MACHINE,
    BUDGET,
    *CONTEXT,
    click.option("--ctx-min", type=click.IntRange(1), help="The context may shrink to this to fit."),
    *CACHE,
    click.option(
        "-ub",
        "--ubatch",
        "--ubatch-size",
        "ubatch",
        type=Ubatch(),
        metavar="TOKENS",
        default="auto",
        show_default=True,
        help="Tokens of a prompt computed at once; auto: by its length.",
    ),
    *REQUEST,
    click.option("--mtp", is_flag=True, help="Load the NextN/MTP block."),
    click.option("--pin", "pins", multiple=True, help="PATTERN=SITE, for example 'blk.0.*=gpu'."),
    click.option(
        "-ncmoe",
        "--n-cpu-moe",
        "cpu_moe_layers",
        type=click.IntRange(0, 9999),
        help="Pin the experts of the first N layers to the CPU.",
    ),
    click.option("-cmoe", "--cpu-moe", "cpu_moe", is_flag=True, help="Pin all experts to the CPU."),
    click.option("--contiguous", is_flag=True, help="Whole layers only, one run of layers per device."),
    click.option("--no-cpu", is_flag=True, help="Nothing but the input tables in host memory."),
    click.option("--page", is_flag=True, help="Host weights may exceed memory and are paged from disk."),
    click.option(
        "--host-memory",
        type=click.Choice(["auto", "mapped", "pinned"]),
        default="auto",
        show_default=True,
        help="Of weights on the CPU: mapped from the file, or pinned for prompts.",
    ),
    click.option("--pinned-limit", help="MiB that may be pinned [half of the host's memory]."),
    click.option(
        "--reserve",
        type=Size(),
        multiple=True,
        callback=joined,
        metavar="SIZE",
        help="To leave to others: 1024 (MiB), 1G, or CUDA0=2048,CUDA1=512.",
    ),
    click.option("--mmproj", type=_FILE, help="Vision projector to leave room for."),
    click.option(
        "--mmproj-device",
        "eyes",
        type=click.Choice(("auto", "gpu", "cpu")),
        default="auto",
        help="Where it computes [auto: the CPU where the GPU has no room].",
    ),
    click.option("--draft", type=_FILE, help="Draft model to leave room for."),
    click.option("--ngram", "ngrams", is_flag=True, help="Draft what followed the last tokens before."),
    click.option(
        "--draft-accept",
        "accept",
        metavar="RATE",
        help="Choose the draft length by the share of accepted tokens: 0.7, by position 0.8,0.7,0.6, auto, "
        "or a file with a log or the /metrics of llama-server [--draft, --mtp or --ngram].",
    ),
    click.option("--heat", type=_FILE, help="Expert routing (heat.csv): lets hot experts live on the GPU."),
    click.option(
        "--stripes/--no-stripes", default=True, help="Hot experts of a layer on the GPU [with --heat]."
    ),
    click.option(
        "--hybrid/--no-hybrid",
        default=False,
        help="Experts in slots of a GPU, the others by CPU and bus at the same time.",
    ),
    click.option(
        "--follow",
        type=_FILE,
        help="Routing trace: lets the experts in slots change with the text, where that pays [--hybrid].",
    ),
    click.option("--fit", "engine", help="Compare with --fit of this engine too: library, folder, or auto."),
    click.option(
        "--cache",
        type=_FILE,
        help="Routing trace: lets the engine's MoE cache (llama.cpp b11480 and later) hold host experts.",
    ),
    click.option(
        "--time-limit",
        type=Number(0.1, 3600),
        help="Seconds by the clock for all of it; runs may then differ [none: work is limited, not time].",
    ),
)


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """The command line, unread; spellings of other tools are those of this one already."""

    model: Path
    profile_path: Path | None
    machine: str | None
    budget: str | None
    ctx: str
    ctx_min: int | None
    kv_type: str
    ubatch: int  # or UBATCH_AUTO
    batch: int | None
    use: str | None
    mtp: bool
    pins: tuple[str, ...]
    cpu_moe_layers: int | None
    cpu_moe: bool
    contiguous: bool
    no_cpu: bool
    page: bool
    host_memory: str
    pinned_limit: str | None
    reserve: str | None
    mmproj: Path | None
    eyes: str
    draft: Path | None
    ngrams: bool
    accept: str | None
    heat: Path | None
    stripes: bool
    hybrid: bool
    follow: Path | None
    engine: str | None
    cache: Path | None
    time_limit: float | None


def solve_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options, handed over as one `asked`."""
    names = SolveOptions.__slots__

    @functools.wraps(function)
    def wrapped(**values: Any) -> Any:
        keys, values_type = values.pop("type_k"), values.pop("type_v")
        values["kv_type"] = kv_type(values["kv_type"], keys, values_type)
        values["use"] = use_with_sequences(values["use"], values.pop("sequences"))
        own = {name: values.pop(name) for name in names}
        return function(asked=SolveOptions(**own), **values)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return answers(SOLVE)(wrapped)
