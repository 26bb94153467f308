"""atsplan serve: an OpenAI-compatible server for a plan, by the llama-server of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import COMPILING, loading, next_step, out, say, waiting
from commands.shared.extra_models import draft_fields, missing_files, projector_fields, uncounted_draft
from commands.shared.option_types import Target
from commands.shared.plan_job import Job, engine_options, load_bytes, open_job, plan_options, review
from planner.errors import EngineProblem, FileProblem, OptionProblem

if TYPE_CHECKING:
    from contextlib import ExitStack

    from planner.plan.plan import Plan
    from runtime.metrics.registry import Metrics
    from runtime.tools.hybrid_script import SlottedServer


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model", type=click.Path(path_type=Path))
@plan_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Another one needs a key.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True)
@click.option("--no-key", is_flag=True, help="Let everyone who reaches --host use it, without a key.")
@click.option("--mmproj", type=click.Path(path_type=Path), help="Vision projector to load beside the model.")
@click.option("--draft", type=click.Path(path_type=Path), help="Draft model for speculative decoding.")
@click.option("--no-check", is_flag=True, help="Skip the dry run.")
@click.option("--quiet", is_flag=True, help="Do not show the server's log.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve figures for Prometheus here.")
@click.option("--heat-out", type=Target("heat file"), help="Write here which experts are chosen (slots).")
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Who may read the figures.")
@engine_options
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def command(
    model: Path,
    plan_path: Path,
    device_maps: tuple[str, ...],
    threads: int,
    mmap: bool | None,
    other_machine: bool,
    host: str,
    port: int,
    no_key: bool,
    mmproj: Path | None,
    draft: Path | None,
    no_check: bool,
    quiet: bool,
    metrics_port: int | None,
    metrics_host: str,
    heat_out: Path | None,
    engine: str | None,
    llama_h: Path | None,
    extra: tuple[str, ...],
) -> None:
    """Serve MODEL by its plan until interrupted; EXTRA options go to llama-server as they are.

    Striped experts are served by the engine's own server library, loaded beside the stripes; experts in
    slots by the unpatched program, through this program's device: the plan's file is looked at while it runs,
    and another plan there, alike but for the experts in slots, is taken over without a restart.
    """
    from contextlib import ExitStack
    from dataclasses import replace

    from runtime.child.environment import python_program
    from runtime.tools.llama_server import free_port, serving

    _refuse_open(host, extra, no_key)
    free_port(host, port)  # before anything is asked of the engine
    job = open_job(model, plan_path, device_maps, threads, mmap, other_machine)
    with ExitStack() as stack:
        slots = _slots(job, stack)
        if heat_out is not None and slots is None:
            raise OptionProblem("--heat-out", str(heat_out), "only a plan with experts in slots counts them")
        served = replace(job, spec=slots.spec) if slots else job
        program, words = _command(served, engine, _beside(served, mmproj, draft))
        if not no_check:
            build = None if program == python_program() else str(program.parent)
            review(job, engine or build, llama_h)
        hear: Callable[[str], None] = (lambda line: None) if quiet else say
        metrics = None
        if metrics_port is not None:
            metrics = _metrics(job, stack, metrics_port, metrics_host, slots)
            hear, more = _heard(metrics, [*words, *extra], hear)
            words = [*words, *more]
        variables = slots.variables if slots else {}
        with loading(load_bytes(job, mmproj, draft)) as load:
            running = serving(
                program, [*words, *extra], host, port, hear, more=variables, on_loading=load.taken
            )
            server = stack.enter_context(running)
        if slots:
            _follow(job, stack, slots, metrics)
            if heat_out is not None:
                from commands.heat.served_heat import heat_written

                stack.enter_context(heat_written(heat_out, job.file, slots.reports.blocks))
        out(f"{server.url} (OpenAI-compatible under /v1)")
        next_step("atsplan", "refine", plan_path, "--measured", "server.log")
        raise EngineProblem("llama-server", server.outlive())


def _slots(job: Job, stack: ExitStack) -> SlottedServer | None:
    """Experts in slots for a stock server, their settings kept as long as the stack; None without any."""
    from planner.quoting import Unquotable
    from runtime.tools.hybrid_script import has_slots, settings_folder, slotted_server

    if not has_slots(job.spec):
        return None
    folder = stack.enter_context(settings_folder())
    try:
        with waiting(COMPILING):  # unless it is there already
            return slotted_server(job.spec, job.path, folder)
    except Unquotable as problem:
        raise FileProblem(str(folder), str(problem)) from None


def _follow(job: Job, stack: ExitStack, slots: SlottedServer, metrics: Metrics | None) -> None:
    """Another plan in the plan's file is taken over as long as the stack, where it needs no restart."""
    from commands.shared.plan_job import plan_of_model
    from planner.plan.plan import to_text
    from planner.records import digest
    from runtime.tools.follow_plan import Served, following_file

    def taken(plan: Plan) -> None:
        if metrics is not None:
            metrics.planned(plan, digest(to_text(plan)))

    read = partial(plan_of_model, job.plan_path, job.file)
    served = Served(job.path, job.plan, job.plan_path, slots.orders, read)
    stack.enter_context(following_file(served, say, taken))


