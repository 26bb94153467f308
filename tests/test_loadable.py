"""What stock llama.cpp would not load is refused by every command, with one reason and one exit code.

The engine itself is the judge: what is refused here it refuses too, and what it loads is planned.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from engines import ROOT
from made_models import ALL, hparams, make
from required_tensors import load_all, one_less
from sparse_model import write_sparse

from atsplan import main
from planner.model.gguf.header import parse_header
from planner.model.gguf.reader import read_model
from planner.model.inventory import Hparam, Inventory, from_text, to_text
from planner.model.validity import load_faults
from planner.plan.plan import from_text as plan_from
from planner.plan.plan import to_text as plan_text
from profiler.synth.synth import ARCHITECTURES, SynthSpec, write

Edit = Callable[[Inventory], Inventory]
MACHINE = ("--machine", "rtx4090-ddr5")


def without(*names: str) -> Edit:
    """The model less the tensors of these names, or with these endings."""
    return lambda m: m.model_copy(
        update={"tensors": tuple(t for t in m.tensors if not t.name.endswith(names))}
    )


def saying(**values: Hparam | None) -> Edit:
    """The model with other hyperparameters; None takes one away. `__` stands for a dot."""
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return lambda m: m.model_copy(
        update={"hparams": {k: v for k, v in {**m.hparams, **changed}.items() if v is not None}}
    )


# Kind -> what is done to the table of a GLM-4.5 with a NextN block (layer 4; layer 0 is dense), the reason.
TABLES: Mapping[str, tuple[Edit, str]] = {
    "a norm of one layer": (without("blk.2.attn_norm.weight"), "blk.2.attn_norm.weight is missing"),
    "the norm of all layers": (without("post_attention_norm.weight"), "blk.0.post_attention_norm"),
    "the last norm": (without("output_norm.weight"), "output_norm.weight is missing"),
    "the embedding": (without("token_embd.weight"), "token_embd.weight is missing"),
    "a weight beside its bias": (without("blk.0.attn_q.weight"), "blk.0.attn_q.weight is missing"),
    "queries of all layers": (without("attn_q.weight"), "blk.0.attn_q.weight is missing"),
    "the only dense gate": (without("blk.0.ffn_gate.weight"), "blk.0.ffn_gate.weight is missing"),
    "up of the experts": (without("ffn_up_exps.weight"), "blk.1.ffn_up_exps.weight is missing"),
    "a router": (without("blk.3.ffn_gate_inp.weight"), "blk.3.ffn_gate_inp.weight is missing"),
    "a shared expert": (without("blk.2.ffn_up_shexp.weight"), "blk.2.ffn_up_shexp.weight is missing"),
    "a selection bias": (without("blk.1.exp_probs_b.bias"), "blk.1.exp_probs_b.bias is missing"),
    "a norm of the NextN block": (without("nextn.enorm.weight"), "blk.4.nextn.enorm.weight is missing"),
    "a NextN block uncounted": (saying(nextn_predict_layers=0), "nextn_predict_layers does not count it"),
    "a NextN block unsaid": (saying(nextn_predict_layers=None), "nextn_predict_layers does not count it"),
    "no length": (saying(context_length=None), "glm4moe.context_length is missing"),
    "wider keys": (saying(attention__key_length=128), "attn_k.weight has 128 rows"),
    "unsaid heads": (
        saying(attention__key_length=None, attention__head_count=2), "does not say attention.key_length"
    ),
    "more experts": (saying(expert_count=16), "holds 8 experts, expert_count says 16"),
    "fewer layers": (saying(block_count=4), "block_count is 4"),
    "a wider model": (saying(embedding_length=512), "embedding_length says 512"),
}  # fmt: skip
# Kind -> key, its type and value as written, the reason.
TYPES: Mapping[str, tuple[str, bytes, str]] = {
    "a count of 64 bits": ("glm4moe.block_count", struct.pack("<IQ", 10, 5), "block_count: of a number type"),
    "a signed count": ("glm4moe.expert_count", struct.pack("<Ii", 5, 8), "expert_count: of a number type"),
    "a count as a list": (
        "glm4moe.embedding_length", struct.pack("<IIQI", 9, 4, 1, 256), "embedding_length: of a number type"
    ),
    "a fraction of 64 bits": (
        "glm4moe.attention.layer_norm_rms_epsilon", struct.pack("<Id", 12, 1e-5), "epsilon: of a number type"
    ),
    "a whole base": ("glm4moe.rope.freq_base", struct.pack("<II", 4, 10000), "freq_base: of a number type"),
    "a token as text": (
        "tokenizer.ggml.eos_token_id", struct.pack("<IQ", 8, 1) + b"2", "eos_token_id: of a number type"
    ),
    "an adapter": ("general.type", struct.pack("<IQ", 8, 7) + b"adapter", "general.type is adapter"),
    "a matrix": ("general.type", struct.pack("<IQ", 8, 7) + b"imatrix", "general.type is imatrix"),
    "shards as text": ("split.count", struct.pack("<IQ", 8, 1) + b"1", "split.count: of a number type"),
}  # fmt: skip


def retyped(data: bytes, key: str, value: bytes) -> bytes:
    """A file with a key of another value, or one more key."""
    header = parse_header(data, "model")
    kv = header.get(key)
    if kv is None:
        entry = struct.pack("<Q", len(key)) + key.encode() + value
        counts = struct.pack("<QQ", len(header.infos), len(header.kvs) + 1)
        head = data[:8] + counts + data[24 : header.kvs_end] + entry + data[header.kvs_end : header.end]
    else:
        head = data[: kv.value_start - 4] + value + data[kv.end : header.end]
    return head + bytes(-len(head) % header.alignment) + data[header.data_offset :]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the engine loads, and a plan of it beside it."""
    folder = tmp_path_factory.mktemp("loadable")
    path = write(folder / "model.gguf", SynthSpec("glm4moe", n_nextn=1))
    done = told("solve", path, *MACHINE, "--budget", "2000", "-c", "256", "-o", folder / "plan.yaml")
    assert done.exit_code == 0, done.output
    return path


