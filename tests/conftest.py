"""Models that every test may read: generated once a session, small, of fixed seeds."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from engines import computing_server, node_engine, portable_engine, server_engine, vulkan_engine
from rpc_servers import rpc_server

from profiler.synth.synth import SynthSpec, write

__all__ = [
    "computing_server",
    "node_engine",
    "portable_engine",
    "rpc_server",
    "server_engine",
    "vulkan_engine",
]

# Properties are tried on the same texts and numbers each time: what a run says, it says of the tree and not
# of its luck. ATSPLAN_DRAW=1 draws others, for who looks for something new.
hypothesis.settings.register_profile("same", derandomize=True)
if not os.environ.get("ATSPLAN_DRAW"):
    hypothesis.settings.load_profile("same")

# Files that take longest, before all others: workers take whole files, and the last ones should be short.
LONGEST = (
    *("test_docs", "test_planning", "test_memory_matrix", "test_expert_rule", "test_kept_state", "test_fuzz"),
    *("test_deadline", "test_plan_alone", "test_hostile_files", "test_export_choice", "test_profile_command"),
    *("test_bench", "test_bench_devices", "test_hybrid_server", "test_hybrid_run", "test_hybrid_native"),
    *("test_synth", "test_check", "test_bombs", "test_serve", "test_session", "test_publishing", "test_page"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, in their order; the others as they are."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the session's models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def dense_model(models: Path) -> Path:
    """Llama, 4 layers, q8_0, 2.8 MB."""
    return write(models / "dense.gguf", SynthSpec("llama"))


@pytest.fixture(scope="session")
def moe_model(models: Path) -> Path:
    """Qwen3-MoE, 4 layers of 8 experts (2 used), mixed types, 5 MB; its routing is skewed."""
    types = {"experts": "q4_K", "attention": "q8_0", "output": "q6_K"}
    return write(models / "moe.gguf", SynthSpec("qwen3moe", types=types, skew=1.0))


@pytest.fixture(scope="session")
def gdn_model(models: Path) -> Path:
    """Qwen3.5-MoE, 4 layers (three gated-delta-net, one attention) of 8 experts, q8_0."""
    return write(models / "gdn.gguf", SynthSpec("qwen35moe"))


@pytest.fixture(scope="session")
def split_model(models: Path) -> Path:
    """The first file of a Qwen3-MoE model split into several."""
    (models / "split").mkdir()
    return write(models / "split" / "moe.gguf", SynthSpec("qwen3moe", n_layers=2, shard_tensors=12))
