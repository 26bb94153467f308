"""Small files that would unfold into gigabytes or hours: each is answered in one line, in little memory.

Every bomb is read by the real program in a process of its own, whose memory and CPU time are measured: copies
of one that has imported what commands need, so that nothing but their own work is measured.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz
import fuzz_targets
import numpy as np
import pytest
from copies import ENDS
from gguf_bytes import ARR, F32, STR, U32, U64, T, arch, f32, gguf, info, kv

SEEDS = fuzz_targets.DATA / "seeds"
BIG = 2_000_000  # bytes of a bomb
PEAK_KIB = 500 << 10


def seed(name: str) -> str:
    return (SEEDS / name).read_text()


def plan(old: str, new: str) -> str:
    text = seed("plan.yaml")
    assert old in text
    return text.replace(old, new, 1)


def each(text: str, count: int) -> str:
    return "".join(text.format(n) for n in range(count))


def many(text: str, size: int = BIG) -> str:
    return text * (size // len(text))


MBLT = b"MBLT" + struct.pack("<II", 1, 8)
HEAT = "# heat: 1\n# model:\n# experts: 4096\n# used: 8\nlayer,expert,count\n"
PART = "# source: s{}\n# phase: decode\n# tokens: 1\n1,4095,1\n"
PLANS: dict[str, Callable[[], str]] = {
    "nested lists": lambda: plan("experts: []", "experts: " + "[" * BIG),
    "nested mappings": lambda: plan("experts: []", "experts: " + many("{a: ")),
    "nested blocks": lambda: seed("plan.yaml") + "".join(" " * n + "a:\n" for n in range(1900)),
    "a list of a million wrong entries": lambda: plan("units:\n", f"units: [{many('1,')}]\nmore:\n"),
    "a million numbers": lambda: plan("experts: []", f"experts:\n- {{layer: 0, order: [{many('1,')}]}}"),
    "a million orders": lambda: plan(
        "experts: []", "experts:\n" + many(f"- {{layer: 0, order: [{'1, ' * 4000}]}}\n")
    ),
    "a million keys": lambda: seed("plan.yaml") + "".join(f"k{n}: 1\n" for n in range(150_000)),
    "a million units": lambda: plan(
        "overrides:", many("- {unit: a, site: cpu, size_bytes: 1, time_ns: 1, why: ''}\n") + "overrides:"
    ),
    "an alias bomb": lambda: "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + seed("plan.yaml"),
    "5000 digits": lambda: plan("n_ctx: 512", "n_ctx: " + "9" * 5000),
    "a number beyond all": lambda: plan("n_ctx: 512", "n_ctx: 99999999999999999999"),
    "bytes beyond all": lambda: plan("weights_bytes: ", "weights_bytes: " + "9" * 17),
    "layers without end": lambda: plan("layers:\n", "layers:\n- {first: 0, last: 999999999, device: CPU}\n"),
    "a layer in a name": lambda: plan("unit: blk.1.attention", "unit: blk.99999999999999999999.attention"),
    "a digit that is none": lambda: plan("unit: blk.1.attention", "unit: blk.\u00b2.attention"),
    "a binary word": lambda: plan("name: Fuzz", "name: !!binary RnV6eg=="),
    "a date": lambda: plan("name: Fuzz", "name: 2026-11-30"),
    "a catastrophic pattern": lambda: plan(r"^blk\.0\.", r"^(((a|a)*)*)*(x+x+)+blk\.0\."),
    "a nested pattern": lambda: plan(r"^blk\.0\.", "(" * 8000),
    "an endless pattern": lambda: plan(r"^blk\.0\.", "x" * BIG),
    "a counted pattern": lambda: plan(r"^blk\.0\.", r"((a{999}){999}){999}blk\.0\."),
    "a pin of stars": lambda: plan("pins: [", f"pins: ['{'*a' * 500}=cpu', "),
}
ROUTING: dict[str, Callable[[], str | bytes]] = {
    "8000 layers of 65536 experts": lambda: (
        "layer,expert,count\n" + "".join(f"{n},65535,1\n" for n in range(8000))
    ),
    "512 layers of 4096 experts, often": lambda: HEAT + each(PART, 40_000),
    "heat of 5000 digits": lambda: HEAT + "0,1," + "9" * 5000 + "\n",
    "experts of 5000 digits": lambda: HEAT.replace("4096", "9" * 5000) + "0,1,1\n",
    "one wide row, many short ones": lambda: (
        "0,1," + ",".join(map(str, range(4000))) + "\n" + many("1,1,0,1\n")
    ),
    "many turns": lambda: (
        "turn,phase,step,layer,slot,expert\n" + "".join(f"{n},1,0,1,0,4000\n" for n in range(90_000))
    ),
    "many runs": lambda: "".join(f"{n % 2},1,3,4095\n" for n in range(120_000)),
    "nested JSON": lambda: '{"layers": ' + "[" * BIG,
    "nested JSON lines": lambda: '{"type": "meta"}\n{"type": ' + "[" * BIG + "\n",
    "JSON of 5000 digits": lambda: '{"logical_count": [[1, ' + "9" * 5000 + "]]}",
    "sparse layers": lambda: (
        '{"schema": "llama.cpp.moe_layer_perf.v1", "n_expert": 4096, "layers": ['
        + ",".join(f'{{"layer": {n}, "experts": [[4095, 1]]}}' for n in range(30_000))
        + "]}"
    ),
    "prompts over each other": lambda: (
        '{"schema": "glm52-routing-trace-export/v2", "routing": '
        '{"n_expert_per_layer": 8, "k": 1}, "conditional": {"prompts": ['
        + ",".join(['{"start_row": 0, "prefill_rows": 1, "end_row": 99999}'] * 9000)
        + ']}, "layers": {"1": {"executed_topk": ['
        + ",".join(["[1]"] * 200_000)
        + "]}}"
    ),
    "a numpy file": lambda: _numpy(),
    "a zip of zeros": lambda: _zip(),
    "counts that share bytes": lambda: _shared_counts(),
    "records of nothing": lambda: MBLT + struct.pack("<III", 1, 2, 0) * 150_000,
    "a record of all": lambda: MBLT + struct.pack("<III", 1, 1, 2**32 - 1) + bytes(BIG),
}


def _numpy() -> bytes:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(  # announces 8 TB
        head, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    )
    return head.getvalue()


def _zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("counts.npy", bytes(200 << 20))
    return packed.getvalue()


def _shared_counts() -> bytes:
    """Sixty thousand entries of an importance matrix, all of them the same half megabyte."""
    data = T("blk.0.ffn_up_exps.weight.counts", (1 << 17,), 0, bytes(4 << 17))
    kvs = [kv("general.type", STR, "imatrix")]
    names = [f"blk.{n}.ffn_up_exps.weight.counts" for n in range(40_000)]
    infos = b"".join(info(name, data.dims, 0, 0) for name in names)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), 1) + kvs[0] + infos
    return head + bytes(-len(head) % 32) + data.payload


LINE = "slot print_timing: id  0 | task {0} | eval time = 200.0 ms / 10 tokens\n"
LOGS: dict[str, Callable[[], str]] = {
    "requests without end": lambda: each("slot launch_slot_: id  0 | task {0} | x\n", 40_000) + LINE,
    "slots without end": lambda: each("slot launch_slot_: id  {0} | task {0} | x\n", 40_000) + LINE,
    "launches and releases": lambda: each(
        "slot launch_slot_: id  {0} | task {0} |\n" + LINE + "slot release: id  {0} | task {0} |\n", 12_000
    ),
    "two slots in turns": lambda: (
        "slot launch_slot_: id  1 | task 1 |\n"
        + many("slot launch_slot_: id  0 | task 0 |\nslot release: id  0 | task 0 |\n")
        + "slot release: id  1 | task 1 |\n"
    ),
    "times that never end": lambda: each(LINE, 25_000),
    "digits": lambda: LINE.replace("200.0", "9" * BIG),
    "blanks": lambda: LINE.replace("id  0", "id " + " " * BIG),
    "one line": lambda: many("print_timing: id  0 | task 0 | eval time = "),
    "a page of figures": lambda: each("llamacpp:f{0} 1\n", 100_000),
    "nested JSON": lambda: "[" * BIG,
    "many drafts": lambda: many("srv x: id  0 | task 1 | accepted  3/ 4 draft tokens\n"),
    "a draft of all": lambda: "draft acceptance = 0.5 ( 1 accepted / 99999999999999999999 generated)\n",
    "many who draft": lambda: each(
        "statistics d{0}: #calls(b,g,a) = 1 5 5, #gen drafts = 5, #acc drafts = 5, #gen tokens = 9,"
        " #acc tokens = 5, #acc rate/pos = (0.5)\n",
        12_000,
    ),
    "many positions": lambda: (
        "statistics d: #calls(b,g,a) = 1 5 5, #gen drafts = 5, #acc drafts = 5, #gen tokens = 9,"
        f" #acc tokens = 5, #acc rate/pos = ({many('0.5, ')})\n"
    ),
}


ONE = f32("a.weight", 1.0)
MODELS: dict[str, Callable[[], bytes]] = {
    "a count of entries": lambda: b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63),
    "a long string": lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"a",
    "a long array": lambda: gguf([arch(), kv("llama.a", ARR, (U32, []))]).replace(
        struct.pack("<IQ", U32, 0), struct.pack("<IQ", U32, 2**61)
    ),
    "an array of strings": lambda: gguf([arch(), kv("llama.a", ARR, (STR, []))]).replace(
        struct.pack("<IQ", STR, 0), struct.pack("<IQ", STR, 2**60)
    ),
    "a layer beyond all": lambda: gguf([arch()], [f32("blk.999999999.attn_q.weight", 1.0)]),
    "layers beyond all": lambda: gguf([arch(), kv("llama.block_count", U32, 2**31)], [ONE]),
    "layers in 64 bits": lambda: gguf([arch(), kv("llama.block_count", U64, 2**63)], [ONE]),
    "alignment of three": lambda: gguf([arch(), kv("general.alignment", U32, 3)], [ONE]),
    "alignment of 2^31": lambda: gguf([arch(), kv("general.alignment", U32, 2**31)], [ONE]),
    "no finite number": lambda: gguf([arch(), kv("llama.block_count", F32, float("inf"))], [ONE]),
    "a shape of 2^63": lambda: gguf([arch()], [T("a.weight", (2**32, 2**31), 0, bytes(64))]),
}
STRANGE_NAMES = [
    "blk.x.attn_q.weight",
    "blk.\u00b2.ffn_up_exps.weight",
    "blk.\u0663.attn_k.weight",
    "blk..weight",
    "blk",
]


# Imports once, then answers each line of its input by a copy of itself that runs the command.
_STARTER = (
    """
