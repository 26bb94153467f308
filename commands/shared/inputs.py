"""Finds what plans were made from: inventories and profiles by digest, in `inputs/` beside the plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.shared.console import read_text, say
from planner.errors import FileProblem, InputError
from planner.quoting import file_name

if TYPE_CHECKING:
    from planner.check.check import Inputs
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from planner.plan.known import Known
    from planner.plan.plan import CachePoint, Following, Plan
    from planner.routing.expert_counts import Heat
    from planner.workload import Workload


_FILES: dict[str, Any] = {"multiple": True, "type": click.Path(path_type=Path)}


def input_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--model, --profile and --heat for a command that takes them as one `library`."""

    @click.option("--model", "models", help="GGUF or inventory; else inputs/ beside the plan.", **_FILES)
    @click.option("--profile", "profiles", help="Machine profile; else inputs/ beside the plan.", **_FILES)
    @click.option("--heat", "heats", help="Expert routing that plans were made with.", **_FILES)
    @functools.wraps(function)
    def wrapped(
        models: tuple[Path, ...], profiles: tuple[Path, ...], heats: tuple[Path, ...], **options: Any
    ) -> Any:
        return function(library=InputLibrary(models, profiles, heats), **options)

    return wrapped


class InputLibrary:
    """Inventories and profiles of some folders and files, each read once."""

    def __init__(
        self,
        models: tuple[Path, ...] = (),
        profiles: tuple[Path, ...] = (),
        heats: tuple[Path, ...] = (),
    ) -> None:
        self._heats = heats
        self._inventories: dict[str, Inventory] = {}
        self._profiles: dict[str, Profile] = {}
        self._seen: set[Path] = set()
        self._routing: dict[object, Known] = {}  # by heat file, model and what of the use bears on it
        self._files: dict[Path, str] = {}  # models with weights, to the digest of their tensor tables
        self._sources: dict[str, Inventory] = {}  # by header: what rewritten files were made from
        self._models, self._given_profiles = models, profiles
        for path in models:
            self._add_model(path, planned=True)
        for path in profiles:
            self._add_profile(path)
        for path in heats:
            _check_heat(path)

    def of(self, plan: Plan, path: Path) -> Inputs:
        """The inputs with the digests that the plan names; None for those that are not there."""
        from planner.check.check import Inputs

        self._read_folder(path.parent / "inputs", plan)
        if self._models and plan.model.table_digest not in self._inventories:
            given = ", ".join(str(model) for model in self._models)
            raise FileProblem(str(path), f"is a plan for another model than {given}: {plan.model.name}")
        inventory = self._inventories.get(plan.model.table_digest)
        if inventory is not None:  # or what it was rewritten from, of which the plan was made
            inventory = self._sources.get(plan.model.header_digest, inventory)
        return Inputs(inventory, self._profile(plan), self._known(plan, path.parent / "inputs", inventory))

    def model_file(self, plan: Plan) -> Path:
        """The GGUF file of a plan's model among those given by --model; FileProblem when there is none."""
        for path, digest in self._files.items():
            if digest == plan.model.table_digest:
                return path
        raise FileProblem(plan.model.name, "no GGUF file of this model: give it with --model")

    def _known(self, plan: Plan, folder: Path, inventory: Inventory | None) -> Known:
        """What the solver knew beside the profile: coverage from the heat file with the plan's digest."""
        from planner.plan.known import Known
        from planner.records import digest

        wanted = plan.constraints.heat_digest
        for path in (*self._heats, *sorted(folder.glob("*.heat.csv"))) if wanted and inventory else ():
            if digest(read_text(path)) == wanted and inventory:
                work = plan.workload
                key = wanted, plan.model.table_digest, work.n_ubatch, work.depth + work.prompt
                if key not in self._routing:
                    self._routing[key] = known_of_heat(path, inventory, work)
                return self._routing[key]
        return Known()

    def _read_folder(self, folder: Path, plan: Plan) -> None:
        """Files named after the plan's model and machine; their digests decide. Files given by hand win."""
        model, machine = plan.model.name, plan.machine.name
        inventory = folder / file_name(model, ".inventory.yaml")
        profile = folder / file_name(machine, ".profile.yaml")
        if not self._models and self._is_new(inventory):
            self._add_model(inventory, planned=False)  # its digest is not known yet: judged with its plan
            self._seen.add(inventory)
        if not self._given_profiles and self._is_new(profile):
            self._add_profile(profile)
            self._seen.add(profile)

    def _is_new(self, path: Path) -> bool:
        """Also where it could not be read before: each plan that needs it is told so."""
        return path not in self._seen and path.is_file()

    def _profile(self, plan: Plan) -> Profile | None:
        wanted = plan.machine.profile_digest
        if wanted not in self._profiles:
            self._add_shipped(plan.machine.name)
        return self._profiles.get(wanted)

    def _add_model(self, path: Path, *, planned: bool) -> None:
        from commands.shared.models import load_inventory

        inventory = load_inventory(path, planned=planned)
        digest = inventory.table_digest()
        self._inventories[digest] = inventory
        if path.suffix not in {".yaml", ".yml"}:
            self._files[path] = digest
            if source := _source(path):
                self._sources[source.header_digest] = source

    def _add_profile(self, path: Path) -> None:
        from planner.machine.profile import from_text

        self._keep(from_text(read_text(path), str(path)))

    def _add_shipped(self, name: str) -> None:
        from planner.machine.presets import load, names

        if name in names():
            self._keep(load(name))

    def _keep(self, profile: Profile) -> None:
        from planner.machine.profile import profile_digest

        self._profiles[profile_digest(profile)] = profile


