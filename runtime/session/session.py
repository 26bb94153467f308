"""A loaded model: tokens, logits, text. An ExitStack owns every C handle; two sessions share nothing."""

from __future__ import annotations

import ctypes as c
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import EngineProblem, InputError
from planner.plan.load_spec import LoadSpec
from runtime.engine.ggml import Handle
from runtime.engine.libllama import Batch, ChainParams, ChatMessage, Engine
from runtime.engine.logs import Tail, cache_buffers
from runtime.load import dry_run, load_params
from runtime.session.text_pieces import Pieces
from runtime.verify import loaded_placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 1


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Timings:
    """One generation; times in nanoseconds."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    prefill_ns: int
    decode_ns: int  # of all tokens after the first, whose logits the prefill computes
    drafts: tuple[tuple[int, int], ...] = ()  # guesses of each pass by a draft, and how many were right

    @property
    def guessed(self) -> int:
        """Tokens that a draft guessed."""
        return sum(made for made, _ in self.drafts)

    @property
    def accepted(self) -> int:
        """Guesses that were right."""
        return sum(right for _, right in self.drafts)

    @property
    def tpot_ns(self) -> int:
        """Time per output token; 0 when fewer than two tokens were made."""
        return self.decode_ns // (len(self.tokens) - 1) if len(self.tokens) > 1 else 0


class Answer:
    """The tokens of one generation as they come, and their text."""

    def __init__(
        self,
        session: Session,
        n: int,
        on_text: Callable[[str], None],
        stop: Sequence[str],
        ignore_end: bool,
    ) -> None:
        self.tokens: list[int] = []
        self._session, self._n, self._ignore_end = session, n, ignore_end
        self._pieces = Pieces(on_text, stop)

    def take(self, token: int) -> bool:
        """Take the next token; False when the answer ends with it, or before it at an end-of-text token."""
        if self._session.is_end(token) and not self._ignore_end:
            return False
        self.tokens.append(token)
        return self._pieces.feed(self._session.piece(token)) and len(self.tokens) < self._n

    def finish(self) -> None:
        """Give out the text that was held back."""
        self._pieces.finish()


class Session:
    """A model loaded by a spec; a context manager.

    `own` maps buffer names that ggml does not know to handles; `observe` makes `nodes()` work at the
    price of slower decoding; `on_node` is a cb_eval of the caller's own (tensor address, ask, user data).
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        spec: LoadSpec,
        own: Mapping[str, Handle] | None = None,
        observe: bool = False,
        on_node: Callable[[int, bool, int | None], bool] | None = None,
    ) -> None:
        self.engine, self.path, self.spec = engine, Path(path), spec
        self._own, self._on_node = own, on_node
        self._stack, self._said = ExitStack(), Tail()
        self._observer = loaded_placement.Observer(engine) if observe else None
        self.model: Handle = 0
        self.context: Handle = 0

    def __enter__(self) -> Session:
        load_params.check(self.engine, self.spec)
        kept = load_params.Kept()
        with ExitStack() as stack:
            # First in, last out: the engine reads these arrays as long as the model lives.
            stack.callback(kept.objects.clear)
            params = load_params.model_params(self.engine, self.spec, kept, own=self._own)
            self.model = stack.enter_context(load_params.model(self.engine, self.path, params))
            context = load_params.context_params(
                self.engine, self.spec, kept, self._on_node or self._observer
            )
            self.context = stack.enter_context(
                load_params.context(self.engine, self.model, context, self._said)
            )
            self._stack = stack.pop_all()
        self.vocab: Handle = self.engine.lib.llama_model_get_vocab(self.model)
        self.n_vocab: int = self.engine.lib.llama_vocab_n_tokens(self.vocab)
        self.n_ctx: int = self.engine.lib.llama_n_ctx(self.context)
        self.n_batch: int = self.engine.lib.llama_n_batch(self.context)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free context and model; may be called twice."""
        self._stack.close()
        self.model = self.context = 0

    def tokenize(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Token ids of a text; `bos` None adds the start token when the model wants one."""
        lib, data = self.engine.lib, text.encode(errors="replace")
        add = lib.llama_vocab_get_add_bos(self.vocab) if bos is None else bos
        room = len(data) + 8
        ids = (c.c_int32 * room)()
        count = lib.llama_tokenize(self.vocab, data, len(data), ids, room, add, special)
        if count < 0:
            raise EngineProblem(self.engine.label, "the model has no tokenizer this engine can use")
        return list(ids[:count])

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; they may be part of a character."""
        room = c.create_string_buffer(256)
        count = self.engine.lib.llama_token_to_piece(self.vocab, token, room, len(room), 0, special)
        if count < 0:
            room = c.create_string_buffer(-count)
            count = self.engine.lib.llama_token_to_piece(self.vocab, token, room, len(room), 0, special)
        return room.raw[:count]

    def logits(self, tokens: Sequence[int], last: bool = False) -> NDArray[np.float32]:
        """Logits of a fresh sequence: float32, shape (n_tokens, n_vocab), or (1, n_vocab) with `last`."""
        import numpy as np

        self.clear()
        rows = []
        for start, chunk in self._chunks(tokens):
            wanted = [not last or start + i == len(tokens) - 1 for i in range(len(chunk))]
            self._decode(chunk, start, wanted)
            if any(wanted):
                rows.append(self._rows(sum(wanted)).copy())
        return np.concatenate(rows)

    def generate(
        self,
        prompt: str | Sequence[int],
        n: int,
        on_text: Callable[[str], None] = lambda text: None,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
    ) -> Timings:
        """Continue a prompt by up to `n` tokens, giving text to `on_text` as it comes.

        `stop` texts end the generation and are not shown; `ignore_end` runs on past end-of-text
        tokens, for measuring.
        """
        ids = self.ids(prompt, n)
        self.clear()
        answer = Answer(self, n, on_text, stop, ignore_end)
        with ExitStack() as stack:
            sampler = self._sampler(stack, sampling)
            start = time.perf_counter_ns()
            self._read(ids, 0)
            token = self._sample(sampler)
            first = time.perf_counter_ns()
            position = len(ids)
            while answer.take(token):
                self._decode([token], position, [True])
                token = self._sample(sampler)
                position += 1
            ended = time.perf_counter_ns()
        answer.finish()
        return Timings(len(ids), tuple(answer.tokens), first - start, ended - first)

    def ids(self, prompt: str | Sequence[int], n: int) -> list[int]:
        """The tokens of a prompt; InputError when it is empty or leaves no room for `n` more."""
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InputError("the prompt is empty")
        if len(ids) + n > self.n_ctx:
            raise InputError(
                f"prompt of {len(ids)} tokens and {n} more do not fit the context of {self.n_ctx}; "
                "ask for less, or plan with a larger context"
            )
        return ids

    def choose(self, tokens: Sequence[int], start: int) -> int:
        """Read tokens from a position on; the most likely next one."""
        self._read(tokens, start)
        return int(self._rows(1)[0].argmax())

    def choices(self, tokens: Sequence[int], start: int) -> list[int]:
        """Read one batch of tokens from a position on; the most likely next one after each."""
        self._decode(tokens, start, [True] * len(tokens))
        return [int(best) for best in self._rows(len(tokens)).argmax(axis=1)]

    def cut(self, length: int) -> bool:
        """Forget the tokens from a position on; False where the model's memory cannot."""
        memory = self.engine.lib.llama_get_memory(self.context)
        return bool(self.engine.lib.llama_memory_seq_rm(memory, 0, length, -1))

    def chat(self, text: str) -> str | None:
        """The text as a user's message in the model's chat template; None when it has none."""
        lib = self.engine.lib
        template = lib.llama_model_chat_template(self.model, None)
        if not template:
            return None
        asked = text.encode(errors="replace")
        message = (ChatMessage * 1)(ChatMessage(b"user", asked))
        room = c.create_string_buffer(4 * len(asked) + 4096)
        size = lib.llama_chat_apply_template(template, message, 1, True, room, len(room))
        return room.raw[:size].decode(errors="replace") if 0 < size <= len(room) else None

    def weights(self) -> tuple[loaded_placement.Weight, ...]:
        """Every weight with the buffer it is really in."""
        return loaded_placement.weights(self.engine, self.model)

    def tensor_devices(self) -> dict[str, str]:
        """Device of every weight; of a tied head that the engine copied, the copy's comes last."""
        return {weight.name: weight.device for weight in self.weights()}

    def nodes(self) -> tuple[loaded_placement.Node, ...]:
        """Nodes of one decoded token with the device that computed each; needs `observe`."""
        if self._observer is None:
            raise ValueError("the session was opened without observe")
        self.clear()
        self._observer.nodes.clear()
        self._decode([0], 0, [True])
        self.engine.lib.llama_synchronize(self.context)
        return tuple(self._observer.nodes)

    def memory(self) -> dict[str, dry_run.Breakdown]:
        """Bytes per device as the engine counts them now."""
        return dry_run.by_device(self.engine, dry_run.breakdown(self.engine, self.context))

    def caches(self) -> dict[str, dict[str, int]]:
        """Bytes of "KV" cache and recurrent state ("RS") by device, as the engine said when it made them."""
        buffers = cache_buffers(self._said.lines)
        return {item: dry_run.sizes_by_device(self.engine, sizes) for item, sizes in buffers.items()}

    def clear(self) -> None:
        """Forget all tokens."""
        self.engine.lib.llama_memory_clear(self.engine.lib.llama_get_memory(self.context), True)

    def _read(self, tokens: Sequence[int], start: int) -> None:
        """Decode tokens of any number; logits of the last one only."""
        for at, chunk in self._chunks(tokens):
            self._decode(chunk, start + at, [at + i == len(tokens) - 1 for i in range(len(chunk))])

    def _rows(self, count: int) -> NDArray[np.float32]:
        """The logits of the last batch's wanted tokens, shape (count, n_vocab); the engine's own memory."""
        import numpy as np

        address = self.engine.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(c.cast(address, c.POINTER(c.c_float)), (count, self.n_vocab))

    def _chunks(self, tokens: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        return [(at, tokens[at : at + self.n_batch]) for at in range(0, len(tokens), self.n_batch)]

    def _decode(self, tokens: Sequence[int], start: int, wanted: Sequence[bool]) -> None:
        """Decode tokens at consecutive positions of sequence 0; EngineProblem when the engine fails."""
        if any(not 0 <= t < self.n_vocab for t in tokens):
            raise InputError(f"token ids must lie between 0 and {self.n_vocab - 1}")
        n = len(tokens)
        ids, places = (c.c_int32 * n)(*tokens), (c.c_int32 * n)(*range(start, start + n))
        counts, sequence = (c.c_int32 * n)(*[1] * n), (c.c_int32 * 1)(0)
        sequences = (c.c_void_p * n)(*[c.addressof(sequence)] * n)
        flags = (c.c_int8 * n)(*wanted)
        arrays = [c.cast(a, c.c_void_p) for a in (ids, places, counts, sequences, flags)]
        batch = Batch(n, arrays[0], None, *arrays[1:])
        status = self.engine.lib.llama_decode(self.context, batch)
        if status:
            raise EngineProblem(self.engine.label, _decode_status(status))

    def _sampler(self, stack: ExitStack, sampling: Sampling) -> Handle:
        lib = self.engine.lib
        chain: Handle = lib.llama_sampler_chain_init(ChainParams(True))
        stack.callback(lib.llama_sampler_free, chain)
        steps: list[Any] = [lib.llama_sampler_init_greedy]
        if sampling.temperature > 0:
            steps = [
                lambda: lib.llama_sampler_init_top_k(sampling.top_k),
                lambda: lib.llama_sampler_init_top_p(sampling.top_p, 1),
                lambda: lib.llama_sampler_init_temp(sampling.temperature),
                lambda: lib.llama_sampler_init_dist(sampling.seed),
            ]
        for make in steps:
            lib.llama_sampler_chain_add(chain, make())
        return chain

    def _sample(self, sampler: Handle) -> int:
        return int(self.engine.lib.llama_sampler_sample(sampler, self.context, -1))

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""
        return bool(self.engine.lib.llama_vocab_is_eog(self.vocab, token))


def _decode_status(status: int) -> str:
    reasons = {
        1: "no room in the KV cache",
        2: "decoding was stopped",
        -1: "the batch was refused",
        -2: "no memory for the compute buffers",
        -3: "computing failed",
    }
    return f"decoding failed: {reasons.get(status, 'status')} ({status})"
