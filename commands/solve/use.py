"""What a model is to be used for, as commands are told it: context, cache types, batches, sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from commands.shared.spellings import Tokens, kv_type, use_with_sequences

_CTX, _CACHE, _UBATCH = "4096", "f16", 512

# `solve` and `sweep` have these among their own, `fit` all of them.
CONTEXT = (
    click.option(
        "-c",
        "--ctx",
        "--ctx-size",
        "ctx",
        type=Tokens(),
        metavar="TOKENS",
        default=_CTX,
        show_default=True,
        help="Cells of the KV cache: 4096, 32k, or max.",
    ),
)
CACHE = (
    click.option("--kv-type", metavar="TYPE", help="Of K and V: f16, q8_0; K/V: q8_0/f16 [default: f16]."),
    click.option("-ctk", "--cache-type-k", "type_k", metavar="TYPE", help="Of K alone [default: f16]."),
    click.option("-ctv", "--cache-type-v", "type_v", metavar="TYPE", help="Of V alone [default: f16]."),
)
REQUEST = (
    click.option(
        "-b",
        "--batch",
        "--batch-size",
        "batch",
        type=click.IntRange(1, 2**31 - 1),
        metavar="TOKENS",
        help="Tokens of a prompt handed over at once [default: 2048, or -ub].",
    ),
    click.option("-np", "--parallel", "sequences", type=click.IntRange(1), help="Sequences at once."),
    click.option(
        "--workload",
        "use",
        help="prompt=512,gen=256,depth=640,seqs=1; depth: the middle of the answer unless stated.",
    ),
)
_OPTIONS = (
    *CONTEXT,
    *CACHE,
    click.option(
        "-ub",
        "--ubatch",
        "--ubatch-size",
        "ubatch",
        type=click.IntRange(1, 65536),
        metavar="TOKENS",
        default=_UBATCH,
        show_default=True,
        help="Tokens of a prompt computed at once.",
    ),
    *REQUEST,
)


@dataclass(frozen=True, slots=True)
class Use:
    """The options, unread; spellings of other tools are those of this one already."""

    ctx: str
    kv_type: str
    ubatch: int
    batch: int | None
    use: str | None
    mtp: bool = False

    @property
    def words(self) -> list[str]:
        """The options again, as words of a command line, without those that say what goes without saying."""
        usual = {"-c": _CTX, "--kv-type": _CACHE, "-ub": str(_UBATCH), "-b": None, "--workload": None}
        given = (self.ctx, self.kv_type, str(self.ubatch), self.batch and str(self.batch), self.use)
        told = zip(usual, given, strict=True)
        return [word for name, value in told if value and value != usual[name] for word in (name, value)]


def use_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options, handed over as one `use`."""

    @functools.wraps(function)
    def wrapped(**values: Any) -> Any:
        cache = kv_type(values.pop("kv_type"), values.pop("type_k"), values.pop("type_v"))
        used = use_with_sequences(values.pop("use"), values.pop("sequences"))
        own = {name: values.pop(name) for name in ("ctx", "ubatch", "batch")}
        return function(use=Use(kv_type=cache, use=used, **own), **values)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped
