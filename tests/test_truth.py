"""A load against its plan, item by item and device by device; edits by hand that no load would honour."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from small_plans import plan_for

from atsplan import main
from planner.model.gguf.reader import read_model
from planner.plan.plan import DeviceUse, Plan, from_text, to_text
from planner.workload import Workload
from runtime.engine.logs import cache_buffers
from runtime.load.dry_run import Breakdown
from runtime.verify.memory_against_plan import ItemDiffers, check_caches, check_items, planned

MIB = 2**20


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def one_line(result: Result, code: int) -> str:
    """The command failed with this code and said one line."""
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("atsplan:")]
    assert result.stdout == "" and len(lines) == 1, result.output
    return lines[0]


@pytest.fixture
def solved(gdn_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A solved plan for a Vulkan card: the experts of layer 2 on the CPU, the rest on the card."""
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    path = tmp_path / "plan.yaml"
    pins = [w for u in ("attention", "recurrent", "router") for w in ("--pin", f"blk.*.{u}=gpu")]
    done = call(
        *("solve", gdn_model, "--machine", "rx9070xt-ddr5", "--budget", "1000", "--ctx", 512),
        *("--ubatch", 64, *pins, "--pin", "blk.2.experts=cpu", "-o", path),
    )
    assert done.exit_code == 0, done.output
    made = from_text(path.read_text(), "plan")
    assert {use.name for use in made.devices} == {"Vulkan0", "CPU"}
    assert made.devices[0].state_bytes and made.devices[0].kv_bytes
    return path


def edit(path: Path, device: str, **changes: Callable[[int], int]) -> None:
    """Change figures of one device of a plan file."""
    plan = from_text(path.read_text(), "plan")

    def changed(use: DeviceUse) -> DeviceUse:
        values = {name: change(getattr(use, name)) for name, change in changes.items()}
        return use.model_copy(update=values) if use.name == device else use

    path.write_text(to_text(plan.model_copy(update={"devices": tuple(map(changed, plan.devices))})))


def test_what_is_loaded_is_what_was_planned(gdn_model: Path, vulkan_engine: Path, solved: Path) -> None:
    done = call(
        *("run", gdn_model, "--plan", solved, "--engine", vulkan_engine, "-p", "a", "-n", 2),
        *("--ignore-eos", "--json", "--threads", 1),
    )
    assert done.exit_code == 0, done.output
    memory = json.loads(done.stdout)["memory"]
    for use in from_text(solved.read_text(), "plan").devices:
        assert memory[use.name]["context"] == use.kv_bytes + use.state_bytes


def test_a_figure_that_the_engine_does_not_confirm(
    gdn_model: Path, vulkan_engine: Path, solved: Path
) -> None:
    """Nothing in a plan contradicts the size of its compute buffers: the engine's dry run does."""
    plan = from_text(solved.read_text(), "plan")
    batches = plan.workload.model_copy(update={"n_batch": 2048, "n_ubatch": 2048, "n_ctx": 2048})
    solved.write_text(to_text(plan.model_copy(update={"workload": batches})))
    edit(solved, "Vulkan0", compute_bytes=lambda size: 0, kv_bytes=lambda size: 4 * size)
    line = one_line(call("run", gdn_model, "--plan", solved, "--engine", vulkan_engine, "-p", "a"), 3)
    for part in ("Vulkan0: compute buffers: the engine would hold", "the plan says", "solve it again"):
        assert part in line


@pytest.mark.parametrize("factor", [0, 2])
def test_a_figure_that_the_plan_itself_contradicts(gdn_model: Path, solved: Path, factor: int) -> None:
    """Before any engine is asked."""
    edit(solved, "Vulkan0", weights_bytes=lambda size: factor * size)
    line = one_line(call("run", gdn_model, "--plan", solved, "-p", "a"), 2)
    assert "Vulkan0: weights of" in line and "its units hold" in line


def use_of(**sizes: int) -> DeviceUse:
    parts = {name: sizes.get(name, 0) for name in ("weights", "kv", "state", "compute", "cache")}
    return DeviceUse(
        name="CUDA0",
        kind="gpu",
        budget_bytes=2**40,
        **{f"{name}_bytes": size for name, size in parts.items()},
    )


