"""atsplan profile: measure this machine for a model and write profile.yaml."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from commands.shared import console
from commands.shared.machine_options import Described, machine_parts, profile_of
from commands.shared.option_types import Number, Target
from planner.errors import FileProblem, OptionProblem
from planner.quoting import shell

if TYPE_CHECKING:
    from planner.learn.calibrate import Observed, Together
    from planner.learn.samples import Cleaned
    from planner.machine.op_time import Case
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.plan.plan import Plan
    from profiler.session import Measured, Request
    from profiler.whole_model.llama_bench import Row
    from profiler.whole_model.published import Predicted

_FAR = 0.25  # what a row of llama-bench may be off what all others say before it is named

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
    as_json: bool,
) -> None:
    """Time every operator of MODEL (a GGUF file or an inventory) on every device, and the links between them.

    An interrupted profile continues where it stopped when the same command is given again.
    """
    from profiler.session import Request

    if source is not None:
        made = _fitted(source, _inventory(model), profile_of(None, machine, parts), name)
        _hand_over(made, out, as_json, model)
        return
    if results:
        _hand_over(_refined(results, model, machine, name), out, as_json, model)
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
    _report(measured, profile, as_json)
    _write(profile, out, model)


def _hand_over(profile: Profile, out: Path | None, as_json: bool, model: Path | None) -> None:
    """A profile that was not measured here: its figures, and the file."""
    if as_json:
        console.out_json(profile.model_dump(mode="json", by_alias=True))
    else:
        _devices(profile, {d.name: d.bandwidth_bytes_per_s for d in profile.devices})
        _links(profile)
        _calibrations(profile)
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


def _report(measured: Measured, profile: Profile, as_json: bool) -> None:
    if as_json:
        console.out_json(profile.model_dump(mode="json", by_alias=True))
    else:
        _devices(profile, measured.streams)
        _links(profile)
        _cases(measured)
        _calibrations(profile)
        _slots(profile)
    for warning in profile.warnings:
        console.say(f"warning: {warning}")


def _devices(profile: Profile, streams: dict[str, int]) -> None:
    table = console.table("device", "memory", "streams", "mat-vec q4_K", "product", "small op", "threads")
    for d in profile.devices:
        table.add_row(
            f"{d.name} ({d.description})",
            console.mib(d.memory_bytes),
            f"{streams[d.name] / 1e9:.1f} GB/s",
            f"{d.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
            f"{d.flops_per_s / 1e12:.2f} TFLOP/s",
            f"{d.op_overhead_ns / 1e3:.1f} us",
            str(d.threads or ""),
        )
    console.out_table(table)


def _links(profile: Profile) -> None:
    if not profile.links:
        return
    table = console.table("link", "copies", "latency", "kernels read")
    for link in profile.links:
        table.add_row(
            f"{link.source} to {link.target}",
            f"{link.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
            f"{link.latency_ns / 1e3:.1f} us",
            f"{link.zero_copy_bytes_per_s / 1e9:.1f} GB/s" if link.zero_copy_bytes_per_s else "",
        )
    console.out_table(table)


def _cases(measured: Measured) -> None:
    from profiler.operators.cases import NOT_SUPPORTED
    from profiler.summarise import compulsory_bytes, where, without_kernels

    if not measured.verdicts:
        return
    table = console.table("operator", "batch", "depth", "where", "time", "spread", "GB/s", "of stream")
    for verdict in measured.verdicts:
        case, place, timing = verdict.job.case, verdict.job.place, verdict.timing
        head = (case.label, str(case.batch), str(case.depth or ""), where(place))
        if timing is None and verdict.dropped == NOT_SUPPORTED:
            continue
        if timing is None:
            table.add_row(*head, verdict.dropped, "", "", "")
            continue
        rate = compulsory_bytes(case) * 1e9 / timing.time_ns
        stream = measured.streams.get(f"{place.device} {place.buffer}", measured.streams[place.device])
        share = (f"{rate / 1e9:.1f}", f"{rate / stream:.0%}") if rate else ("", "")
        table.add_row(
            *head, f"{timing.time_ns / 1e3:.1f} us", f"{timing.spread_ns / timing.time_ns:.0%}", *share
        )
    console.out_table(table)
    for place_name, products in without_kernels(measured.verdicts).items():
        console.out(f"{place_name}: no kernels for {', '.join(products)}")


def _calibrations(profile: Profile) -> None:
    if not profile.calibrations:
        return
    table = console.table("calibration", "split", "mixed graph", "token", "scale", "worst residual", "runs")
    for c in profile.calibrations:
        scales = ", ".join(f"{name} {ppm / 1e6:.2f}" for name, ppm in c.scale_ppm.items())
        table.add_row(
            c.model[:19] or "generated model",
            f"{c.split_ns / 1e3:.1f} us",
            console.ms(c.mixed_ns),
            console.ms(c.token_ns),
            scales,
            f"{c.residual_ppm / 1e4:.1f} %",
            str(c.runs),
        )
    console.out_table(table)


def _slots(profile: Profile) -> None:
    """What a layer's experts cost in slots, the others beside them."""
    if not profile.slots:
        return
    table = console.table(
        "experts in slots", "a layer", "an expert by CPU", "beside the bus", "by bus", "prompts", "off by"
    )
    for c in profile.slots:
        table.add_row(
            f"{c.device}, {c.type}, {c.expert_bytes / 2**20:.1f} MiB",
            f"{c.sync_ns / 1e3:.0f} us",
            f"{c.pair_ns / 1e3:.0f} us",
            f"{c.beside_ns / 1e3:.0f} us",
            f"{c.upload_ns / 1e3:.0f} us",
            f"{c.staged_bytes_per_s / 1e9:.1f} GB/s" if c.staged_bytes_per_s else "",
            f"{c.residual_ppm / 1e4:.1f} %",
        )
    console.out_table(table)


