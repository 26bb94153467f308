"""Results of stock llama-bench as measurements: its JSON (`-o json`) or its Markdown table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from planner.errors import FieldProblem, FileProblem
from planner.learn.llama_bench import NotACount, bench_test, count
from planner.machine.host_memory import HostMemory
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.plan.engine_rules import layers_by_ngl
from planner.workload import Workload
from profiler.whole_model import bench_machine
from profiler.whole_model.bench_machine import Ran
from profiler.whole_model.placements import Placement, movable
from profiler.whole_model.published import ERROR, Point

_TEST = re.compile(r"(?:pp(?P<prompt>\d{1,9})|tg(?P<gen>\d{1,9}))(?: ?@ ?d(?P<depth>\d{1,9}))?")
_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})?")
_COLUMNS = {"ngl": "n_gpu_layers", "n_cpu_moe": "n_cpu_moe", "ncmoe": "n_cpu_moe", "n_ubatch": "n_ubatch"}
_COLUMNS |= {name: name for name in ("n_batch", "type_k", "type_v")} | {
    "fa": "flash_attn",
    "mmap": "use_mmap",
    "threads": "n_threads",
    "size": "model_size",
    "backend": "backends",
    "dev": "devices",
    "sm": "split_mode",
}
# Settings that change what is computed where, in ways that a fit of one GPU and its host does not know.
_OTHERS = ("tensor_split", "tensor_buft_overrides", "no_kv_offload", "embeddings", "no_op_offload")
_PLAIN = (None, "", "0", "0.00", "none", "None", 0, 0.0, False, "false")
_MOST_ROWS = 1000
_ALL = 999  # layers: newer builds say -1
APART = (
    1.15  # two times of one setting, or of more work on the GPU, that differ by more contradict each other
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of llama-bench: settings, tokens of prompt or answer, tokens per second."""

    number: int
    n_gpu_layers: int
    n_cpu_moe: int
    workload: Workload
    prompt: bool
    rate: float
    spread: float  # standard deviation over rate
    mapped: bool
    ran: Ran

    @property
    def ns(self) -> int:
        """Nanoseconds of the whole prompt, or of one token."""
        return round((self.workload.prompt if self.prompt else 1) * 1e9 / self.rate)

    @property
    def use(self) -> str:
        """What is computed and by what, wherever it is."""
        return f"{self.prompt} {self.mapped} {self.ran} {self.workload.model_dump_json()}"

    @property
    def words(self) -> str:
        """The row as a person would find it again."""
        what = f"pp{self.workload.prompt}" if self.prompt else f"tg at depth {self.workload.depth}"
        moved = f" n_cpu_moe {self.n_cpu_moe}" if self.n_cpu_moe else ""
        return f"row {self.number} (ngl {self.n_gpu_layers}{moved}, {what}: {self.rate:g} t/s)"


