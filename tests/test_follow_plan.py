"""Other experts for the slots of a running server: by its plan's file, through a real llama-server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from engines import ENVIRONMENT, ROOT
from hybrid_plans import slotted_plan
from processes import until

from planner.errors import FileProblem
from planner.plan.difference import NeedsRestart, check_while_running
from planner.plan.plan import Plan, to_text
from planner.records import digest
from planner.routing import expert_counts as heats
from runtime.hybrid.lane_files import LaneFiles, read_live
from runtime.hybrid.orders import NotFollowed, Orders, order_text
from runtime.tools.follow_plan import Served, following_file
from runtime.tools.llama_server import free_port

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"  # trained: its tokens are text
PROMPT = list(range(40, 60))  # not of 8 to 12 tokens: the software driver ends by those
N = 16
LIMIT_S = 60


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return slotted_plan(MODEL, tmp_path_factory.mktemp("plan"), 5)


def turned(plan: Plan, by: int) -> Plan:
    """The same with other experts first."""
    orders = tuple(e.model_copy(update={"order": e.order[by:] + e.order[:by]}) for e in plan.experts)
    return plan.model_copy(update={"experts": orders})


def deeper(plan: Plan) -> Plan:
    """The same for a token that stands elsewhere: the engine is told the same."""
    work = plan.workload.model_copy(update={"depth": plan.workload.depth + 1})
    return plan.model_copy(update={"workload": work})


@dataclass(frozen=True, slots=True)
class Running:
    """`atsplan serve` with the software GPU."""

    url: str
    metrics: str
    path: Path  # of the plan
    log: Path
    folder: Path  # that only the server and its device use

    def complete(self) -> list[int]:
        more = {"temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        asked = json.dumps({"prompt": PROMPT, "n_predict": N, **more}).encode()
        request = urllib.request.Request(
            f"{self.url}/completion", asked, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def residents(self) -> dict[int, set[int]]:
        return {b.block: set(b.resident) for b in read_live(self.folder / "HYBRID0.json")}

    def digest(self) -> str:
        text: str = urllib.request.urlopen(self.metrics, timeout=60).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("atsplan_plan_info{")]
        assert len(lines) == 1
        return lines[0].partition('digest="')[2].partition('"')[0]

    def says(self, words: str, times: int = 1) -> bool:
        """Whether so many lines of its log have these words, within a time."""
        return until(lambda: self.log.read_text().count(words) >= times, LIMIT_S)


@contextmanager
def running(plan: Plan, folder: Path, engine: Path) -> Iterator[Running]:
    path, log = folder / "plan.yaml", folder / "log"
    path.write_text(to_text(plan))
    port, page = free_port("127.0.0.1"), free_port("127.0.0.1")
    words = ["--plan", path, "--engine", engine, "--threads", 1, "--port", port, "--metrics-port", page]
    words += ["--device-map", "CUDA0=Vulkan0", "--no-check", "--heat-out", folder / "heat.csv"]
    with log.open("w") as to:
        process = subprocess.Popen(
            [sys.executable, "-m", "atsplan", "serve", str(MODEL), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=to,
            text=True,
            cwd=ROOT,
            env={**ENVIRONMENT, "TMPDIR": str(folder), "GGML_VK_VISIBLE_DEVICES": "0"},
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" ")[0]
            assert url, log.read_text()
            (own,) = folder.glob("atsplan-slots-*")
            yield Running(url, f"http://127.0.0.1:{page}/metrics", path, log, own)
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait(60)


def wanted(plan: Plan) -> dict[int, set[int]]:
    return {e.layer: set(e.order[:5]) for e in plan.experts}


def test_a_running_server_takes_other_experts_into_its_slots(
    plan: Plan, vulkan_engine: Path, tmp_path: Path
) -> None:
    with running(plan, tmp_path, vulkan_engine) as served:
        tokens = served.complete()
        assert len(tokens) == N and until(lambda: served.residents() == wanted(plan), LIMIT_S)
        assert served.digest() == digest(to_text(plan))

        other = turned(plan, 7)
        served.path.write_text(to_text(other))
        assert served.says("plan.yaml: 20 other experts in the slots of 4 layers")
        assert until(lambda: served.residents() == wanted(other), LIMIT_S)
        assert served.complete() == tokens and served.digest() == digest(to_text(other))

        # What needs a restart, and what is no plan: a line each, and nothing changes.
        longer = other.workload.model_copy(update={"n_batch": other.workload.n_batch * 2})
        served.path.write_text(to_text(turned(other.model_copy(update={"workload": longer}), 1)))
        assert served.says("plan.yaml: workload.n_batch: 2048 -> 4096: only other experts in as many slots")
        served.path.write_text(to_text(other)[:2000])
        assert served.says(f"note: {served.path}", 2)
        served.path.unlink()
        # Nor does garbage where the device looks for orders.
        for text in (
            "order 9\nresident 0 16 3\nend\n",
            "\0" * 5000,
            "order 10\nresident 0 16 1,2,3,4,99\nend\n",
        ):
            (served.folder / "HYBRID0.orders").write_text(text)
            assert served.complete() == tokens
        assert served.residents() == wanted(other) and served.digest() == digest(to_text(other))

        third = turned(plan, 3)
        served.path.write_text(to_text(third))
        assert until(lambda: served.residents() == wanted(third), LIMIT_S)
        assert served.complete() == tokens and served.says("other experts in the slots", 2)
    # What was chosen meanwhile, whoever had the slots: of six answers, the last of them perhaps in part.
    heat = heats.from_text((tmp_path / "heat.csv").read_text(), "heat.csv")
    assert heat.model == plan.model.table_digest and heat.layers == (0, 1, 2, 3)
    assert 5 * N < heat.parts[0].tokens <= 6 * (len(PROMPT) + N)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda p: deeper(p), "workload.depth"),
        (lambda p: p.model_copy(update={"op_offload": not p.op_offload}), "op_offload"),
        (lambda p: slotted_plan(MODEL, Path(), 4, of=p), "blk.0.experts"),
        (
            lambda p: p.model_copy(update={"model": p.model.model_copy(update={"tensors": 1})}),
            "model.tensors",
        ),
        (lambda p: p.model_copy(update={"overrides": p.overrides[:-1]}), "overrides"),
        (lambda p: p.model_copy(update={"repack": False}), "repack"),
    ],
    ids=["workload", "prompts", "slots", "model", "overrides", "layout"],
)
def test_what_differs_in_more_is_refused_by_name(
    plan: Plan, change: Callable[[Plan], Plan], field: str
) -> None:
    with pytest.raises(NeedsRestart) as refused:
        check_while_running(plan, change(turned(plan, 1)), "plan.yaml")
    assert str(refused.value).startswith(f"plan.yaml: {field}: ") and "\n" not in str(refused.value)


def test_what_is_only_said_differs_freely(plan: Plan) -> None:
    faster = plan.predicted.model_copy(update={"tpot_ns": 1})
    units = tuple(u.model_copy(update={"time_ns": u.time_ns + 1, "why": "so"}) for u in plan.units)
    changed = {"predicted": faster, "command": "", "notes": ("so",), "units": units, "baselines": ()}
    check_while_running(plan, turned(plan.model_copy(update=changed), 2), "plan.yaml")


def test_a_file_is_read_when_nobody_is_writing_it(plan: Plan, tmp_path: Path) -> None:
    """Each other plan reaches the device once; one that is none is told of, and the next is read."""
    path = tmp_path / "plan.yaml"
    said: list[str] = []
    seen: list[Plan] = []
    path.write_text("0")
    report, orders = tmp_path / "report.json", tmp_path / "orders"

    def read() -> Plan:
        turns = path.read_text()
        if not turns.isdigit():
            raise FileProblem(str(path), "is no plan")
        return turned(plan, int(turns))

    def device() -> None:
        while not over.wait(0.01):
            number = orders.read_text().split()[1] if orders.exists() else "0"
            report.write_text(json.dumps({"order": int(number), "order_fault": ""}))

    over = threading.Event()
    answering = threading.Thread(target=device)
    answering.start()
    served = Served(MODEL, plan, path, Orders({"CUDA0": orders}, LaneFiles({"CUDA0": report})), read)
    with following_file(served, said.append, seen.append, every_s=0.01):
        path.write_text("3")
        assert until(lambda: len(seen) == 1, LIMIT_S)
        path.write_text("no")
        assert until(lambda: len(said) == 2, LIMIT_S)
        path.write_text("5")
        assert until(lambda: len(seen) == 2, LIMIT_S)
    over.set()
    answering.join()
    assert [p.experts for p in seen] == [turned(plan, 3).experts, turned(plan, 5).experts]
    assert said[0].startswith(f"{path}: ") and said[1] == f"note: {path}: is no plan"
    assert "\nresident 0 16 5,6,7,8,9\n" in orders.read_text()
    assert orders.stat().st_mode & 0o777 == 0o600


def test_after_a_device_that_did_not_follow_the_next_plan_is_sent_whatever_it_says(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device may have followed: the old plan again does not say what is in the slots."""
    orders, report = tmp_path / "orders", tmp_path / "report.json"
    monkeypatch.setattr("secrets.randbelow", lambda most: 6)
    report.write_text(json.dumps({"order": 7, "order_fault": "no"}))
    files = Orders({"CUDA0": orders}, LaneFiles({"CUDA0": report}))
    served = Served(MODEL, plan, tmp_path / "p", files, lambda: plan)
    for each, first in ((turned(plan, 3), "3,4,5,6,7"), (plan, "0,1,2,3,4")):
        served.read = partial(lambda found: found, each)
        with pytest.raises(NotFollowed, match="no"):
            served.take_over()
        assert served.plan == plan and f"\nresident 0 16 {first}\n" in orders.read_text()


