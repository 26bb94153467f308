"""Numbers and options as people know them from llama.cpp: `32k`, `8G`, `-c`, `-ctk`, `-ngl 99`.

What means the same is taken. What a plan decides itself, or what belongs to another command, is answered by
one line that says what to use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import click

from commands.shared.option_types import whole
from planner.errors import OptionProblem

_COUNT = re.compile(r"([0-9]{1,9})([kKmM])", re.ASCII)
_BARE = re.compile(r"[0-9]*\.?[0-9]+", re.ASCII)
_FACTORS = {"k": 2**10, "m": 2**20}
# Below these a bare number was meant in GiB: no driver's context fits, no machine has so little.
_FEW_MIB = {"--budget": 256, "--budgets": 256, "--vram": 1024, "--ram": 1024}
_FEW = 64  # of what is to be left to others
_ALL_LAYERS = 99  # what people write for `as many as there are`
_EVERY = ("all", "auto", "-1", "-2")


class Tokens(click.ParamType[str]):
    """A number of tokens, `32k` and `1M` in powers of two; other words stay as they are."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return tokens(str(value))


class Size(click.ParamType[str]):
    """Memory of devices; a bare number too small to be meant in MiB is a question."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        ask_unit(param.opts[0] if param else "--budget", str(value))
        return str(value)


def joined(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> str | None:
    """An option that is given for one device after the other, as one list; None where it is not given."""
    return ",".join(given) if given else None


def tokens(text: str) -> str:
    """`32k` as `32768`; a text of another form as it is."""
    match = _COUNT.fullmatch(text.strip())
    return str(int(match[1]) * _FACTORS[match[2].lower()]) if match else text


def ask_unit(option: str, text: str) -> None:
    """OptionProblem for a size without unit that is above zero and too small for that option."""
    few = _FEW_MIB.get(option, _FEW)
    for part in text.split(","):
        device, equals, size = part.rpartition("=")
        size = size.strip()
        if equals and not device.strip():
            continue  # wrong in another way
        if _BARE.fullmatch(size) and 0 < float(size) < few:
            meant = f"{device}{equals}{size}"
            why = f"a bare number counts MiB: write {meant}GiB, or {meant}MiB if that is meant"
            raise OptionProblem(option, text, why)


def answered(option: str, why: str, value: str = "") -> NoReturn:
    """The one line for an option that is understood and not to be had here."""
    raise OptionProblem(option, value, why)


# Of solve and sweep: options that become others


def kv_type(whole: str | None, keys: str | None, values: str | None) -> str:
    """The text of --kv-type from it or from -ctk and -ctv; OptionProblem where both are given."""
    if keys is None and values is None:
        return "f16" if whole is None else whole
    if whole is not None:
        answered("--kv-type", "says it for K and V: leave out -ctk and -ctv", whole)
    return f"{keys or 'f16'}/{values or 'f16'}"


def use_with_sequences(use: str | None, sequences: int | None) -> str | None:
    """The text of --workload with -np in it; OptionProblem where both say how many sequences."""
    if sequences is None:
        return use
    if use is not None and re.search(r"(^|,)\s*seqs=", use):
        answered("-np", "--workload says seqs= already: give one of the two", str(sequences))
    return f"seqs={sequences}" if use is None else f"{use},seqs={sequences}"


def expert_pins(layers: int | None, every: bool, routed: Iterable[int]) -> tuple[str, ...]:
    """Pins that --cpu-moe and --n-cpu-moe stand for: experts of all layers, or of the first, on the CPU.

    `routed`: the layers that have experts. As in llama.cpp dense layers count, and `layers` may be more than
    there are; OptionProblem where no layer has any.
    """
    where = sorted(routed)
    if not where and (every or layers):
        answered("--cpu-moe" if every else "--n-cpu-moe", "the model has no routed experts")
    if every:
        return ("blk.*.experts=cpu",)
    return tuple(f"blk.{layer}.experts=cpu" for layer in where if layer < (layers or 0))


# Options that are only answered


def _flash(value: str) -> None:
    if value.lower() in ("off", "0", "false"):
        answered("--flash-attn", "plans are made for flash attention: leave it out", value)
    if value.lower() not in ("on", "auto", "1", "true"):
        answered("--flash-attn", "expected on or auto", value)


def _gpu_layers(value: str) -> None:
    if value in _EVERY or (whole(value) or 0) >= _ALL_LAYERS:
        return  # a plan may use all layers anyway
    why = "the plan chooses the layers; --no-cpu demands all on the GPU, --pin 'blk.0.*=cpu' one on the CPU"
    answered("-ngl", why, value)


def _solve_threads(value: str) -> None:
    answered("-t", "the profile says the best count; run, bench and serve take -t", value)


def _overrides(value: str) -> None:
    answered("-ot", "a plan writes these itself: --pin PATTERN=SITE, for example 'blk.0.experts=cpu'", value)


def _split(value: str) -> None:
    answered("-ts", "the plan chooses the split: --budget CUDA0=8G,CUDA1=6G limits each device", value)


def _model(value: str) -> None:
    answered("-m", "the model is an argument of its own: leave out -m", value)


def _every_number(value: str) -> None:
    answered("--n-cpu-moe", "every number is tried here, the best is told; solve takes it as asked for")


def _fixed(what: str, use: str) -> Callable[[str], None]:
    def answer_value(value: str) -> None:
        answered(what, f"the plan says it: atsplan solve {use}", value)

    return answer_value


_Answers = Mapping[tuple[str, ...], Callable[[str], None]]
SOLVE: _Answers = {
    ("-fa", "--flash-attn"): _flash,
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _gpu_layers,
    ("-t", "--threads"): _solve_threads,
    ("-ot", "--override-tensor"): _overrides,
    ("-ts", "--tensor-split"): _split,
    ("-m", "--model"): _model,
}
FIT: _Answers = {
    **SOLVE,
    ("-ncmoe", "--n-cpu-moe"): _every_number,
    ("-cmoe", "--cpu-moe"): _every_number,
}
RUN: _Answers = {
    ("-c", "--ctx", "--ctx-size"): _fixed("-c", "-c"),
    ("-ub", "--ubatch", "--ubatch-size"): _fixed("-ub", "-ub"),
    ("-b", "--batch", "--batch-size"): _fixed("-b", "-b"),
    ("-ctk", "--cache-type-k"): _fixed("-ctk", "-ctk"),
    ("-ctv", "--cache-type-v"): _fixed("-ctv", "-ctv"),
    ("-fa", "--flash-attn"): _flash,
    ("-np", "--parallel"): _fixed("-np", "-np"),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _gpu_layers,
    ("-ot", "--override-tensor"): _fixed("-ot", "--pin"),
    ("-ts", "--tensor-split"): _fixed("-ts", "--budget"),
    ("-ncmoe", "--n-cpu-moe"): _fixed("--n-cpu-moe", "--n-cpu-moe"),
    ("-m", "--model"): _model,
}


def answers(known: _Answers) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Hidden options of a command that are taken without effect or answered by one line."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        for names, answer in known.items():
            function = _hidden(names, answer)(function)
        return function

    return decorated


def _hidden(names: tuple[str, ...], answer: Callable[[str], None]) -> Callable[..., Any]:
    def answer_value(ctx: click.Context, param: click.Parameter, value: str | bool | None) -> None:
        if value:
            answer(str(value))

    flag = "--cpu-moe" in names
    # Before the others are asked for: `-m model.gguf` lacks the argument only because of -m.
    own = f"answered_{names[-1].strip('-').replace('-', '_')}"  # `model` is an argument's name already
    return click.option(
        own, *names, is_flag=flag, hidden=True, expose_value=False, is_eager=True, callback=answer_value
    )
