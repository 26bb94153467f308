"""Heat: how often the router chose each expert, by original expert id, and its text form.

`heat.csv` is `layer,expert,count` in parts. The head names the model; each part starts with its own
`# source:`, `# phase:` and `# tokens:` lines, and where they are known `# domain:` (code, prose, a
language …) and `# depth:` (tokens of the longest context that was seen). A reader that skips `#` lines
and adds up what repeats sees the total, so any tool for plain `layer,expert,count` files can read it.
Zero counts are not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import FieldProblem, FileProblem, InputError
from planner.file_kinds import mistaken
from planner.model.routed_layers import MoeShape
from planner.quoting import heat_name

MAGIC = "# heat: 1"
COLUMNS = "layer,expert,count"
MAX_EXPERTS = 4096  # of a layer; models have up to some 900
MAX_LAYERS = 512  # the engine's own limit
MAX_COUNT = 1 << 53  # of an expert, and of tokens
MAX_CELLS = 1 << 23  # counts in all parts together: 128 sources of a model with 128 layers of 512 experts


class Phase(StrEnum):
    """Which part of inference was watched."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # or not known


@dataclass(frozen=True, slots=True)
class Part:
    """Counts of one source (a prompt, a corpus, a workload) in one phase."""

    source: str
    phase: Phase
    tokens: int  # 0: not known, for instance after somebody normalised the counts
    counts: Mapping[int, tuple[int, ...]]  # layer -> count of each expert
    domain: str = ""  # what the text was about; "": not known
    depth: int = 0  # tokens of the longest context; 0: not known


