"""Profiles from results that were measured before: rows of llama-bench, and runs of plans."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from commands.shared import console
from planner.errors import FileProblem, OptionProblem

if TYPE_CHECKING:
    from planner.learn.calibrate import Observed, Together
    from planner.learn.samples import Cleaned
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.plan.plan import Plan
    from profiler.whole_model.llama_bench import Row
    from profiler.whole_model.published import Predicted

_FAR = 0.25  # what a row of llama-bench may be off what all others say before it is named


def fitted(source: Path, inventory: Inventory | None, assumed: Profile, name: str) -> Profile:
    """The assumed profile, fitted to the rows of a llama-bench file; notes go to the terminal.

    Raises OptionProblem without a model, FileProblem and FieldProblem for what is no result of llama-bench.
    """
    from planner.cost.error_bar import AGAIN, doubt
    from profiler.whole_model import llama_bench, published

    if inventory is None:
        raise OptionProblem("--from", str(source), "name the MODEL that was run, a file or its inventory")
    if assumed.timings:
        raise OptionProblem("--from", str(source), "fits assumed figures: name --machine, or its parts")
    found = llama_bench.read(console.read_text(source), str(source)).of(inventory, assumed, str(source))
    for note in found.notes:
        console.say(f"{source}: {note}")
    points = llama_bench.points(found.rows, inventory, assumed)
    made = published.fitted(assumed, points, again=median(row.spread for row in found.rows))
    told = published.predict(made, points)
    _show_rows(found.rows, told)
    off = median(abs(priced.ns / row.ns - 1) for row, priced in zip(found.rows, told, strict=True))
    if off > _FAR:
        why = f"no figures of {assumed.name} explain these rows: half of them stay {off:.0%} off or more"
        raise FileProblem(str(source), f"{why}; is it that machine and that model?")
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


def refined(results: tuple[str, ...], model: Path | None, machine: str | None, name: str) -> Profile:
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
        results_of = [result for path, result in pairs if path == plan_path]
        for text, seen in _seen(plan, results_of, inputs.inventory):
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


def _seen(plan: Plan, results: list[Path], inventory: Inventory) -> list[tuple[str, Cleaned]]:
    """What each result says of a plan; those that say too little alone are taken together."""
    from planner.learn.readers import samples_in
    from planner.learn.samples import cleaned

    found: list[tuple[str, Cleaned]] = []
    few: list[Path] = []
    samples = {path: samples_in(console.read_text(path), str(path), inventory) for path in results}
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
