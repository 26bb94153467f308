"""What a stock llama-server with experts in slots does, told while it runs: by its device, as metrics."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT
from prometheus_client.parser import text_string_to_metric_families
from small_plans import server_plan

from planner.plan.load_spec import LoadSpec
from planner.site import Site
from planner.workload import Workload
from runtime.hybrid.lane_files import MAX_REPORT, read_live
from runtime.metrics.registry import Metrics
from runtime.tools.hybrid_script import SlottedServer, slotted_server
from runtime.tools.llama_server import Server, serving

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"  # 4 layers of 16 experts
USUAL = ["-m", str(MODEL), "-ngl", "99", "-c", "256", "-t", "1", "-np", "1", "-fit", "off"]
RESIDENT = (5, 1, 15)


def slots(folder: Path, device: str) -> SlottedServer:
    """The settings of a plan for a device, with three experts of each layer in slots."""
    spec = LoadSpec(
        devices=(device,),
        tensor_split=(5,),
        n_gpu_layers=5,
        overrides=((r"ffn_.*_exps", Site.parse(f"hybrid:{device}:3+1").buffer),),
        workload=Workload(n_ctx=256),
        residents=tuple((layer, 16, RESIDENT) for layer in range(4)),
        guests=tuple((layer, 1) for layer in range(4)),
    )
    return slotted_server(spec, MODEL, folder)


@contextmanager
def served(engine: Path, made: SlottedServer, folder: Path, *more: str) -> Iterator[Server]:
    """The settings of a GPU on the CPU instead, where a server starts in seconds."""
    path = folder / "slots"
    path.write_text(path.read_text().replace("device Vulkan0", "device CPU").replace(" 1000", " 20"))
    words = [*USUAL, *more, "-dev", ",".join(made.spec.devices)]
    words += ["-ot", ",".join("=".join(each) for each in made.spec.overrides)]
    with serving(engine / "llama-server", words, more=made.variables) as server:
        yield server


def complete(url: str, n_predict: int = 8) -> int:
    asked = json.dumps(
        {"prompt": list(range(40, 60)), "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
    ).encode()
    request = urllib.request.Request(f"{url}/completion", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["tokens_predicted"])


def choices(metrics: Metrics) -> dict[str, float]:
    """Choices of experts by layer, whoever served them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples if family.name == "atsplan_expert_choices" else ():
            assert sample.labels["device"] == "Vulkan0"
            found[sample.labels["layer"]] = found.get(sample.labels["layer"], 0) + sample.value
    return found


def test_a_scrape_of_a_running_server_has_the_work_of_each_layer(
    computing_server: Path, tmp_path: Path
) -> None:
    made = slots(tmp_path, "Vulkan0")
    metrics = Metrics(server_plan(MODEL), "digest")
    metrics.lanes_now(made.reports.blocks)
    assert choices(metrics) == {}
    with served(computing_server, made, tmp_path) as server:
        before = choices(metrics)
        tokens = complete(server.url)
        deadline = time.monotonic() + 30
        now = choices(metrics)
        while not all(now.get(n, 0) > before.get(n, 0) for n in "0123") and time.monotonic() < deadline:
            time.sleep(0.02)
            now = choices(metrics)
        blocks = [block for _, block in made.reports.blocks()]
        assert "atsplan_expert_wait_seconds" in metrics.text()
    assert sorted(now) == ["0", "1", "2", "3"] and tokens > 0
    assert all(now[layer] > before.get(layer, 0) for layer in now)
    assert all(block.resident == RESIDENT and block.slots == 3 for block in blocks)
    assert all(sum(b.chosen) == b.hits + b.uploaded + b.cpu for b in blocks)
    assert choices(metrics) == {}  # the model is gone, and with it what is loaded


def rows(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Choices, and those with a slot, by rank in a step."""
    return {
        (sample.labels["row"], family.name.removeprefix("atsplan_expert_row_")): sample.value
        for family in text_string_to_metric_families(metrics.text())
        if "_row_" in family.name
        for sample in family.samples
    }


def test_sequences_that_decode_together_are_told_by_rank(computing_server: Path, tmp_path: Path) -> None:
    made = slots(tmp_path, "Vulkan0")
    metrics = Metrics(server_plan(MODEL), "digest")
    metrics.lanes_now(made.reports.blocks)
    with served(computing_server, made, tmp_path, "-np", "2", "-c", "1024") as server:
        deadline = time.monotonic() + 60
        while ("1", "hits") not in rows(metrics) and time.monotonic() < deadline:
            with ThreadPoolExecutor() as pool:
                list(pool.map(complete, [server.url] * 2, [100] * 2))
        found = rows(metrics)
    assert sorted(found) == [(row, what) for row in "01" for what in ("choices", "hits")]
    assert all(0 < found[row, "hits"] <= found[row, "choices"] for row in "01")
    # Steps of two, wherever they came from: as many choices of the first as of the second.
    assert found["0", "choices"] == found["1", "choices"]


def block(**changed: Any) -> dict[str, Any]:
    from runtime.hybrid.device import Block

    counts: dict[str, Any] = dict.fromkeys(Block.__dataclass_fields__, 0)
    lists = {"resident": [1, -1], "chosen": [0] * 4, "row_choices": [4, 2], "row_hits": [4, 0]}
    return {**counts, **lists, "kind": "exps", "experts": 4, **changed}


@pytest.mark.parametrize(
    "wrong",
    [
        {"hits": -1},
        {"hits": "many"},
        {"hits": 1.5},
        {"hits": 2**63},
        {"kind": 'exps"} 1\n'},
        {"experts": 0},
        {"chosen": [0] * 5},
        {"resident": [4]},
        {"row_hits": [5, 0]},
        {"row_hits": [4]},
        {"row_choices": [0] * 17, "row_hits": [0] * 17},
        {"row_choices": [4, -1], "row_hits": [4, -2]},
    ],
    ids=str,
)
def test_a_report_that_cannot_be_is_dropped_whole(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"host_bytes": 1, "blocks": [block(), block(**wrong)], "freed": []}))
    assert read_live(path) == ()
    path.write_text(json.dumps({"host_bytes": 1, "blocks": [block(), block(hits=7)], "freed": []}))
    assert [each.hits for each in read_live(path)] == [0, 7]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null", '{"blocks": 3}', "\0" * 9])
def test_what_is_no_report_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert read_live(path) == ()
    path.write_text(text)
    assert read_live(path) == ()
    with path.open("w") as file:
        file.truncate(MAX_REPORT + 1)
    assert read_live(path) == ()
