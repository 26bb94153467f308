"""What has to be measured for a model: held to the graph that the engine really builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from profiler.operators.cases import Job, Place, attention_shapes, cases_of, job_of, jobs_of, state_shape

GRAPH = """
import json, sys
from pathlib import Path
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.load import load_params
from runtime.engine.ggml import Tensor
from runtime.engine.libllama import Engine

engine, kept = Engine.find(), load_params.Kept()
work = Workload(n_ctx=512, n_ubatch=64)
spec = LoadSpec((), (), 0, (), work, use_mmap=False, use_extra_bufts=False)
params = load_params.model_params(engine, spec, kept, True)
with load_params.model(engine, Path(sys.argv[1]), params) as model:
    with load_params.context(engine, model, load_params.context_params(engine, spec, kept)) as context:
        graph = getattr(engine.lib, "_Z19llama_graph_reserveP13llama_contextjjj")(context, 1, 1, 1)
        found = []
        for i in range(engine.ggml.lib.ggml_graph_n_nodes(graph)):
            node = Tensor.from_address(engine.ggml.lib.ggml_graph_node(graph, i))
            op = engine.ggml.lib.ggml_op_name(node.op).decode()
            weight = Tensor.from_address(node.src[0]) if node.src[0] else None
            if op in ("MUL_MAT", "MUL_MAT_ID") and weight.name.endswith(b".weight"):
                kind = engine.ggml.lib.ggml_type_name(weight.type).decode()
                found.append([op, kind, [n for n in weight.ne if n > 1]])
            if op in ("FLASH_ATTN_EXT", "GATED_DELTA_NET", "SSM_SCAN", "GET_ROWS"):
                found.append([op, "", []])
print(json.dumps(found))
"""


def engine_cases(model: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Operators with weights, and the names of those without, of the decode graph."""
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", GRAPH, str(model)], capture_output=True, text=True, env=environment, check=True
    )
    return [(op, kind, tuple(shape)) for op, kind, shape in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("fixture", ["dense_model", "moe_model", "gdn_model"])
def test_every_product_of_the_engines_graph_is_a_case_and_no_other(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(fixture)
    graph = engine_cases(path)
    ours = {c for c in cases_of(read_model(path).inventory) if c.batch == 1}
    # A product with one row (the gate of a shared expert) is a small operator like a norm.
    products = {(op, kind, s) for op, kind, s in graph if op.startswith("MUL_MAT") and len(s) > 1}
    assert {(c.op, c.type, c.shape) for c in ours if c.op.startswith("MUL_MAT")} == products
    others = {op for op, _, _ in graph if not op.startswith("MUL_MAT")}
    assert others <= {c.op for c in ours}


def test_each_operator_stands_once_however_many_layers_have_it(moe_model: Path) -> None:
    cases = cases_of(read_model(moe_model).inventory)
    assert len(set(cases)) == len(cases)
    experts = [c for c in cases if c.op == "MUL_MAT_ID" and c.batch == 1]
    assert {c.used for c in experts} == {2}
    assert len(experts) < 4


def test_the_state_operator_has_its_batch_regimes(gdn_model: Path) -> None:
    cases = [c for c in cases_of(read_model(gdn_model).inventory) if c.op == "GATED_DELTA_NET"]
    assert [c.batch for c in cases] == [1, 16, 512]
    assert {c.shape for c in cases} == {state_shape(read_model(gdn_model).inventory)}


def test_depths_stop_at_the_models_context_and_at_the_wish(dense_model: Path) -> None:
    inventory = read_model(dense_model).inventory  # trained for 4096
    flash = [c.depth for c in cases_of(inventory) if c.op == "FLASH_ATTN_EXT" and c.batch == 1]
    assert flash == [0, 4096]
    assert {c.depth for c in cases_of(inventory, max_depth=100) if c.op == "FLASH_ATTN_EXT"} == {0}


def test_layers_with_different_heads_are_different_cases(dense_model: Path) -> None:
    inventory: Inventory = read_model(dense_model).inventory
    mixed = inventory.model_copy(
        update={"hparams": inventory.hparams | {"attention.head_count_kv": (2, 0, 4, 2)}}
    )
    assert len(attention_shapes(mixed)) == 2


def test_only_places_that_matter_are_measured(moe_model: Path) -> None:
    places = (
        Place("CPU", "CPU", "own"),
        Place("CUDA0", "CUDA0", "own"),
        Place("CPU", "CUDA_Host", "host"),
        Place("CUDA0", "CUDA_Host", "zero-copy"),
        Place("CPU", "CPU_REPACK", "repack"),
    )
    jobs = jobs_of(cases_of(read_model(moe_model).inventory), places)
    assert {j.case.op for j in jobs if j.place.kind == "zero-copy"} == {"MUL_MAT_ID"}
    assert {j.case.batch for j in jobs if j.place.kind == "host"} == {1}
    assert {j.case.batch for j in jobs if j.place.kind == "repack"} == {1, 512}
    assert len({j.key for j in jobs}) == len(jobs)


def test_a_job_survives_json(moe_model: Path) -> None:
    from dataclasses import asdict

    for job in jobs_of(cases_of(read_model(moe_model).inventory), (Place("CPU", "CPU", "own"),)):
        back: Job = job_of(json.loads(json.dumps(asdict(job))))
        assert back == job
