"""Sessions and children of the real embedded engine: logits, text, memory, truth, deaths and leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import ROOT

from planner.errors import AtsplanError, EngineProblem, InputError
from planner.model.gguf.reader import read_model
from planner.model.structure import structure_of
from planner.plan.engine_rules import tensor_devices
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.child.ask import ask
from runtime.engine import locate
from runtime.engine.libllama import Engine
from runtime.load import dry_run
from runtime.load.load_params import MissingDevice, usable_cores
from runtime.session.session import Sampling, Session
from runtime.session.text_pieces import Pieces
from runtime.verify import loaded_placement
from runtime.worker import Ask, Checks, work

SMALL = Workload(n_ctx=256, n_batch=64, n_ubatch=64)
CPU_ONLY = LoadSpec((), (), 0, (), SMALL, use_extra_bufts=False, threads=1)
TOKENS = [5, 9, 3, 7, 200, 11, 8, 8]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The embedded engine."""
    return Engine.find(str(next(locate.installed()).path))


def test_logits_do_not_depend_on_batches_and_repeat(engine: Engine, dense_model: Path) -> None:
    with Session(engine, dense_model, CPU_ONLY) as session:
        whole = session.logits(TOKENS)
        assert whole.shape == (8, session.n_vocab)
        assert np.array_equal(whole, session.logits(TOKENS))
        assert np.array_equal(whole[-1:], session.logits(TOKENS, last=True))
    cut = replace(CPU_ONLY, workload=SMALL.model_copy(update={"n_batch": 3, "n_ubatch": 3}))
    with Session(engine, dense_model, cut) as session:
        assert np.allclose(whole, session.logits(TOKENS), atol=1e-2 * np.abs(whole).max())


def test_two_sessions_at_once_share_nothing(engine: Engine, dense_model: Path, moe_model: Path) -> None:
    with Session(engine, dense_model, CPU_ONLY) as alone:
        dense = alone.logits(TOKENS)
    with Session(engine, moe_model, CPU_ONLY) as alone:
        moe = alone.logits(TOKENS)
    other = Engine.find(str(engine.path))
    with Session(engine, dense_model, CPU_ONLY) as one, Session(other, moe_model, CPU_ONLY) as two:
        assert np.array_equal(one.logits(TOKENS[:4]), dense[:4])
        assert np.array_equal(two.logits(TOKENS), moe)
        assert np.array_equal(one.logits(TOKENS), dense)
        one.close()
        assert np.array_equal(two.logits(TOKENS), moe)


def test_two_sessions_compute_at_the_same_time(engine: Engine, dense_model: Path, gdn_model: Path) -> None:
    """Two models in two threads, each with a cache of its own, many times over."""

    def often(session: Session) -> bool:
        first = session.logits(TOKENS)
        return all(np.array_equal(first, session.logits(TOKENS)) for _ in range(20))

    other = Engine.find(str(engine.path))
    with Session(engine, dense_model, CPU_ONLY) as one, Session(other, gdn_model, CPU_ONLY) as two:
        alone = [session.logits(TOKENS) for session in (one, two)]
        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(often, (one, two)))
        for session, logits in zip((one, two), alone, strict=True):
            assert np.array_equal(session.logits(TOKENS), logits)