@dataclass(frozen=True, slots=True)
class Heat:
    """Expert counts of one model; parts are sorted by source, phase and domain, and unique."""

    model: str  # table digest of the model, "" when not known
    n_expert: int
    n_used: int  # experts per token, 0 when not known
    parts: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with any count, ascending."""
        return tuple(sorted({layer for part in self.parts for layer in part.counts}))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(sorted({part.source for part in self.parts}))

    @property
    def domains(self) -> tuple[str, ...]:
        """Those that are known."""
        return tuple(sorted({part.domain for part in self.parts if part.domain}))

    @property
    def depth(self) -> int:
        """Tokens of the longest context that was counted; 0 where no part says."""
        return max((part.depth for part in self.parts), default=0)

    def total(self) -> dict[int, tuple[int, ...]]:
        """Counts added over all parts, by layer."""
        return {
            layer: _add([p.counts[layer] for p in self.parts if layer in p.counts]) for layer in self.layers
        }


@dataclass(eq=False)
class WrongModel(InputError):
    """Heat that cannot belong to the model it is used with."""

    path: str
    why: str

    def message(self) -> str:
        return f"{self.path}: not heat of this model: {self.why}"


@dataclass(eq=False)
class NoProfile(InputError):
    """A name that no part of a heat file has."""

    path: str
    name: str
    names: tuple[str, ...]

    def message(self) -> str:
        return f"{self.path}: no domain or source {self.name}; there are {', '.join(self.names) or 'none'}"


@dataclass(eq=False)
class TooManyCounts(InputError):
    """Heat with so many layers, parts and experts that a count for each would fill the memory."""

    rows: int
    n_expert: int

    def message(self) -> str:
        return (
            f"routing of {self.rows} layers, all sources together, with {self.n_expert} experts each: "
            f"more than the {MAX_CELLS} counts this program holds; merge the sources first"
        )


@dataclass(eq=False)
class NoCount(InputError):
    """A number in heat that no routing can have given."""

    what: str
    most: int

    def message(self) -> str:
        return f"routing with {self.what} that cannot be: expected 0 to {self.most}"


def check_size(rows: int, n_expert: int) -> None:
    """TooManyCounts where so many layers, over all parts, cannot be held with a count for every expert."""
    if rows * n_expert > MAX_CELLS:
        raise TooManyCounts(rows, n_expert)


def make(model: str, n_expert: int, n_used: int, parts: Iterable[Part]) -> Heat:
    """Heat in canonical form: parts of one source and phase are added up, layers without counts dropped.

    ValueError when a part does not hold `n_expert` counts a layer; NoCount and TooManyCounts for
    what `from_text` would refuse: what is made here can be written and read.
    """
    _bounded("a number of experts per token", n_used, n_expert)
    found: dict[tuple[str, Phase, str], Part] = {}
    for part in parts:
        kept = {layer: tuple(row) for layer, row in sorted(part.counts.items()) if any(row)}
        if any(len(row) != n_expert for row in kept.values()):
            raise ValueError(f"expected {n_expert} counts a layer")
        for layer, row in kept.items():
            _bounded("a layer", layer, MAX_LAYERS - 1)
            _bounded("a count", min(row), MAX_COUNT)
        domain = heat_name(part.domain) if part.domain else ""
        part = replace(part, source=heat_name(part.source), counts=kept, domain=domain)
        key = (part.source, part.phase, domain)
        found[key] = _join(found[key], part) if key in found else part
    kept_parts = tuple(found[key] for key in sorted(found) if found[key].counts)
    check_size(sum(len(part.counts) for part in kept_parts), n_expert)
    for part in kept_parts:
        _bounded("a number of tokens", part.tokens, MAX_COUNT)
        _bounded("a depth", part.depth, MAX_COUNT)
        _bounded("a count", max(map(max, part.counts.values())), MAX_COUNT)
    return Heat(model, n_expert, n_used, kept_parts)


def _bounded(what: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise NoCount(what, most)


def merge(heats: Sequence[Heat], weights: Sequence[float] | None = None) -> Heat:
    """One heat from several of the same model; a weight scales counts and tokens of a whole heat.

    Raises WrongModel when the numbers of experts or the known model digests differ.
    """
    first = heats[0]
    for other in heats[1:]:
        if other.n_expert != first.n_expert:
            raise WrongModel("merge", f"{other.n_expert} experts against {first.n_expert}")
        if other.model and first.model and other.model != first.model:
            raise WrongModel("merge", f"model {other.model[:19]}… against {first.model[:19]}…")
    parts = [
        _scaled(part, weight)
        for heat, weight in zip(heats, weights or (1.0,) * len(heats), strict=True)
        for part in heat.parts
    ]
    model = next((h.model for h in heats if h.model), "")
    return make(model, first.n_expert, max(h.n_used for h in heats), parts)


def original(heat: Heat, orders: Mapping[int, Sequence[int]]) -> Heat:
    """Counts by original id, from counts by position in a permuted file.

    `orders[layer][p]` is the original id of the expert stored at position p; layers not named stay.
    """
    for layer, order in orders.items():
        if sorted(order) != list(range(heat.n_expert)):
            raise WrongModel(f"permutation of layer {layer}", f"not an order of {heat.n_expert} experts")

    def back(layer: int, row: tuple[int, ...]) -> tuple[int, ...]:
        moved = [0] * heat.n_expert
        for position, expert in enumerate(orders.get(layer, range(heat.n_expert))):
            moved[expert] = row[position]
        return tuple(moved)

    parts = [replace(p, counts={la: back(la, row) for la, row in p.counts.items()}) for p in heat.parts]
    return make(heat.model, heat.n_expert, heat.n_used, parts)


def only(heat: Heat, phase: Phase) -> Heat:
    """The parts of one phase, mixed ones included; the whole heat when there are none."""
    parts = tuple(p for p in heat.parts if p.phase in (phase, Phase.MIXED))
    return replace(heat, parts=parts) if parts else heat


def about(heat: Heat, domain: str, depth: int) -> Heat:
    """The same counts, with a domain and a depth where a part says none."""
    parts = [replace(p, domain=p.domain or domain, depth=p.depth or depth) for p in heat.parts]
    return make(heat.model, heat.n_expert, heat.n_used, parts)


def profile(heat: Heat, name: str, path: str) -> Heat:
    """The parts of one domain, else of one source. Raises NoProfile."""
    of_domain = tuple(p for p in heat.parts if p.domain == name)
    parts = of_domain or tuple(p for p in heat.parts if p.source == name)
    if not parts:
        raise NoProfile(path, name, (*heat.domains, *heat.sources))
    return replace(heat, parts=parts)


def hottest(heat: Heat) -> dict[int, tuple[int, ...]]:
    """Experts of each layer that was seen, most chosen first; equals by their id."""
    return {
        layer: tuple(sorted(range(heat.n_expert), key=lambda e: (-row[e], e)))
        for layer, row in heat.total().items()
    }


def to_text(heat: Heat) -> str:
    """Canonical `heat.csv`."""
    head = [MAGIC, f"# model: {heat.model}".rstrip(), f"# experts: {heat.n_expert}", f"# used: {heat.n_used}"]
    lines = [*head, COLUMNS]
    for part in heat.parts:
        lines += [f"# source: {part.source}", f"# phase: {part.phase}", f"# tokens: {part.tokens}"]
        lines += [f"# domain: {part.domain}"] if part.domain else []
        lines += [f"# depth: {part.depth}"] if part.depth else []
        lines += [
            f"{layer},{expert},{count}"
            for layer, row in part.counts.items()
            for expert, count in enumerate(row)
            if count
        ]
    return "\n".join(lines) + "\n"


def from_text(text: str, path: str) -> Heat:
    """Heat from `heat.csv` text; FieldProblem names the line of what is wrong."""
    if why := mistaken(text, "heat file"):
        raise FieldProblem(path, 1, "", why)
    reader = _Reader(path)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            reader.take(number, line.strip())
    return reader.heat()


_PART = {"source": "unnamed", "phase": "mixed", "tokens": "0", "domain": "", "depth": "0"}


class _Reader:
    """State while reading: the head, then parts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.head: dict[str, str] = {}
        self.parts: list[tuple[dict[str, str], dict[int, dict[int, int]]]] = []
        self.in_rows = True
        self.n_expert = 0

    def take(self, number: int, line: str) -> None:
        if line == COLUMNS and not self.n_expert:
            self._finish_head(number)
        elif line.startswith("#"):
            self._key(number, line)
        else:
            self._row(number, line)

    def heat(self) -> Heat:
        if not self.n_expert:
            raise FieldProblem(
                self.path, 0, "", f"no line {COLUMNS}; `atsplan heat import` reads other profiles"
            )
        check_size(sum(len(rows) for _, rows in self.parts), self.n_expert)
        parts = [
            Part(
                keys["source"],
                Phase(keys["phase"]),
                int(keys["tokens"]),
                self._dense(rows),
                keys["domain"],
                int(keys["depth"]),
            )
            for keys, rows in self.parts
        ]
        try:
            return make(self.head.get("model", ""), self.n_expert, int(self.head.get("used", "0")), parts)
        except NoCount as problem:  # of parts of one name, which are added up
            raise FieldProblem(self.path, 0, "", str(problem)) from None

    def _finish_head(self, number: int) -> None:
        if self.head.get("heat") != "1":
            raise FieldProblem(
                self.path, 1, "heat", f"expected the first line {MAGIC}; `atsplan heat import` makes one"
            )
        self.n_expert = int(self.head.get("experts", "0"))
        if not 0 < self.n_expert <= MAX_EXPERTS:
            raise FieldProblem(self.path, number, "experts", "expected the number of experts of a layer")
        if int(self.head.get("used", "0")) > self.n_expert:
            raise FieldProblem(self.path, number, "used", f"a token uses {self.n_expert} experts at most")

    def _key(self, number: int, line: str) -> None:
        name, _, value = (s.strip() for s in line[1:].partition(":"))
        in_head = not self.n_expert
        if name not in (("heat", "model", "experts", "used") if in_head else _PART):
            raise FieldProblem(self.path, number, name, "unknown key")
        if name == "model" and not is_digest(value):
            raise FieldProblem(self.path, number, name, "expected the digest of a tensor table, or nothing")
        if name in ("experts", "used", "tokens", "depth") and not whole(value):
            raise FieldProblem(self.path, number, name, "expected a number")
        if name == "phase" and value not in set(Phase):
            raise FieldProblem(self.path, number, name, "expected prefill, decode or mixed")
        if not in_head and (self.in_rows or not self.parts):
            self.parts.append(({**_PART}, {}))
            self.in_rows = False
        (self.head if in_head else self.parts[-1][0])[name] = value

    def _row(self, number: int, line: str) -> None:
        fields = line.split(",")
        if not self.n_expert or len(fields) != 3 or not all(map(whole, fields)):
            raise FieldProblem(self.path, number, "", f"expected {COLUMNS} as whole numbers")
        layer, expert, count = map(int, fields)
        if layer >= MAX_LAYERS:
            raise FieldProblem(self.path, number, "layer", f"{layer}: models have up to {MAX_LAYERS} layers")
        if expert >= self.n_expert:
            raise FieldProblem(self.path, number, "expert", f"{expert} of {self.n_expert} experts")
        if not self.parts:
            self.parts.append(({**_PART}, {}))
        self.in_rows = True
        row = self.parts[-1][1].setdefault(layer, {})
        if expert in row:
            raise FieldProblem(self.path, number, "expert", f"layer {layer} expert {expert} appears twice")
        row[expert] = count

    def _dense(self, rows: Mapping[int, Mapping[int, int]]) -> dict[int, tuple[int, ...]]:
        return {la: tuple(row.get(e, 0) for e in range(self.n_expert)) for la, row in rows.items()}