def one_device(plan: Plan, use: DeviceUse, **workload: object) -> Plan:
    work = plan.workload.model_copy(update=workload)
    return plan.model_copy(update={"devices": (use,), "workload": work})


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"model": 2}, "weights"),
        ({"model": -2}, "weights"),
        ({"context": 1}, "KV cache and state"),
        ({"context": -1}, "KV cache and state"),
        ({"compute": 20}, "compute buffers"),
    ],
)
def test_items_beyond_their_tolerance(moe_model: Path, change: dict[str, int], item: str) -> None:
    use = use_of(weights=500 * MIB, kv=60 * MIB, state=4 * MIB, compute=200 * MIB)
    plan = one_device(plan_for(moe_model), use)
    right = planned(use)
    check_items(plan, {"CUDA0": right})
    check_items(plan, {"CUDA0": Breakdown(right.model, right.context, right.compute // 2)})
    sizes = {
        name: getattr(right, name) + change.get(name, 0) * MIB for name in ("model", "context", "compute")
    }
    with pytest.raises(ItemDiffers, match=f"CUDA0: {item}: the engine holds, now loaded, ") as problem:
        check_items(plan, {"CUDA0": Breakdown(**sizes)}, loaded=True)
    for part in (f"{problem.value.engine_bytes} bytes", f"the plan says {problem.value.planned_bytes}"):
        assert part in str(problem.value)


def test_a_device_that_holds_nothing_of_what_it_should(moe_model: Path) -> None:
    plan = one_device(plan_for(moe_model), use_of(kv=60 * MIB))
    with pytest.raises(ItemDiffers, match="CUDA0: KV cache and state: the engine would hold 0 bytes"):
        check_items(plan, {"CPU": Breakdown(0, 60 * MIB, 0)})


def test_host_weights_and_buffers_are_not_compared_but_caches_are(moe_model: Path) -> None:
    host = use_of(weights=500 * MIB, kv=60 * MIB).model_copy(update={"name": "CPU", "kind": "cpu"})
    plan = one_device(plan_for(moe_model), host)
    check_items(plan, {"CPU": Breakdown(900 * MIB, 60 * MIB, 90 * MIB)})
    with pytest.raises(ItemDiffers, match="CPU: KV cache and state"):
        check_items(plan, {"CPU": Breakdown(500 * MIB, 30 * MIB, 0)})


def test_a_head_that_speculates_keeps_its_cache_elsewhere(moe_model: Path) -> None:
    use = use_of(kv=64 * MIB)
    check_items(one_device(plan_for(moe_model), use, mtp=True), {"CUDA0": Breakdown(0, 60 * MIB, 0)})
    with pytest.raises(ItemDiffers):
        check_items(one_device(plan_for(moe_model), use, mtp=True), {"CUDA0": Breakdown(0, 65 * MIB, 0)})


LOG = """llama_kv_cache:      CUDA0 KV buffer size =    60.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =     4.00 MiB
llama_memory_recurrent:        CPU RS buffer size =     8.00 MiB
llama_kv_cache: size =   64.00 MiB (   512 cells,   6 layers,  1/1 seqs), K (f16): 32.00 MiB
sched_reserve:      CUDA0 compute buffer size =    12.50 MiB""".splitlines()


def test_caches_each_for_itself(moe_model: Path) -> None:
    found = cache_buffers(LOG)
    assert found == {"KV": {"CUDA0": 64 * MIB}, "RS": {"CPU": 8 * MIB}}
    plan = one_device(plan_for(moe_model), use_of(kv=64 * MIB))
    check_caches(plan, found)
    check_caches(plan, {})  # a build that prints nothing
    swapped = one_device(plan, use_of(kv=56 * MIB, state=8 * MIB))
    check_items(swapped, {"CUDA0": Breakdown(0, 64 * MIB, 0)})
    with pytest.raises(ItemDiffers, match="CUDA0: KV cache: the engine holds, now loaded, 67108864 bytes"):
        check_caches(swapped, found)
    with pytest.raises(ItemDiffers, match="CUDA0: recurrent state: the engine holds, now loaded, 0 bytes"):
        check_caches(one_device(plan, use_of(kv=64 * MIB, state=8 * MIB)), found)


EDITS = [
    ("mtp: false", "mtp: true", "workload: mtp is true, but the model holds no NextN/MTP block"),
    ("n_ctx: 256", "n_ctx: 512", "KV cache of 524288 bytes, workload and layers give 1048576"),
    ("n_ctx: 256", "n_ctx: 300", "KV cache of"),
    ("type_k: f16", "type_k: q8_0", "KV cache of"),
    ("last: 4, device: CUDA0", "last: 4, device: CUDA1", "CUDA0"),
]


@pytest.mark.parametrize(("before", "after", "part"), EDITS)
def test_an_edited_plan_is_refused_before_the_engine_is_asked(
    moe_model: Path, tmp_path: Path, before: str, after: str, part: str
) -> None:
    text = to_text(plan_for(moe_model))
    assert before in text
    path = tmp_path / "plan.yaml"
    path.write_text(text.replace(before, after))
    for command in (
        ("run", moe_model, "--plan", path, "--device-map", "CUDA0=CPU", "-p", "a"),
        ("bench", moe_model, "--plan", path, "--device-map", "CUDA0=CPU"),
        ("export", path, "--inventory", moe_model),
    ):
        line = one_line(call(*command), 2)
        assert part in line and str(path) in line


def test_check_names_the_line_of_a_head_that_is_not_there(dense_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    made = call("solve", dense_model, "--machine", "cpu-only-ddr5", "--ctx", 512, "-o", path)
    assert made.exit_code == 0, made.output
    path.write_text(path.read_text().replace("mtp: false", "mtp: true"))
    done = call("check", path, "--model", dense_model, "--no-resolve")
    assert done.exit_code == 1
    (line,) = [row for row in done.stdout.splitlines() if "NextN" in row]
    number = next(n for n, row in enumerate(path.read_text().splitlines(), 1) if row.startswith("workload"))
    assert line.startswith(f"{path}:{number}: ") and "mtp is true" in line


def test_a_model_with_such_a_head_may_load_it(tmp_path: Path) -> None:
    from planner.check.consistency import workload_faults
    from profiler.synth.synth import SynthSpec, write

    model = write(tmp_path / "m.gguf", SynthSpec("qwen35moe", n_nextn=1))
    assert workload_faults(Workload(mtp=True), read_model(model).inventory) == []
