"""A plan in sentences: where time goes, what limits it, what more memory would buy, why it beats others."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.block_names import layer_of, stem_of
from planner.check.gains import gains_text
from planner.check.reprice import known_of, request_of, settings_of
from planner.constants import PPM
from planner.cost import hybrid_slots
from planner.cost.evidence import ASSUMED, SLOTS, Part, by_basis, in_words, unmeasured
from planner.errors import AnswerIsNo
from planner.machine.profile import Profile
from planner.memory.kv_cache import checkpoint_bytes
from planner.memory.server_memory import Kept, kept
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.make_plan import make_plan
from planner.passes.predict import Breakdown
from planner.plan.adaptation import Policy
from planner.plan.known import Known
from planner.plan.load_spec import pins_host_weights, works_from_host
from planner.plan.plan import Baseline, DeviceUse, Plan, Speculation
from planner.plan.stock_rule import NOT_KEPT
from planner.site import ON_CPU, Site, SiteKind
from planner.solver.clock import Clock

_NAMED = 4  # operators that were not measured
_SHOWN = 6  # largest parts of a token's time


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of the time of one token."""

    what: str
    time_ns: int
    units: int


def slices(plan: Plan, parts: Breakdown | None = None) -> tuple[Slice, ...]:
    """The predicted time of one token by kind of unit and place, most first; they add up to it exactly.

    `parts` tells what lies between the units; without it that is one sum.
    """
    times: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    for placed in plan.units:
        if placed.time_ns:
            what = f"{stem_of(placed.unit)} on {_place(placed.site)}"
            times[what] += placed.time_ns
            counts[what] += 1
    if drafting := _drafting_ns(plan):
        times["the draft model"] = drafting
    found = [Slice(what, ns, counts[what]) for what, ns in times.items()]
    found += _between(plan, plan.predicted.tpot_ns - sum(times.values()), parts)
    return tuple(sorted(found, key=lambda s: (-s.time_ns, s.what)))


def _between(plan: Plan, rest_ns: int, parts: Breakdown | None) -> list[Slice]:
    """What is not the units' own: changes of device, a fixed cost of several devices, sampling, launch."""
    changes = parts.inside_ns + parts.edges_ns if parts else 0
    mixed = parts.mixed_ns if parts else 0
    if parts is None or plan.predicted.splits < 2 or changes < 0:
        return [Slice("changes of device, sampling and launch", rest_ns, 0)]
    found = [
        Slice(_counted(plan.predicted.splits - 1), changes, 0),
        Slice("sampling and launch", rest_ns - changes - mixed, 0),
    ]
    return [*found, Slice("work on several devices in one graph", mixed, 0)] if mixed else found


def _counted(changes: int) -> str:
    return f"{changes} {'change' if changes == 1 else 'changes'} of device"


def _drafting_ns(plan: Plan) -> int:
    """What the draft model takes of a token."""
    speculation = plan.speculation
    if speculation is None or not speculation.draft or not speculation.tokens:
        return 0
    return speculation.per_token(speculation.tokens * speculation.draft_ns)


def _place(site: Site) -> str:
    if site.kind is SiteKind.STRIPE:
        return f"{site.device}, hot ones there and the others across the bus"
    if site.kind is SiteKind.HYBRID:
        return (
            f"{site.device}, the CPU and the bus at once"
            if site.guests
            else f"{site.device} and the CPU at once"
        )
    if site.kind is SiteKind.CACHE:
        return f"{site.device}, through the engine's MoE cache"
    return "the CPU" if site == ON_CPU else site.device


def binding(plan: Plan) -> DeviceUse | None:
    """The device whose memory keeps units off it: the fullest GPU, when anything is not on a GPU."""
    gpus = [use for use in plan.devices if use.kind != "cpu"]
    elsewhere = any(p.site == ON_CPU and p.time_ns > 0 and "embd" not in p.unit for p in plan.units)
    split = any(p.site.divided for p in plan.units)
    if not gpus or not (elsewhere or split):
        return None
    return min(gpus, key=lambda use: use.budget_bytes - use.used_bytes)


def with_more(
    plan: Plan,
    inventory: Inventory,
    profile: Profile,
    known: Known,
    device: str,
    extra_bytes: int,
    clock: Clock | None = None,
) -> Plan | None:
    """The plan with a larger budget on one device; None when the answer is no, as for pins."""
    budgets = dict(plan.constraints.budgets)
    budgets[device] = budgets.get(device, 0) + extra_bytes
    request = replace(request_of(plan), budgets=budgets)
    try:
        return make_plan(inventory, profile, request, known_of(plan, known), settings_of(plan), clock)
    except AnswerIsNo:
        return None


