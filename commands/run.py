"""atsplan run: load a model by its plan, prove that it lies as planned, generate text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.check.smoke_test import smoke as prove
from commands.shared.console import loading, ms, next_step, out, out_json, out_piece, say, write_text
from commands.shared.heat_files import seeded
from commands.shared.option_types import Number, Target
from commands.shared.plan_job import (
    Job,
    draft_options,
    engine_options,
    load_bytes,
    open_draft,
    open_job,
    plan_options,
)
from commands.shared.spellings import RUN, answers
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from runtime.session.session import Timings
    from runtime.worker import Outcome


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@plan_options
@click.option(
    "--heat",
    metavar="FILE[:NAME]",
    help="Fill the slots with the hottest experts of this routing, or of one domain or source in it.",
)
@click.option("-p", "--prompt", help="The prompt [default: read stdin].")
@click.option("-n", "--tokens", type=click.IntRange(1), default=128, show_default=True, help="At most.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--temp", type=Number(0, 100), default=0.0, show_default=True, help="0: greedy.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="For --temp above 0."
)
@click.option("--stop", multiple=True, help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Run on past the end of the text.")
@click.option("--no-check", is_flag=True, help="Skip the dry run and the proof of placement.")
@click.option(
    "--smoke", is_flag=True, help="Only prove that short and long prompts decode; no prompt needed."
)
@draft_options
@click.option("--prometheus", type=Target(), help="Also write the figures as a Prometheus text file.")
@click.option("--json", "as_json", is_flag=True, help="Text, timings and memory as JSON.")
@engine_options
@answers(RUN)
def command(
    model: Path,
    plan_path: Path,
    heat: str | None,
    device_maps: tuple[str, ...],
    threads: int,
    mmap: bool | None,
    other_machine: bool,
    prompt: str | None,
    tokens: int,
    raw: bool,
    temp: float,
    seed: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    no_check: bool,
    smoke: bool,
    draft: Path | None,
    draft_max: int | None,
    draft_device: str | None,
    prometheus: Path | None,
    as_json: bool,
    engine: str | None,
    llama_h: Path | None,
) -> None:
    """Load MODEL by its plan and continue a prompt, token by token.

    The engine runs in a child process. Before loading, a dry run asks it for its exact memory; after
    loading, every weight's real device is compared with the plan.
    """
    from dataclasses import replace

    from runtime.session.session import Sampling
    from runtime.worker import Ask, work

    if draft is not None and temp > 0:
        raise OptionProblem("--draft", str(draft), "guesses are checked greedily: leave --temp at 0")
    job = seeded(open_job(model, plan_path, device_maps, threads, mmap, other_machine), heat)
    guesser = open_draft(draft, job, draft_max, draft_device)
    if smoke:
        prove(job, plan_path, engine, llama_h, guesser)
        next_step(*("atsplan", "run", *_loading(model, plan_path, device_maps)), "-p", "Once upon a time")
        return
    heard: list[str] = []
    sampling = Sampling(temperature=temp, seed=seed)
    ask = Ask(_prompt(prompt), tokens, sampling, stop, chat=not raw, ignore_end=ignore_eos)
    with loading(load_bytes(job, draft)) as load:
        outcome = work(
            engine,
            llama_h,
            job.path,
            replace(job.spec, rollback=guesser.spec.rollback if guesser else 0),
            [ask],
            None if no_check else job.checks(),
            on_text=heard.append if as_json else out_piece,
            on_note=say,
            load=load,
            draft=guesser,
        )
    if prometheus is not None:
        write_text(prometheus, _figures(job, outcome))
        say(f"wrote {prometheus}")
    if as_json:
        out_json(_report(job, outcome, "".join(heard)))
    else:
        out("")
    _say_speed(job, outcome.timings[0])
    next_step("atsplan", "bench", *_loading(model, plan_path, device_maps))


def _loading(model: Path, plan: Path, maps: tuple[str, ...]) -> tuple[str, ...]:
    """The words that load a model by its plan again."""
    return (str(model), "--plan", str(plan), *(word for each in maps for word in ("--device-map", each)))


def _prompt(given: str | None) -> str:
    text = given if given is not None else "" if sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise OptionProblem("--prompt", "", "is empty: give a text with -p or on stdin")
    return text


def _say_speed(job: Job, timings: Timings) -> None:
    made, predicted = len(timings.tokens), job.plan.predicted
    say(f"prompt: {timings.prompt_tokens} tokens in {ms(timings.prefill_ns)}")
    if not timings.tpot_ns:
        return
    if timings.guessed:
        say(f"draft: {timings.accepted} of {timings.guessed} guesses accepted")
    rate = 1e9 / timings.tpot_ns
    line = f"decode: {made} tokens, {ms(timings.tpot_ns)} each, {rate:.1f} tokens/s"
    if job.mapped or job.elsewhere:
        line += f"; the plan's times are for {job.plan.machine.name}, not for this machine"
    elif predicted.tpot_ns:
        line += f"; predicted {ms(predicted.tpot_ns)}, {1e9 / predicted.tpot_ns:.1f} tokens/s"
        line += "" if job.plan.machine.measured else " (assumed, not measured)"
    say(line)


def _figures(job: Job, outcome: Outcome) -> str:
    """The text of a Prometheus file."""
    from dataclasses import asdict

    from planner.plan.plan import to_text
    from planner.records import digest
    from runtime.metrics.registry import Metrics, Request

    metrics = Metrics(job.plan, digest(to_text(job.plan)))
    for each in outcome.timings:
        metrics.request(Request(each.prompt_tokens, each.prefill_ns, len(each.tokens), each.tpot_ns))
        metrics.drafted(each.drafts)
    metrics.memory({name: asdict(sizes) for name, sizes in outcome.loaded.memory.items()})
    metrics.lanes(outcome.lanes)
    return metrics.text()


def _report(job: Job, outcome: Outcome, text: str) -> dict[str, Any]:
    from dataclasses import asdict

    timings = outcome.timings[0]
    return {
        "text": text,
        **asdict(timings),
        "guessed": timings.guessed,
        "accepted": timings.accepted,
        "tpot_ns": timings.tpot_ns,
        "predicted_tpot_ns": job.plan.predicted.tpot_ns,
        "device_map": dict(job.mapped),
        **asdict(outcome.loaded),
    }
