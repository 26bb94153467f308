"""What run, bench, serve and export share: engine options, device maps, a plan checked against its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commands.shared.console import say
from commands.shared.extra_models import first_gpu
from commands.shared.models import load_plan
from planner.constants import STOCK_DRAFT
from planner.errors import OptionProblem
from planner.model.structure import structure_of
from planner.model.units import units_of

if TYPE_CHECKING:
    from planner.machine.engine_builds import Demands
    from planner.model.gguf.reader import ModelFile
    from planner.plan.load_spec import LoadSpec
    from planner.plan.plan import Plan
    from runtime.engine.locate import Place
    from runtime.session.draft_model import Draft
    from runtime.worker import Checks

F = TypeVar("F", bound=Callable[..., Any])
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_exps\."  # of every layer


@dataclass(frozen=True, slots=True)
class Job:
    """A model, its plan, and what the engine must be told."""

    file: ModelFile
    plan: Plan
    spec: LoadSpec
    mapped: Mapping[str, str]  # plan's device to the one used here; empty: the plan's own
    plan_path: Path
    elsewhere: bool = False  # the plan may have been priced for another machine

    @property
    def path(self) -> Path:
        """The file to load: the first shard."""
        return self.file.paths[0]

    def checks(self) -> Checks:
        """What to prove around a load; budgets only where the plan's own devices are used."""
        from dataclasses import replace

        from planner.machine.fingerprint import host_facts
        from planner.plan.engine_rules import tensor_devices
        from profiler import host
        from runtime.worker import Checks

        structure = structure_of(self.file.inventory)
        shared = sorted(set(structure.readers.values()))
        plan = None if self.mapped else self.plan
        placed = tensor_devices(structure, self.spec)
        checks = Checks(plan, placed, tuple(shared), self._demands(placed), path=str(self.plan_path))
        known = self.plan.machine.measured_on
        if not known or self.mapped or self.elsewhere:
            return checks
        return replace(checks, measured_on=known, here=host_facts(host.fingerprint("")))

    def _demands(self, placed: Mapping[str, str]) -> Demands:
        """What the placement asks of a build; the plan's own range counts on its own devices only."""
        from planner.machine.engine_builds import Demands, computing_devices

        devices = computing_devices(units_of(self.file.inventory).units, placed)
        architecture = self.file.inventory.architecture
        if self.mapped:
            return Demands(architecture, devices)
        engines = self.plan.engines
        return Demands(
            architecture,
            devices,
            self.plan.machine.engine,
            engines.least if engines else 0,
            engines.most if engines else 0,
        )


def engine_options(function: F) -> F:
    """--engine and --llama-h."""
    function = click.option(
        "--engine", metavar="PATH", help="llama.cpp library or build folder [default: the installed one]."
    )(function)
    return click.option(
        "--llama-h",
        type=click.Path(path_type=Path, dir_okay=False),
        help="llama.h of that very build, when its struct layout is not known here.",
    )(function)


def plan_options(function: F) -> F:
    """--plan, --device-map, --other-machine, --threads, --mmap."""
    function = click.option(
        "--mmap/--no-mmap",
        "mmap",
        default=None,
        help="Map host weights from the file, or read them into memory of their own (pinned beside a GPU) "
        "[the plan's].",
    )(function)
    function = click.option(
        "-t", "--threads", type=click.IntRange(0, 512), default=0, help="CPU threads [the plan's]."
    )(function)
    function = click.option(
        "--other-machine", is_flag=True, help="Load it even where its profile does not hold here."
    )(function)
    return click.option(
        "--plan", "plan_path", required=True, type=click.Path(path_type=Path), help="The plan to load by."
    )(device_map_option(function))


def device_map_option(function: F) -> F:
    """--device-map."""
    return click.option(
        "--device-map",
        "device_maps",
        multiple=True,
        metavar="CUDA0=CPU",
        help="Use a device of this machine in place of the plan's; repeatable.",
    )(function)


def draft_options(function: F) -> F:
    """--draft, --draft-max, --draft-device."""
    function = click.option(
        "--draft-device", metavar="DEVICE", help="Of the draft [default: the plan's, or its first GPU]."
    )(function)
    function = click.option(
        "--draft-max",
        type=click.IntRange(1, 63),
        help=f"Tokens the draft guesses at a time [default: the plan's, or {STOCK_DRAFT}].",
    )(function)
    return click.option(
        "--draft",
        type=click.Path(path_type=Path),
        help="A small model of the same vocabulary that guesses tokens ahead.",
    )(function)


def find_engine(path: str | None, llama_h: Path | None) -> Place:
    """Where the engine to use is, not loaded; EngineProblem says why there is none."""
    from dataclasses import replace

    from runtime.engine import locate

    return replace(locate.find(path), llama_h=llama_h)