def sentences(
    plan: Plan, larger: Plan | None = None, parts: Breakdown | None = None, server: Kept | None = None
) -> Iterator[str]:
    """The explanation, a sentence a line; `larger` is the plan with one GiB more on the binding device,
    `parts` what the predicted time is made of, `server` what llama-server keeps besides.
    """
    p = plan.predicted
    prompt = f", {_range(p.prefill_ns, p.prefill_error_ppm)}" if p.prefill_error_ppm is not None else ""
    yield (
        f"A token is predicted to take {_ms(p.tpot_ns)} ({1e9 / max(p.tpot_ns, 1):.1f} tokens/s), "
        f"{_range(p.tpot_ns, p.error_ppm)}, with {plan.workload.depth} cells of the context filled; "
        f"a prompt of {plan.workload.prompt} tokens {_ms(p.prefill_ns)}{prompt}."
    )
    yield from _basis(plan, parts)
    if plan.speculation is not None:
        yield _speculation(plan.speculation, plan.predicted.tpot_ns)
    if plan.following is not None:
        yield _following(plan)
    yield from _time(plan, parts)
    if plan.repack is False:
        yield (
            "The CPU's weights stay as they are in the file (--no-repack): in the layout that the engine "
            "would give them its kernels were measured to be slower."
        )
    if not plan.op_offload:
        yield (
            "Prompts are computed where the weights are (--no-op-offload): to copy host weights to a GPU for "
            "each batch, as the engine does on its own, would take longer or more memory than there is."
        )
    yield from _host_memory(plan)
    if server is not None:
        yield from _server(server)
    yield from _limit(plan, larger)
    yield from _proof(plan)
    yield from (_against(plan, baseline) for baseline in plan.baselines)
    if text := gains_text(plan):
        yield text


def _range(ns: int, error_ppm: int) -> str:
    """The interval that holds four of five runs."""
    factor = 1 + error_ppm / PPM
    return f"between {_ms(round(ns / factor))} and {_ms(round(ns * factor))} in four of five runs"


def _basis(plan: Plan, parts: Breakdown | None) -> Iterator[str]:
    """What the time of a token stands on, and the operators that nobody measured."""
    shares = by_basis(parts.token) if parts else plan.predicted.basis_ppm
    if not shares:
        return
    yield f"Of that time is, by what it stands on: {in_words(shares)}."
    if plan.machine.measured and parts and any(_put_together(part) for part in parts.token):
        yield (
            "What layers with slots take is put together from what CPU and bus take apart; atsplan profile "
            "MODEL measures them at work together."
        )
    missing = _missing(parts) if plan.machine.measured else ()
    if missing:
        named = [f"{what} ({_ms(ns)})" for what, ns in missing[:_NAMED]]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        yield f"Not measured in this profile: {', '.join(named)}{more}; atsplan profile MODEL measures them."


def _put_together(part: Part) -> bool:
    return part.figure.startswith(SLOTS) and part.basis == ASSUMED


def _missing(parts: Breakdown | None) -> tuple[tuple[str, int], ...]:
    return unmeasured(parts.token) if parts else ()


def _host_memory(plan: Plan) -> Iterator[str]:
    """How the weights that the CPU computes are loaded, where prompts copy them to a GPU."""
    if not plan.op_offload or not works_from_host(plan):
        return
    if pins_host_weights(plan):
        yield (
            "Weights on the CPU are read into pinned memory (--no-mmap): prompts copy them to a GPU at the "
            "bus's speed, while pages of a mapped file take a detour."
        )
    else:
        yield "Weights on the CPU stay mapped from the file, from which prompts copy them at a slower rate."


def kept_of(plan: Plan, inventory: Inventory) -> Kept | None:
    """What llama-server keeps in the host memory that a plan leaves; None where that has no budget."""
    host = next((use for use in plan.devices if use.kind == "cpu"), None)
    if host is None:
        return None
    one = checkpoint_bytes(structure_of(inventory), plan.workload)
    return kept(host.budget_bytes - host.used_bytes, one, plan.workload.n_seq)


