"""Drafts: the model's own greedy tokens, whatever the draft guesses; what cannot be drafted is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import ROOT
from small_plans import HERE, plan_for

from atsplan import main
from planner.constants import STOCK_DRAFT
from planner.drafts.length import DraftLength
from planner.errors import EngineProblem, InputError
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import to_text
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.engine.libllama import Engine
from runtime.session import draft_model
from runtime.session.draft_model import OtherVocabulary, check_vocabulary
from runtime.session.session import Session, Timings

PLAIN = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=16, n_ubatch=16), threads=1)
PROMPT = "The young engineer measured the water level before noon, and then"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.find()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that shares the generated models' vocabulary and knows nothing of them."""
    return write(tmp_path_factory.mktemp("draft") / "small.gguf", SynthSpec("llama", n_layers=2, seed=9))


def plainly(engine: Engine, model: Path, n: int, **options: object) -> tuple[Timings, str]:
    """The model alone."""
    heard: list[str] = []
    with Session(engine, model, PLAIN) as session:
        return session.generate(PROMPT, n, heard.append, **options), "".join(heard)  # type: ignore[arg-type]


def drafted(
    engine: Engine, model: Path, draft: Path, n: int, guesses: int | DraftLength = 4, **options: object
) -> tuple[Timings, str]:
    """The model with a draft."""
    heard: list[str] = []
    spec = replace(PLAIN, rollback=guesses if isinstance(guesses, int) else guesses.high)
    with Session(engine, model, spec) as session, Session(engine, draft, spec) as guesser:
        check_vocabulary(session, guesser)
        made = draft_model.generate(session, guesser, guesses, PROMPT, n, heard.append, **options)  # type: ignore[arg-type]
    return made, "".join(heard)


@pytest.mark.parametrize("guesses", [1, 4, 14])
@pytest.mark.parametrize("which", ["dense", "moe", "recurrent", "real"])
def test_tokens_are_those_of_the_model_alone(
    engine: Engine,
    which: str,
    guesses: int,
    small: Path,
    dense_model: Path,
    moe_model: Path,
    gdn_model: Path,
) -> None:
    real = ROOT / "tests" / "data" / "tiny-moe.gguf"
    model = {"dense": dense_model, "moe": moe_model, "recurrent": gdn_model, "real": real}[which]
    alone, text = plainly(engine, model, 30, ignore_end=True)
    drafts = [model] if which == "real" else [model, small]
    for draft in drafts:
        made, said = drafted(engine, model, draft, 30, guesses, ignore_end=True)
        assert (made.tokens, said) == (alone.tokens, text)
        assert made.prompt_tokens == alone.prompt_tokens
        assert made.guessed >= made.accepted
        if draft == model:
            # It agrees with itself, so that each pass makes all its guesses and one token more.
            assert made.accepted == made.guessed >= 29 - 29 // (guesses + 1) - 1
        else:
            assert made.accepted < made.guessed


def test_an_answer_ends_where_the_model_alone_would_end_it(engine: Engine, dense_model: Path) -> None:
    alone, text = plainly(engine, dense_model, 12, ignore_end=True)
    stop = text[len(text) // 2 :][:2]
    assert stop
    for n in (1, 2, 3, 12):
        assert drafted(engine, dense_model, dense_model, n, ignore_end=True)[0].tokens == alone.tokens[:n]
    ended = plainly(engine, dense_model, 12, stop=[stop])
    made = drafted(engine, dense_model, dense_model, 12, stop=[stop])
    assert (made[0].tokens, made[1]) == (ended[0].tokens, ended[1])
    assert stop not in made[1]


def test_an_end_of_text_among_the_guesses_ends_the_answer(
    engine: Engine, dense_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = plainly(engine, dense_model, 8, ignore_end=True)
    last = alone.tokens[5]
    assert last not in alone.tokens[:5]
    monkeypatch.setattr(Session, "is_end", lambda self, token: token == last)
    assert drafted(engine, dense_model, dense_model, 8)[0].tokens == alone.tokens[:5]


def test_a_recurrent_model_that_cannot_go_back_is_refused(
    engine: Engine, small: Path, tmp_path: Path
) -> None:
    model = write(tmp_path / "mamba.gguf", SynthSpec("mamba2"))
    with pytest.raises(EngineProblem, match=r"mamba\.gguf: its recurrent state cannot take tokens back"):
        drafted(engine, model, small, 20, ignore_end=True)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (SynthSpec("llama", n_layers=1, n_vocab=1024), "1024 tokens against 512"),
        (SynthSpec("llama", n_layers=1, n_vocab=600), ""),
    ],
)
def test_a_vocabulary_may_differ_by_its_padding_only(
    engine: Engine, dense_model: Path, tmp_path: Path, spec: SynthSpec, why: str
) -> None:
    draft = write(tmp_path / "draft.gguf", spec)
    if why:
        with pytest.raises(OtherVocabulary, match=why):
            drafted(engine, dense_model, draft, 3)
    else:
        alone, _ = plainly(engine, dense_model, 20, ignore_end=True)
        assert drafted(engine, dense_model, draft, 20, ignore_end=True)[0].tokens == alone.tokens


