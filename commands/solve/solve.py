"""atsplan solve: place every tensor under a memory budget, and write the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import (
    again,
    mib,
    ms,
    next_step,
    out,
    out_json,
    out_table,
    planning,
    say,
    table,
    write_text,
)
from commands.shared.option_types import Target, html_option
from commands.shared.paste import TABLES
from commands.shared.refusals import refusal_data
from commands.solve.options import SolveOptions, solve_options
from commands.solve.request import inputs_of
from commands.solve.ubatch import smallest_batch, solved
from planner.errors import AnswerIsNo, OptionProblem

if TYPE_CHECKING:
    from commands.solve.request import Inputs
    from planner.plan.plan import Plan


@click.command()
@solve_options
@click.option("-o", "--output", "--out", "output", type=Target("plan"), help="Where to write the plan.")
@click.option(
    "--quant", "quants", multiple=True, help="What if: REGEX=TYPE, for example 'ffn_.*_exps=iq2_xs'."
)
@click.option("--tensor-types", type=Target(), help="Write --quant as a llama-quantize map.")
@html_option
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def command(
    asked: SolveOptions,
    output: Path | None,
    quants: tuple[str, ...],
    tensor_types: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Place every tensor of MODEL (a GGUF file or an inventory.yaml) under a memory budget."""
    from planner.plan.plan import to_text

    if tensor_types is not None and not quants:
        raise OptionProblem("--tensor-types", str(tensor_types), "needs --quant")
    try:
        inputs, plan = _what_if(asked, quants, tensor_types) if quants else solved(asked)
    except AnswerIsNo as refusal:
        if as_json:
            out_json(refusal_data(refusal))
        raise
    if output is not None:
        write_text(output, to_text(plan))
        say(f"wrote {output}")
    if html is not None:
        from commands.page.page import plan_page, view_of, write_page

        write_page(html, plan_page(view_of(plan, inputs.inventory, inputs.model, output)))
    if as_json:
        out_json(plan.model_dump(mode="json", by_alias=True))
    else:
        show(plan)
    _next(asked, output, bool(quants) and tensor_types is None)


def _next(asked: SolveOptions, output: Path | None, unquantised: bool) -> None:
    """The plan written; then tried where the model is here, else read and given to llama.cpp."""
    if unquantised:  # a plan for a file that is not made yet
        next_step(*again("--tensor-types", "types.txt"))
    elif output is None:
        next_step(*again("-o", "plan.yaml"))
    elif asked.model.suffix in TABLES:
        profile = ["--profile", str(asked.profile_path)] if asked.profile_path else []
        next_step("atsplan", "explain", output, "--model", asked.model, *profile)
        next_step("atsplan", "export", output)
    else:
        next_step("atsplan", "run", asked.model, "--plan", output, "-p", "Once upon a time")
        next_step("atsplan", "export", output, "--model", asked.model)


def _what_if(asked: SolveOptions, quants: tuple[str, ...], tensor_types: Path | None) -> tuple[Inputs, Plan]:
    """The plan for other types of the same tensors, and what it gains; the model as it is may not fit."""
    from planner.model.requantise import parse_rule, requantised
    from planner.model.requantise import tensor_types as as_map
    from planner.passes.refusal import Infeasible

    today: Plan | None = None
    try:
        inputs, today = solved(asked, 0.5, advise=False)
    except Infeasible:
        inputs = inputs_of(smallest_batch(asked))
    inventory = inputs.inventory
    after = requantised(inventory, [parse_rule(text) for text in quants])
    other = replace(inputs, inventory=after, fit_engine="")  # --fit reads the file as it is
    with planning("with other types", inputs.deadline.left_s) as watch:
        plan = other.plan(watch=watch)
    after_ns = plan.predicted.tpot_ns
    times = f"{ms(after_ns)} a token, which fits now"
    if today is not None:
        before_ns = today.predicted.tpot_ns
        times = f"{ms(before_ns)} -> {ms(after_ns)} a token ({before_ns / max(after_ns, 1):.2f}x)"
    say(f"with {', '.join(quants)}: {mib(inventory.size_bytes)} -> {mib(after.size_bytes)}, {times}")
    if tensor_types is not None:
        write_text(tensor_types, as_map(inventory, after))
        say(f"wrote {tensor_types}: llama-quantize --tensor-type-file {tensor_types}")
    note = f"what if: for the model after quantising {', '.join(quants)}"
    return inputs, plan.model_copy(update={"notes": (note, *plan.notes)})


