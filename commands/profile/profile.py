"""atsplan profile: measure this machine for a model and write profile.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.profile.from_results import fitted, refined
from commands.profile.tables import all_cases, report, show_profile
from commands.shared import console
from commands.shared.machine_options import Described, machine_parts, profile_of
from commands.shared.option_types import Number, Target
from planner.errors import OptionProblem
from planner.quoting import shell

if TYPE_CHECKING:
    from planner.machine.op_time import Case
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from profiler.session import Measured, Request

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@click.command(short_help="Measure this machine for a model.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", "--output", "out", type=Target("profile"), help="Where to write the profile (YAML)."
)
@click.option("--engine", help="llama.cpp library or build folder [default: the installed one].")
@click.option("--device", "devices", multiple=True, help="Measure this device beside the CPU; repeatable.")
@click.option(
    "-t", "--threads", type=click.IntRange(0, 512), default=0, help="CPU threads [default: find the best]."
)
@click.option("--seconds", type=Number(1), default=75.0, show_default=True, help="Aim for all of it.")
@click.option(
    "-ub",
    "--ubatch",
    "--ubatch-size",
    "ubatch",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Prompt batch.",
)
@click.option("--depth", type=click.IntRange(0), default=65536, show_default=True, help="Deepest attention.")
@click.option(
    "--kv", multiple=True, type=click.Choice(KV_TYPES), help="KV cache type; repeatable [default: f16]."
)
@click.option("--strict", is_flag=True, help="Refuse a machine that is busy or unsteady.")
@click.option("--name", default="", help="Name of the machine in the profile.")
@click.option("--no-calibration", is_flag=True, help="Skip the whole-model runs.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Results of stock llama-bench (-o json, or its table): fit a machine to them.",
)
@click.option(
    "--refine",
    "results",
    multiple=True,
    metavar="PLAN=RESULT",
    help="What bench or run measured of a plan: correct the profile it was made on; repeatable.",
)
@click.option(
    "--machine",
    metavar="NAME",
    help="With --from: the machine that comes nearest, or its parts; with --refine: the profile:",
)
@machine_parts
@click.option("--table", "table", type=Target(), help="Write every case as CSV; shown are the worst.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    model: Path | None,
    out: Path | None,
    engine: str | None,
    devices: tuple[str, ...],
    threads: int,
    seconds: float,
    ubatch: int,
    depth: int,
    kv: tuple[str, ...],
    strict: bool,
    name: str,
    no_calibration: bool,
    source: Path | None,
    results: tuple[str, ...],
    machine: str | None,
    parts: Described,
    table: Path | None,
    as_json: bool,
) -> None:
    """Time every operator of MODEL (a GGUF file or an inventory) on every device, and the links between them.

    An interrupted profile continues where it stopped when the same command is given again.
    """
    from profiler.session import Request

    if source is not None:
        made = fitted(source, _inventory(model), profile_of(None, machine, parts), name)
        _hand_over(made, out, as_json, model)
        return
    if results:
        _hand_over(refined(results, model, machine, name), out, as_json, model)
        return
    if machine is not None or parts:
        raise OptionProblem("--machine", machine or "", "is for --from; without it this machine is measured")
    request = Request(
        engine=engine,
        devices=devices,
        threads=threads,
        seconds=seconds,
        strict=strict,
        name=name,
        command=_command(model, devices, ubatch),
    )
    inventory = _inventory(model)
    cases = _cases_of(inventory, ubatch, depth, kv)
    here = (model, inventory) if model and inventory and not _is_table(model) else None
    measured, profile = _measure(request, cases, here, not no_calibration)
    measured.journal.finish()
    report(measured, profile, inventory, as_json)
    if table is not None:
        console.write_text(table, all_cases(measured.verdicts, measured.streams))
        console.say(f"wrote {table}")
    _write(profile, out, model)


def _hand_over(profile: Profile, out: Path | None, as_json: bool, model: Path | None) -> None:
    """A profile that was not measured here: its figures, and the file."""
    if as_json:
        console.out_json(profile.model_dump(mode="json", by_alias=True))
    else:
        show_profile(profile)
    _write(profile, out, model)


def _write(profile: Profile, out: Path | None, model: Path | None) -> None:
    if out is not None:
        from planner.machine.profile import to_text

        console.write_text(out, to_text(profile))
        console.say(f"wrote {out}")
    if out is None:
        console.next_step(*console.again("-o", "profile.yaml"))
    else:
        asked = ("solve", model or "MODEL", "--profile", out, "-o", "plan.yaml")
        console.next_step("atsplan", *asked)


def _inventory(model: Path | None) -> Inventory | None:
    if model is None:
        return None
    if _is_table(model):
        from planner.model.inventory import from_text

        return from_text(console.read_text(model), str(model))
    from planner.model.gguf.reader import read_model

    return read_model(model).inventory


def _is_table(model: Path) -> bool:
    return model.suffix in (".yaml", ".yml")


def _cases_of(inventory: Inventory | None, ubatch: int, depth: int, kv: tuple[str, ...]) -> list[Case]:
    from profiler.operators.cases import cases_of

    return list(cases_of(inventory, ubatch, depth, kv or ("f16",))) if inventory else []


def _command(model: Path | None, devices: tuple[str, ...], ubatch: int) -> str:
    words = ["atsplan", "profile", *([model.name] if model else [])]
    words += [word for device in devices for word in ("--device", device)]
    return shell([*words, *(["--ubatch", str(ubatch)] if ubatch != 512 else [])])


def _measure(
    request: Request, cases: list[Case], model: tuple[Path, Inventory] | None, calibrate: bool
) -> tuple[Measured, Profile]:
    from profiler import session
    from profiler.whole_model.full_profile import complete

    with console.progress() as bar:
        task = bar.add_task("devices and links", total=None, rate="")

        def begin(total: int, known: int) -> None:
            if known:
                console.say(f"continuing an interrupted profile: {known} of {total} cases are known")
            bar.update(task, description="operators", total=total, completed=known)

        def case(line: dict[str, Any]) -> None:
            if line["kind"] == "case":
                bar.update(task, advance=1, rate=line["key"])

        watch = session.Watcher(
            stage=lambda text: bar.update(task, description=text, rate=""),
            begin=begin,
            case=case,
            run=lambda text: bar.update(task, rate=text),
            note=console.say,
        )
        try:
            if calibrate:
                return complete(request, cases, model, watch)
            measured = session.measure(request, lambda _: cases, watch)
            return measured, measured.profile
        except KeyboardInterrupt:
            console.say("what was measured is kept: give the same command again to continue")
            raise