def is_digest(text: str) -> bool:
    """Whether a text can name a model's tensor table, or is empty: one short word."""
    return re.fullmatch(r"[!-~]{0,100}", text) is not None


def whole(text: str) -> bool:
    """Whether a text is a whole number that a count may be."""
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_COUNT


def _add(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def _join(one: Part, two: Part) -> Part:
    layers = sorted({*one.counts, *two.counts})
    counts = {la: _add([p.counts[la] for p in (one, two) if la in p.counts]) for la in layers}
    # A part whose tokens are not known makes the sum unknown too.
    tokens = one.tokens + two.tokens if one.tokens and two.tokens else 0
    return replace(one, tokens=tokens, counts=counts, depth=max(one.depth, two.depth))


def _scaled(part: Part, weight: float) -> Part:
    if weight == 1.0:
        return part
    counts = {la: tuple(round(c * weight) for c in row) for la, row in part.counts.items()}
    return replace(part, tokens=round(part.tokens * weight), counts=counts)


def heat_of_model(heat: Heat, shape: MoeShape, path: str) -> Heat:
    """Heat held against the model it is used with, its experts per token filled in.

    Raises WrongModel for heat of another model, with other numbers of experts, or of layers that do
    not route, FileProblem for heat that counts nothing. `path` names the heat in messages.
    """
    if heat.model and heat.model != shape.digest:
        raise WrongModel(path, f"recorded from {heat.model[:19]}, this is {shape.digest[:19]}")
    if heat.n_expert != shape.n_expert:
        raise WrongModel(path, f"{heat.n_expert} experts a layer, the model {shape.n_expert}")
    strangers = sorted(set(heat.layers) - set(shape.layers))
    if strangers:
        raise WrongModel(path, f"layer {strangers[0]} routes here, but not in the model")
    if not heat.layers:
        raise FileProblem(path, "heat without a single routed choice")
    return replace(heat, model=shape.digest, n_used=shape.n_used or heat.n_used)