def open_job(
    model: Path,
    plan_path: Path,
    device_maps: tuple[str, ...],
    threads: int,
    mmap: bool | None = None,
    other_machine: bool = False,
) -> Job:
    """Read plan and model; the model must be the plan's, or rewritten from it (else exit 2)."""
    from dataclasses import replace

    from planner.check.consistency import check_order
    from planner.model.gguf.reader import read_model
    from planner.model.units import foreign_note, units_of
    from planner.model.validity import check_loadable
    from planner.plan.load_spec import load_spec, map_devices
    from rewriter.stamp import read_stamp
    from runtime.load.load_params import usable_threads

    plan = load_plan(plan_path)
    file = read_model(model)
    check_loadable(file.inventory, str(model), file.refused)
    _check_of_model(plan, file, plan_path)
    spec = load_spec(plan)
    mapped = parse_map(device_maps, plan)
    spec = map_devices(spec, mapped) if mapped else spec
    # A plan made on a larger machine must not crowd this one.
    spec = replace(spec, threads=threads or min(spec.threads, usable_threads()))
    spec = spec if mmap is None else replace(spec, use_mmap=mmap)
    stamp = read_stamp(file)
    check_order(plan, spec, stamp.experts if stamp else {}, str(plan_path))
    foreign = foreign_note(units_of(file.inventory).units)
    for note in filter(None, (*file.notes, *spec.notes, foreign)):
        say(f"note: {note}")
    return Job(file, plan, spec, mapped, plan_path, other_machine)


def plan_of_model(path: Path, file: ModelFile) -> Plan:
    """The plan that lies at `path`, proven to be of this model (else exit 2)."""
    plan = load_plan(path)
    _check_of_model(plan, file, path)
    return plan


def _check_of_model(plan: Plan, file: ModelFile, path: Path) -> None:
    from planner.check.consistency import check_agreement
    from rewriter.stamp import check_plan

    check_plan(file, plan, str(path))
    check_agreement(plan, file.inventory, str(path))


def load_bytes(job: Job, *beside: Path | None) -> int:
    """Bytes of the files that a load reads or maps: the model's, and those of what is loaded with it."""
    return job.file.inventory.size_bytes + sum(path.stat().st_size for path in beside if path is not None)


def open_draft(path: Path | None, job: Job, most: int | None, device: str | None) -> Draft | None:
    """The draft for a plan's model: whole on one device, with the model's context and KV types.

    None without a path; where the plan counts on a draft that is said.
    """
    from planner.constants import CPU
    from planner.drafts.length import bounds
    from planner.memory.reserves import check_extras
    from planner.model.gguf.reader import read_model
    from planner.model.layers import layers_of
    from planner.plan.engine_rules import tensor_devices
    from planner.plan.load_spec import LoadSpec
    from runtime.load.load_params import most_rollback
    from runtime.session.draft_model import Draft

    planned = job.plan.speculation
    if path is None:
        if planned and planned.tokens:
            own = "n-grams" if planned.ngrams else "its NextN block"
            who = f"--draft {planned.draft}" if planned.draft else f"{own}, which `serve` uses"
            say(
                f"note: the plan's times count on {planned.tokens} guesses a pass: {who}; here there are none"
            )
        return None
    file = read_model(path)
    check_extras(None, file.inventory)
    first = first_gpu(job.spec)
    if planned and planned.draft:
        first = job.mapped.get(planned.device, planned.device)
    chosen = device or first
    count = layers_of(file.inventory).n_all + 1 if chosen != CPU else 0
    base = most or (planned.tokens if planned else 0) or STOCK_DRAFT
    n_guess = min(base, most_rollback(job.spec.workload))
    # A plan has room for copies of recurrent state as many as it drafts, and not more.
    kept = any(layers_of(job.file.inventory).recurrent) or any(layers_of(file.inventory).recurrent)
    highest = n_guess if most or kept else min(bounds(n_guess)[1], most_rollback(job.spec.workload))
    spec = LoadSpec(
        devices=(chosen,) if count else (),
        tensor_split=(count,) if count else (),
        n_gpu_layers=count,
        overrides=((_EXPERTS, CPU),) if count and planned and planned.experts_on_host else (),
        workload=job.spec.workload.model_copy(update={"mtp": False, "n_seq": 1}),
        threads=job.spec.threads,
        use_mmap=job.spec.use_mmap,
        rollback=highest,
    )
    devices = tensor_devices(structure_of(file.inventory), spec)
    step_ns = planned.step_ns if planned else ()
    return Draft(file.paths[0], spec, n_guess, devices, highest, step_ns)


def review(job: Job, engine: str | None, llama_h: Path | None) -> None:
    """The dry run in a child process: devices, budgets, free memory; MachineError says what is wrong."""
    from runtime.worker import work

    work(engine, llama_h, job.path, job.spec, [], job.checks(), on_note=say, dry=True)


def parse_map(texts: tuple[str, ...], plan: Plan) -> dict[str, str]:
    """`CUDA0=CPU` options as a mapping; OptionProblem for a device that the plan does not use."""
    from planner.constants import CPU
    from planner.plan.load_spec import devices_of, load_spec

    known = {*devices_of(load_spec(plan)), *(use.name for use in plan.devices)} - {CPU}
    found: dict[str, str] = {}
    for text in texts:
        source, equals, target = text.partition("=")
        if not (source and equals and target):
            raise OptionProblem("--device-map", text, "write it as CUDA0=CPU")
        if source == CPU:
            raise OptionProblem("--device-map", text, "what the plan leaves on the CPU stays there")
        if source in found:
            raise OptionProblem("--device-map", text, f"{source} is mapped to {found[source]} already")
        if source not in known:
            there = ", ".join(sorted(known)) or "none but CPU"
            raise OptionProblem("--device-map", text, f"the plan does not use {source} (it uses {there})")
        found[source] = target
    return found