def test_memory_is_given_back(engine: Engine, moe_model: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(3):
        with Session(engine, moe_model, CPU_ONLY) as session:
            session.logits(TOKENS)
    before = resident()
    for _ in range(8):
        with Session(engine, moe_model, CPU_ONLY) as session:
            session.logits(TOKENS)
    # One leaked model is 5 MB, one leaked context several.
    assert resident() - before < 8 * 2**20


def test_generation_ends_by_count_end_token_and_stop_text(engine: Engine, dense_model: Path) -> None:
    with Session(engine, dense_model, CPU_ONLY) as session:
        heard: list[str] = []
        run = session.generate(TOKENS, 6, heard.append, ignore_end=True)
        assert len(run.tokens) == 6 and run.prompt_tokens == 8
        assert run.prefill_ns > 0 and run.tpot_ns == run.decode_ns // 5
        text = "".join(heard)
        again = session.generate(TOKENS, 6, ignore_end=True)
        assert again.tokens == run.tokens
        warm = Sampling(temperature=2.0, seed=7)
        drawn = [session.generate(TOKENS, 6, sampling=warm, ignore_end=True).tokens for _ in range(2)]
        assert drawn[0] == drawn[1] != run.tokens
        first = text[:2]
        if first:
            cut: list[str] = []
            session.generate(TOKENS, 6, cut.append, stop=[first], ignore_end=True)
            assert "".join(cut) == ""


@pytest.mark.parametrize(
    ("tokens", "n", "why"),
    [([], 4, "empty"), (TOKENS, 256, "do not fit the context of 256"), ([10**6], 4, "token ids must lie")],
)
def test_wrong_prompts(engine: Engine, dense_model: Path, tokens: list[int], n: int, why: str) -> None:
    with Session(engine, dense_model, CPU_ONLY) as session, pytest.raises(InputError, match=why):
        session.generate(tokens, n)


def test_text_comes_in_whole_characters_and_stops_are_not_shown() -> None:
    heard: list[str] = []
    pieces = Pieces(heard.append, ["<end>"])
    for part in ("é".encode()[:1], "é".encode()[1:], b"a<e", b"x<en", b"d>tail"):
        if not pieces.feed(part):
            break
    pieces.finish()
    assert "".join(heard) == "éa<ex"
    assert all("\ufffd" not in text for text in heard)


def test_a_dry_run_counts_what_a_load_takes(engine: Engine, dense_model: Path, gdn_model: Path) -> None:
    for model in (dense_model, gdn_model):
        spec = replace(CPU_ONLY, use_mmap=False)
        dry = dry_run.memory(engine, model, spec)
        with Session(engine, model, spec) as session:
            assert session.memory() == dry
        tensors = read_model(model).inventory.size_bytes
        assert dry["CPU"].model >= tensors
        assert dry["CPU"].compute > 0


def test_every_weight_is_where_the_rules_say(engine: Engine, moe_model: Path) -> None:
    inventory = read_model(moe_model).inventory
    experts = r"^blk\.(?:1|3)\.(?:ffn_down_exps|ffn_gate_exps|ffn_up_exps)\.weight$"
    spec = replace(
        CPU_ONLY, devices=("CPU",), tensor_split=(5,), n_gpu_layers=5, overrides=((experts, "CPU"),)
    )
    with Session(engine, moe_model, spec, observe=True) as session:
        found = session.weights()
        assert {w.name for w in found} == {t.name for t in inventory.tensors}
        assert sum(w.size_bytes for w in found) == inventory.size_bytes
        loaded_placement.compare(engine, found, tensor_devices(structure_of(inventory), spec))
        with pytest.raises(
            loaded_placement.Misplaced, match=r"token_embd.weight was loaded into CPU, the plan says CUDA0"
        ):
            loaded_placement.compare(engine, found, {"token_embd.weight": "CUDA0"})
        nodes = session.nodes()
        assert {n.device for n in nodes} == {"CPU"}
        assert sum(n.op == "MUL_MAT_ID" for n in nodes) == 3 * 4


@pytest.mark.parametrize("count", [0, 1, 4200])
def test_any_number_of_overrides(engine: Engine, dense_model: Path, count: int) -> None:
    # 4096 is the limit of the engine's own tools, not of its loader.
    patterns = [rf"^never\.{n}$" for n in range(count - 1)] + [r"^blk\.0\.attn_q\.weight$"] * (count > 0)
    spec = replace(CPU_ONLY, overrides=tuple((pattern, "CPU") for pattern in patterns))
    with Session(engine, dense_model, spec) as session:
        assert session.logits(TOKENS).shape[0] == 8


def test_a_device_that_is_not_here(engine: Engine, dense_model: Path) -> None:
    spec = replace(CPU_ONLY, devices=("CUDA0",), tensor_split=(5,), n_gpu_layers=5)
    with (
        pytest.raises(MissingDevice, match=r"no device CUDA0 .*--device-map CUDA0=CPU"),
        Session(engine, dense_model, spec),
    ):
        pass
    with pytest.raises(EngineProblem, match="no device CUDA0"):
        dry_run.memory(engine, dense_model, spec)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"overrides": ((r"^blk\.0\.attn_norm\.weight$", "CPU_REPACK"),)}, "ended by SIG"),
        ({"overrides": (("(", "CPU"),)}, "[Pp]arenthes"),
        ({"cache_bytes": 2**20}, "MoE cache requires a GPU backend|GPU"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(
    engine: Engine, dense_model: Path, change: dict[str, object], why: str
) -> None:
    with pytest.raises(EngineProblem, match=why) as problem:
        dry_run.memory(engine, dense_model, replace(CPU_ONLY, **change))  # type: ignore[arg-type]
    assert "\n" not in str(problem.value)


def test_quantised_v_without_flash_attention_names_both_fields(engine: Engine, dense_model: Path) -> None:
    work_ = SMALL.model_copy(update={"type_v": "q8_0", "flash_attn": False})
    with pytest.raises(InputError, match=r"type_v q8_0 needs flash_attn"):
        dry_run.memory(engine, dense_model, replace(CPU_ONLY, workload=work_))


def test_a_worker_streams_and_reports(engine: Engine, moe_model: Path) -> None:
    checks = Checks(None, tensor_devices(structure_of(read_model(moe_model).inventory), CPU_ONLY))
    heard: list[str] = []
    ask = Ask(tuple(TOKENS), 5, ignore_end=True)
    outcome = work(
        str(engine.path), None, moe_model, CPU_ONLY, [ask, replace(ask, silent=True)], checks, heard.append
    )
    first, second = outcome.timings
    assert first.tokens == second.tokens and len(first.tokens) == 5
    assert outcome.loaded.memory["CPU"].model > 0
    with pytest.raises(AtsplanError, match=r"token_embd\.weight was loaded into CPU, the plan says CUDA0"):
        work(str(engine.path), None, moe_model, CPU_ONLY, [ask], Checks(None, {"token_embd.weight": "CUDA0"}))


def test_a_broken_model_is_one_line(engine: Engine, dense_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(dense_model.read_bytes()[:100_000])
    with pytest.raises(EngineProblem) as problem:
        work(str(engine.path), None, cut, CPU_ONLY, [Ask((1,), 1)])
    assert "\n" not in str(problem.value)
    assert "data is not within the file bounds" in str(problem.value)


def children_of(pid: int) -> set[int]:
    """Processes of the session (in the Unix sense) that `pid` leads, and its own children."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


_ENDLESS = """
import sys
from pathlib import Path
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.worker import Ask, work
spec = LoadSpec((), (), 0, (), Workload(n_ctx=4096), threads=1)
ask = Ask((1, 2), 4000, ignore_end=True)
work(None, None, Path(sys.argv[1]), spec, [ask], on_text=lambda text: print("text", flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent(dense_model: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(dense_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    while parent.stdout.readline().strip() != "text":
        assert parent.poll() is None
    workers = children_of(parent.pid)
    assert workers
    parent.send_signal(number)
    parent.wait(30)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and _alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineProblem, match="no answer within 1 s"):
        ask("hangs", {}, "test", timeout_s=1)


def test_a_death_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, sys\nsys.stderr.write('/x/ggml.c:7: GGML_ASSERT(n > 0) failed\\n')\n"
        "sys.stderr.flush()\nos.abort()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineProblem, match=r"GGML_ASSERT\(n > 0\) failed \(ended by SIGABRT\)"):
        ask("dies", {}, "test")


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for n in mine:
        (tmp_path / f"cpu{n}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{n}" / "topology" / "thread_siblings_list").write_text("0-999\n")
    assert usable_cores(tmp_path) == 1
    assert usable_cores(tmp_path / "nowhere") == len(mine)
