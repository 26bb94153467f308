"""Keys of the vocabulary that the engine's tokenizers need: left out one by one, asked of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from dry_loads import Bytes, Load, attempt
from sparse_model import string, value, write_sparse

from atsplan import main
from planner.memory.compute_buffer import vocabulary
from planner.model.gguf.reader import read_model
from planner.model.inventory import Hparam, Inventory
from planner.model.structure import structure_of
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

WORK = Workload(n_ctx=256)
Keys = Mapping[str, Hparam]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """A small model whose size of the vocabulary only its tensors tell."""
    path = write(tmp_path_factory.mktemp("words") / "m.gguf", SynthSpec("qwen3", n_layers=1))
    found = read_model(path).inventory
    kept = {key: one for key, one in found.hparams.items() if key != "vocab_size"}
    return found.model_copy(update={"hparams": kept})


def cases(count: int) -> Iterator[tuple[str, Keys]]:
    """Each kind of tokenizer whole, without each of its keys, and with too short a list."""
    tokens = tuple(f"t{n}" for n in range(count))
    scores = {"scores": (0.0,) * count}
    kinds: dict[str, Keys] = {
        "llama": {"tokens": tokens, **scores},
        "gpt2": {"pre": "qwen2", "tokens": tokens, "merges": ("t 1", "t 2")},
        "gemma4": {"tokens": tokens, **scores, "merges": ("t 1",)},
        "bert": {"tokens": tokens},
        "t5": {"tokens": tokens, **scores},
        "rwkv": {"tokens": tokens},
    }
    for kind, keys in kinds.items():
        whole = {"model": kind, **keys}
        yield kind, whole
        for left in whole:
            yield f"{kind} without {left}", {key: one for key, one in whole.items() if key != left}
        yield f"{kind} with short scores", {**whole, "scores": (0.0,)}
    yield "no vocabulary, said so, of a size that nothing says", {"model": "none"}
    yield "no vocabulary, and nothing of it said", {}


def put(path: Path, inventory: Inventory, keys: Keys) -> Path:
    """The file with these keys of its vocabulary; without `model` that key gets a name that nobody reads."""
    write_sparse(path, inventory, **keys)
    if not keys:
        path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.", b"tokenizer.none."))
    elif "model" not in keys:
        path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modex"))
    return path


def test_a_file_without_a_key_that_its_tokenizer_needs_is_refused(model: Inventory, tmp_path: Path) -> None:
    asked = dict(cases(vocabulary(structure_of(model))))
    paths = [put(tmp_path / f"{n}.gguf", model, keys) for n, keys in enumerate(asked.values())]
    for name, path, said in zip(asked, paths, attempt([Load(p, WORK) for p in paths]), strict=True):
        refused = read_model(path).refused
        assert bool(refused) == (not isinstance(said, Bytes)), (name, said, refused)
        if refused:
            done = CliRunner().invoke(main, ["solve", str(path), "--machine", "rtx4090-ddr5"])
            assert done.exit_code == 2 and "would not load it: " in done.stderr, done.output


def test_types_of_tokens_are_counted_for_encoders(tmp_path: Path) -> None:
    pairs: dict[str, Hparam] = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ("a",),
    }
    path = tmp_path / "m.gguf"
    for more, wanted in (
        ({}, ("tokenizer.ggml.token_type_count is missing",)),
        ({"token_type_count": 2}, ()),
    ):
        told: dict[str, Hparam] = {**pairs, **{f"tokenizer.ggml.{key}": one for key, one in more.items()}}
        data = b"".join(string(key) + value(one) for key, one in told.items())
        path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
                         + len(told).to_bytes(8, "little") + data)  # fmt: skip
        assert read_model(path).refused == wanted
