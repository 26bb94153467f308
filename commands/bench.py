"""atsplan bench: measure a plan against stock rules, or other plans, at equal measured memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import (
    again,
    loads,
    mib,
    next_step,
    out,
    out_json,
    out_table,
    progress,
    say,
    table,
    write_text,
)
from commands.shared.option_types import Target, html_option
from commands.shared.plan_job import (
    Job,
    draft_options,
    engine_options,
    find_engine,
    load_bytes,
    open_draft,
    open_job,
    plan_options,
    review,
)
from commands.shared.spellings import RUN, answers
from planner.constants import CPU
from planner.errors import AnswerIsNo, MachineError, OptionProblem
from planner.model.structure import structure_of
from planner.plan.stock_rule import ALL_CPU, FIT, N_CPU_MOE, NGL

if TYPE_CHECKING:
    from runtime.bench.intervals import Interval
    from runtime.bench.measure import Comparison, Result
    from runtime.bench.rivals import Rival
    from runtime.engine.locate import Place
    from runtime.session.draft_model import Draft

RULES = (FIT, NGL, N_CPU_MOE, ALL_CPU)
_EQUAL_BYTES = 2**20
_FAR = 2.0  # measured over predicted, from which the prediction is called wrong


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@plan_options
@click.option(
    "--against",
    default=",".join(RULES[:3]),
    show_default=True,
    help="Rivals: fit, ngl, n-cpu-moe, all-cpu, or plan files; comma-separated.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Loads of each.")
@click.option("--prompts", default="50,500,2000", show_default=True, help="Prompt lengths in tokens.")
@click.option("-n", "--tokens", type=click.IntRange(2), default=64, show_default=True, help="Per prompt.")
@click.option("--json", "as_json", is_flag=True, help="Results as JSON.")
@click.option("--prometheus", type=Target(), help="Also write a Prometheus text file.")
@html_option
@draft_options
@engine_options
@answers(RUN)
def command(
    model: Path,
    plan_path: Path,
    device_maps: tuple[str, ...],
    threads: int,
    mmap: bool | None,
    other_machine: bool,
    against: str,
    rounds: int,
    prompts: str,
    tokens: int,
    as_json: bool,
    prometheus: Path | None,
    html: Path | None,
    draft: Path | None,
    draft_max: int | None,
    draft_device: str | None,
    engine: str | None,
    llama_h: Path | None,
) -> None:
    """Measure MODEL by its plan against rivals that get the same device memory.

    Each runs in a process of its own, in alternating order; medians with 95 % bootstrap intervals.
    Ends with status 1 when, after three rounds or more, a rival decodes faster by more than 1 %,
    whole interval.
    """
    from runtime.bench.measure import Terms, compare, run

    job = open_job(model, plan_path, device_maps, threads, mmap, other_machine)
    lengths = _lengths(prompts, tokens, job)
    review(job, engine, llama_h)
    guesser = open_draft(draft, job, draft_max, draft_device)
    rivals, checks = _rivals(job, against, find_engine(engine, llama_h), device_maps, threads, guesser)
    twins = _twins(job, rivals)
    terms = Terms(engine, llama_h, job.path, lengths, tokens, rounds)
    with progress() as bar:
        task = bar.add_task("bench", total=rounds * len(rivals), rate="")
        load = loads(bar, load_bytes(job, draft))
        results = run(
            terms,
            rivals,
            checks,
            say,
            lambda done, what: bar.update(task, completed=done, rate=what),
            load,
        )
    comparisons = [c for rival in results[1:] for c in compare(results[0], rival)]
    if prometheus:
        from runtime.bench.prometheus import prometheus as metrics

        write_text(prometheus, metrics(job.plan.model.name, results))
    if html is not None:
        _write_page(html, job, results)
    if as_json:
        out_json(_report(job, results, comparisons, twins))
    else:
        _show(results, comparisons)
    if as_json:  # that this program itself reads
        next_step("atsplan", "refine", plan_path, "--measured", "bench.json")
    else:
        next_step(*again("--json"))
    _fail_if_lost(results, comparisons)
    _judge_prediction(job, results[0])
    _judge([c for c in comparisons if c.rival not in twins], rounds)


def _rivals(
    job: Job, against: str, engine: Place, maps: tuple[str, ...], threads: int, draft: Draft | None
) -> tuple[list[Rival], dict[str, Any]]:
    """The plan and its rivals, each with what is proven at its load."""
    from dataclasses import replace

    from planner.plan.engine_rules import tensor_devices
    from runtime.bench.rivals import dry_runs, field_of, plan_rival, without_draft
    from runtime.bench.rivals import rivals as rivals_of
    from runtime.worker import Checks

    say("dry runs: the plan's memory, and rivals that fit into it")
    spec = replace(job.spec, rollback=draft.spec.rollback if draft else 0)
    mine = plan_rival(engine, job.path, spec, draft)
    names = [name.strip() for name in against.split(",") if name.strip()]
    rules = tuple(name for name in names if name in RULES)
    # A stock rule runs with the engine's own count of threads, whatever suits the plan.
    stock = replace(job.spec, threads=threads, op_offload=True, use_extra_bufts=True)
    with progress() as bar:
        task = bar.add_task(
            "dry runs", total=dry_runs(rules, structure_of(job.file.inventory).layers.n_all), rate=""
        )
        field = field_of(engine, job.path, job.file.inventory, mine, lambda: bar.advance(task))
        rivals, missing = rivals_of(field, stock, rules)
    for why in missing:
        say(f"no rival {why}")
    if draft:
        rivals.insert(0, without_draft(plan_rival(engine, job.path, job.spec)))
    for name in (n for n in names if n not in RULES):
        if not Path(name).is_file():
            raise OptionProblem("--against", name, f"is no rule ({', '.join(RULES)}) and no plan file")
        other = open_job(job.path, Path(name), maps, threads, job.spec.use_mmap, job.elsewhere)
        called = _unused(Path(name).stem, ["plan", *(rival.name for rival in rivals)])
        rivals.append(replace(plan_rival(engine, other.path, other.spec), name=called, setting=name))
        _say_unequal(mine, rivals[-1])
    if names and not rivals:
        raise MachineError(
            f"there is nothing to compare with: {'; '.join(missing)}; --against all-cpu or a plan can be"
        )
    checks = {a.name: Checks(None, tensor_devices(structure_of(job.file.inventory), a.spec)) for a in rivals}
    return [mine, *rivals], {"plan": job.checks(), **checks}


def _say_unequal(mine: Rival, other: Rival) -> None:
    """Another plan brings its own placement, and with it its own memory: said where it is more."""
    for device, size in other.device_bytes.items():
        more = size - mine.device_bytes.get(device, 0)
        if more > _EQUAL_BYTES:
            say(f"note: {other.name} takes {mib(more)} more of {device} than the plan")


def _unused(name: str, taken: list[str]) -> str:
    """A name that no other contender has."""
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in taken)


def _twins(job: Job, rivals: list[Rival]) -> list[str]:
    """Rivals that load exactly as the plan does, said: against them any difference is noise."""
    from runtime.bench.rivals import same_load

    mine, rivals = rivals[0], rivals[1:]
    alike = (same_load(job.file.inventory, mine.spec, rival.spec) for rival in rivals)
    twins = [rival.name for rival, same in zip(rivals, alike, strict=True) if same and not mine.draft]
    for name in twins:
        say(f"{name} is the plan's own load: what differs between the two is noise")
    return twins


def _judge(comparisons: list[Comparison], rounds: int) -> None:
    """AnswerIsNo when a rival is faster; what is too close or too little measured is said."""
    from runtime.bench.measure import VERDICT_ROUNDS, slower

    if comparisons and rounds < VERDICT_ROUNDS:
        say(f"no verdict: it takes {VERDICT_ROUNDS} rounds")
    if lost := slower(comparisons):
        worst = max(lost, key=lambda c: c.decode.median)
        raise AnswerIsNo(f"{worst.rival} decodes faster: plan takes {worst.decode.median:.2f} of its time")


def _lengths(text: str, tokens: int, job: Job) -> tuple[int, ...]:
    try:
        asked = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise OptionProblem("--prompts", text, "write lengths as 50,500,2000") from None
    if any(n < 1 for n in asked):
        raise OptionProblem("--prompts", text, "a prompt has at least one token")
    fitting = tuple(n for n in asked if n + tokens <= job.spec.workload.n_ctx)
    if not fitting:
        raise OptionProblem("--prompts", text, f"nothing fits a context of {job.spec.workload.n_ctx}")
    for n in sorted(set(asked) - set(fitting)):
        say(f"prompt of {n} tokens skipped: the plan's context is {job.spec.workload.n_ctx}")
    return fitting


def _show(results: list[Result], comparisons: list[Comparison]) -> None:
    from runtime.bench.measure import summary

    heads = ("contender", "setting", "device", "prompt", "prefill t/s", "ms/token", "from–to", "tokens/s")
    made = table(*heads)
    for result in results:
        memory = sum(sizes.total for name, sizes in result.memory.items() if name != CPU)
        for prompt in sorted(result.decode):
            decode, prefill = summary(result.decode[prompt]), summary(result.prefill[prompt])
            assert decode is not None and prefill is not None
            made.add_row(
                result.rival.name,
                result.rival.setting,
                mib(memory),
                str(prompt),
                f"{prompt * 1e9 / prefill.median:.0f}",
                f"{decode.median / 1e6:.2f}",
                f"{decode.low / 1e6:.2f}–{decode.high / 1e6:.2f}",
                f"{1e9 / decode.median:.1f}",
            )
    out_table(made)
    for c in comparisons:
        text = f"plan / {c.rival}, prompt {c.prompt}: decode {_ratio(c.decode)}, prefill {_ratio(c.prefill)}"
        out(text)
    for result in results:
        for failure in result.failures:
            when = "computing" if failure.loaded else "loading"
            say(f"{failure.at} {result.rival.name} failed while {when}: {failure.why}")
            for line in failure.lines:
                say(f"    {line}")


def _write_page(path: Path, job: Job, results: list[Result]) -> None:
    """The page of the plan with what was measured."""
    from dataclasses import replace

    from commands.page.bars_figure import Bar
    from commands.page.page import plan_page, view_of, write_page
    from runtime.bench.measure import summary

    measured: dict[int, list[Bar]] = {}
    for index, result in enumerate(results):
        memory = sum(sizes.total for name, sizes in result.memory.items() if name != CPU)
        for prompt in sorted(result.decode):
            if found := summary(result.decode[prompt]):
                name, setting = ("this plan", "") if index == 0 else (result.rival.name, result.rival.setting)
                rates = (1e9 / found.median, 1e9 / found.high, 1e9 / found.low)
                said = f"{found.samples} samples, 95 % interval, {mib(memory)} of device memory"
                measured.setdefault(prompt, []).append(Bar(name, setting, *rates, said, index == 0))
    view = view_of(job.plan, job.file.inventory, job.path)
    shown = tuple((f"{prompt} tokens", tuple(found)) for prompt, found in measured.items())
    write_page(path, plan_page(replace(view, measured=shown, facts=(*_where(job), *view.facts))))


def _where(job: Job) -> tuple[str, ...]:
    """Where it was measured, unless that is the machine that the prediction is for."""
    if not (job.mapped or job.elsewhere):
        return ()
    maps = f" with {', '.join(f'{of} as {here}' for of, here in job.mapped.items())}" if job.mapped else ""
    return (
        f"Measured on another machine{maps}: what is predicted is for {job.plan.machine.name}, "
        "and not to be compared with what was measured.",
    )


def _ratio(each: Interval) -> str:
    return f"{each.median:.3f} [{each.low:.3f}, {each.high:.3f}]"


def _judge_prediction(job: Job, plan: Result) -> None:
    """Compare measured with predicted time; AnswerIsNo when a plan priced for this machine is far off."""
    from statistics import median

    predicted = job.plan.predicted.tpot_ns
    if job.mapped or job.elsewhere or not plan.tpot or not predicted:
        return
    factor = median(plan.tpot) / predicted
    say(f"measured over predicted: {factor:.2f}")
    if factor > _FAR and job.plan.machine.measured:
        raise AnswerIsNo(
            f"{factor:.1f} times slower than predicted: weights paged from disk, work that fell back to the "
            "CPU, another thread count than profiled, or the profile of another machine"
        )


def _fail_if_lost(results: list[Result], comparisons: list[Comparison]) -> None:
    """MachineError when the plan failed in a round, or no rival is left to compare with."""
    plan, rivals = results[0], results[1:]
    if plan.failures:
        raise MachineError(f"the plan failed in {len(plan.failures)} rounds: {plan.failures[0].why}")
    if rivals and not comparisons:
        raise MachineError(f"no rival finished a round: {rivals[0].failures[0].why}")


def _report(
    job: Job, results: list[Result], comparisons: list[Comparison], twins: list[str]
) -> dict[str, Any]:
    from dataclasses import asdict

    from runtime.bench.measure import summary
    from runtime.load.load_params import usable_cores

    def times(samples: dict[int, list[float]]) -> dict[str, Any]:
        found = {str(n): summary(values) for n, values in sorted(samples.items())}
        return {n: asdict(each) for n, each in found.items() if each is not None}

    return {
        "model": job.plan.model.name,
        "predicted_tpot_ns": job.plan.predicted.tpot_ns,
        "contenders": [
            {
                "name": r.rival.name,
                "setting": r.rival.setting,
                "threads": r.rival.spec.threads or usable_cores(),
                "op_offload": r.rival.spec.op_offload,
                "host_memory": "mmap" if r.rival.spec.use_mmap else "read",
                "decode_ns": times(r.decode),
                "prefill_ns": times(r.prefill),
                "load_ns": r.load_ns,
                "memory": {name: asdict(sizes) for name, sizes in r.memory.items()},
                "same_load_as_plan": r.rival.name in twins,
                "guessed": r.guessed,
                "accepted": r.accepted,
                "gpu_percent": r.utilisation,
                "gpu_peak_bytes": r.peak_bytes,
                "unsettled": r.unsettled,
                "failures": [asdict(f) for f in r.failures],
            }
            for r in results
        ],
        "comparisons": [asdict(c) for c in comparisons],
    }
