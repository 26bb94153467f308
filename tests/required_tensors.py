"""What the engine requires of each architecture's layers, asked of the engine itself.

`python tests/required_tensors.py` takes a small model of every architecture that can be made or generated,
leaves out one tensor at a time with its bias and scales, groups that may be absent together, and one key at a
time, loads what is left without weights, and writes what was missed to planner/model/required_tensors.txt.
With architectures as arguments it asks only about these, and keeps the other lines.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from planner.block_names import within_block
from planner.model.inventory import Hparam, Inventory
from planner.model.layers import layers_of, stems_by_layer
from planner.model.required_tensors import GLOBAL, KEYS, PATH, kind_of, parse
from profiler.synth.synth import ARCHITECTURES, SynthProblem, SynthSpec, write

_VARIANTS: tuple[Mapping[str, int], ...] = (
    {}, {"n_nextn": 1}, {"n_expert": 8}, {"n_dense": 0},
)  # fmt: skip
_SUFFIX = re.compile(r"(\.weight)?\.(weight|bias|scale|input_scale)$")
_GROUPS = tuple(
    map(
        re.compile,
        (
            r"ffn_(up|gate|down)",
            r"ffn_\w+_exps|ffn_gate_inp|exp_probs_b",
            r"ffn_\w+_shexp",
            r"attn_(q|k|v)",
        ),
    )
)


def generated(arch: str, folder: Path) -> Iterator[Inventory]:
    """Generated models of an architecture, of every kind that its builder makes."""
    from planner.model.gguf.reader import read_model

    seen = set()
    for n, variant in enumerate(_VARIANTS):
        try:
            path = write(folder / f"{arch}-{n}.gguf", SynthSpec(arch, **variant))  # type: ignore[arg-type]
        except SynthProblem:
            continue
        made = read_model(path).inventory
        path.unlink()
        if (names := tuple(tensor.name for tensor in made.tensors)) not in seen:
            seen.add(names)
            yield made


def engine_made(names: Iterable[str], folder: Path) -> Iterator[Inventory]:
    """Models that the engine made, all optional tensors included."""
    from made_models import hparams, make

    from planner.model.gguf.reader import read_model

    for name in names:
        make(folder, [name])
        path = folder / f"{name}.gguf"
        yield read_model(path).inventory.model_copy(update={"hparams": hparams(name)})
        path.unlink()


def one_less(inventory: Inventory) -> list[Inventory]:
    """The model whole, then without each of its tensors; a weight goes with its bias and scales.

    These are counted by the engine only where it asked for the weight: left behind, they alone are refused.
    """
    return [inventory, *(without(inventory, _beside(inventory, gone.name)) for gone in inventory.tensors)]


def without(inventory: Inventory, names: frozenset[str]) -> Inventory:
    """The model less these tensors."""
    kept = tuple(t for t in inventory.tensors if t.name not in names)
    return inventory.model_copy(update={"tensors": kept})


def _stem(name: str) -> str:
    return _SUFFIX.sub("", name)


def _beside(inventory: Inventory, name: str) -> frozenset[str]:
    """A tensor, and of a weight all that goes with it."""
    if not name.endswith(".weight"):
        return frozenset({name})
    return frozenset(t.name for t in inventory.tensors if _stem(t.name) == _stem(name))


def groups(inventory: Inventory) -> list[frozenset[str]]:
    """Tensors of a layer that some files have and others do not, all of them."""
    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    for tensor in inventory.tensors:
        part = within_block(tensor.name)
        for group in _GROUPS if part else ():
            if part and group.fullmatch(_stem(part[1])):
                found[part[0], group.pattern].add(tensor.name)
    return [frozenset(names) for names in found.values()]


def missed(models: list[Inventory], folder: Path) -> Iterator[tuple[Inventory, set[str]]]:
    """Each model that the engine loads whole, and the tensors without which it does not.

    Not those of a group without which it does.
    """
    from sparse_model import write_sparse

    grouped = [groups(model) for model in models]
    lacking = [
        [*one_less(model), *(without(model, names) for names in some)]
        for model, some in zip(models, grouped, strict=True)
    ]
    paths = [
        write_sparse(folder / f"{n}-{m}.gguf", each)
        for n, less in enumerate(lacking)
        for m, each in enumerate(less)
    ]
    answers = iter(load_all([str(path) for path in paths]))
    for path in paths:
        path.unlink()
    for model, some in zip(models, grouped, strict=True):
        whole = next(answers)
        gone = {tensor.name for tensor in model.tensors if next(answers)}
        for names in some:
            if not next(answers):
                gone -= names
        if not whole:
            yield model, gone


def load_all(paths: list[str]) -> list[str]:
    """What the engine says against loading each file, "" for nothing; a child that dies is followed."""
    from engines import python

    answers: list[str] = []
    while len(answers) < len(paths):
        asked = python(__file__, "load", given=json.dumps(paths[len(answers) :]), limit_s=300)
        answers += [json.loads(line) for line in asked.stdout.splitlines()]
        if asked.returncode:
            answers.append(f"dies: {asked.stderr[-200:]}")
    return answers


def _load_here(paths: list[str]) -> Iterator[str]:
    from planner.errors import EngineProblem
    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.engine.libllama import Engine
    from runtime.load import load_params

    engine, kept = Engine.find(None), load_params.Kept()
    spec = LoadSpec((), (), 0, (), Workload(), use_mmap=False, use_extra_bufts=False)
    params = load_params.model_params(engine, spec, kept, True)
    for path in paths:
        try:
            with load_params.model(engine, Path(path), params):
                yield ""
        except EngineProblem as refused:
            yield refused.message()


Found = dict[str, dict[str, str]]  # kind of layer -> name -> "" always required, "?" of some models


def required(models: Iterable[Inventory], folder: Path) -> Found:
    """Names that the engine requires in each kind of layer of these models, all of one architecture.

    What only some layers of a kind need, in one model, depends on more than the kind: it is left out.
    """
    needed: dict[str, list[set[str]]] = defaultdict(list)
    for inventory, gone in missed([*models], folder):
        for kind, sets in _by_kind(inventory, gone).items():
            needed[kind].append(set.intersection(*sets))
    found: Found = {}
    for kind, sets in needed.items():
        always = set.intersection(*sets)
        if names := set.union(*sets):
            found[kind] = {name: "" if name in always else "?" for name in sorted(names)}
    return found


def _by_kind(inventory: Inventory, gone: set[str]) -> Mapping[str, list[set[str]]]:
    """What each layer of each kind misses."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    found[GLOBAL].append({name for name in gone if within_block(name) is None})
    layers, stems = layers_of(inventory), stems_by_layer(inventory)
    for n in range(layers.n_all):
        own = {part[1] for name in gone if (part := within_block(name)) and part[0] == n}
        if n == 0 and any(name.endswith(".attn_norm.weight") for name in gone):
            own.add("attn_norm.weight")  # without it here the engine takes the file for a NextN block alone
        found[kind_of(layers, n, stems.get(n, frozenset()))].append(own)
    return found