def show(plan: Plan) -> None:
    """The plan in short: what fills the devices, predicted speed against the stock rules, bound and gap."""
    _show_devices(plan)
    _show_speed(plan)
    p = plan.predicted
    out(
        f"{p.status}: request ({plan.workload.prompt} tokens of prompt, {plan.workload.gen} of answer) "
        f"{ms(p.objective_ns)}, bound {ms(p.bound_ns)}, gap {p.gap_ppm / 1e4:.2f} %, "
        f"{p.splits} splits, "
        f"context {plan.workload.n_ctx}, a token at depth {plan.workload.depth}"
    )
    out(_certainty(plan))
    if plan.search is not None and plan.search.ended_by == "clock":
        seconds = plan.search.time_limit_ms / 1000
        say(f"its search was ended by the clock after {seconds:g} s: another run may find another plan")
    for note in plan.notes:
        say(note)


def _certainty(plan: Plan) -> str:
    """How far the times may be off, and what they stand on."""
    from planner.cost.evidence import in_words

    p = plan.predicted
    prompt = f", the prompt ±{p.prefill_error_ppm / 1e4:.0f} %" if p.prefill_error_ppm is not None else ""
    stands = in_words(p.basis_ppm or {})
    return f"error bar ±{p.error_ppm / 1e4:.0f} % of a token{prompt}" + (
        f"; stands on: {stands}" if stands else ""
    )


def _show_devices(plan: Plan) -> None:
    tables = any(use.tables_bytes for use in plan.devices)
    heads = ("device", "budget", "used", "weights", "KV", "state", "compute", "cache", "reserve")
    filled = table(*heads, *(["mapped tables"] if tables else []))
    for use in plan.devices:
        parts = (use.weights_bytes, use.kv_bytes, use.state_bytes, use.compute_bytes)
        filled.add_row(
            use.name,
            mib(use.budget_bytes),
            mib(use.used_bytes),
            *(mib(size) if size else "-" for size in (*parts, use.cache_bytes, use.reserve_bytes)),
            *([mib(use.tables_bytes) if use.tables_bytes else "-"] if tables else []),
        )
    out_table(filled)


def _show_speed(plan: Plan) -> None:
    from planner.check.gains import gains_text
    from planner.plan.stock_rule import NOT_KEPT

    speed = table("placement", "setting", "ms/token", "tokens/s", "prompt ms", "GPU")
    p = plan.predicted
    used = sum(d.used_bytes for d in plan.devices if d.kind != "cpu")
    speed.add_row("this plan", p.status, *_speed(p.tpot_ns, p.prefill_ns), mib(used))
    for b in plan.baselines:
        if b.feasible:
            speed.add_row(b.name, b.setting, *_speed(b.tpot_ns, b.prefill_ns), mib(b.vram_bytes))
        else:
            speed.add_row(b.name, b.setting, "-" if b.setting == NOT_KEPT else "does not fit", "", "", "")
    out_table(speed)
    if text := gains_text(plan):
        out(text)


def _speed(tpot_ns: int, prefill_ns: int) -> tuple[str, str, str]:
    return f"{tpot_ns / 1e6:.2f}", f"{1e9 / max(tpot_ns, 1):.1f}", f"{prefill_ns / 1e6:.0f}"