@dataclass(frozen=True, slots=True)
class Results:
    """The rows that can be used, and what is said of the others."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def of(self, inventory: Inventory, profile: Profile, path: str) -> Results:
        """Those of one model on one machine; FileProblem where none is, with why the first is not."""
        layers = layers_of(inventory).n_all
        asked = [(r.ran, r.prompt, r.n_gpu_layers <= layers or r.n_cpu_moe > 0) for r in self.rows]
        whys = bench_machine.refusals(asked, inventory, profile)
        kept = tuple(row for row, why in zip(self.rows, whys, strict=True) if not why)
        if not kept:
            raise FileProblem(path, f"no row is of this model on this machine: {whys[0]}")
        left = (
            f"row {row.number} is left out: {why}" for row, why in zip(self.rows, whys, strict=True) if why
        )
        told = (note for note in self.notes if "left out" in note)
        return Results(kept, (*told, *left, *contradictions(kept)))


def read(text: str, path: str) -> Results:
    """Rows of a file. Raises FileProblem for another file, FieldProblem for a broken row."""
    found = list(_from_json(text, path) if text.lstrip().startswith(("[", "{")) else _from_table(text, path))
    if len(found) > _MOST_ROWS:
        raise FileProblem(path, f"{len(found)} rows of llama-bench, at most {_MOST_ROWS} are read")
    rows, notes = [], []
    for number, values in enumerate(found, 1):
        strange = [name for name in _OTHERS if values.get(name) not in _PLAIN]
        if strange:
            notes.append(f"row {number} is left out: {', '.join(strange)} is not fitted")
            continue
        row = _row(number, values, path)
        if row is None:
            notes.append(f"row {number} is left out: neither a prompt alone nor tokens alone")
        else:
            rows.append(row)
    if not rows:
        raise FileProblem(path, "no row of llama-bench that could be used (pp or tg with a rate)")
    return Results(tuple(rows), (*notes, *contradictions(rows)))


def points(rows: Sequence[Row], inventory: Inventory, profile: Profile) -> list[Point]:
    """The measurements that rows state, on the GPUs of a machine that each used."""
    layers, units = layers_of(inventory).n_all, movable(inventory)
    made = []
    for row in rows:
        gpus = bench_machine.gpus_of(row.ran, profile)
        devices = layers_by_ngl(layers, min(row.n_gpu_layers, layers + 1) if gpus else 0, gpus)
        placement = Placement(row.words, devices, units[: row.n_cpu_moe])
        memory = HostMemory.MAPPED if row.mapped else HostMemory.PINNED
        error = max(ERROR, row.spread)
        made.append(Point(inventory, placement, row.workload, row.ns, row.prompt, memory, error))
    return made


def contradictions(rows: Sequence[Row]) -> Iterator[str]:
    """Rows that cannot both be right: one setting twice, or less work for the CPU that takes longer."""
    for index, one in enumerate(rows):
        for two in rows[index + 1 :]:
            if one.use != two.use:
                continue
            slow, fast = (one, two) if one.ns > two.ns else (two, one)
            if slow.ns < APART * fast.ns:
                continue
            same = (one.n_gpu_layers, one.n_cpu_moe) == (two.n_gpu_layers, two.n_cpu_moe)
            if same:
                yield f"{one.words} and {two.words} contradict each other: the same settings"
            elif slow.n_gpu_layers >= fast.n_gpu_layers and slow.n_cpu_moe <= fast.n_cpu_moe:
                yield (
                    f"{slow.words} is slower than {fast.words} with less on the CPU: "
                    "a full card that spills, or another program"
                )


def _row(number: int, values: Mapping[str, Any], path: str) -> Row | None:
    try:
        return _counted(number, values, path)
    except NotACount as problem:
        raise FieldProblem(path, 0, f"row {number}: {problem}", "expected a whole number") from None


def _counted(number: int, values: Mapping[str, Any], path: str) -> Row | None:
    test = bench_test(values)
    if not test.alone:
        return None
    rate = values.get("avg_ts")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 1e-6 < rate < 1e9:
        raise FieldProblem(path, 0, f"row {number}: avg_ts", "expected tokens per second")
    spread = values.get("stddev_ts", 0)
    try:
        workload = Workload(
            n_ctx=test.depth + test.prompt + test.gen,
            depth=test.at,
            prompt=test.prompt or 512,
            gen=max(test.gen, 1),
            n_batch=count(values, "n_batch", 2048),
            n_ubatch=count(values, "n_ubatch", 512),
            type_k=values.get("type_k", "f16"),
            type_v=values.get("type_v", "f16"),
        )
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        raise FieldProblem(path, 0, f"row {number}: {first['loc'][0]}", str(first["msg"]).lower()) from None
    return Row(
        number,
        _ALL if values.get("n_gpu_layers") == -1 else count(values, "n_gpu_layers", 99),
        count(values, "n_cpu_moe", 0),
        workload,
        test.prompt > 0,
        float(rate),
        float(spread) / float(rate) if isinstance(spread, int | float) and 0 <= spread < 1e9 else 0.0,
        values.get("use_mmap", True) not in (False, 0),
        bench_machine.ran(values),
    )


def _from_json(text: str, path: str) -> Iterator[Mapping[str, Any]]:
    try:
        data = _parsed(text)
    except (ValueError, RecursionError):
        raise FileProblem(path, "no JSON of llama-bench (-o json): it does not parse") from None
    listed = data if isinstance(data, list) else [data]
    for each in listed:
        if not isinstance(each, dict) or "avg_ts" not in each:
            raise FileProblem(path, "no JSON of llama-bench (-o json): rows with avg_ts are missing")
        yield each


def _parsed(text: str) -> Any:
    """JSON, or a value a line (-o jsonl)."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(
        line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines
    ):
        return [json.loads(line) for line in lines[: _MOST_ROWS + 1]]
    return json.loads(text)


def _from_table(text: str, path: str) -> Iterator[Mapping[str, Any]]:
    """Rows of the Markdown table; its columns are those of the settings that were given."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    heads = [n for n, line in enumerate(lines) if "t/s" in _cells(line) and "test" in _cells(line)]
    if not heads:
        raise FileProblem(path, "neither JSON (-o json) nor a table of llama-bench with test and t/s")
    names: list[str] = []
    for n, line in enumerate(lines):
        cells = _cells(line)
        if n in heads:
            names = cells
        elif names and len(cells) == len(names) and not set(line) <= set("|-: "):
            yield _values(dict(zip(names, cells, strict=True)))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _values(cells: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"use_mmap": True}
    for column, name in _COLUMNS.items():
        if column in cells:
            found[name] = int(cells[column]) if cells[column].lstrip("-").isdigit() else cells[column]
    names = (("ts", "tensor_split"), ("ot", "tensor_buft_overrides"))
    found |= {name: cells[short] for short, name in names if short in cells}
    if match := _TEST.fullmatch(cells["test"]):
        found |= {"n_prompt": int(match["prompt"] or 0), "n_gen": int(match["gen"] or 0)}
        found["n_depth"] = int(match["depth"] or 0)
    numbers = _NUMBER.findall(cells["t/s"])
    found["avg_ts"] = float(numbers[0]) if numbers else None
    found["stddev_ts"] = float(numbers[1]) if len(numbers) > 1 else 0.0
    return found