def test_a_folder_that_is_gone_is_one_line_and_ends_nothing(plan: Plan, tmp_path: Path) -> None:
    path, said = tmp_path / "plan.yaml", list[str]()
    path.write_text("0")
    gone = Orders({"CUDA0": tmp_path / "gone" / "orders"}, LaneFiles({"CUDA0": tmp_path / "gone" / "report"}))
    served = Served(MODEL, plan, path, gone, lambda: turned(plan, int(path.read_text())))
    with following_file(served, said.append, every_s=0.01):
        for turns in (3, 5):
            path.write_text(str(turns))
            seen = len(said)
            assert until(lambda: len(said) > seen, LIMIT_S)  # noqa: B023 - called at once
    assert all("gone/orders: No such file" in line for line in said)


def test_a_plan_out_of_a_pipe_is_not_read_again(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    said: list[str] = []

    def read() -> Plan:
        raise AssertionError

    served = Served(MODEL, plan, path, Orders({}, LaneFiles({})), read)
    with following_file(served, said.append, every_s=0.01):
        assert not until(lambda: bool(said), 0.2)


def test_a_device_that_refuses_or_is_silent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    orders = Orders({"CUDA0": tmp_path / "orders"}, LaneFiles({"CUDA0": report}))
    with pytest.raises(NotFollowed, match=r"CUDA0: .*: no answer in 0 s"):
        orders.send(((0, 4, (1,)),), limit_s=0)
    monkeypatch.setattr("secrets.randbelow", lambda most: 6)
    report.write_text(json.dumps({"order": 7, "order_fault": "block 0: 1 experts for 2 slots"}))
    with pytest.raises(
        NotFollowed, match="CUDA0: did not take other experts into its slots: block 0: 1 experts for 2"
    ):
        orders.send(((0, 4, (1,)),))
    for wrong in (
        {"order": "3"},
        {"order": 3, "order_fault": 4},
        {"order": 3, "order_fault": ["x"]},
    ):
        report.write_text(json.dumps(wrong))
        assert orders.reports.answer("CUDA0").order == 0
    report.write_text(json.dumps({"order": 7, "order_fault": "\x1b[31mred\nline"}))
    with pytest.raises(NotFollowed) as refused:
        orders.send(((0, 4, (1,)),))
    assert str(refused.value).isprintable()
    assert order_text(7, ((1, 4, ()), (0, 4, (3, 1)))) == "order 7\nresident 0 4 3,1\nresident 1 4 -\nend\n"
