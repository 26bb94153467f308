"""An unpatched llama-server with hybrid experts, by its environment and its options alone."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT

from runtime.hybrid import build, config
from runtime.hybrid.config import Config, Resident
from runtime.hybrid.device import read_blocks
from runtime.tools.llama_server import serving

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"  # trained, 4 layers of 16 experts: its tokens are text
RESIDENT = {block: Resident(16, (5, 1, 15 - block)) for block in range(4)}
# With experts on the CPU the stock server itself ends in the software driver for prompts of 8 to 12 tokens
# (docs/findings-hybrid.md): this one has more.
PROMPT = list(range(40, 60))
N = 16
# One slot: with more the software Vulkan device ends by itself. The software device and the CPU lane round
# differently: probabilities agree to that.
USUAL = ["-m", str(MODEL), "-ngl", "99", "-c", "512", "-t", "2", "-np", "1", "-fit", "off"]
CLOSE = 0.02


@pytest.fixture(scope="module", autouse=True)
def software_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
        patch.setenv("GGML_NO_BACKTRACE", "1")
        yield


def complete(url: str) -> tuple[list[int], list[float]]:
    """Tokens of a greedy completion, and the logarithm of each one's probability."""
    asked = {
        "prompt": PROMPT,
        "n_predict": N,
        "temperature": 0,
        "n_probs": 1,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completion", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        said: Mapping[str, Any] = json.load(answer)
    return said["tokens"], [each["logprob"] for each in said["completion_probabilities"]]


def settings(folder: Path, **more: Any) -> Path:
    """A file for ATSPLAN_HYBRID."""
    path = folder / "hybrid.txt"
    report = str(folder / "report.json")
    path.write_bytes(Config(device="Vulkan0", report=report, quiet=False, **more).text())
    return path


@pytest.fixture(scope="module")
def plain(vulkan_engine: Path, software_device: None) -> tuple[list[int], list[float]]:
    """What the server says on the device itself."""
    with serving(vulkan_engine / "llama-server", [*USUAL, "-dev", "Vulkan0"]) as server:
        return complete(server.url)


@pytest.mark.parametrize(
    "costs",
    [{"cpu_bytes_us": 20000, "bus_bytes_us": 20000}, {}],
    ids=["given", "measured"],
)
def test_the_server_answers_with_the_same_tokens(
    costs: Mapping[str, int],
    plain: tuple[list[int], list[float]],
    vulkan_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(config.LIBRARY, str(build.library()))
    monkeypatch.setenv(config.ENVIRONMENT, str(settings(tmp_path, residents=RESIDENT, guests=1, **costs)))
    experts = [r"-ot", r"ffn_.*_exps=HYBRID0_EXPERTS"]
    with serving(vulkan_engine / "llama-server", [*USUAL, "-dev", "HYBRID0", *experts]) as server:
        hybrid = complete(server.url)
    assert len(plain[0]) == N
    assert hybrid[0] == plain[0]
    assert max(abs(a - b) for a, b in zip(plain[1], hybrid[1], strict=True)) < CLOSE
    blocks = read_blocks((tmp_path / "report.json").read_text())
    assert {block.block: block.resident for block in blocks} == {b: r.experts for b, r in RESIDENT.items()}
    for block in blocks:
        # Every lane had its share (where the costs say so), nothing was lost on the way.
        assert min(block.hits, block.uploaded + block.cpu) > 0
        assert not costs or min(block.uploaded, block.cpu) > 0
        assert sum(block.chosen) == block.hits + block.uploaded + block.cpu
        assert block.device_bytes >= (3 + 1) * block.expert_bytes


@pytest.mark.parametrize("fault", ["no file", "wrong line", "no device", "row", "tensor"])
def test_what_is_wrong_is_said_in_one_line(
    fault: str, vulkan_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    path = settings(tmp_path)
    if fault == "no file":
        path.unlink()
    if fault == "wrong line":
        path.write_text("slots many\n")
    if fault == "no device":
        path.write_text("device Vulkan7\n")
    monkeypatch.setenv(config.LIBRARY, str(build.library()))
    monkeypatch.setenv(config.ENVIRONMENT, str(path))
    divided = ["--split-mode", fault] if fault in ("row", "tensor") else []
    done = subprocess.run(
        [str(vulkan_engine / "llama-server"), *divided, "--list-devices"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "hybrid experts:" in line]
    wanted = {
        "no file": "cannot be read",
        "wrong line": "line 1 is not understood: slots many",
        "no device": "no device Vulkan7",
        "row": "--split-mode row divides tensors over devices",
        "tensor": "--split-mode tensor divides tensors over devices",
    }
    assert len(said) == 1 and wanted[fault] in said[0]
    assert "Vulkan0" in done.stdout + done.stderr
    assert "HYBRID0" not in done.stdout
