"""Greedy decoding with a draft: a small model guesses tokens ahead, one pass of the model checks them all.

What comes out are the model's own greedy tokens. (Batches of several tokens may use other kernels than
one token does: where two tokens score the same but for rounding, either may be chosen.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.drafts.acceptance import Step
from planner.drafts.length import DraftLength
from planner.errors import EngineProblem, InputError
from planner.plan.load_spec import LoadSpec
from runtime.load.dry_run import from_json, to_json
from runtime.session.session import Answer, Session, Timings

_SPARE_TOKENS = 128  # padding at the end of a vocabulary that may differ between two models of a family


@dataclass(frozen=True, slots=True)
class Draft:
    """The model that guesses."""

    path: Path
    spec: LoadSpec
    tokens: int  # guessed at a time, at first
    devices: Mapping[str, str]  # tensor to the device it must be on
    most: int = 0  # the length follows what is accepted, up to this; 0: it stays
    step_ns: tuple[int, ...] = ()  # of a pass that checks 0, 1, 2, … guesses, where a plan says it

    @property
    def guesses(self) -> int | DraftLength:
        """The length of a sequence's drafts."""
        return DraftLength(self.tokens, self.step_ns, self.most) if self.most else self.tokens


@dataclass(eq=False)
class OtherVocabulary(InputError):
    """A draft whose tokens mean something else."""

    path: str
    why: str

    def message(self) -> str:
        return f"draft {self.path}: its vocabulary is not the model's: {self.why}"


def draft_to_json(draft: Draft) -> dict[str, Any]:
    """A draft as plain data."""
    return {**asdict(draft), "path": str(draft.path.resolve()), "spec": to_json(draft.spec)}


def draft_from_json(data: Mapping[str, Any]) -> Draft:
    """A draft from the plain data that `draft_to_json` made."""
    fields = {**data, "path": Path(data["path"]), "spec": from_json(data["spec"])}
    return Draft(**{**fields, "step_ns": tuple(data["step_ns"])})


def check_vocabulary(model: Session, draft: Session) -> None:
    """Raises OtherVocabulary unless every token that both can choose has the same text."""
    lib, path = model.engine.lib, str(draft.path)
    kinds = [lib.llama_vocab_type(s.vocab) for s in (model, draft)]
    if kinds[0] != kinds[1]:
        raise OtherVocabulary(path, "another kind of tokenizer")
    if abs(model.n_vocab - draft.n_vocab) > _SPARE_TOKENS:
        raise OtherVocabulary(path, f"{draft.n_vocab} tokens against {model.n_vocab}")
    text = lib.llama_vocab_get_text
    for token in range(min(model.n_vocab, draft.n_vocab)):
        mine, its = text(model.vocab, token), text(draft.vocab, token)
        if mine != its:
            raise OtherVocabulary(path, f"token {token} is {its!r} against {mine!r}")


def generate(
    model: Session,
    draft: Session,
    guesses: int | DraftLength,
    prompt: str | Sequence[int],
    n: int,
    on_text: Callable[[str], None] = lambda text: None,
    stop: Sequence[str] = (),
    ignore_end: bool = False,
) -> Timings:
    """Continue a prompt as `Session.generate` does greedily, with up to `guesses` a pass, or as many as the
    length of this sequence's drafts has come to.
    """
    ids = model.ids(prompt, n)
    answer = Answer(model, n, on_text, stop, ignore_end)
    model.clear()
    guesser = _Guesser(draft)
    start = time.perf_counter_ns()
    known = [*ids, model.choose(ids, 0)]
    guesser.read(ids)
    first = time.perf_counter_ns()
    going, drafts = answer.take(known[-1]), list[tuple[int, int]]()
    while going:
        # A pass makes one token more than it accepts guesses.
        length = guesses if isinstance(guesses, int) else guesses.tokens
        most = min(length, n - len(answer.tokens) - 1, model.n_batch - 1)
        guess = guesser.guess(known, most, model.n_vocab)
        chosen = model.choices([known[-1], *guess], len(known) - 1)
        right = _agreeing(guess, chosen)
        _forget(model, len(known) + right, right < len(guess))
        guesser.keep(len(known) + right)
        if guess:
            drafts.append((len(guess), right))
        if isinstance(guesses, DraftLength):
            guesses.saw(Step(len(guess), right))
        for token in (*guess[:right], chosen[right]):
            known.append(token)
            if going:
                going = answer.take(token)
    ended = time.perf_counter_ns()
    answer.finish()
    return Timings(len(ids), tuple(answer.tokens), first - start, ended - first, tuple(drafts))


class _Guesser:
    """The draft, which has read some beginning of the known tokens and, past it, its own guesses."""

    def __init__(self, draft: Session) -> None:
        self._draft, self._read = draft, 0
        draft.clear()

    def read(self, tokens: Sequence[int]) -> int:
        """Read on up to the end of the tokens; what would come next."""
        best = self._draft.choose(tokens[self._read :], self._read)
        self._read = len(tokens)
        return best

    def guess(self, known: Sequence[int], count: int, n_vocab: int) -> list[int]:
        """The next tokens; fewer where the draft chooses one that the model does not have."""
        guesses: list[int] = []
        while len(guesses) < count:
            best = self.read([*known, *guesses])
            if best >= n_vocab:
                break
            guesses.append(best)
        return guesses

    def keep(self, length: int) -> None:
        """Forget what was read past this many tokens."""
        _forget(self._draft, length, self._read > length)
        self._read = min(self._read, length)


def _agreeing(guesses: Sequence[int], chosen: Sequence[int]) -> int:
    pairs = enumerate(zip(guesses, chosen, strict=False))
    return next((i for i, (guess, choice) in pairs if guess != choice), len(guesses))


def _forget(session: Session, length: int, needed: bool) -> None:
    if needed and not session.cut(length):
        why = "its recurrent state cannot take tokens back: decode it without a draft"
        raise EngineProblem(session.engine.label, f"{session.path.name}: {why}")