def _metrics(job: Job, stack: ExitStack, port: int, host: str, slots: SlottedServer | None) -> Metrics:
    """A page of figures as long as the stack."""
    from planner.plan.plan import to_text
    from planner.records import digest
    from runtime.metrics.endpoint import metrics_page
    from runtime.metrics.registry import Metrics

    metrics = Metrics(job.plan, digest(to_text(job.plan)))
    if slots is not None:
        metrics.lanes_now(slots.reports.blocks)
    say(f"figures for Prometheus: {stack.enter_context(metrics_page(metrics, port, host))}")
    return metrics


def _heard(
    metrics: Metrics, words: Sequence[str], hear: Callable[[str], None]
) -> tuple[Callable[[str], None], list[str]]:
    """Who is to hear the server's log, and options of the server for it."""
    from runtime.metrics.server_log import listening

    count = listening(metrics)

    def both(line: str) -> None:
        count(line)
        hear(line)

    # From this verbosity on the server tells at which position drafts fail.
    return both, ["--verbosity", "4"] if "--spec-type" in words else []


def _refuse_open(host: str, extra: tuple[str, ...], no_key: bool) -> None:
    """OptionProblem for an address that other machines reach, without a key and without --no-key."""
    from runtime.tools.llama_server import has_key, is_loopback

    if is_loopback(host) or has_key(extra):
        return
    if not no_key:
        why = "other machines reach it: give --api-key-file FILE, set LLAMA_API_KEY, or say --no-key"
        raise OptionProblem("--host", host, why)
    say(f"note: whoever reaches {host} can use this server: it asks for no key")


def _file(path: Path | None) -> str:
    """The path of a file that is there; "" for none. FileProblem otherwise."""
    if path is not None and not path.is_file():
        raise FileProblem(str(path), "no such file")
    return str(path) if path is not None else ""


def _beside(job: Job, mmproj: Path | None, draft: Path | None) -> dict[str, Any]:
    """The fields of a Stock for projector and draft; what the plan counts on and nobody gave is said."""
    for sentence in missing_files(job.plan, mmproj is not None, draft is not None):
        say(f"note: {sentence}")
    given = job.plan, job.mapped, job.spec
    beside = {**projector_fields(*given, _file(mmproj)), **draft_fields(*given, _file(draft))}
    if draft is not None and (sentence := uncounted_draft(job.plan)):
        say(f"note: {sentence}")
    return beside


def _command(job: Job, engine: str | None, beside: Mapping[str, Any]) -> tuple[Path, list[str]]:
    """The program that serves and its arguments; what it cannot be told is said."""
    from dataclasses import replace

    from planner.memory.kv_cache import checkpoint_bytes
    from planner.model.structure import structure_of
    from planner.plan.load_spec import plan_layer_devices
    from planner.quoting import Unquotable
    from planner.site import Site
    from runtime.child.environment import python_program
    from runtime.engine import locate
    from runtime.stripes import server as striped_server
    from runtime.stripes.widths import widths as stripe_widths
    from runtime.tools.export import arguments, host_limits
    from runtime.tools.llama_server import find_program
    from runtime.tools.options import stock

    widths = stripe_widths(job.file.inventory, job.spec)
    spec = job.spec
    if widths:
        # The hook gives striped tensors their memory when the server loads them on their device, mapped:
        # the uploads of files that are read refuse buffers that are not the device's own.
        kept = tuple((p, b) for p, b in spec.overrides if not Site.of_buffer(b).divided)
        spec = replace(spec, overrides=kept, use_mmap=True)
    placed = replace(stock(spec, len(plan_layer_devices(job.plan)) - 1), **beside)
    held = checkpoint_bytes(structure_of(job.file.inventory), spec.workload)
    placed = replace(placed, checkpoint_bytes=held)
    for note in placed.notes:
        say(f"not expressible: {note}")
    try:
        words = [*arguments(placed, str(job.path)), *host_limits(job.plan, placed)]
    except Unquotable as problem:
        raise FileProblem(str(job.plan_path), str(problem)) from None
    if not widths:
        return find_program(engine), words
    place = locate.find(engine)
    if place.folder is None:
        raise EngineProblem(place.label, "stripes are served by a build folder: give one with --engine PATH")
    return python_program(), striped_server.command(place.folder, widths, words)
