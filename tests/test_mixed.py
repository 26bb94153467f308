"""Models in parts, on the CPU here and on a remote device that computes alike: not a logit may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rpc_servers import rpc_serving

from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.units import Kind, units_of
from planner.plan.load_spec import LoadSpec
from planner.plan.overrides import overrides_of
from planner.site import Site
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.child.ask import ask
from runtime.load import dry_run

WORK = Workload(n_ctx=256, n_batch=64, n_ubatch=64)
TOKENS = [5, 9, 3, 7, 200, 11, 8, 8] * 6  # past the batch from which host weights are computed on a device
_LOGITS = """
from pathlib import Path
from runtime.child.serve import serve
from runtime.load import dry_run
from runtime.engine.libllama import Engine
from runtime.engine.rpc import connect
from runtime.session.session import Session

def work(request):
    engine, found = Engine.find(request["engine"]), []
    for plain in request["specs"]:
        spec, _ = connect(engine, dry_run.from_json(plain))
        with Session(engine, Path(request["model"]), spec) as session:
            devices = sorted(set(session.tensor_devices().values()))
            found.append({"devices": devices, "logits": session.logits(request["tokens"]).tolist()})
    return {"found": found}

serve(work)
"""


@pytest.fixture(scope="module")
def endpoint(computing_server: Path) -> Iterator[str]:
    """A device that computes with the kernels of the CPU here."""
    with rpc_serving(computing_server) as address:
        yield address


def specs(inventory: Inventory, device: str) -> list[LoadSpec]:
    """All on the CPU; all on the device; some experts or FFNs on the CPU; half of the layers there."""
    blocks = layers_of(inventory).n_all
    units = [u for u in units_of(inventory).units if u.kind is not Kind.FOREIGN]

    def spec(n_host: int, experts: bool) -> LoadSpec:
        out = {u.name for u in units if experts and u.kind in (Kind.EXPERTS, Kind.FFN) and (u.layer or 0) % 2}
        homes = ["CPU"] * n_host + [device] * (blocks + 1 - n_host)
        tables = (Kind.EMBEDDING, Kind.LOOKUP)
        sites = [
            Site.on("CPU" if u.name in out or u.kind in tables else homes[-1 if u.layer is None else u.layer])
            for u in units
        ]
        patterns = tuple((o.pattern, o.buffer) for o in overrides_of(inventory, units, sites, homes))
        n = blocks + 1 - n_host
        return LoadSpec((device,), (n,), n, patterns, WORK, use_extra_bufts=False, threads=1)

    alone = LoadSpec((), (), 0, (), WORK, use_extra_bufts=False, threads=1)
    return [alone, spec(0, False), spec(0, True), spec(blocks // 2, False)]


@pytest.mark.parametrize("arch", ["gpt-oss", "llama4", "qwen35moe", "gemma4", "nemotron_h_moe"])
def test_where_weights_are_does_not_change_a_logit(
    arch: str, endpoint: str, computing_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "m.gguf", SynthSpec(arch))
    (tmp_path / "logits_of.py").write_text(_LOGITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    request = {
        "engine": str(computing_server),
        "model": str(model),
        "tokens": TOKENS,
        "specs": [dry_run.to_json(s) for s in specs(read_model(model).inventory, f"RPC0[{endpoint}]")],
    }
    alone, *others = ask("logits_of", request, "test")["found"]
    assert alone["devices"] == ["CPU"]
    for other in others:
        assert other["devices"] == ["CPU", "RPC0"]
        assert other["logits"] == alone["logits"]