def _server(server: Kept) -> Iterator[str]:
    """Checkpoints, of models that need them."""
    if server.checkpoint_bytes:
        each, whole = (_mib(size) for size in (server.checkpoint_bytes, server.checkpoints_bytes))
        yield (
            "A server that goes back in a conversation starts from checkpoints: the host has room for "
            f"{server.checkpoints}, {each} MiB each of every sequence, {whole} MiB in all, beside the plan."
        )


def drafter(speculation: Speculation) -> str:
    """Who drafts, at the beginning of a sentence."""
    if speculation.ngrams:
        return "What followed the last tokens before"
    return speculation.draft or "The model's own NextN block"


def acceptance_text(speculation: Speculation) -> str:
    """The share of drafted tokens that is right: one rate, or the counted one of each position."""
    counted = "/".join(f"{ppm / 1e4:.3g}" for ppm in speculation.accepted_ppm[: max(speculation.tokens, 4)])
    return f"{counted} % (by position)" if counted else f"{speculation.accept_ppm / 1e4:g} %"


def _following(plan: Plan) -> str:
    how = plan.following
    assert how is not None
    ways = {
        Policy.LRU: "those used last stay",
        Policy.LFU: f"those used most stay, by counts that fade to a half within {how.half_life} tokens",
        Policy.STATIC: "those of the plan stay",
    }
    slots = {layer_of(p.unit): p.site.amount for p in plan.units if p.site.kind is SiteKind.HYBRID}
    experts = {each.layer: len(each.order) for each in plan.experts}
    rates = [
        hybrid_slots.served(each, slots[each.layer], experts[each.layer])
        for each in how.layers
        if each.layer in slots and each.layer in experts
    ]
    hit = sum(rate for rate, _ in rates) / max(len(rates), 1)
    came = sum(admitted for _, admitted in rates) / max(len(rates), 1)
    brought = "are brought for later"
    if how.least_misses:
        brought = f"get slots as they are missed, most in steps that miss {how.least_misses} or more"
    return (
        f"The experts in slots follow the text: {ways[how.policy]}; on the routing trace so many slots "
        f"serve {hit:.0%} of the choices while {came:.2f} experts a layer and token {brought}."
    )


def _speculation(speculation: Speculation, tpot_ns: int) -> str:
    rate = acceptance_text(speculation)
    who = drafter(speculation)
    if not speculation.tokens:
        return f"{who} drafts nothing: with {rate} of its tokens accepted no length would pay."
    tokens, ones = speculation.step
    step_ns = tpot_ns * tokens // ones
    each = f", {_ms(speculation.draft_ns)} each," if speculation.draft else ""
    return (
        f"{who} drafts {speculation.tokens} tokens a step{each} for one pass that checks them: with {rate} "
        f"accepted a step of {_ms(step_ns)} yields {tokens / ones:.2f} tokens."
    )


def _time(plan: Plan, parts: Breakdown | None) -> Iterator[str]:
    total = max(plan.predicted.tpot_ns, 1)
    found = slices(plan, parts)
    large = [part for part in found[:_SHOWN] if part.time_ns * 100 >= total]
    small = len(found) - len(large)
    rest = plan.predicted.tpot_ns - sum(part.time_ns for part in large)
    terms = _rounded([*(part.time_ns for part in large), *([rest] if small else [])])
    for part, ms in zip(large, terms, strict=False):
        count = f" ({part.units} units)" if part.units > 1 else ""
        yield f"{part.time_ns * 100 / total:.0f} % of it, {ms} ms, goes to {part.what}{count}."
    last = f", the last for {small} smaller parts" if small > 1 else ""
    yield f"Added up: {' + '.join(terms)} = {_ms(plan.predicted.tpot_ns)}{last}."


def _rounded(terms: Sequence[int]) -> list[str]:
    """Milliseconds with two decimals that add up to their rounded sum, digit for digit."""
    ends = [round(sum(terms[:n]) / 10_000) for n in range(len(terms) + 1)]
    return [f"{(after - before) / 100:.2f}" for before, after in itertools.pairwise(ends)]