def _fitted(source: Path, inventory: Inventory | None, assumed: Profile, name: str) -> Profile:
    """The assumed profile, fitted to the rows of a llama-bench file; notes go to the terminal.

    Raises OptionProblem without a model, FileProblem and FieldProblem for what is no result of llama-bench.
    """
    from planner.cost.error_bar import AGAIN, doubt
    from profiler.whole_model import llama_bench, published

    if inventory is None:
        raise OptionProblem("--from", str(source), "name the MODEL that was run, a file or its inventory")
    if assumed.timings:
        raise OptionProblem("--from", str(source), "fits assumed figures: name --machine, or its parts")
    found = llama_bench.read(console.read_text(source), str(source))
    for note in found.notes:
        console.say(f"{source}: {note}")
    points = llama_bench.points(found.rows, inventory, assumed)
    made = published.fitted(assumed, points, again=median(row.spread for row in found.rows))
    _show_rows(found.rows, published.predict(made, points))
    known = {one.figure: one.covariance[-1] for one in made.doubts or () if one.figure != AGAIN}
    learnt = [figure for figure, variance in known.items() if variance < 0.25e6 * doubt(figure, assumed) ** 2]
    console.say(f"now known from these runs: {', '.join(learnt) or 'no single figure, only their sums'}")
    count = f"{len(found.rows)} rows of llama-bench ({inventory.name})"
    return made.model_copy(
        update={
            "name": name or f"{assumed.name}-fitted",
            "source": f"fitted to {count} from: {assumed.source}",
            "warnings": (*made.warnings, *(note for note in found.notes if "left out" not in note)),
        }
    )


def _show_rows(rows: tuple[Row, ...], told: list[Predicted]) -> None:
    """Each row beside what the fitted machine says of it."""
    table = console.table("row", "ngl", "n_cpu_moe", "test", "measured t/s", "fitted", "error")
    for row, priced in zip(rows, told, strict=True):
        tokens = row.workload.prompt if row.prompt else 1
        test = f"pp{tokens}" if row.prompt else f"tg @ d{row.workload.depth}"
        error = priced.ns / row.ns - 1
        settings = (str(row.number), str(row.n_gpu_layers), str(row.n_cpu_moe), test)
        table.add_row(
            *settings, f"{row.rate:.1f}", f"{tokens * 1e9 / max(priced.ns, 1):.1f}", f"{error:+.1%}"
        )
        if abs(error) > _FAR:
            console.say(f"{row.words} is not explained together with the others: {error:+.0%}")
    console.out_table(table)


def _refined(results: tuple[str, ...], model: Path | None, machine: str | None, name: str) -> Profile:
    """The profile of some plans, corrected by what was measured of them; what contradicts the rest is named.

    Raises OptionProblem without plans or with plans of several profiles, FileProblem for what is no result
    and for a result that no calibration explains.
    """
    from planner.learn.calibrate import calibrated_together

    names, observed, inventory, profile = _observed(results, model, machine)
    made = calibrated_together(observed, inventory, profile)
    _refuse_unexplained(names, observed, inventory, profile)
    notes = _show_results(names, observed, made)
    factors = ", ".join(f"{device} {ppm / 1e6:.2f}" for device, ppm in made.factors.items())
    console.say(f"times of the devices, of those that the profile gave: {factors}")
    return made.profile.model_copy(
        update={
            "name": name or profile.name,
            "source": f"{profile.source}; corrected by {len(names)} results of {inventory.name}",
            "warnings": (*made.profile.warnings, *notes),
        }
    )


