"""When the answer is no: what is needed per device, what is there, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.constants import CPU
from planner.cost.build_problem import Priced
from planner.cost.layer_options import PER_DEVICE
from planner.cost.paged import least_resident, resident_of
from planner.errors import AnswerIsNo
from planner.machine.attention_kernels import CUDA_TYPES, attends
from planner.machine.engine_builds import Fault, sentence
from planner.memory.memory import Memory, together
from planner.plan.request import Request
from planner.solver.problem import Decision, Option, Problem


@dataclass(frozen=True, slots=True)
class Need:
    """The least that one device must hold, by part, against what it has."""

    device: str
    budget_bytes: int
    memory: Memory

    @property
    def total_bytes(self) -> int:
        return self.memory.total


@dataclass(eq=False)
class Infeasible(AnswerIsNo):
    """No placement keeps all budgets."""

    needs: tuple[Need, ...]
    hints: tuple[str, ...]
    why: str = ""

    def message(self) -> str:
        told = [*([self.why] if self.why else []), *(_sentence(need) for need in self.needs)]
        hint = f"; try {' or '.join(self.hints)}" if self.hints else ""
        return "does not fit: " + ("; ".join(told) or "no placement keeps all limits") + hint


class OutOfTime(AnswerIsNo):
    """The clock ended the search before it found a placement, or showed that there is none."""

    def message(self) -> str:
        return "no placement was found in time: give a longer --time-limit, or none"


def parts(memory: Memory, grouping: str = "") -> str:
    """What memory is filled with, in MiB rounded up: `weights 40544, KV and state 2560`."""
    sizes = (
        ("weights", memory.weights),
        ("KV and state", memory.kv + memory.state),
        ("compute", memory.compute),
        ("MoE cache", memory.cache),
        ("reserve", memory.reserve),
    )
    return ", ".join(f"{name} {-(-size // 2**20):,}".replace(",", grouping) for name, size in sizes if size)


def _sentence(need: Need) -> str:
    needed, there = -(-need.total_bytes // 2**20), need.budget_bytes // 2**20
    needs = "need" if " devices" in need.device else "needs"
    return f"{need.device} {needs} {needed} MiB, budget {there}: {parts(need.memory)}"


def unavoidable(priced: Priced, request: Request) -> Infeasible | None:
    """What no search can save: a decision without options, or forced bytes above a limit.

    None does not promise that a placement exists.
    """
    problem = priced.problem
    for decision in problem.decisions:
        if not decision.options and (why := _no_kernels(priced)):
            return Infeasible((), (f"--kv-type {CUDA_TYPES[2]}",), why)
        if not decision.options:
            why = f"{decision.name} has no allowed place under the pins, modes, KV and tensor types given"
            return Infeasible((), hints(priced, request), why)
    needs = [_least_need(priced, d, request) for d in range(len(problem.devices))]
    short = [n for n in needs if n.total_bytes > n.budget_bytes]
    if not short:
        return None
    host = any(d.host and n in short for d, n in zip(problem.devices, needs, strict=True))
    total = _together(priced, request)
    if total.total_bytes > total.budget_bytes:
        lacks = total.total_bytes - total.budget_bytes
        if lacks > sum(n.total_bytes - n.budget_bytes for n in short):
            short.append(total)
            host = host or _hosts(problem)
    short.sort(key=lambda n: n.budget_bytes - n.total_bytes)  # the shortage that matters first
    lacks = short[0].total_bytes - short[0].budget_bytes
    return Infeasible(tuple(short), hints(priced, request, host, lacks))


def _no_kernels(priced: Priced) -> str:
    """Why no layer with a cache can be anywhere; "" where some device computes its attention."""
    prices = priced.prices
    devices = [prices.profile.device(d.device) for d in priced.problem.devices]
    if any(attends(device, prices.workload, prices.profile.timings) for device in devices):
        return ""
    types = " and ".join(dict.fromkeys((prices.workload.type_k, prices.workload.type_v)))
    return f"no device computes attention on KV of type {types}"


def _hosts(problem: Problem) -> bool:
    return any(d.host for d in problem.devices)


def overfilled_by_extras(priced: Priced, request: Request) -> Infeasible | None:
    """Devices that a projector or a draft model overfills by itself, layers or not."""
    opened = dict.fromkeys(
        r.device for r in priced.settings.reserves if r.opens and r.device in request.budgets
    )
    needs = []
    for name in opened:
        context = priced.prices.profile.device(name).context_bytes
        needs.append(
            Need(name, request.budgets[name], Memory(reserve=context + priced.settings.reserved_bytes(name)))
        )
    short = tuple(n for n in needs if n.total_bytes > n.budget_bytes)
    draft = any(r.name.startswith("draft") for r in priced.settings.reserves)
    ours = ("no --", "--mmproj") if not draft else ("no --", "--")
    helpful = tuple(h for h in hints(priced, request) if h.startswith(ours))
    return Infeasible(short, helpful) if short else None


def refuse(priced: Priced, request: Request) -> Infeasible:
    """The refusal after a search: all devices together against all that must be held."""
    need = _together(priced, request)
    if need.total_bytes <= need.budget_bytes:
        if host := _host_need(priced, request):
            lacks = host.total_bytes - host.budget_bytes
            why = "weights of the host may be paged, what else it holds may not"
            return Infeasible((host,), hints(priced, request, lacks=lacks), why)
        return Infeasible((need,), hints(priced, request), "there is room, but not for whole units")
    lacks = need.total_bytes - need.budget_bytes
    return Infeasible((need,), hints(priced, request, _hosts(priced.problem), lacks))


def _host_need(priced: Priced, request: Request) -> Need | None:
    """What a host that pages its weights lacks for all else, wherever layers are."""
    if (least := least_resident(priced)) is None:
        return None
    name = priced.problem.devices[least[0]].device
    reserve = Memory(reserve=priced.settings.reserved_bytes(name))
    need = Need(name, request.budgets[name], least[1] + reserve)
    return need if need.total_bytes > need.budget_bytes else None


def _together(priced: Priced, request: Request) -> Need:
    """The least that all devices must hold together, each one in use, against what they have."""
    problem = priced.problem
    least = [min((_held(priced, d, o) for o in d.options), key=lambda m: m.total) for d in problem.decisions]
    used = [priced.ledger.shares[PER_DEVICE * d] for d in range(len(problem.devices))]
    beside = Memory(reserve=sum(r.size_bytes for r in priced.settings.reserves))
    total, name = _total_budget(priced, request)
    return Need(name, total, together((*least, *used, beside)))


def _held(priced: Priced, decision: Decision, option: Option) -> Memory:
    """What an option must have in memory, on all devices: of a host that pages no weights."""
    return together(resident_of(priced, priced.ledger.of(decision, option)))


def because(fault: Fault | None, refusal: Infeasible) -> Infeasible:
    """A refusal that says which fault of the engine left the CPU out, if one did."""
    if fault is None:
        return refusal
    why = "; ".join(filter(None, (f"wholly on the GPUs, since {sentence(fault)}", refusal.why)))
    hints = (*(h for h in refusal.hints if h != "allowing the CPU"), "another build of the engine")
    return Infeasible(refusal.needs, hints, why)


def _total_budget(priced: Priced, request: Request) -> tuple[int, str]:
    """What all devices hold together, memory that several share counted once, and what to call them."""
    problem, total = priced.problem, 0
    for index, pool in enumerate((*problem.pools, None)):
        members = [d.device for d in problem.devices if d.pool == (index if pool else -1)]
        kept = sum(r.size_bytes for r in priced.settings.reserves if r.device in members)
        offered = sum(request.budgets[name] for name in members)
        total += min(offered, priced.pool_bytes(index) + kept) if pool else offered
    one = len(problem.pools) == 1 and len(problem.devices) > 1 and all(d.pool == 0 for d in problem.devices)
    names = " and ".join(d.device for d in problem.devices)
    return total, f"the one memory of {names}" if one else "all devices together"


def _least_need(priced: Priced, device: int, request: Request) -> Need:
    problem, name = priced.problem, priced.problem.devices[device].device
    reserve = priced.settings.reserved_bytes(name)
    least = [(d, min(d.options, key=lambda o: o.memory[device])) for d in problem.decisions]
    shares = [s for s in _always(problem) if problem.shares[s].device == device]
    held = together(priced.ledger.of(d, o)[device] for d, o in least)
    held += together(priced.ledger.shares[s] for s in shares) + Memory(reserve=reserve)
    capacity = problem.devices[device].capacity_bytes
    if device in priced.resident:
        held = replace(held, weights=0)
    return Need(name, min(request.budgets[name], capacity + reserve), held)


def _always(problem: Problem) -> set[int]:
    """Shares that every placement pays: some decision has no option without them."""
    found: set[int] = set()
    for decision in problem.decisions:
        found |= set.intersection(*(set(o.shares) for o in decision.options))
    return found


def hints(priced: Priced, request: Request, host: bool = False, lacks: int = 0) -> tuple[str, ...]:
    """What would free memory, most promising first, if not too little of the bytes that lack.

    `host`: it is host memory that is short.
    """
    workload = priced.prices.workload
    found = []
    halved, batch = sum(priced.model.kv.values()) // 2, together(priced.ledger.shares).compute // 2
    if halved > lacks and workload.n_ctx > 8192:
        found.append(f"--ctx {max(workload.n_ctx // 2, 4096)}")
    if halved > lacks and workload.type_k == "f16" and workload.flash_attn:
        found.append("--kv-type q8_0")
    if batch > lacks and workload.n_ubatch > 256:
        found.append(f"--ubatch {workload.n_ubatch // 2}")
    eyes = [r.device for r in priced.settings.reserves if r.name.startswith("projector")]
    if eyes:
        found.append("no --mmproj" if CPU in eyes else "--mmproj-device cpu")
    if any(r.name.startswith("draft") for r in priced.settings.reserves):
        found.append("no --draft")
    if request.pins:
        found.append("fewer pins")
    if request.no_cpu or request.contiguous:
        found.append("allowing the CPU")
    elif not request.page:
        found += [*(["--page"] if host else []), "a smaller quantisation"]
    return tuple(found)
