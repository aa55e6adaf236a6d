"""A drafter's guesses along a known text; mining compares them with the target's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Sources
from lenience.core.noise import Noise
from lenience.core.protocols import Drafter
from lenience.core.types import Reading, Verdict
from lenience.decoding.checks import draft_of, share_vocabulary
from lenience.decoding.decoder import Decoder
from lenience.decoding.dialogue import Predict
from lenience.decoding.loop import propose
from lenience.decoding.soundness import check_predictions, warn_of_non_finite
from lenience.drafting.base import DrafterSpec
from lenience.drafting.stops import Fixed
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.models.threads import torch_threads

ROOM = 2
"""Token budget with which a drafter proposes one token: that token and the correction."""


class Guesses(Protocol):
    """A source of answers to `Predict`."""

    tokens_read: int
    """Number of tokens that the models, including the target, have read for guesses."""

    def predict(self, question: Predict, ctx: Context) -> list[int | None]:
        """Return the drafter's token at each requested position; None where the drafter proposes
        nothing. `ctx` has one row, at the first of these positions."""
        ...


class CanDecode(Protocol):
    """The parts of a pair that guesses need."""

    target: LM

    @property
    def models(self) -> dict[str, LM]: ...

    def check(self, decoder: Decoder) -> None: ...

    def engine(
        self, decoder: Decoder, rows: int, capacity: int
    ) -> tuple[Session, Drafter]: ...


def check_guesses(drafter: DrafterSpec) -> None:
    """Raise InputError if a drafter's guesses have no meaning for mining."""
    if Sources.EARLIER_ANSWERS in drafter.needs:
        raise InputError(
            f"--drafter {drafter}: its guesses depend on earlier answers; mine with a drafter "
            "whose guesses depend on the text alone"
        )
    if drafter.branches:
        raise InputError(
            f"--drafter {drafter}: proposes several tokens at a position; mine with one of its "
            "drafters"
        )


def guesses_of(pair: CanDecode, decoder: Decoder, capacity: int) -> Guesses:
    """Return the guesses of a decoder's drafter, for texts of at most `capacity` tokens."""
    if decoder.drafter.proposes_as_draft and share_vocabulary(pair.models):
        return _ModelGuesses(pair, capacity)
    return _DrafterGuesses(pair, decoder, capacity)


def guess(
    guesses: Guesses, question: Predict, ctx: Context, seed: int, threads: int | None
) -> tuple[list[int | None], int]:
    """Answer a request. Return the drafter's token at each position (None where it proposes
    nothing), and the number of tokens that the models have read for it. `ctx` holds the sampling
    parameters; `threads` is the number of torch's threads, None for any."""
    noise = Noise.for_prompt(seed, question.ids[: question.prompt_length])
    at = Row(noise, position=question.start - question.prompt_length)
    read = guesses.tokens_read
    with torch_threads(threads), torch.inference_mode():
        predicted = guesses.predict(question, replace(ctx, rows=[at]))
    return predicted, guesses.tokens_read - read


class _ModelGuesses:
    """Guesses of the draft model, from one pass over the text."""

    def __init__(self, pair: CanDecode, capacity: int):
        draft = draft_of(pair.models, "mining")
        length = min(capacity, draft.context_length or capacity)
        self._session = Session(draft, capacity=length)
        self._vocabulary = pair.target.vocab_size
        self.tokens_read = 0

    def predict(self, question: Predict, ctx: Context) -> list[int | None]:
        before = list(question.ids[:-1])
        count = len(question.ids) - question.start
        reading = self._session.read([before], count)
        self.tokens_read += reading.tokens_read[0]
        # [1, count, V]
        logits = ctx.process(reading.logits, torch.tensor([before]))
        check_predictions(logits[0], question.start, self._session.lm)
        tokens: list[int | None] = ctx.draw(logits[..., : self._vocabulary])[0].tolist()
        return tokens


class _DrafterGuesses:
    """Guesses of any drafter: the decoding loop with windows of one token, along a given text. The
    target reads the text in one pass, or step by step if the drafter writes into the target's
    cache."""

    def __init__(self, pair: CanDecode, decoder: Decoder, capacity: int):
        strict = decoder.for_strict().with_parts(window=1, stop=Fixed())
        self._session, self._drafter = pair.engine(strict, 1, capacity + ROOM)
        self._reads_ahead = not decoder.drafter.writes_target_cache
        self._vocabulary = pair.target.vocab_size
        self.tokens_read = 0

    def predict(self, question: Predict, ctx: Context) -> list[int | None]:
        ids = list(question.ids)
        (row,) = ctx.rows
        ctx = replace(ctx, window=1)
        whole = self._read(ids, question.start) if self._reads_ahead else None
        guesses: list[int | None] = []
        for at in range(question.start, len(ids)):
            row.prefix = ids[:at]
            row.position = at - question.prompt_length
            if row.position:  # the target has read nothing before the first cycle
                state = self._state(ids, at, whole)
                self._drafter.observe(ctx, state, [_accepts_nothing(ids[at - 1])])
            guesses.append(self._guess(ctx))
        return guesses

    def _read(self, ids: list[int], start: int) -> Reading:
        """Return the target's states after each token from index `start - 2` to the last but
        one."""
        before = ids[:-1]
        reading = self._session.read([before], min(len(ids) - start + 1, len(before)))
        self.tokens_read += reading.tokens_read[0]
        return reading

    def _state(self, ids: list[int], at: int, whole: Reading | None) -> Reading:
        """Return the target's state that predicts the token before position `at`."""
        if whole is None:
            step = self._session.read([ids[: at - 1]])
            self.tokens_read += step.tokens_read[0]
            return step
        n = at - len(ids) - 1
        return Reading(whole.logits[:, n, None], whole.hidden[:, n, None])

    def _guess(self, ctx: Context) -> int | None:
        draft = propose(self._session, self._drafter, ctx, [ROOM])
        self.tokens_read += sum(draft.tokens_read)
        warn_of_non_finite(draft.cut, self._session.lm)
        if not int(draft.lengths[0]):
            return None
        token = int(draft.tokens[0, 0])
        return token if token < self._vocabulary else None


def _accepts_nothing(following: int) -> Verdict:
    """Return the verdict of a cycle that accepts no drafted token and ends with the token
    `following`."""
    return Verdict([], [], following, [], [])