import json, os, sys
import click.testing, numpy
import atsplan
runner = click.testing.CliRunner()
for name in ("plan.yaml", "model.gguf", "heat.csv"):
    for command in (["check", "--no-resolve"], ["explain"], ["export"], ["inventory"], ["heat", "report"]):
        runner.invoke(atsplan.main, [*command, name])
for line in sys.stdin:
    folder, *words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for number, name in enumerate(("/dev/null", "stdout", "stderr")):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(name if number == 0 else os.path.join(sys.argv[1], name), flags, 0o600), number)
        sys.argv[1:] = words
        code = 1
        try:
            atsplan.main()
"""
    + ENDS
    + """    _, status, use = os.wait4(child, 0)
    told = [os.waitstatus_to_exitcode(status), use.ru_maxrss, use.ru_utime + use.ru_stime]
    print(json.dumps(told), flush=True)
"""
)


class Starter:
    """A process that has imported everything, and starts commands as copies of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = [sys.executable, "-P", "-c", _STARTER, str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(program, cwd=SEEDS, stdin=pipe, stdout=pipe, text=True)

    def __call__(self, folder: Path, *command: str) -> tuple[int, list[str], int, float]:
        """Exit code, lines of stderr, peak in KiB and CPU time of the program."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([str(folder), *command]), file=self.process.stdin, flush=True)
        code, peak_kib, cpu_s = json.loads(self.process.stdout.readline())
        lines = (self.folder / "stderr").read_text(errors="replace").splitlines()
        return code, lines, peak_kib, cpu_s


@pytest.fixture(scope="module", autouse=True)
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    made = Starter(tmp_path_factory.mktemp("starter"))
    _STARTED.append(made)
    yield made
    _STARTED.clear()
    made.process.communicate(timeout=60)


_STARTED: list[Starter] = []


def run(folder: Path, *command: str) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of the program, its memory and time within bounds."""
    for again in (False, True):
        code, lines, peak_kib, cpu_s = _STARTED[0](folder, *command)
        assert peak_kib < PEAK_KIB, f"{peak_kib >> 10} MiB"
        if cpu_s < fuzz.CPU_SECONDS:
            break
        assert not again, f"{cpu_s} s"
    return code, lines


def refused(folder: Path, *command: str) -> None:
    code, lines = run(folder, *command)
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("atsplan: ") and len(lines[0]) < 600, lines


@pytest.mark.parametrize("name", PLANS)
def test_plans(tmp_path: Path, name: str) -> None:
    (tmp_path / "plan.yaml").write_text(PLANS[name]())
    (tmp_path / "inputs").mkdir()
    for source, place in fuzz_targets.INPUTS:
        (tmp_path / place).write_bytes((SEEDS / source).read_bytes())
    code, _ = run(tmp_path, "check", "plan.yaml", "--no-resolve")
    assert code in (1, 2)  # one finding or several, on stdout, each with its line
    code, lines = run(tmp_path, "explain", "plan.yaml")  # which looks at costs, not at patterns
    assert code in (0, 1, 2) and len(lines) <= 5, lines


@pytest.mark.parametrize("name", ROUTING)
def test_routing(tmp_path: Path, name: str) -> None:
    data = ROUTING[name]()
    (tmp_path / "x").write_bytes(data.encode() if isinstance(data, str) else data)
    refused(tmp_path, "heat", "import", "x", "-o", "out.csv")
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("name", LOGS)
def test_logs(tmp_path: Path, name: str) -> None:
    """What a server wrote may hold what its clients sent."""
    (tmp_path / "log").write_text(LOGS[name]())
    for source, place in [*fuzz_targets.INPUTS, ("plan.yaml", "plan.yaml")]:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes((SEEDS / source).read_bytes())
    code, lines = run(tmp_path, "refine", "plan.yaml", "--measured", "log")
    assert code in (0, 2) and len(lines) < 6, lines
    words = ("--machine", "rtx4060-8gb-ddr5", "--budget", "1000", "--ctx", "512", "--ngram")
    (tmp_path / "m.gguf").write_bytes((SEEDS / "model.gguf").read_bytes())
    code, lines = run(tmp_path, "solve", "m.gguf", *words, "--draft-accept", "log")
    assert code in (0, 1, 2) and len(lines) < 12, lines


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.gguf").write_bytes(MODELS[name]())
    refused(tmp_path, "inventory", "m.gguf", "-o", "m.yaml")
    assert not (tmp_path / "m.yaml").exists()


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_strange_names_are_carried_and_planned_around(tmp_path: Path, name: str) -> None:
    data = (SEEDS / "model.gguf").read_bytes()
    old = b"output.weight"  # of which the engine can do without
    raw = struct.pack("<Q", len(old)) + old
    assert data.count(raw) == 1
    # Padding to the alignment takes up the difference in length.
    head = data.index(raw)
    made = data[:head] + struct.pack("<Q", len(name.encode())) + name.encode() + data[head + len(raw) :]
    from planner.model.gguf.header import parse_header

    before, after = parse_header(data, "x"), parse_header(made, "x")
    (tmp_path / "m.gguf").write_bytes(made[: after.end] + bytes(-after.end % 32) + data[before.data_offset :])
    assert run(tmp_path, "inventory", "m.gguf", "-o", "m.yaml")[0] == 0
    assert run(tmp_path, "inventory", "m.yaml")[0] == 0
    code, lines = run(
        tmp_path, "solve", "m.gguf", "--machine", "rtx4060-8gb-ddr5", "--budget", "1000", "--ctx", "512"
    )
    assert code in (0, 1), lines


@pytest.mark.parametrize("alignment", [3, 2**31, 2**32 - 1])
def test_a_stamp_with_an_impossible_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    data = (SEEDS / "rewritten.gguf").read_bytes()
    key = b"atsplan.source.alignment" + struct.pack("<I", U32)
    at = data.index(key) + len(key)
    (tmp_path / "m.gguf").write_bytes(data[:at] + struct.pack("<I", alignment) + data[at + 4 :])
    refused(tmp_path, "rewrite", "m.gguf", "--undo", "-o", "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("size_bytes: 1088", "size_bytes: 0"),
        ("size_bytes: 1088", "size_bytes: 64"),
        ("size_bytes: 1088", "size_bytes: 99999999999999999999"),
        ("block_count: 2", "block_count: 99999999999999999999"),
        ("block_count: 2", "block_count: -1"),
        ("context_length: 4096", "context_length: x"),
        ("shape: 32x32,", f"shape: {'1x' * 100_000}1,"),
        ("name: Fuzz", "name: 2026-11-30"),
    ],
)
def test_inventories(tmp_path: Path, old: str, new: str) -> None:
    text = seed("model.inventory.yaml")
    assert old in text
    (tmp_path / "m.yaml").write_text(text.replace(old, new, 1))
    refused(tmp_path, "inventory", "m.yaml")