def _limit(plan: Plan, larger: Plan | None) -> Iterator[str]:
    tight = binding(plan)
    if tight is None:
        yield "Memory is not the limit: everything that a GPU could speed up is on one."
        return
    free = tight.budget_bytes - tight.used_bytes
    used = f"{_mib(tight.used_bytes)} of {_mib(tight.budget_bytes)} MiB of {tight.name} are used"
    # What can move by itself; the other parts of a layer on the CPU move only together, with its cache.
    apart = [p.size_bytes for p in plan.units if p.site == ON_CPU and p.unit.endswith((".experts", ".ffn"))]
    if not apart or free < min(apart):
        yield f"The limit is memory: {used}, {_mib(free)} MiB are too few for one more unit."
    else:
        yield f"{used}; {_why_not(plan)}."
    if larger is not None:
        gain = plan.predicted.tpot_ns - larger.predicted.tpot_ns
        prompt = plan.predicted.prefill_ns - larger.predicted.prefill_ns
        yield f"1 GiB more on {tight.name} would {_changes(gain, prompt)}{_rate(larger) if gain else ''}."


def _why_not(plan: Plan) -> str:
    """Why nothing fills the room that would hold one more unit."""
    if _asked_for(plan):
        return "what was asked keeps the rest off it"
    if plan.predicted.status == "baseline":
        return "what more would fit gains too little to tell from the stock rule"
    return "nothing more there was found to be faster"


def _changes(token_ns: int, prompt_ns: int) -> str:
    """What a change of the plan takes off a token and the prompt, below zero adds to them."""
    told = [
        (ns, what) for ns, what in ((token_ns, "a token"), (prompt_ns, "the prompt")) if _ms(ns) != _ms(0)
    ]
    if not told:
        return "change neither a token nor the prompt"
    return " and ".join(
        f"take {_ms(ns)} off {to}" if ns > 0 else f"add {_ms(-ns)} to {to}" for ns, to in told
    )


def _rate(plan: Plan) -> str:
    return f" ({1e9 / max(plan.predicted.tpot_ns, 1):.1f} tokens/s)"


def _proof(plan: Plan) -> Iterator[str]:
    p = plan.predicted
    gap = f"{p.gap_ppm / 1e4:.2f} %"
    if p.status == "baseline" and p.gap_ppm:
        yield f"Some placement may be {gap} faster, too little to tell: the stock rule is kept."
    elif p.gap_ppm == 0:
        yield "No placement under this budget is predicted to be faster: that is proven, not searched."
    else:
        yield f"No placement is predicted to be more than {gap} faster; a closer answer was not proven."


def _against(plan: Plan, baseline: Baseline) -> str:
    name = f"{baseline.name} ({baseline.setting})"
    if not baseline.feasible:
        kept = baseline.setting != NOT_KEPT
        return f"{name} does not fit." if kept else f"{baseline.name} {NOT_KEPT}."
    mine = _request(plan, plan.predicted.tpot_ns, plan.predicted.prefill_ns)
    theirs = _request(plan, baseline.tpot_ns, baseline.prefill_ns)
    if mine == theirs:
        return f"{name} is this plan."
    faster = theirs / max(mine, 1)
    token = baseline.tpot_ns - plan.predicted.tpot_ns
    prompt = baseline.prefill_ns - plan.predicted.prefill_ns
    return (
        f"{name} takes {faster:.2f} times as long for a request: {_signed(token)} a token, "
        f"{_signed(prompt)} for the prompt, with {_mib(baseline.vram_bytes)} MiB of GPU memory."
    )


def _asked_for(plan: Plan) -> bool:
    """Whether placements were limited by more than memory."""
    limits = plan.constraints
    return bool(limits.pins or limits.contiguous or limits.no_cpu)


def _request(plan: Plan, tpot_ns: int, prefill_ns: int) -> int:
    return plan.workload.gen * tpot_ns + prefill_ns


def _signed(ns: int) -> str:
    return f"{'+' if ns >= 0 else '-'}{_ms(abs(ns))}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}".replace(",", " ")  # as every table rounds and groups it


def as_data(
    plan: Plan, larger: Plan | None, parts: Breakdown | None = None, server: Kept | None = None
) -> Mapping[str, object]:
    """The same for a program."""
    tight = binding(plan)
    return {
        "tpot_ns": plan.predicted.tpot_ns,
        "error_ppm": plan.predicted.error_ppm,
        "basis_ppm": by_basis(parts.token) if parts else plan.predicted.basis_ppm,
        "unmeasured": [{"operator": w, "time_ns": ns} for w, ns in unmeasured(parts.token)]
        if parts
        else None,
        "slices": [{"what": s.what, "time_ns": s.time_ns, "units": s.units} for s in slices(plan, parts)],
        "binding": tight.name if tight else None,
        "tpot_ns_with_1_gib_more": larger.predicted.tpot_ns if larger else None,
        "sentences": list(sentences(plan, larger, parts, server)),
    }
