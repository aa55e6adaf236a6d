"""Pair: a target and a draft model, and the functions that decode with them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar, Unpack

from transformers import PreTrainedTokenizerBase

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter
from lenience.core.transfer import waiting_for
from lenience.core.types import Step
from lenience.decoding.auto_window import Chooser, Drafting
from lenience.decoding.checks import (
    check_decoder,
    draft_of,
    warn_of_another_drafter,
    warn_of_translation,
)
from lenience.decoding.decoder import Decoder, DecoderOptions, check_binding
from lenience.decoding.dialogue import Dialogue, FinishedDialogue
from lenience.decoding.engine import build_engine
from lenience.decoding.generation import Generation, Reporting
from lenience.decoding.loop import Request, decode
from lenience.decoding.options import OWN, takes_options
from lenience.decoding.response import Response
from lenience.decoding.scheduler import DialogueLimits, converse
from lenience.models.compile import compile_model
from lenience.models.generation_config import processors_of
from lenience.models.lm import LM
from lenience.models.prompts import Prompt, several
from lenience.models.session import Session
from lenience.models.translation import shares_vocabulary

T = TypeVar("T")
BATCH_SIZE = 16
"""Default number of prompts per batch."""
SEED_BITS = 31
"""Number of bits of a random seed."""


class Pair:
    """A target model and, optionally, a draft model. If the draft has another tokenizer, its
    proposals are translated, see `lenience.drafting.translated`."""

    engine_name = OWN
    """Engine that runs the models: lenience's own loop, or another engine with its version."""

    answers_at_a_time = 1
    """Number of prompts that are answered at a time although fewer are needed now: many if a change
    between decoders takes long."""
    noise: dict[str, int] | None = None
    """Number of answers that differ between two runs of the same greedy requests on a reference
    server."""
    candidate_noise: dict[str, dict[str, int]] | None = None
    """The same for each candidate server, by name."""

    def __init__(self, target: LM, draft: LM | None, name: str):
        self.target = target
        self.draft = draft
        self.name = name
        self._picked: dict[Hashable, Drafting] = {}
        if draft is not None:
            warn_of_translation(target, draft)

    def __repr__(self) -> str:
        models = ", ".join(
            f"{role} {lm.model.num_parameters() / 1e6:,.1f} M {lm.dtype} on {lm.device}"
            for role, lm in self.models.items()
        )
        return f"<Pair {self.name}: {models}>"

    def require_draft(self, what: str) -> LM:
        """Return the draft model. Raises InputError that names the feature `what` if the pair has
        none."""
        return draft_of(self.models, what)

    @property
    def models(self) -> dict[str, LM]:
        """Return the models by role."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {"target": self.target, **draft}

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the models and the tokenizer, to which heads are bound."""
        models = {role: lm.fingerprint for role, lm in self.models.items()}
        return {**models, "tokenizer": self.target.tokenizer_fingerprint}

    def compile(self, *, export: bool = True) -> bool:
        """Compile the models: exported graphs on a CPU in float32, recorded passes on a GPU, see
        `lenience.models.compile.compile_model`. Return True if all models are compiled."""
        return all([compile_model(lm, export=export) for lm in self.models.values()])

    def by_engine(self, decoders: Sequence[Decoder]) -> list[list[Decoder]]:
        """Return the decoders in groups that can take turns: those of one engine, in the order in
        which engines run. lenience's own loop runs them all."""
        return [list(decoders)]

    def reset_prefix_cache(self) -> None:
        """Drop what the engine keeps of earlier prompts, so that timings do not depend on the order
        of answers. lenience's own loop keeps nothing."""

    @property
    def engine_setup(self) -> str:
        """Return the engine with all that changes its speed."""
        return self.engine_name

    @property
    def torch_threads(self) -> int | None:
        """Return the number of PyTorch threads outside the models: 1 if exported graphs, which wait
        by spinning, use the cores; None for PyTorch's default."""
        on_cpu = all(lm.device.type == "cpu" for lm in self.models.values())
        return 1 if self.compiled and on_cpu else None

    @property
    def compiled(self) -> bool:
        return all(lm.backend is not None for lm in self.models.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer; prompts and answers use its ids."""
        return self.target.tokenizer

    @property
    def shares_vocabulary(self) -> bool:
        """Return True if the draft reads the target's token ids; False without a draft."""
        return self.draft is not None and shares_vocabulary(self.target, self.draft)

    def encode(self, prompt: Prompt, reader: LM) -> list[int]:
        """Return the token ids of a prompt, by the target's tokenizer and chat template, checked
        for the model `reader`. Raises InputError, see `LM.encode`."""
        own = reader is self.target
        ids = self.target.encode(prompt, any_length=not own)
        return ids if own else reader.encode(ids)

    @takes_options
    def generate(
        self,
        prompt: Prompt,
        decoder: Decoder | None = None,
        *,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Unpack[DecoderOptions],
    ) -> Generation:
        """Answer one prompt: text, chat messages, or token ids as a list, an array, a tensor or a
        tokenizer's output.

        A `decoder` holds all options; further keywords override some of them. A `profile` receives
        wall-clock times. With `logprobs`, the answer has the target's log-probability of each
        token. Raises InputError for an unusable prompt or wrong options.
        """
        telling = Reporting(profile, logprobs)
        ((_, out),) = self._completed(
            [prompt], self._seeded(decoder, options), 1, telling
        )
        return out

    @takes_options
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder | None = None,
        *,
        batch_size: int | None = BATCH_SIZE,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Unpack[DecoderOptions],
    ) -> list[Generation]:
        """Answer prompts in batches of at most `batch_size`, with the same results as `generate`
        one by one, in order. Prompts may also be one padded batch of ids.

        The next prompt takes over the row of a finished answer at once. An answer's `seconds` run
        from its start to its end and include work on other rows. Raises InputError, before any
        work, for an unusable prompt, wrong options or a cache that does not fit into memory.
        """
        telling = Reporting(profile, logprobs)
        answers = dict(
            self._answered(prompts, self._seeded(decoder, options), batch_size, telling)
        )
        return [answers[i] for i in range(len(answers))]

    @takes_options
    def as_completed(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder | None = None,
        *,
        batch_size: int | None = BATCH_SIZE,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Unpack[DecoderOptions],
    ) -> Iterator[tuple[int, Generation]]:
        """Decode as `generate_batch` does, and yield each answer with its prompt's index as soon as
        it is finished."""
        telling = Reporting(profile, logprobs)
        return self._answered(
            prompts, self._seeded(decoder, options), batch_size, telling
        )

    def _answered(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder,
        batch_size: int | None,
        telling: Reporting,
    ) -> Iterator[tuple[int, Generation]]:
        size = BATCH_SIZE if batch_size is None else batch_size
        if not isinstance(size, int) or size < 1:
            raise InputError(
                f"batch_size {batch_size!r}: must be a whole number, 1 or more"
            )
        rows = several(prompts, self.tokenizer.pad_token_id)
        return self._completed(rows, decoder, size, telling)

    def _seeded(self, decoder: Decoder | None, options: Mapping[str, Any]) -> Decoder:
        """Return the checked decoder of a call. For sampling without a seed, a random seed is
        drawn. A given or certified decoder keeps its seed: an audit compares with the target's
        sample from the same draws."""
        asked = decoder.with_options(options) if decoder else Decoder.of(options)
        self.check(asked)
        fixed = decoder is not None or options.get("seed") is not None or asked.bound_to
        if fixed or not asked.temperature:
            return asked
        return replace(asked, seed=secrets.randbits(SEED_BITS), seeds_by_prompt=True)

    def _completed(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder,
        batch_size: int,
        telling: Reporting,
    ) -> Iterator[tuple[int, Generation]]:
        """Answer prompts and yield finished answers. All errors of the input are raised before the
        first answer."""
        outs, steps = self._decode(prompts, decoder, batch_size, telling)
        return self._finished(outs, steps, decoder)

    def _finished(
        self,
        outs: list[Generation],
        steps: Iterator[tuple[Request, Step]],
        decoder: Decoder,
    ) -> Iterator[tuple[int, Generation]]:
        for request, step in steps:
            out = outs[request.number]
            out.add(step)
            if not step.finish:
                continue
            text = None if decoder.answer_stops else self.target.decode(out.tokens)
            seconds = time.perf_counter() - request.began
            out.end(seconds, text, by_draft=decoder.alone == "draft")
            yield request.number, out

    @takes_options
    def stream(
        self,
        prompt: Prompt,
        decoder: Decoder | None = None,
        *,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Unpack[DecoderOptions],
    ) -> Iterator[Step]:
        """Answer one prompt and yield each cycle's step; `step.text` is its new text. Raises
        InputError as `generate` does."""
        telling = Reporting(profile, logprobs, stream=True)
        _, steps = self._decode([prompt], self._seeded(decoder, options), 1, telling)
        return (step for _, step in steps)

    def decoder(self, options: Mapping[str, Any] | Decoder) -> Decoder:
        """Return the decoder for some options, checked for this pair. Raises InputError as `check`
        does."""
        decoder = options if isinstance(options, Decoder) else Decoder.of(options)
        self.check(decoder)
        return decoder

    def check(self, decoder: Decoder) -> None:
        """Raise InputError if the parts of a decoder do not fit together or do not fit this pair.
        That includes heads of other models, rules without a meaning at this temperature, and
        deviations from the certified setup."""
        if decoder.bound_to:
            check_binding(decoder.bound_to, self.binding(decoder))
        check_decoder(decoder, self.models, lambda: self.fingerprints)
        if decoder.proposer and not decoder.bound_to:
            warn_of_another_drafter(decoder)

    def reader(self, decoder: Decoder) -> LM:
        """Return the model whose answers a decoder returns: the draft if it decodes alone, else the
        target."""
        return (
            self.require_draft("rule draft")
            if decoder.alone == "draft"
            else self.target
        )

    def _decode(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder,
        batch_size: int,
        telling: Reporting,
    ) -> tuple[list[Generation], Iterator[tuple[Request, Step]]]:
        """Return empty answers and an iterator of their steps. All errors of the input are raised
        before the first step."""
        reader = self.reader(decoder)
        ids = [self.encode(prompt, reader) for prompt in prompts]
        size = min(batch_size, len(ids))
        decoder = Chooser(self, self._picked).settled(ids, size, decoder)
        window = int(decoder.window)
        ctx = replace(self.context(decoder), logprobs=telling.logprobs)
        profile = telling.profile
        if profile:
            profile.wait_by(waiting_for({lm.device for lm in self.models.values()}))
        # a row holds a prompt, its answer, and the widest window after it
        longest = (
            max(map(len, ids), default=0)
            + decoder.max_new_tokens
            + decoder.columns(window)
        )
        session, drafter = self.engine(decoder, size, longest, profile=profile)

        def request(number: int, prompt: list[int]) -> Request:
            row = Row(Noise.for_prompt(decoder.seed_of(number), prompt), list(prompt))
            response = Response(
                reader,
                decoder.max_new_tokens,
                len(prompt),
                decoder.answer_stops,
                stream=telling.stream,
                shown=decoder.answer_tokens,
            )
            return Request(row, response, number)

        requests = (request(i, prompt) for i, prompt in enumerate(ids))
        outs = [
            decoder.answer(prompt, window, number) for number, prompt in enumerate(ids)
        ]
        following = partial(next, requests, None)
        steps = decode(
            session, drafter, decoder.rule, ctx, lambda _: following(), size=size
        )
        return outs, steps

    def steps(
        self, prompts: Sequence[list[int]], decoder: Decoder, batch_size: int
    ) -> Iterator[Step]:
        """Yield the steps of the answers to prompts, as the cycles end."""
        _, steps = self._decode(prompts, decoder, batch_size, Reporting())
        return (step for _, step in steps)

    def context(self, decoder: Decoder) -> Context:
        """Return the sampling parameters of a decoder whose window is a number. Missing options
        default to the model's generation_config."""
        reader = self.reader(decoder)
        config = reader.model.generation_config
        top_k = decoder.top_k
        top_p = decoder.top_p
        return Context(
            window=int(decoder.window),
            temperature=decoder.temperature,
            draft_temperature=decoder.draft_temperature,
            top_k=getattr(config, "top_k", None) if top_k is None else top_k,
            top_p=getattr(config, "top_p", None) if top_p is None else top_p,
            processors=processors_of(reader, sampling=decoder.temperature > 0) or None,
            decode=partial(reader.decode, special=True),
            token_mask=reader.token_mask,
            fresh_noise_per_window=decoder.rule.needs.whole_window
            or decoder.verifies_draws,
        )

    def engine(
        self,
        decoder: Decoder,
        rows: int,
        capacity: int,
        *,
        beside: Sequence[LM] = (),
        profile: Profile | None = None,
    ) -> tuple[Session, Drafter]:
        """Return the target's session and the drafter, with caches for `rows` sequences of at most
        `capacity` tokens. Raises InputError if the caches, with those of the models `beside` that
        the caller makes, do not fit into memory."""
        return build_engine(
            self, decoder, rows, capacity, beside=beside, profile=profile
        )

    def converse(
        self,
        dialogues: Iterable[Dialogue[T]],
        *,
        size: int,
        capacity: int,
        sampling: Decoder | None = None,
        guesses: bool = True,
    ) -> Iterator[FinishedDialogue[T]]:
        """Run dialogues, `size` of them concurrently, and yield each as it ends.

        A request has at most `capacity` tokens with its answer. `sampling` holds the sampling
        options of the target's continuations (greedy by default) and the drafter that answers
        `Predict`. `guesses` is False if no dialogue uses `Predict`. Raises InputError if the caches
        do not fit into memory.
        """
        limits = DialogueLimits(size, capacity, sampling or Decoder(), guesses=guesses)
        return converse(self, dialogues, limits)

    def binding(self, decoder: Decoder) -> dict[str, Any]:
        """Return the facts besides the options that lenient answers depend on: the models and their
        dtypes, the tokenizer, the chat template, the target's generation_config, the drafter, and
        the heads of all parts."""
        return {
            "models": {
                role: {"fingerprint": lm.fingerprint, "dtype": lm.dtype}
                for role, lm in self.models.items()
            },
            "tokenizer": self.target.tokenizer_fingerprint,
            "template": self.target.chat.identity(self.target.tokenizer),
            "generation_config": self.target.generation_settings(),
            "heads": [head.head.fingerprint for head in decoder.heads],
            "drafter": str(decoder.without_paths().drafter),
        }

    @takes_options
    def settle(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder | None = None,
        *,
        batch_size: int = 1,
        **options: Unpack[DecoderOptions],
    ) -> Decoder:
        """Return the decoder with the window "auto" and the tree "auto" replaced by the fastest
        choice for these prompts.

        See `lenience.decoding.auto_window.Chooser`. The choice is cached by decoder and batch size.
        """
        asked = decoder.with_options(options) if decoder else Decoder.of(options)
        self.check(asked)
        ids = [self.encode(prompt, self.reader(asked)) for prompt in prompts]
        return Chooser(self, self._picked).settled(
            ids, min(batch_size, len(ids)), asked
        )