def test_what_inventory_writes_it_reads(tmp_path: Path) -> None:
    """A rank of low-rank attention that is no count was written and then refused."""
    data = gguf([arch(), kv("llama.attention.q_lora_rank", F32, 1.5)], [f32("token_embd.weight", 1.0, 2.0)])
    (tmp_path / "m.gguf").write_bytes(data)
    refused(tmp_path, "inventory", "m.gguf", "-o", "m.yaml")
    assert not (tmp_path / "m.yaml").exists()


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [("llama.block_count", U64, 1), ("split.count", STR, "2"), ("split.count", F32, 2.0)],
)
def test_number_types_that_stock_llama_refuses_are_said(
    tmp_path: Path, key: str, kind: int, value: object
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([arch(), kv(key, kind, value)], [f32("token_embd.weight", 1.0)]))
    code, lines = run(tmp_path, "inventory", "m.gguf")
    assert code == 0 and any(
        f"{key}: of a number type that stock llama.cpp does not read" in x for x in lines
    )


def test_profiles(tmp_path: Path) -> None:
    text = seed("machine.profile.yaml")
    for old, new in (
        ("memory_bytes: ", "memory_bytes: 9" + "9" * 30),
        ("op_overhead_ns: ", "op_overhead_ns: 9" + "9" * 19),
        ("threads: ", "threads: 99999"),
        ("warnings: []", f"warnings: [{many('a, ')}]"),
    ):
        assert old in text, old
        (tmp_path / "p.yaml").write_text(text.replace(old, new, 1))
        (tmp_path / "m.gguf").write_bytes((SEEDS / "model.gguf").read_bytes())
        refused(tmp_path, "solve", "m.gguf", "--profile", "p.yaml", "--budget", "1000")


@pytest.mark.parametrize(
    ("unit", "site"),
    [
        ("blk.999999999.experts", "cpu"),
        ("blk.99999999999999999999.experts", "cpu"),
        ("blk.\u0663.experts", "cpu"),
        ("blk.", "cpu"),
        ("blk", "hybrid:CUDA0:4"),
        ("output", "hybrid:CUDA0:4"),
    ],
)
def test_names_of_units_that_no_model_has(tmp_path: Path, unit: str, site: str) -> None:
    """A plan may say anything: layers of a picture and of slots are those a model can have."""
    text = plan("unit: blk.1.experts, site: 'gpu:CUDA0'", f"unit: '{unit}', site: '{site}'")
    (tmp_path / "plan.yaml").write_text(text)
    for command in (
        ("explain", "plan.yaml", "--plot", "p.svg"),
        ("export", "plan.yaml", "--model", "m.gguf"),
    ):
        code, lines = run(tmp_path, *command)
        assert code in (0, 1, 2) and not any("Traceback" in line for line in lines), lines