def test_other_tokens_are_another_vocabulary(
    engine: Engine, dense_model: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(engine, dense_model, PLAIN) as one, Session(engine, small, PLAIN) as other:
        real = engine.lib.llama_vocab_get_text
        monkeypatch.setattr(
            engine.lib,
            "llama_vocab_get_text",
            lambda vocab, token: b"?" if (vocab, token) == (other.vocab, 300) else real(vocab, token),
        )
        with pytest.raises(OtherVocabulary, match=r"token 300 is b'\?' against b'"):
            check_vocabulary(one, other)


def test_more_guesses_than_a_ubatch_holds_are_refused_not_aborted_on(
    engine: Engine, dense_model: Path
) -> None:
    with pytest.raises(InputError, match="15 guesses at a time: a ubatch of 16 takes at most 14"):
        drafted(engine, dense_model, dense_model, 3, 15)


def test_run_with_a_draft(moe_model: Path, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))
    base = ["run", str(moe_model), "--plan", str(path), *HERE, "--threads", "1", "-p", "The cat", "--raw"]
    base += ["-n", "12", "--ignore-eos", "--json"]
    alone = CliRunner().invoke(main, base)
    helped = CliRunner().invoke(main, [*base, "--draft", str(moe_model), "--draft-max", "3"])
    assert helped.exit_code == 0, helped.output
    first, second = json.loads(alone.stdout), json.loads(helped.stdout)
    assert first["tokens"] == second["tokens"] and first["text"] == second["text"]
    assert (first["guessed"], second["accepted"]) == (0, second["guessed"])
    assert second["memory"]["CPU"]["model"] > first["memory"]["CPU"]["model"]
    assert f"draft: {second['accepted']} of {second['guessed']} guesses accepted" in helped.stderr
    warm = CliRunner().invoke(main, [*base, "--draft", str(small), "--temp", "0.5"])
    assert warm.exit_code == 2 and "leave --temp at 0" in warm.stderr
    gone = CliRunner().invoke(main, [*base, "--draft", str(tmp_path / "no.gguf")])
    assert gone.exit_code == 2 and "no such file" in gone.stderr


def test_the_length_follows_what_a_sequence_accepts(engine: Engine, dense_model: Path, small: Path) -> None:
    """A draft that is always right comes to the most, one that never is to the least, for each text anew."""
    right, _ = drafted(engine, dense_model, dense_model, 60, DraftLength(2), ignore_end=True)
    made = [guesses for guesses, _ in right.drafts]
    assert made[:5] == [2] * 5 and max(made) == 4
    wrong, _ = drafted(engine, dense_model, small, 60, DraftLength(4), ignore_end=True)
    assert wrong.accepted * 100 < 15 * wrong.guessed  # random weights of another seed
    assert [guesses for guesses, _ in wrong.drafts][25] == 2
    assert right.tokens == wrong.tokens == plainly(engine, dense_model, 60, ignore_end=True)[0].tokens


def test_a_draft_on_a_device_that_is_not_here(moe_model: Path, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))
    words = ["run", str(moe_model), "--plan", str(path), *HERE, "-p", "a", "--draft", str(small)]
    found = CliRunner().invoke(main, [*words, "--draft-device", "CUDA7"])
    assert (found.exit_code, found.stdout) == (3, "")
    assert found.stderr.endswith("no device CUDA7 on this machine (there is CPU); give --draft-device CPU\n")


def test_bench_with_a_draft_measures_the_plan_without_it_too(
    moe_model: Path, small: Path, tmp_path: Path
) -> None:
    path, metrics = tmp_path / "plan.yaml", tmp_path / "m.prom"
    path.write_text(to_text(plan_for(moe_model)))
    base = ["bench", str(moe_model), "--plan", str(path), *HERE, "--threads", "1", "--against", "all-cpu"]
    base += ["--rounds", "1", "--prompts", "12", "-n", "6", "--json", "--prometheus", str(metrics)]
    done = CliRunner().invoke(main, [*base, "--draft", str(small)])
    assert done.exit_code == 0, done.output
    plan, alone, cpu = json.loads(done.stdout)["contenders"]
    assert [plan["name"], alone["name"], cpu["name"]] == ["plan", "no-draft", "all-cpu"]
    assert plan["setting"] == f"the plan, drafts of {STOCK_DRAFT} by small.gguf"
    assert plan["guessed"] > 0 and alone["guessed"] == cpu["guessed"] == 0
    assert 'atsplan_draft_accepted_ratio{model="synth-qwen3moe",arm="plan"}' in metrics.read_text()