_UNREAD = re.compile(r"key not found in model: \w[\w.-]*?\.(?P<key>\S+)")
# Whose default contradicts some tables: the engine then finds a wrong shape, misses tensors, or dies.
_DEFAULTS = frozenset({"feed_forward_length", "leading_dense_block_count"})
_LATENT_DEFAULTS = frozenset({"attention.key_length", "rope.dimension_count"})
_SOME = frozenset({("deepseek2", "attention.q_lora_rank")})  # models of 27 layers do without


def required_keys(models: Iterable[Inventory], folder: Path) -> dict[str, str]:
    """Keys without which the engine refuses every one of these models that it loads whole."""
    from sparse_model import write_sparse

    found: list[dict[str, str]] = []
    for model in models:
        keys = sorted(model.hparams)
        less = [
            model,
            *(model.model_copy(update={"hparams": _but(model.hparams, key)}) for key in keys),
        ]
        paths = [write_sparse(folder / f"key-{n}.gguf", each) for n, each in enumerate(less)]
        whole, *answers = load_all([str(path) for path in paths])
        for path in paths:
            path.unlink()
        if not whole:
            found.append(dict(_refused(model, dict(zip(keys, answers, strict=True)))))
    every = {key: mark for each in found for key, mark in each.items()}
    return {k: every[k] for k in sorted(every) if k in _DEFAULTS or all(k in each for each in found)}


def _but(hparams: Mapping[str, Hparam], gone: str) -> dict[str, Hparam]:
    return {key: one for key, one in hparams.items() if key != gone}


def _refused(model: Inventory, answers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The keys that a model is refused without, and how they are marked in the table."""
    latent = "attention.key_length_mla" in model.hparams
    for key, said in answers.items():
        unread = _UNREAD.search(said)
        if unread and unread["key"] == key:
            yield key, "?" * ((model.architecture, key) in _SOME)
        elif said and (key in _DEFAULTS or (latent and key in _LATENT_DEFAULTS)):
            yield key, "?" * (key in _DEFAULTS)


def lines(arch: str, found: Found) -> Iterator[str]:
    """The table's lines of one architecture."""
    for kind in sorted(found):
        yield f"{arch} {kind} {' '.join(name + mark for name, mark in found[kind].items())}"


def table(names: Iterable[str]) -> str:
    """The table for these architectures."""
    from made_models import ALL, NEXTN

    text: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for arch in sorted(names):
            models = [*generated(arch, folder)] if arch in ARCHITECTURES else []
            made = [arch] if arch in ALL else []
            made += [f"{arch}+nextn"] if arch in NEXTN else []
            models += engine_made(made, folder)
            found = required(models, folder)
            text += lines(arch, found | ({KEYS: keys} if (keys := required_keys(models, folder)) else {}))
            print(arch, len(models), file=sys.stderr, flush=True)
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["load"]:
        for said in _load_here(json.load(sys.stdin)):
            print(json.dumps(said), flush=True)
    else:
        from made_models import ALL

        asked = {*sys.argv[1:]} or {*ALL, *ARCHITECTURES}
        kept = [line for line in PATH.read_text().splitlines() if line.partition(" ")[0] not in asked]
        PATH.write_text("\n".join(sorted([*kept, *table(asked).splitlines()])) + "\n")
        parse(PATH.read_text())
