"""atsplan profile --from: a machine fitted to results of stock llama-bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared import console
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from profiler.whole_model.llama_bench import Row
    from profiler.whole_model.published import Predicted

_FAR = 0.25  # what a row may be off what all others say before it is named


def fitted_profile(source: Path, inventory: Inventory | None, assumed: Profile, name: str) -> Profile:
    """The assumed profile, fitted to the rows of a llama-bench file; notes go to the terminal.

    Raises OptionProblem without a model, FileProblem and FieldProblem for what is no result of llama-bench.
    """
    from planner.cost.error_bar import doubt
    from profiler.whole_model import llama_bench, published

    if inventory is None:
        raise OptionProblem("--from", str(source), "name the MODEL that was run, a file or its inventory")
    if assumed.timings:
        raise OptionProblem("--from", str(source), "fits assumed figures: name --machine, or its parts")
    found = llama_bench.read(console.read_text(source), str(source))
    for note in found.notes:
        console.say(f"{source}: {note}")
    points = llama_bench.points(found.rows, inventory, assumed)
    made = published.fitted(assumed, points)
    _show(found.rows, published.predict(made, points))
    known = {one.figure: one.covariance[-1] for one in made.doubts or ()}
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


def _show(rows: tuple[Row, ...], told: list[Predicted]) -> None:
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