def _source(path: Path) -> Inventory | None:
    from planner.model.gguf.reader import read_model
    from rewriter.stamps import original_inventory

    return original_inventory(read_model(path))


def _check_heat(path: Path) -> None:
    """A file given by hand is read even where no plan asks for it: a wrong name is not passed over."""
    from planner.routing.expert_counts import from_text

    from_text(read_text(path), str(path))


def cache_curve(path: Path, model: Path) -> tuple[CachePoint, ...]:
    """A hit curve from a routing trace: what sizes of the engine's MoE cache would serve."""
    from commands.shared.heat_files import decode_trace, read_profile, shape_of
    from planner.routing.cache_curve import hit_curve
    from planner.routing.cache_simulation import demand_of

    trace, shape = decode_trace(read_profile(path, model), path), shape_of(model)
    demand = demand_of(trace, per_layer=False)
    curve = hit_curve(demand, shape.n_used if shape else trace.n_used, demand.n_steps // 2)
    if not curve:
        raise InputError(f"{path}: {demand.n_steps} decode steps: too few to tell what a cache would serve")
    told = ", ".join(f"{p.hit_ppm / 1e4:.0f} % with {p.share_ppm / 1e4:.0f} %" for p in curve)
    say(f"{path}: choices that a MoE cache serves, by the experts it holds: {told}")
    return curve


def followings(path: Path, model: Path) -> tuple[Following, ...]:
    """What slots that follow the text would serve, from a routing trace."""
    from commands.shared.heat_files import decode_trace, read_profile, shape_of
    from planner.routing.following import followings as replayed

    trace, shape = decode_trace(read_profile(path, model), path), shape_of(model)
    if shape is None or not (found := replayed(trace, shape.expert_bytes)):
        raise InputError(f"{path}: too few decode steps to tell what slots would serve")
    return found


def outside(heat: Heat, workload: Workload) -> Iterator[str]:
    """Where the use that is planned for lies outside of what was counted."""
    length = workload.depth + workload.prompt
    if heat.depth and length > 2 * heat.depth:
        yield (
            f"counted in contexts up to {heat.depth} tokens, planned for {length}: routing moves with depth, "
            "slots may serve less"
        )
    if len(heat.domains) > 1:
        yield f"holds {', '.join(heat.domains)} together; `run --heat FILE:NAME` fills slots for one of them"


def known_of_heat(path: Path, inventory: Inventory, workload: Workload) -> Known:
    """What a heat file says: coverage curves, orders, experts that a ubatch touches."""
    from planner.model.routed_layers import moe_shape
    from planner.plan.known import Known
    from planner.records import digest
    from planner.routing.coverage import curves, expected_distinct, hot_order
    from planner.routing.expert_counts import from_text, heat_of_model
    from planner.routing.formats.detect import with_tokens
    from planner.routing.report import report

    text, shape = read_text(path), moe_shape(inventory)
    heat = with_tokens(heat_of_model(from_text(text, str(path)), shape, str(path)))
    for warning in outside(heat, workload):
        say(f"{path}: {warning}")
    judged = report(heat, n_group=shape.n_group)  # as `heat report` judges it
    return Known(
        curves=curves(heat, shape.n_group) if judged.exploitable else {},
        verdict=judged.verdict,
        orders=hot_order(heat, shape.n_group),
        distinct=expected_distinct(heat, workload.n_ubatch),
        heat_digest=digest(text),
    )
