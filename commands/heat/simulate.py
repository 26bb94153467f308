"""atsplan simulate: replay a routing trace against expert caches, and say which cache to ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import ms, next_step, out, out_json, out_table, progress, say, table
from commands.shared.heat_files import decode_trace, read_heat, read_profile, shape_of
from commands.shared.option_types import Number
from planner.constants import PPM
from planner.errors import InputError, OptionProblem

if TYPE_CHECKING:
    from planner.model.routed_layers import MoeShape
    from planner.routing.cache_curve import CacheAdvice, Prefetch, TimeModel
    from planner.routing.cache_simulation import Demand, Ints, Policy, Replay
    from planner.routing.formats.detect import Imported
    from planner.routing.trace import Trace
    from planner.routing.verify_batches import Verified

FILE = click.Path(path_type=Path)
THRASHES = 1.25  # times as many experts a token as steps of one token bring
SHARES = (0.0625, 0.125, 0.25, 0.5)  # of the experts, where no slots are asked for


@dataclass(frozen=True, slots=True)
class Batches:
    """Experts that a cache brings for a token of the text, by steps of one token and with drafts."""

    policy: str
    slots: int
    alone: float
    checked: float
    beyond: float  # share of batches and layers that ask for more experts than there are slots
    tokens_a_step: float


@click.command(short_help="Replay a routing trace against expert caches.")
@click.argument("file", type=FILE)
@click.option("--model", type=FILE, help="GGUF or inventory.yaml to check against; needed for --budget.")
@click.option("--policy", "names", multiple=True, help="Repeatable [default: all].")
@click.option(
    "--slots",
    multiple=True,
    type=click.IntRange(1),
    help="Experts held: in a layer, or in all with --shared.",
)
@click.option("--shared", is_flag=True, help="One cache for all layers, as the engine's own MoE cache is.")
@click.option("--serial", is_flag=True, help="Ids of a step ask one after another, not all at once.")
@click.option(
    "--half-life",
    type=Number(0, min_open=True),
    default=16,
    show_default=True,
    help="Steps, of decaying counts.",
)
@click.option(
    "--upload",
    type=Number(0, min_open=True),
    help="Also slots that follow the text (solve --hybrid): experts that a layer may bring in a step.",
)
@click.option(
    "--least-misses",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="With --upload: experts come on demand, in steps of a layer that miss so many; 0: at any time.",
)
@click.option("--drafts", type=click.IntRange(1, 63), help="Tokens that a step checks beside its own.")
@click.option(
    "--draft-accept",
    "accept",
    type=Number(0, 1),
    default=0.7,
    show_default=True,
    help="With --drafts: share of them that is right.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    help="Steps that are not counted; the static set is chosen on them [default: half].",
)
@click.option("--hot", type=FILE, help="Heat that the static set is chosen on instead.")
@click.option("--budget", type=Number(0, min_open=True), help="MiB: recommend the engine's MoE cache size.")
@click.option("--fixed-ms", type=Number(0), help="Time of a step without misses.")
@click.option("--miss-ms", type=Number(0), help="Time of one miss.")
@click.option("--recall", type=Number(0, 1), help="Look-ahead: share of misses it names in time.")
@click.option("--width", type=click.IntRange(1), help="Look-ahead: experts it fetches a step.")
@click.option(
    "--spare",
    type=Number(0, 1),
    default=0.0,
    show_default=True,
    help="Look-ahead: share of the fixed time in which the link is free.",
)
@click.option("--json", "as_json", is_flag=True)
def command(
    file: Path,
    model: Path | None,
    names: tuple[str, ...],
    slots: tuple[int, ...],
    shared: bool,
    serial: bool,
    half_life: float,
    upload: float | None,
    least_misses: int,
    drafts: int | None,
    accept: float,
    warm_up: int | None,
    hot: Path | None,
    budget: float | None,
    fixed_ms: float | None,
    miss_ms: float | None,
    recall: float | None,
    width: int | None,
    spare: float,
    as_json: bool,
) -> None:
    """Hit rates of cache policies on the decode steps of a routing trace, beside what is possible at all.

    FILE: a trace by `atsplan heat trace --trace`, or of any tool that `heat import` reads. Steps with a
    time (`step= misses= ms=` lines) give a time model. With --drafts a step is the batch that checks so many
    tokens, and what it brings is shown beside steps of one token.
    """
    from planner.routing import cache_simulation as sim
    from planner.routing.verify_batches import verified

    found = read_profile(file, model)
    single = decode_trace(found, file)
    checked = verified(single, drafts, round(accept * PPM)) if drafts else None
    trace = checked.trace if checked else single
    whole = sim.demand_of(trace, per_layer=not shared)
    demand = sim.one_by_one(whole) if serial else whole
    after = demand.n_steps // 2 if warm_up is None else min(warm_up, demand.n_steps - 1)
    order = _hot(trace, hot, after, shared)
    policies = _policies(names, half_life, static=order is not None)
    sizes = sorted(set(slots)) or _default_slots(demand)
    with progress() as bar:
        task = bar.add_task("replaying", total=len(policies) * len(sizes), rate="")
        runs = sim.sweep(demand, policies, sizes, order, after, lambda: bar.advance(task))
    if upload is not None:
        runs += _following(trace, order, sizes, after, half_life, upload, least_misses, shared)
    beside = None
    if checked is not None:
        beside = _beside(single, checked, policies, sizes, shared, serial, hot, after)
    times = _time_model(found, fixed_ms, miss_ms)
    ahead = _prefetch(recall, width, spare)
    advice = _advise(trace, shape_of(model), budget, after, drafts or 0)
    if as_json:
        out_json(_report(runs, times, ahead, advice, beside))
    else:
        _print(runs, demand, whole, times)
        _print_beside(beside)
        _print_ahead(runs, times, ahead)
        _print_advice(advice)
    asked = ("--profile", "profile.yaml", "--cache", file, "-o", "plan.yaml")
    next_step("atsplan", "solve", model or "MODEL", *asked)


def _policies(names: tuple[str, ...], half_life: float, static: bool) -> list[Policy]:
    from dataclasses import replace

    from planner.routing.cache_simulation import POLICIES

    for name in names:
        if name not in POLICIES:
            raise OptionProblem("--policy", name, f"is none of {', '.join(POLICIES)}")
        if name == "static" and not static:
            raise OptionProblem("--policy", name, "needs --hot, or steps to choose it on (--warm-up)")
    chosen = [POLICIES[n] for n in names or POLICIES if static or n != "static"]
    return [replace(p, half_life=half_life) if p.half_life else p for p in chosen]


def _following(
    trace: Trace,
    order: Ints | None,
    sizes: list[int],
    after: int,
    half_life: float,
    upload: float,
    least_misses: int,
    shared: bool,
) -> list[Replay]:
    """Slots as the device of hybrid experts fills them, from the static set at the end of the warm-up on."""
    from planner.plan.adaptation import Policy
    from planner.routing.following import replays

    if shared or order is None:
        raise OptionProblem(
            "--upload", str(upload), "needs slots in every layer, and steps to choose a seed on"
        )
    ways = [
        (policy, round(half_life), round(100 * upload), least_misses) for policy in (Policy.LRU, Policy.LFU)
    ]
    return [run for way in ways for run in replays(trace, way, order, sizes, after)]


def _beside(
    single: Trace,
    checked: Verified,
    policies: list[Policy],
    sizes: list[int],
    shared: bool,
    serial: bool,
    hot: Path | None,
    after: int,
) -> list[Batches]:
    """What batches of drafted tokens bring, beside steps of one token over the same part of the text."""
    from planner.routing import cache_simulation as sim

    def demand(trace: Trace) -> Demand:
        made = sim.demand_of(trace, per_layer=not shared)
        return sim.one_by_one(made) if serial else made

    batches = demand(checked.trace)
    until = int(checked.tokens[:after].sum())
    alone = sim.sweep(demand(single), policies, sizes, _hot(single, hot, until, shared), until)
    order = _hot(checked.trace, hot, after, shared)
    together = sim.sweep(batches, policies, sizes, order, after)
    events = (batches.ids >= 0).sum(axis=2)[batches.steps >= after]
    tokens = max(int(checked.tokens[after:].sum()), 1)
    return [
        Batches(
            a.policy,
            a.slots,
            float(a.misses.sum()) / max(len(a.misses), 1),
            float(b.misses.sum()) / tokens,
            float((events > b.slots).mean()) if events.size else 0.0,
            tokens / max(len(b.misses), 1),
        )
        for a, b in zip(alone, together, strict=True)
    ]


def _print_beside(beside: list[Batches] | None) -> None:
    if not beside:
        return
    made = table(
        "experts brought a token", "slots", "one at a time", "with drafts", "batches beyond the slots"
    )
    for each in beside:
        made.add_row(
            each.policy, str(each.slots), f"{each.alone:.2f}", f"{each.checked:.2f}", f"{each.beyond:.0%}"
        )
    out(f"a step with drafts brings {beside[0].tokens_a_step:.2f} tokens of the text")
    out_table(made)
    worse = [
        f"{e.policy} with {e.slots}"
        for e in beside
        if e.checked > THRASHES * e.alone and e.policy != "belady"
    ]
    if worse:
        out(f"drafts thrash the slots (over {THRASHES:g} times as many experts a token): {', '.join(worse)}")


def _default_slots(demand: Demand) -> list[int]:
    return sorted({max(1, round(share * demand.n_items)) for share in SHARES})


def _hot(trace: Trace, path: Path | None, after: int, shared: bool) -> Ints | None:
    """Hot experts of every bank, best first, for the static policy: of a heat, else of the warm-up."""
    import numpy as np

    from planner.routing import coverage
    from planner.routing import trace as traces
    from planner.routing.cache_simulation import decode_steps

    if path is not None:
        heat = read_heat(path)
        if heat.n_expert != trace.n_expert:
            raise InputError(f"{path}: {heat.n_expert} experts, the trace has {trace.n_expert}")
    elif after:
        heat = traces.heat_of(traces.select(trace, trace.decode & (decode_steps(trace) < after)))
    else:
        return None
    sources = coverage.sources_of(heat)
    share = dict(zip(sources.layers, coverage.shares(sources), strict=True))
    layers = [int(la) for la in np.unique(trace.layer[trace.decode])]
    rows_ = np.array([share.get(la, np.zeros(trace.n_expert)) for la in layers])
    flat = rows_.reshape(1, -1) if shared else rows_
    return np.asarray(np.argsort(-np.round(flat, 12), axis=1, kind="stable"))


def _time_model(found: Imported, fixed_ms: float | None, miss_ms: float | None) -> TimeModel | None:
    from planner.routing.cache_curve import TimeModel, fit

    if (fixed_ms is None) != (miss_ms is None):
        raise OptionProblem("--fixed-ms/--miss-ms", "", "give both or none")
    if fixed_ms is not None and miss_ms is not None:
        return TimeModel(round(fixed_ms * 1e6), round(miss_ms * 1e6), 0, 0)
    return fit(found.ledger) if any(cost.time_ns for cost in found.ledger) else None


def _prefetch(recall: float | None, width: int | None, spare: float) -> Prefetch | None:
    from planner.routing.cache_curve import Prefetch

    if (recall is None) != (width is None):
        raise OptionProblem("--recall/--width", "", "give both or none")
    return Prefetch(recall, width, spare) if recall is not None and width is not None else None


def _advise(
    trace: Trace, shape: MoeShape | None, budget: float | None, after: int, drafts: int
) -> tuple[CacheAdvice, list[CacheAdvice]] | None:
    from planner.routing.cache_curve import advise
    from planner.routing.cache_simulation import demand_of

    if budget is None:
        return None
    if shape is None:
        raise OptionProblem("--budget", str(budget), "needs --model, which says what an expert weighs")
    smallest, largest = min(shape.expert_bytes.values()), max(shape.expert_bytes.values())
    if smallest < largest:
        say(f"experts weigh {_kib(smallest)} to {_kib(largest)}, by layer: all are priced like the largest")
    # The engine asks the cache for a batch only if it could hold the experts of every token in it.
    least = min(shape.n_used * (1 + drafts), trace.n_expert)
    return advise(demand_of(trace, per_layer=False), largest, least, round(budget * 2**20), after)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.0f} KiB".replace(",", " ")


def _print(runs: list[Replay], demand: Demand, whole: Demand, times: TimeModel | None) -> None:
    where = "of all layers together" if demand.ids.shape[1] == 1 and whole.step_length > 1 else "in a layer"
    sizes = sorted({run.slots for run in runs})
    out(f"{len(runs[0].hits)} of {demand.n_steps} decode steps counted")
    out(f"hit rate by slots {where} ({demand.n_items} experts)")
    made = table("policy", *map(str, sizes))
    for name in dict.fromkeys(run.policy for run in runs):
        row = {run.slots: run for run in runs if run.policy == name}
        cells = [_cell(row[size], times) for size in sizes]
        made.add_row(name, *cells)
    out_table(made)
    if times is not None:
        error = f" (± {ms(times.error_ns)}, {times.samples} steps)" if times.samples else ""
        out(f"time of a step: {ms(times.fixed_ns)} + {ms(times.per_miss_ns)} a miss{error}")


def _cell(run: Replay, times: TimeModel | None) -> str:
    rate = f"{run.hit_rate:.3f}"
    return rate if times is None else f"{rate}  {times.step_ns(float(run.misses.mean())) / 1e6:.1f} ms"


def _print_ahead(runs: list[Replay], times: TimeModel | None, ahead: Prefetch | None) -> None:
    from planner.routing.cache_curve import prefetched

    if ahead is None:
        return
    if times is None:
        raise OptionProblem("--recall", str(ahead.recall), "needs a time model: --fixed-ms and --miss-ms")
    made = table("look-ahead", "slots", "plain", "ahead", "gain", "right", "wasted")
    for run in runs:
        result = prefetched(run, times, ahead)
        made.add_row(
            run.policy,
            str(run.slots),
            ms(round(result.plain_ns)),
            ms(round(result.ahead_ns)),
            f"{result.gain:+.1%}",
            f"{result.right:.1f}",
            f"{result.wasted:.1f}",
        )
    out_table(made)


def _print_advice(advice: tuple[CacheAdvice, list[CacheAdvice]] | None) -> None:
    if advice is None:
        return
    best, curve = advice
    made = table("cache", "slots", "hit rate", "misses a step")
    for entry in curve:
        made.add_row(
            _mib(entry.cache_bytes), str(entry.slots), f"{entry.hit_rate:.3f}", f"{entry.misses:.1f}"
        )
    out_table(made)
    out(f"MoE cache: {_mib(best.cache_bytes)} ({best.slots} experts), hit rate {best.hit_rate:.3f}")


def _report(
    runs: list[Replay],
    times: TimeModel | None,
    ahead: Prefetch | None,
    advice: tuple[CacheAdvice, list[CacheAdvice]] | None,
    beside: list[Batches] | None,
) -> dict[str, Any]:
    from dataclasses import asdict

    from planner.routing.cache_curve import prefetched

    rows = []
    for run in runs:
        row: dict[str, Any] = {"policy": run.policy, "slots": run.slots, "hit_rate": round(run.hit_rate, 6)}
        row["misses_per_step"] = round(float(run.misses.mean()), 3)
        if times is not None:
            row["step_ns"] = round(times.step_ns(float(run.misses.mean())))
            if ahead is not None:
                row["look_ahead"] = asdict(prefetched(run, times, ahead))
        rows.append(row)
    made: dict[str, Any] = {"runs": rows, "time_model": asdict(times) if times else None}
    if beside is not None:
        made["drafts"] = [asdict(each) for each in beside]
    if advice:
        made["cache"] = {"advice": asdict(advice[0]), "curve": [asdict(entry) for entry in advice[1]]}
    return made
