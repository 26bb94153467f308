"""atsplan run: load a model by its plan, prove that it lies as planned, generate text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.console import ms, out, out_json, say
from commands.engines import Job, engine_options, find_engine, open_job, plan_options
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from runtime.dryrun import Breakdown
    from runtime.libllama import Engine
    from runtime.session import Session, Timings


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@plan_options
@click.option("-p", "--prompt", help="The prompt [default: read stdin].")
@click.option("-n", "--tokens", type=click.IntRange(1), default=128, show_default=True, help="At most.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--temp", type=click.FloatRange(0), default=0.0, show_default=True, help="0: greedy.")
@click.option("--seed", type=int, default=1, show_default=True, help="For --temp above 0.")
@click.option("--stop", multiple=True, help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Run on past the end of the text.")
@click.option("--no-check", is_flag=True, help="Skip the dry run and the proof of placement.")
@click.option("--json", "as_json", is_flag=True, help="Text, timings and memory as JSON.")
@engine_options
def command(
    model: Path,
    plan_path: Path,
    device_maps: tuple[str, ...],
    threads: int,
    prompt: str | None,
    tokens: int,
    raw: bool,
    temp: float,
    seed: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    no_check: bool,
    as_json: bool,
    engine: str | None,
    llama_h: Path | None,
) -> None:
    """Load MODEL by its plan and continue a prompt, token by token.

    Before loading, a dry run in a child process asks the engine for its exact memory; after loading,
    every weight's real device is compared with the plan.
    """
    from runtime.session import Sampling
    from runtime.stripe_session import session_for

    job = open_job(model, plan_path, device_maps, threads)
    text = _prompt(prompt)
    found = find_engine(engine, llama_h)
    if not no_check:
        review(found, job)
    with session_for(found, job.path, job.spec) as session:
        if not no_check:
            prove(session, job)
        asked = text if raw else session.chat(text) or text
        heard: list[str] = []
        timings = session.generate(
            asked,
            tokens,
            on_text=heard.append if as_json else _print,
            sampling=Sampling(temperature=temp, seed=seed),
            stop=stop,
            ignore_end=ignore_eos,
        )
        if as_json:
            out_json(_report(session, job, timings, "".join(heard)))
        else:
            out("")
        _say_speed(job, timings)


def review(engine: Engine, job: Job) -> dict[str, Breakdown]:
    """The dry run: missing devices, budgets and free memory, before anything large is touched."""
    from runtime import load
    from runtime.dryrun import measure
    from runtime.review import check_budgets, check_room

    for name in job.spec.devices:
        load.device_handle(engine, name)
    load.check(engine, job.spec)
    dry = measure(engine, job.path, job.spec)
    for note in dry.notes:
        say(f"engine: {note}")
    if not job.mapped:
        check_budgets(job.plan, dry.devices)
    check_room(dry.devices, engine.ggml.devices())
    return dict(dry.devices)


def prove(session: Session, job: Job) -> None:
    """Every weight's real device against the plan. Raises Misplaced."""
    from planner.expected import expected_devices
    from runtime.truth import compare

    compare(session.engine, session.weights(), expected_devices(job.file.inventory, job.spec))


def _prompt(given: str | None) -> str:
    text = given if given is not None else "" if sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise OptionProblem("--prompt", "", "is empty: give a text with -p or on stdin")
    return text


def _print(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


def _say_speed(job: Job, timings: Timings) -> None:
    made, predicted = len(timings.tokens), job.plan.predicted
    say(f"prompt: {timings.prompt_tokens} tokens in {ms(timings.prefill_ns)}")
    if not timings.tpot_ns:
        return
    rate = 1e9 / timings.tpot_ns
    line = f"decode: {made} tokens, {ms(timings.tpot_ns)} each, {rate:.1f} tokens/s"
    if predicted.tpot_ns:
        line += f"; predicted {ms(predicted.tpot_ns)}, {1e9 / predicted.tpot_ns:.1f} tokens/s"
        where = f" on {job.plan.machine.name}" if job.mapped else ""
        line += where + ("" if job.plan.machine.measured else " (assumed, not measured)")
    say(line)


def _report(session: Session, job: Job, timings: Timings, text: str) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "text": text,
        "prompt_tokens": timings.prompt_tokens,
        "tokens": list(timings.tokens),
        "prefill_ns": timings.prefill_ns,
        "decode_ns": timings.decode_ns,
        "tpot_ns": timings.tpot_ns,
        "predicted_tpot_ns": job.plan.predicted.tpot_ns,
        "device_map": dict(job.mapped),
        "memory": {name: asdict(sizes) for name, sizes in session.memory().items()},
        "engine": session.engine.build.text,
    }