def _observed(
    results: tuple[str, ...], model: Path | None, machine: str | None
) -> tuple[list[str], list[Observed], Inventory, Profile]:
    """What was measured, by name, and the one model and profile that all plans were made from."""
    from commands.shared.inputs import InputLibrary
    from commands.shared.models import load_plan
    from planner.learn.calibrate import Observed
    from planner.machine.profile import profile_digest

    library = InputLibrary((model,) if model else (), (Path(machine),) if machine else ())
    pairs = list(map(_pair, results))
    names: list[str] = []
    observed: list[Observed] = []
    used: dict[str, tuple[Inventory, Profile]] = {}
    for plan_path in dict.fromkeys(path for path, _ in pairs):
        plan = load_plan(plan_path)
        inputs = library.of(plan, plan_path)
        if inputs.inventory is None or inputs.profile is None:
            lacks = "its MODEL" if inputs.inventory is None else "its profile with --machine"
            raise FileProblem(str(plan_path), f"what it was made from is not here: give {lacks}")
        key = inputs.inventory.table_digest() + profile_digest(inputs.profile)
        used[key] = inputs.inventory, inputs.profile
        for text, seen in _seen(plan, [result for path, result in pairs if path == plan_path]):
            names.append(text)
            observed.append(Observed(plan, inputs.known, seen))
    if len(used) > 1:
        why = "the plans are of several models or profiles: one at a time"
        raise OptionProblem("--refine", results[-1], why)
    ((inventory, profile),) = used.values()
    return names, observed, inventory, profile


def _refuse_unexplained(
    names: list[str], observed: list[Observed], inventory: Inventory, profile: Profile
) -> None:
    """Each result by itself: those that contradict each other are each another's matter, and named later."""
    from planner.learn.calibrate import calibrated_together, deviation_ppm
    from planner.learn.refine import UNEXPLAINED_PPM, Verdict

    for text, each in zip(names, observed, strict=True):
        alone = calibrated_together([each], inventory, profile).after[0]
        if deviation_ppm(alone, each.seen) >= UNEXPLAINED_PPM:
            raise FileProblem(text, Verdict.UNEXPLAINED.value)


def _pair(text: str) -> tuple[Path, Path]:
    plan, equals, result = text.rpartition("=")
    if not equals or not plan or not result:
        raise OptionProblem("--refine", text, "expected PLAN=RESULT, for example 'plan.yaml=bench.json'")
    return Path(plan), Path(result)


def _seen(plan: Plan, results: list[Path]) -> list[tuple[str, Cleaned]]:
    """What each result says of a plan; those that say too little alone are taken together."""
    from planner.learn.readers import samples_in
    from planner.learn.samples import cleaned

    found: list[tuple[str, Cleaned]] = []
    few: list[Path] = []
    samples = {path: samples_in(console.read_text(path), str(path)) for path in results}
    for path in samples:
        seen = cleaned(samples[path], plan.workload.n_seq, plan.workload.n_ctx)
        if seen.token or seen.prompt:
            found.append((str(path), seen))
        else:
            few.append(path)
    if few:
        seen = cleaned((s for path in few for s in samples[path]), plan.workload.n_seq, plan.workload.n_ctx)
        if not seen.token and not seen.prompt:
            why = ", ".join(f"{number} {dropped.value}" for dropped, number in seen.dropped.items())
            raise FileProblem(str(few[0]), f"holds too few clean measurements{f': {why}' if why else ''}")
        found.append((", ".join(map(str, few)), seen))
    return found


def _show_results(names: list[str], observed: list[Observed], made: Together) -> list[str]:
    """Each measurement beside what the profile and the corrected one say of it; what is contradicted."""
    from planner.learn.watch import DEVIATION_PPM

    notes = []
    table = console.table("result", "of", "measured", "profile", "corrected", "error")
    for path, each, before, after in zip(names, observed, made.before, made.after, strict=True):
        seen = each.seen
        for what, measured, old, new in (
            ("token", seen.token, before.token_ns, after.token_ns),
            ("prompt", seen.prompt, before.prompt_ns, after.prompt_ns),
        ):
            if measured is None or old is None or new is None:
                continue
            error = new / measured.ns - 1
            at = f"depth {measured.depth}" if what == "token" else f"{measured.tokens} tokens"
            told = (console.ms(measured.ns), console.ms(old), console.ms(new), f"{error:+.1%}")
            table.add_row(path, f"{what}, {at}", *told)
            if abs(error) * 1e6 > DEVIATION_PPM:
                against = "contradicts the other measurements, with which"
                against = against if len(names) > 1 else "is not all explained by a calibration, by which"
                notes.append(
                    f"{path}: {console.ms(measured.ns)} for a {what} {against} it would be {console.ms(new)}"
                )
    console.out_table(table)
    for note in notes:
        console.say(note)
    return notes
