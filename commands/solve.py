"""atsplan solve: place every tensor under a memory budget, and write the plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.console import mib, ms, out, out_json, out_table, say, table, write_text
from commands.models import load_inventory, load_profile
from planner.errors import OptionProblem
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.plan import Plan


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say for which machine and for what use a model is planned."""
    for option in (
        click.option(
            "--kv-type", default="f16", show_default=True, help="Type of K and V: f16, q8_0, q8_0/q5_1 …"
        ),
        click.option(
            "--ubatch", type=click.IntRange(1, 65536), default=512, show_default=True, help="Tokens a ubatch."
        ),
        click.option("--workload", "use", default="", help="prompt=512,gen=256,depth=0,seqs=1"),
        click.option("--mtp", is_flag=True, help="Load the NextN/MTP block."),
        click.option(
            "--profile", "profile_path", type=click.Path(path_type=Path), help="Profile of the machine."
        ),
        click.option("--machine", help="A machine description that ships with the program."),
    ):
        function = option(function)
    return function


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--budget", default="", help="MiB for everything on a GPU: 21500, 21.5GiB, CUDA0=21500,CUDA1=8000."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the plan.")
@click.option("--ctx", default="4096", show_default=True, help="Cells of the KV cache.")
@model_options
@click.option("--pin", "pins", multiple=True, help="PATTERN=SITE, for example 'blk.0.*=gpu'.")
@click.option("--contiguous", is_flag=True, help="Whole layers only, one run of layers per device.")
@click.option("--no-cpu", is_flag=True, help="Nothing but the input tables on the CPU.")
@click.option("--page", is_flag=True, help="Host weights may exceed memory and are paged from disk.")
@click.option(
    "--time-limit", type=click.FloatRange(0.1, 3600), default=20.0, show_default=True, help="Seconds."
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def command(
    model: Path,
    budget: str,
    output: Path | None,
    ctx: str,
    kv_type: str,
    ubatch: int,
    use: str,
    mtp: bool,
    profile_path: Path | None,
    machine: str | None,
    pins: tuple[str, ...],
    contiguous: bool,
    no_cpu: bool,
    page: bool,
    time_limit: float,
    as_json: bool,
) -> None:
    """Place every tensor of MODEL (a GGUF file or an inventory.yaml) under a memory budget."""
    from planner.budget import budgets_for, parse_budget
    from planner.make_plan import make_plan
    from planner.options import SolveOptions
    from planner.pins import parse_pin
    from planner.plan import to_text

    profile = load_profile(profile_path, machine)
    budgets = budgets_for(profile, parse_budget(budget) if budget else {})
    inventory = load_inventory(model)
    workload = workload_of(int(ctx), kv_type, ubatch, use, mtp)
    options = SolveOptions(
        pins=tuple(parse_pin(text) for text in pins),
        contiguous=contiguous,
        no_cpu=no_cpu,
        page=page,
        time_limit_s=time_limit,
        command=_command_line(),
    )
    plan = make_plan(inventory, profile, budgets, workload, options)
    if output is not None:
        write_text(output, to_text(plan))
        say(f"wrote {output}")
    if as_json:
        out_json(plan.model_dump(mode="json", by_alias=True))
    else:
        show(plan)


def workload_of(n_ctx: int, kv_type: str, ubatch: int, use: str, mtp: bool) -> Workload:
    """The workload of a command line; OptionProblem for what makes no sense."""
    from pydantic import ValidationError

    type_k, _, type_v = kv_type.partition("/")
    fields: dict[str, Any] = {
        "n_ctx": n_ctx,
        "type_k": type_k,
        "type_v": type_v or type_k,
        "n_ubatch": ubatch,
        "n_batch": max(2048, ubatch),
        "mtp": mtp,
        **_use(use),
    }
    try:
        workload = Workload(**fields)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        raise OptionProblem("--workload", str(first["loc"][0]), first["msg"].lower()) from None
    needed = max(workload.depth, workload.prompt) + workload.gen
    if needed > workload.n_ctx:
        raise OptionProblem("--ctx", str(n_ctx), f"depth or prompt and answer need {needed} cells")
    return workload


_USE = {"prompt": "prompt", "gen": "gen", "depth": "depth", "seqs": "n_seq"}


def _use(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        if name.strip() not in _USE or not value.strip().isdecimal():
            raise OptionProblem("--workload", text, "expected prompt=512,gen=256,depth=0,seqs=1")
        found[_USE[name.strip()]] = int(value)
    return found


def _command_line() -> str:
    import sys

    return shlex.join(["atsplan", *sys.argv[1:]])


def show(plan: Plan) -> None:
    """The plan in short: what fills the devices, predicted speed against the stock rules, bound and gap."""
    filled = table("device", "budget", "used", "weights", "KV", "state", "compute", "reserve")
    for use in plan.devices:
        filled.add_row(
            use.name,
            mib(use.budget_bytes),
            mib(use.used_bytes),
            *(mib(v) for v in (use.weights_bytes, use.kv_bytes, use.state_bytes)),
            *(mib(v) for v in (use.compute_bytes, use.reserve_bytes)),
        )
    out_table(filled)
    speed = table("placement", "setting", "ms/token", "tokens/s", "prompt ms", "GPU memory")
    p = plan.predicted
    used = sum(d.used_bytes for d in plan.devices if d.kind != "cpu")
    speed.add_row("this plan", p.status, *_speed(p.tpot_ns, p.prefill_ns), mib(used))
    for b in plan.baselines:
        if b.feasible:
            speed.add_row(b.name, b.setting, *_speed(b.tpot_ns, b.prefill_ns), mib(b.vram_bytes))
        else:
            speed.add_row(b.name, b.setting, "does not fit", "", "", "")
    out_table(speed)
    out(
        f"{p.status}: request {ms(p.objective_ns)}, bound {ms(p.bound_ns)}, gap {p.gap_ppm / 1e4:.2f} %, "
        f"error bar ±{p.error_ppm / 1e4:.0f} %, {p.splits} splits"
    )
    for note in plan.notes:
        say(note)


def _speed(tpot_ns: int, prefill_ns: int) -> tuple[str, str, str]:
    return f"{tpot_ns / 1e6:.2f}", f"{1e9 / max(tpot_ns, 1):.1f}", f"{prefill_ns / 1e6:.0f}"
