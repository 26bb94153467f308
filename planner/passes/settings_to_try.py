"""The ways to run the engine that a request leaves open, in the order in which they are tried.

A longer draft makes a step's pass over the model dearer (more experts are touched, the CPU computes more)
and yields more tokens, each less likely. The placement is solved again for each length, since it changes
what the best one is; without a draft its memory is free for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from planner.constants import CPU
from planner.cost.unit_time import calibration_for
from planner.errors import AnswerIsNo
from planner.machine.host_memory import HostMemory, can_be_pinned
from planner.machine.profile import Profile
from planner.memory.memory import Reserve
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.model.tensor_roles import Role, part_of
from planner.model.units import Kind
from planner.passes.case import Case, Loading, Tried, loading_of
from planner.passes.largest_context import largest_context
from planner.passes.predict import predict
from planner.passes.record import host_weights_bytes
from planner.plan.engine_settings import EngineSettings
from planner.plan.plan import EngineFit, Projector, Speculation
from planner.plan.request import ExtraModels
from planner.site import ON_CPU
from planner.workload import Workload

LONGEST_DRAFT = 7  # with the model's own next token, the batches of 2 to 8 that profiles hold
# DeepSeek-V3's NextN block accepts 3.20 tokens a step of seven drafted (model card of nebius/MTP-DeepSeek-V3-
# 0324): 0.70 each. Small models drafting for large ones: 0.53 to 0.75 (Leviathan et al. 2023, table 2).
PUBLISHED_PPM = 700_000

AskEngine = Callable[[Workload, EngineSettings], EngineFit]  # what the engine's own --fit chooses


def settings_to_try(
    asked: Case, start: EngineSettings, tried: Tried, ask_engine: AskEngine | None = None
) -> Iterator[tuple[Loading, EngineSettings]]:
    """Projector × context × draft length × host memory, and for each: GPUs or the CPU alone, prompts copied
    or not, weights repacked or not. What `tried` has of the ones before decides which are worth it.
    """
    ask_engine = _asked_once(ask_engine)
    for moved, placed in enumerate(projector_places(asked, start)):
        lengths, guess = draft_lengths(asked, placed), 0
        # Work and time are for all lengths together; places beyond the first are often not worth a search.
        work_s = asked.clock.work_s / min(len(lengths), LONGEST_DRAFT + 1)
        for n, drafts in enumerate(lengths):
            if n and asked.clock.deadline.over():
                break
            if n > LONGEST_DRAFT and _too_slow(drafts.speculation, tried):
                continue
            part = replace(asked.clock.part(1 / (len(lengths) - n)), work_s=work_s)
            try:
                case, settings = _sized(replace(asked, clock=part), drafts, ask_engine, guess)
            except AnswerIsNo as refusal:
                tried.refusals.append(refusal)
                continue
            guess = case.request.workload.n_ctx
            for loading in _loadings(case, settings, tried):
                yield from _placed(loading)
        if tried.found:
            if moved:
                asked.tell("the vision projector goes to the CPU: there is no room for it on the GPU")
            return


def ways_expected(case: Case) -> int:
    """How many ways there are to try, as far as it can be told before: for whoever waits."""
    plain, slots = 3, 2 * (1 + len(case.known.following)) if case.request.hybrid else 0
    extra = case.request.extra_models
    lengths = 1 if extra is None or extra.accept_ppm is None else 1 + LONGEST_DRAFT
    return lengths * (plain + slots)


def projector_places(case: Case, start: EngineSettings) -> Iterator[EngineSettings]:
    """`start` with what runs beside the model: as asked, then with a projector that may move on the CPU."""
    extra = case.request.extra_models
    if extra is None:
        yield start
        return
    yield _with_extra_models(case, start, extra)
    if extra.projector_moves:
        yield _with_extra_models(case, start, _projector_on_cpu(extra))


def _projector_on_cpu(extra: ExtraModels) -> ExtraModels:
    return replace(extra, extras=replace(extra.extras, mmproj_device=CPU))


def _with_extra_models(case: Case, start: EngineSettings, extra: ExtraModels) -> EngineSettings:
    eyes, gpu = extra.extras.mmproj, extra.gpu
    projector = None
    if eyes is not None:
        projector = Projector(name=eyes.name, device=extra.extras.mmproj_device or gpu)
    return replace(start, projector=projector).with_extra_models(case.structure, extra, case.request.workload)


def _sized(
    asked: Case, settings: EngineSettings, ask_engine: AskEngine | None, guess: int
) -> tuple[Case, EngineSettings]:
    """The case with the largest context that fits, if it may shrink, and the engine's own --fit for it; the
    settings with what lies beside the model at that context.
    """
    case = asked
    if asked.request.lowest_ctx:
        lazily = HostMemory.MAPPED if asked.analysed(settings).tables_bytes else settings.host_memory
        held = replace(settings, host_memory=asked.request.host_memory or lazily)
        largest, keep = largest_context(replace(asked, clock=asked.clock.part(0.5)), held, guess)
        workload = asked.request.workload.model_copy(update={"n_ctx": largest})
        case = replace(case, request=replace(case.request, workload=workload), keeps=keep.value)
    settings = settings.with_extra_models(case.structure, case.request.extra_models, case.request.workload)
    if ask_engine is not None:
        fit = ask_engine(case.request.workload, settings)
        case = replace(case, known=replace(case.known, fit=fit))
    return case, settings


def _asked_once(ask_engine: AskEngine | None) -> AskEngine | None:
    """The same, asked once for each context and the memory that is left for it."""
    if ask_engine is None:
        return None
    answers: dict[tuple[Workload, tuple[Reserve, ...]], EngineFit] = {}

    def asked(workload: Workload, settings: EngineSettings) -> EngineFit:
        key = (settings.workload(workload), settings.reserves)
        if key not in answers:
            answers[key] = ask_engine(workload, settings)
        return answers[key]

    return asked


def draft_lengths(case: Case, start: EngineSettings) -> list[EngineSettings]:
    """`start` without drafts, then for each place of the draft and each length; `start` alone where that is
    not to be chosen.
    """
    extra = case.request.extra_models
    if extra is None or extra.accept_ppm is None:
        return [start]
    places = drafters(case, extra)
    lengths = (each.model_copy(update={"tokens": n}) for each in places for n in range(1, LONGEST_DRAFT + 1))
    none = places[0].model_copy(update={"tokens": 0})
    tried = (replace(start, speculation=drafts) for drafts in (none, *lengths))
    return [drafts.with_extra_models(case.structure, extra, case.request.workload) for drafts in tried]


def drafters(case: Case, extra: ExtraModels) -> list[Speculation]:
    """Who may draft, without a length: a draft model on the first GPU as a whole, with its experts on the
    host where it has some, and on the CPU; on the device that was asked for alone, if one was.
    """
    extras = extra.extras
    first = speculation(case.inventory, case.profile, case.request.workload, extra)
    if extras.draft is None or extras.draft_device or first.device == CPU:
        return [first]
    others = [extra_on(extra, CPU)] if CPU in case.request.budgets else []
    if others and any(part_of(t).role is Role.EXPERTS for t in extras.draft.tensors):
        others.insert(0, replace(extra, extras=replace(extras, draft_experts_on_host=True)))
    asked = case.inventory, case.profile, case.request.workload
    return [first, *(speculation(*asked, other) for other in others)]


def extra_on(extra: ExtraModels, device: str) -> ExtraModels:
    """The same with the draft on a device."""
    return replace(extra, extras=replace(extra.extras, draft_device=device))


def _too_slow(drafts: Speculation | None, tried: Tried) -> bool:
    """Whether the drafting alone takes as long as the best token so far: whatever checking takes."""
    if drafts is None or not drafts.tokens or not tried.found:
        return False
    best = min(each.evaluation.decode_ns for each in tried.found)
    return drafts.per_token(drafts.tokens * drafts.draft_ns) >= best


def speculation(
    inventory: Inventory, profile: Profile, workload: Workload, extra: ExtraModels
) -> Speculation:
    """Who drafts and how often it is right, without a length."""
    draft, device = extra.extras.draft, extra.extras.draft_device or extra.gpu
    told: dict[str, Any] = {
        "accept_ppm": extra.accept_ppm or 0,
        "accepted_ppm": extra.accepted_ppm,
        "tokens": 0,
    }
    if extra.extras.ngrams:
        return Speculation(ngrams=True, draft_ns=0, **told)
    if draft is None:
        own_ns = calibration_for(profile, inventory.table_digest()).token_ns
        return Speculation(draft_ns=own_ns, **told)
    apart = extra.extras.draft_experts_on_host
    return Speculation(
        draft=draft.name,
        table_digest=draft.table_digest(),
        device=device,
        experts_on_host=True if apart else None,
        draft_ns=draft_ns(draft, profile, workload, device, experts_on_host=apart),
        **told,
    )


def draft_ns(
    draft: Inventory, profile: Profile, workload: Workload, device: str, *, experts_on_host: bool = False
) -> int:
    """One token of a draft model that lies on one device, but for its experts if so; sampling included."""
    alone = workload.model_copy(update={"mtp": False})
    structure = structure_of(draft)
    layers = (device,) * (structure.layers.n_all + 1)
    apart = {unit.name: ON_CPU for unit in structure.units if experts_on_host and unit.kind is Kind.EXPERTS}
    return predict(draft, profile, alone, layers, apart).tpot_ns


def _loadings(case: Case, drafts: EngineSettings, tried: Tried) -> Iterator[Loading]:
    """Without slots for experts, then with them where they may be, staying or following the text: never
    slower than without.
    """
    yield from _held(case, drafts, tried)
    if case.request.hybrid and not (tried.found and case.clock.deadline.over()):
        yield from _held(case, replace(drafts, slots=True), tried)
        for following in case.known.following:
            yield from _held(case, replace(drafts, slots=True, following=following), tried)


def _held(case: Case, drafts: EngineSettings, tried: Tried) -> Iterator[Loading]:
    """Host weights pinned where memory may hold those that GPUs cannot, else mapped; or as was asked.

    Both where there are tables: mapped they take no memory, pinned they are there whole.
    """
    model, asked = case.analysed(drafts), case.request.host_memory
    kinds = [asked] if asked else [HostMemory.PINNED, HostMemory.MAPPED]
    limit = pinned_limit(case)
    before = len(tried.refusals)
    hosts = {d.name for d in case.profile.devices if d.kind == "cpu"}
    on_gpus = sum(size for name, size in case.request.budgets.items() if name not in hosts)
    if asked is None and case.inventory.size_bytes - on_gpus >= limit:
        kinds.remove(HostMemory.PINNED)
    for kind in kinds:
        # The rest of the time is for mapped weights, should they turn out too many to be pinned.
        clock = case.clock.part(0.6) if kind is not kinds[-1] else case.clock
        loading = loading_of(replace(case, clock=clock), model, replace(drafts, host_memory=kind))
        tried.loadings.append(loading)
        yield loading
        best = loading.best
        # Slots have a copy of all their experts on the host: that is never pinned beyond the limit.
        kept = asked is not None and not (drafts.slots and kind is HostMemory.PINNED)
        within = best is not None and host_weights_bytes(best, case.request) <= limit
        if kept or not (model.tables_bytes or (best is not None and not within)):
            return
        if kind is HostMemory.PINNED and not within:
            tried.loadings.remove(loading)
            del tried.refusals[before:]  # mapped needs no more


def pinned_limit(case: Case) -> int:
    """Bytes of host weights that may be pinned by the planner's own choice."""
    request = case.request
    return 0 if request.page else can_be_pinned(case.profile, request.budgets, request.pinned_limit_bytes)


def _placed(loading: Loading) -> Iterator[tuple[Loading, EngineSettings]]:
    """The settings of one loading that differ in who computes what."""
    yield loading, loading.settings
    if loading.crowded:
        return
    yield loading, replace(loading.settings, gpus=False)
    if loading.settings.slots:  # the other ways were tried without
        return
    if loading.copying:
        yield loading, replace(loading.settings, op_offload=False)
    if loading.best and not loading.best.opens_gpus:
        yield loading, replace(loading.settings, gpus=False, repack=False)