def told(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def every(model: Path, plan: Path, folder: Path) -> Iterator[tuple[str, Result]]:
    """What each command that takes a model says of it."""
    log = folder / "measured.json"
    log.write_text("[]")
    asked: Mapping[str, tuple[object, ...]] = {
        "inventory": (model, "--strict"),
        "solve": (model, *MACHINE, "--budget", "2000", "-o", folder / "new.yaml"),
        "fit": (model, *MACHINE, "-c", "256"),
        "sweep": (model, *MACHINE, "--budgets", "1000:2000:1000"),
        "explain": (plan, "--model", model),
        "check": (plan, "--model", model),
        "diff": (plan, plan, "--model", model),
        "refine": (plan, "--measured", log, "--model", model, "-o", folder / "better.yaml"),
        "export": (plan, "--inventory", model, "-o", folder / "line.sh"),
    }
    if model.suffix == ".gguf":
        asked = {
            **asked,
            "rewrite": (model, "--plan", plan, "-o", folder / "new.gguf"),
            "run": (model, "--plan", plan, "--device-map", "CUDA0=CPU", "-p", "a"),
            "bench": (model, "--plan", plan, "--device-map", "CUDA0=CPU"),
            "serve": (model, "--plan", plan, "--device-map", "CUDA0=CPU"),
        }
    for name, words in asked.items():
        yield name, told(name, *words)


def refused_alike(model: Path, plan: Path, folder: Path, why: str) -> None:
    """Every command says the same, in one line, and leaves nothing behind."""
    before = {*folder.iterdir(), folder / "measured.json"}
    lines = {}
    for name, done in every(model, plan, folder):
        line = done.stderr.strip().splitlines()[-1]
        assert done.exit_code == 2 and "Traceback" not in done.output, f"{name}: {done.output}"
        assert why in line and "\n" not in done.stderr.strip(), f"{name}: {done.stderr}"
        lines[name] = line.removeprefix("atsplan: ").removeprefix(f"{model}: ")
    assert len(set(lines.values())) == 1, lines
    assert {*folder.iterdir()} <= before


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_the_engine_refuses_no_command_takes(kind: str, whole: Path, tmp_path: Path) -> None:
    edit, why = TABLES[kind]
    model = edit(read_model(whole).inventory)
    path = write_sparse(tmp_path / "model.gguf", model)
    assert load_all([str(path)]) != [""]
    plan = tmp_path / "plan.yaml"
    plan.write_text(whole.with_name("plan.yaml").read_text())
    refused_alike(path, plan, tmp_path, why)


@pytest.mark.parametrize("kind", TYPES)
def test_metadata_of_another_type_no_command_takes(kind: str, whole: Path, tmp_path: Path) -> None:
    key, value, why = TYPES[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(retyped(whole.read_bytes(), key, value))
    assert key == "general.type" or load_all([str(path)]) != [""]
    plan = tmp_path / "plan.yaml"
    plan.write_text(whole.with_name("plan.yaml").read_text())
    refused_alike(path, plan, tmp_path, why)


_PACKED = {2: "H", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}


def listed(kind: int, values: Iterable[object]) -> bytes:
    """An array of a GGUF value type."""
    cast = {6: float, 7: bool}.get(kind, int)
    packed = b"".join(struct.pack("<" + _PACKED[kind], cast(int(str(v)))) for v in values)
    return struct.pack("<IIQ", 9, kind, len(packed) // struct.calcsize(_PACKED[kind])) + packed


def test_types_are_read_as_the_engine_reads_them(tmp_path: Path) -> None:
    """Every count as a list and as a wider number, lists of every kind of number."""
    gemma = write(tmp_path / "gemma.gguf", SynthSpec("gemma4", n_layers=2)).read_bytes()
    mla = write(tmp_path / "mla.gguf", SynthSpec("deepseek2", n_layers=2)).read_bytes()
    changed = [
        retyped(data, kv.key, value)
        for data in (gemma, mla)
        for kv in parse_header(data, "model").kvs
        if type(kv.value) is int and kv.key.partition(".")[0] in ("gemma4", "deepseek2")
        for value in (listed(4, [kv.value] * 2), struct.pack("<IQ", 10, kv.value))
        if not kv.key.endswith(".vocab_size")
    ]
    pattern = "gemma4.attention.sliding_window_pattern"
    changed += [retyped(gemma, pattern, listed(kind, (1, 0))) for kind in _PACKED]
    changed += [
        retyped(mla, f"tokenizer.ggml.{key}", listed(kind, (1,) * header.length))
        for key in ("tokens", "token_type")
        for kind in (4, 5, 6)
        if (header := parse_header(mla, "model").get(f"tokenizer.ggml.{key}"))
    ]
    paths = [tmp_path / f"{n}.gguf" for n in range(len(changed))]
    for path, data in zip(paths, changed, strict=True):
        path.write_bytes(data)
    for path, said in zip(paths, load_all([str(path) for path in paths]), strict=True):
        model = read_model(path)
        assert bool(model.refused or load_faults(model.inventory)) == bool(said), (path.name, said)


@pytest.mark.parametrize("kind", ["a norm of one layer", "a weight beside its bias", "unsaid heads"])
def test_an_inventory_is_judged_as_its_file(kind: str, whole: Path, tmp_path: Path) -> None:
    edit, why = TABLES[kind]
    model = edit(read_model(whole).inventory)
    path, plan = tmp_path / "model.inventory.yaml", tmp_path / "plan.yaml"
    path.write_text(to_text(model))
    plan.write_text(whole.with_name("plan.yaml").read_text())
    refused_alike(path, plan, tmp_path, why)
    # Beside the plan, where its digest alone says that they belong together.
    (tmp_path / "inputs").mkdir()
    made = plan_from(plan.read_text(), "plan")
    there = made.model.model_copy(update={"table_digest": model.table_digest()})
    plan.write_text(plan_text(made.model_copy(update={"model": there})))
    (tmp_path / "inputs" / f"{made.model.name}.inventory.yaml").write_text(to_text(model))
    for words in (("explain", plan), ("check", plan), ("export", plan)):
        done = told(*words)
        assert done.exit_code == 2 and why in done.output, f"{words[0]}: {done.output}"


@pytest.mark.parametrize("size", [0, 64])
def test_a_size_below_type_and_shape_no_command_takes(size: int, whole: Path, tmp_path: Path) -> None:
    model = read_model(whole).inventory
    small = tuple(
        t.model_copy(update={"size_bytes": size}) if t.name == "token_embd.weight" else t
        for t in model.tensors
    )
    path, plan = tmp_path / "model.inventory.yaml", tmp_path / "plan.yaml"
    path.write_text(to_text(model.model_copy(update={"tensors": small})))
    plan.write_text(whole.with_name("plan.yaml").read_text())
    refused_alike(path, plan, tmp_path, f"token_embd.weight: holds {size} bytes, its type and shape need")


def test_a_whole_model_every_command_takes(whole: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(whole.with_name("plan.yaml").read_text())
    (tmp_path / "measured.json").write_text("[]")
    for words in (
        ("inventory", whole, "--strict"),
        ("fit", whole, *MACHINE, "-c", "256"),
        ("explain", plan, "--model", whole),
        ("check", plan, "--model", whole),
        ("diff", plan, plan, "--model", whole),
        ("export", plan, "--inventory", whole),
        ("rewrite", whole, "--plan", plan, "-o", tmp_path / "new.gguf"),
    ):
        done = told(*words)
        assert done.exit_code == 0 and "would not load" not in done.output, f"{words[0]}: {done.output}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "plans" / "inputs").glob("*.inventory.yaml")), ids=lambda p: p.name
)
def test_no_real_table_is_refused(path: Path) -> None:
    assert load_faults(from_text(path.read_text(), str(path))) == ()


def test_no_generated_model_is_refused(tmp_path: Path) -> None:
    for arch, habit in ARCHITECTURES.items():
        for more in ({}, {"n_nextn": 1} if habit.nextn else {"n_layers": 9}, {"fused_gate_up": True}):
            if more and "fused_gate_up" in more and not habit.fusible:
                continue
            path = write(tmp_path / "model.gguf", SynthSpec(arch, **more))
            model = read_model(path)
            assert (*model.refused, *load_faults(model.inventory)) == (), arch


def leaner(*patterns: str) -> Edit:
    """The model less the tensors whose names begin as these patterns say."""
    gone = re.compile("|".join(patterns))
    return lambda m: m.model_copy(update={"tensors": tuple(t for t in m.tensors if not gone.match(t.name))})


_ROUTED = r"blk\.0\.(ffn_\w+exps?\.|ffn_gate_inp|exp_probs)"
_DENSE = r"blk\.1\.ffn_(up|gate|down)\."
# What files of an architecture leave out of all that it may have.
LEAN: Mapping[str, tuple[Edit, ...]] = {
    "mimo2": (leaner(_ROUTED, _DENSE),),
    "hy_v3": (leaner(_ROUTED, _DENSE), leaner(r"blk\.\d\.ffn_(up|gate|down)_shexp\.")),
    "grok": (leaner(r"blk\.\d\.ffn_(up|gate|down)\."), leaner(r"blk\.\d\.ffn_gate_exps\.")),
    "granitemoe": (leaner(r"blk\.\d\.ffn_gate_exps\."),),
    "ernie4_5-moe": (leaner(r"blk\.\d\.ffn_gate_exps\."),),
    "codeshell": (leaner("token_embd"),),
    "deci": (lambda m: saying(feed_forward_length=(384, 0))(leaner(r"blk\.1\.ffn")(m)),),
}


def test_no_model_that_the_engine_makes_is_refused(tmp_path: Path) -> None:
    """But one that it does not load again: it saves not every tensor. Nor less of one, as real files have."""
    make(tmp_path, ALL)
    refused, lean = [], []
    for arch in ALL:
        model = read_model(tmp_path / f"{arch}.gguf").inventory.model_copy(update={"hparams": hparams(arch)})
        if load_faults(model):
            refused.append(str(write_sparse(tmp_path / f"{arch}-again.gguf", model)))
        for n, edit in enumerate(LEAN.get(arch, ())):
            edited = edit(model)
            assert edited.tensors != model.tensors and load_faults(edited) == (), arch
            lean.append(str(write_sparse(tmp_path / f"{arch}-{n}.gguf", edited)))
    said = load_all([*lean, *refused])
    assert not any(said[: len(lean)]) and len(refused) <= 1 and all(said[len(lean) :])


def test_what_a_generated_model_may_leave_out_is_not_missed(whole: Path, tmp_path: Path) -> None:
    glm = read_model(whole).inventory
    gemma = read_model(write(tmp_path / "gemma.gguf", SynthSpec("gemma4"))).inventory
    last = int(str(gemma.hparams["block_count"])) - 1
    reader = leaner(rf"blk\.{last}\.attn_(k|v|k_norm)\.")(gemma)
    models = [
        leaner(r"blk\.[0-3]\.")(glm),  # the NextN block alone
        saying(context_length=0)(glm),
        saying(attention__shared_kv_layers=1)(reader),
    ]
    assert [load_faults(model) for model in models] == [(), (), ()]
    paths = [write_sparse(tmp_path / f"{n}.gguf", model) for n, model in enumerate(models)]
    data = whole.read_bytes()
    unread = retyped(data, "glm4moe.my_tool.trained_count", struct.pack("<Ii", 5, 3))
    for name, changed in {
        "unread": unread,
        "merge": retyped(data, "general.type", struct.pack("<IQ", 8, 5) + b"merge"),
    }.items():
        paths.append(tmp_path / f"{name}.gguf")
        paths[-1].write_bytes(changed)
        assert read_model(paths[-1]).refused == ()
    assert any("trained_count: no u32" in note for note in read_model(tmp_path / "unread.gguf").notes)
    assert load_all([str(path) for path in paths]) == [""] * len(paths)
    assert load_faults(reader)  # where no layer reads another's cache
    sizes = ("--budget", "2000", "-c", "max", "-o", tmp_path / "plan.yaml")
    assert told("solve", paths[1], *MACHINE, *sizes).exit_code == 0  # a context_length of 0 says nothing


def test_an_old_adapter_is_called_one(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    path.write_bytes(retyped(whole.read_bytes(), "adapter.type", struct.pack("<IQ", 8, 4) + b"lora"))
    assert read_model(path).refused == ("adapter.type is lora: an adapter, not a model",)


@pytest.mark.parametrize("spec", [SynthSpec("granitehybrid"), SynthSpec("gpt-oss"), SynthSpec("gemma4")])
def test_each_tensor_that_the_engine_misses_is_missed(spec: SynthSpec, tmp_path: Path) -> None:
    models = one_less(read_model(write(tmp_path / "model.gguf", spec)).inventory)
    said = load_all([str(write_sparse(tmp_path / f"{n}.gguf", each)) for n, each in enumerate(models)])
    unlike = [
        gone.name
        for gone, model, refusal in zip(models[0].tensors, models[1:], said[1:], strict=True)
        if bool(refusal) != bool(load_faults(model))
    ]
    assert unlike == []
