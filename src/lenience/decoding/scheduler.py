"""Dialogues in lenience's own loop, with their continuations in a batch.

Continuations that a dialogue is likely to need next are decoded along, so that a search takes fewer
target passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.protocols import Drafter, Rule
from lenience.core.recall import Recall, Recollection
from lenience.core.types import Step
from lenience.decoding.decoder import Decoder
from lenience.decoding.dialogue import (
    ActiveDialogue,
    Compare,
    Comparisons,
    Continue,
    Dialogue,
    FinishedDialogue,
    Predict,
)
from lenience.decoding.guesses import guesses_of
from lenience.decoding.loop import cycle
from lenience.decoding.response import Response
from lenience.drafting.base import DrafterSpec
from lenience.drafting.earlier_texts import Recalled
from lenience.models.lm import LM
from lenience.models.session import Session, common
from lenience.models.threads import torch_threads

T = TypeVar("T")
LONGEST = 32
LONGEST_ON_CPU = 8
"""Tokens drafted in a cycle, at most. A CPU takes the longer the more it reads, and all rows are
read as wide as the widest."""
IN_FLIGHT = 3
IN_FLIGHT_ON_CPU = 1
"""Continuations of a dialogue that are decoded together: the one that was asked for, and others
that rest on it. A wrong guess throws away what rests on it: fewer passes, and more tokens."""


class Decodes(Protocol):
    """The parts of a pair that dialogues use."""

    target: LM

    @property
    def torch_threads(self) -> int | None: ...

    @property
    def models(self) -> dict[str, LM]: ...

    def require_draft(self, what: str) -> LM: ...

    def check(self, decoder: Decoder) -> None: ...

    def context(self, decoder: Decoder) -> Context: ...

    def engine(
        self, decoder: Decoder, rows: int, capacity: int, *, beside: Sequence[LM] = ()
    ) -> tuple[Session, Drafter]: ...


@dataclass(frozen=True)
class DialogueLimits:
    """How dialogues are held."""

    size: int
    """Number of concurrent dialogues."""
    capacity: int
    """Maximum number of tokens of a question with its answer."""
    sampling: Decoder = field(default_factory=Decoder)
    """Temperature, truncation and seed of continuations, and the drafter whose guesses are asked
    for."""
    guesses: bool = True
    """True if dialogues ask for guesses."""
    in_flight: int | None = None
    """Continuations of a dialogue that are decoded together; by default as many as pay on the
    device."""
    drafter: DrafterSpec = field(default_factory=Recalled)
    """Drafter of the continuations."""
    window: int | None = None
    """Tokens drafted in a cycle; by default as many as pay on the device."""


@dataclass(eq=False)
class Continuation:
    """A continuation while it is decoded."""

    dialogue: int
    """Its number."""
    question: Continue
    row: Row
    response: Response
    recall: Recall
    unread: int
    """Number of its tokens that the target has not read."""
    tokens_read: int = 0
    """Number of tokens that the target has read."""
    dropped: bool = False
    searched: int = 0
    """Position up to which it has been searched for a mismatch with the draft."""

    def __post_init__(self) -> None:
        self.searched = len(self.question.ids)

    @property
    def text(self) -> list[int]:
        return self.row.prefix

    @property
    def tokens(self) -> list[int]:
        """Return the answer so far."""
        return self.text[len(self.question.ids) :]

    @property
    def is_over(self) -> bool:
        return self.dropped or self.response.finish is not None

    def keep(self, step: Step) -> int:
        """Record the step of a cycle and return the number of tokens that the target read for
        it."""
        self.row.keep(step)
        self.recall.go_on(self.text)
        read = self.unread + step.drafted
        self.unread = 1
        self.tokens_read += read
        return read

    def next_question(self, eos: frozenset[int]) -> Continue | None:
        """Return the request for the continuation after the draft's token at the next mismatch;
        None if none is known yet."""
        asked = self.question
        while asked.searches and self.searched < len(self.text):
            at = self.searched
            self.searched = self.searched + 1
            guess = self.recall.guesses[at]
            left = asked.limit - (at + 1 - len(asked.ids))
            if guess in (None, self.text[at]) or guess in eos or left < 1:
                continue  # nothing is continued after an end
            assert guess is not None
            return replace(asked, ids=[*self.text[:at], guess], limit=left)
        return None


def converse(
    pair: Decodes, dialogues: Iterable[Dialogue[T]], how: DialogueLimits
) -> Iterator[FinishedDialogue[T]]:
    """Run dialogues in lenience's own loop and yield each as it ends. Common prefixes of
    continuations are read once. Raises InputError if memory has no room for the caches."""
    scheduler = _Scheduler(pair, dialogues, how)
    try:
        scheduler.admit()
        while scheduler.decodes or scheduler.wait():
            yield from scheduler.ended()
            if scheduler.decodes:
                scheduler.cycle()
            scheduler.admit()
        yield from scheduler.ended()
    except Exception:
        yield from scheduler.ended()
        raise
    finally:
        scheduler.close()


class _Scheduler(Generic[T]):
    """The dialogues that are held: `size` of them have continuations that are decoded, and as many
    more may compare meanwhile."""

    def __init__(
        self, pair: Decodes, dialogues: Iterable[Dialogue[T]], how: DialogueLimits
    ):
        guessing = how.sampling.drafter
        each_has = [pair.target]
        if guessing.proposes_as_draft:
            each_has = [pair.require_draft("mining")] if how.guesses else []
        on_cpu = pair.target.device.type == "cpu"
        window = how.window or (LONGEST_ON_CPU if on_cpu else LONGEST)
        in_flight = how.in_flight or (IN_FLIGHT_ON_CPU if on_cpu else IN_FLIGHT)
        if not guessing.proposes_as_draft:  # other guesses come after a continuation
            in_flight = 1
        how = replace(how, in_flight=in_flight)
        strict = how.sampling.with_options({"rule": "exact", "window": window})
        if how.guesses:
            pair.check(strict)
        decoder = replace(strict, drafter=how.drafter)
        self._pair = pair
        self._how = how
        self._ctx = pair.context(decoder)
        rows = how.size * in_flight
        capacity = how.capacity + window
        session, drafter = pair.engine(decoder, rows, capacity, beside=each_has)
        self._slots = _Slots(session, drafter, decoder.rule)
        self._waiting = iter(enumerate(dialogues))
        self._held: dict[int, _Conversation[T]] = {}
        self._in_slots = list[int]()
        """Those that have continuations which are decoded."""
        self._compared = list[tuple[int, Any]]()
        """Those that wait for rows, with what their comparison gave."""
        self._ended = list[FinishedDialogue[T]]()
        self._comparisons = Comparisons[int]()

    def close(self) -> None:
        self._comparisons.close()

    def ended(self) -> list[FinishedDialogue[T]]:
        """Return those that have ended since."""
        ended = self._ended
        self._ended = []
        return ended

    @property
    def decodes(self) -> bool:
        """Return whether there is something to decode."""
        return bool(self._slots.continuations)

    def wait(self) -> bool:
        """Wait until a comparison is finished; False if there is none."""
        return self._comparisons.wait()

    def cycle(self) -> None:
        """Decode a cycle of each continuation, and resume the dialogues whose answers are ready."""
        read = self._slots.cycle(self._ctx)
        for number in list(self._in_slots):
            held = self._held[number]
            held.count(*read[number])
            if held.has_answer:
                self._ask(number, held.take_answer())
            held.search()
        self._settle()

    def admit(self) -> None:
        """Resume dialogues with finished comparisons, and start new ones, while there are free
        rows."""
        while compared := self._comparisons.next(wait=False):
            self._compared.append(compared)
        for number, answer in self._compared:
            if number in self._in_slots:
                self._ask(number, answer)
        self._compared = [
            comparison
            for comparison in self._compared
            if comparison[0] not in self._in_slots
        ]
        self._settle()
        while len(self._in_slots) < self._how.size and (following := self._following()):
            self._in_slots.append(following[0])
            self._ask(*following)
            self._settle()

    def _following(self) -> tuple[int, Any] | None:
        """Return a dialogue with a finished comparison and its result, or a new dialogue; None if
        there is none, or too many compare."""
        if self._compared:
            return self._compared.pop(0)
        if len(self._held) >= 2 * self._how.size or not (
            new := next(self._waiting, None)
        ):
            return None
        number, dialogue = new
        talk = ActiveDialogue(number, dialogue, self._how.size)
        self._held[number] = _Conversation(
            self._pair, talk, self._ctx, self._how, self._slots
        )
        return number, None

    def _ask(self, number: int, answer: Any) -> None:
        """Send a dialogue its answer, and handle its next request."""
        held = self._held[number]
        question = held.go_on(answer)
        if question is not None:
            self._comparisons.begin(number, question)
        ended = held.talk.ended
        if ended:
            self._held.pop(number)
            self._ended.append(ended)

    def _settle(self) -> None:
        """Assign rows to new continuations, and free those of finished ones."""
        self._slots.retire()
        decoder = {continuation.dialogue for continuation in self._slots.continuations}
        self._in_slots = [number for number in self._in_slots if number in decoder]


class _Conversation(Generic[T]):
    """A dialogue in flight. Costs are counted as if it ran alone, so they do not depend on the
    batch."""

    def __init__(
        self,
        pair: Decodes,
        talk: ActiveDialogue[T],
        ctx: Context,
        how: DialogueLimits,
        slots: _Slots,
    ):
        self.talk = talk
        self.target = pair.target
        self._how = how
        self._slots = slots
        self._in_flight = how.in_flight or 1
        self._guesses = how.guesses and guesses_of(pair, how.sampling, how.capacity)
        self._threads = pair.torch_threads
        self._ctx = ctx
        self._continuations = list[Continuation]()
        """Each, but for the first, rests on the one before: on that its answer is the same."""
        self._waits = False
        """True if the first continuation was requested."""
        self._earlier = Recollection()
        self._last: Continuation | None = None
        """The one that began last."""

    @property
    def has_answer(self) -> bool:
        """Return whether the continuation that was asked for is over."""
        return self._waits and self._continuations[0].is_over

    def take_answer(self) -> list[int]:
        """Return the answer to the pending request."""
        self._waits = False
        return self._continuations.pop(0).tokens

    def count(self, target_tokens: int, draft_tokens: int) -> None:
        """Count a cycle with these numbers of tokens read by the models."""
        cost = self.talk.cost
        cost.target_passes += 1
        cost.target_tokens += target_tokens
        cost.draft_tokens += draft_tokens
        for continuation in self._continuations:
            if continuation.is_over:
                continuation.recall.end(continuation.text)

    def go_on(self, answer: Any) -> Compare | None:
        """Give the dialogue answers until it has to wait for one; a comparison is to be made
        then."""
        question = self.talk.ask(answer)
        while question is not None and not isinstance(question, Compare):
            if isinstance(question, Predict):
                question = self.talk.ask(self._predict(question))
                continue
            self._begin(question)
            if not self.has_answer:
                return None
            question = self.talk.ask(self.take_answer())
        if question is None:
            self._drop()
        return question

    def search(self) -> None:
        """Start the continuation that is likely to be requested after the last one."""
        if self._continuations and len(self._continuations) < self._in_flight:
            last = self._continuations[-1]
            question = last.next_question(self.target.eos_ids)
            if question:
                self._continuations.append(self._continuation(question, last))

    def _begin(self, question: Continue) -> None:
        """Decode the requested continuation, unless it is decoded already."""
        self._waits = True
        if self._continuations and self._continuations[0].question == question:
            return
        self._drop()
        self._continuations = [self._continuation(question)]

    def _drop(self) -> None:
        """Leave all continuations."""
        for continuation in self._continuations:
            continuation.dropped = True
            continuation.recall.end(continuation.text)
            self.talk.cost.unused_tokens += continuation.tokens_read
        self._continuations = []

    def _continuation(
        self, question: Continue, like: Continuation | None = None
    ) -> Continuation:
        """Return a continuation that begins like another one, in its row or a copy, or in that of
        the one that it has most in common with."""
        ids = list(question.ids)
        of_prompt = question.prompt_length
        noise = Noise.for_prompt(self._how.sampling.seed, ids[:of_prompt])
        rows = self._slots.of(self.talk.number)
        source = max(rows, key=lambda row: common(row.text[:-1], ids), default=None)
        recall = Recall(self._earlier, 0, ids[:], [None] * len(ids))
        like = like or source or self._last
        if like:
            recall = like.recall.beginning_of(ids)
        unread = len(ids)
        if source:
            unread -= min(common(source.text[:-1], ids), len(ids) - 1)
        row = Row(noise, ids, position=len(ids) - of_prompt, memory={Recall: recall})
        response = Response(
            self.target, question.limit, len(ids), question.stop_strings
        )
        continuation = Continuation(
            dialogue=self.talk.number,
            question=question,
            row=row,
            response=response,
            recall=recall,
            unread=unread,
        )
        self._slots.admit(continuation, source)
        self._last = continuation
        return continuation

    def _predict(self, question: Predict) -> list[int | None]:
        """Return the drafter's guesses."""
        assert self._guesses
        noise = Noise.for_prompt(
            self._how.sampling.seed, question.ids[: question.prompt_length]
        )
        at = Row(noise, position=question.start - question.prompt_length)
        ctx = replace(self._ctx, rows=[at])
        with torch_threads(self._threads), torch.inference_mode():
            read = self._guesses.tokens_read
            predicted = self._guesses.predict(question, ctx)
        self.talk.cost.draft_tokens += self._guesses.tokens_read - read
        return predicted


class _Slots:
    """Continuations in the rows of the caches, the first of them side by side."""

    def __init__(self, session: Session, drafter: Drafter, rule: Rule):
        self.session = session
        self.drafter = drafter
        self.rule = rule
        self.continuations = list[Continuation]()
        self._beginning = list[tuple[Continuation, Continuation | None]]()

    def of(self, dialogue: int) -> list[Continuation]:
        """Return a dialogue's continuations that have rows, also those that are just over."""
        return [
            continuation
            for continuation in self.continuations
            if continuation.dialogue == dialogue
        ]

    def admit(self, continuation: Continuation, source: Continuation | None) -> None:
        """Give a continuation a row when things are settled, that of another one, or a copy."""
        self._beginning.append((continuation, source))

    def cycle(self, ctx: Context) -> dict[int, tuple[int, int]]:
        """Decode a cycle of each; gives how many tokens the target and the draft have read for each
        dialogue."""
        ctx = replace(
            ctx, rows=[continuation.row for continuation in self.continuations]
        )
        room = [continuation.response.room for continuation in self.continuations]
        draft, _, verdicts = cycle(self.session, self.drafter, self.rule, ctx, room)
        drafted = draft.tokens_read or [0] * len(self.continuations)
        read: dict[int, tuple[int, int]] = {}
        for continuation, verdict, by_draft in zip(
            self.continuations, verdicts, drafted
        ):
            by_target = continuation.keep(continuation.response.clip(verdict))
            before = read.get(continuation.dialogue, (0, 0))
            read[continuation.dialogue] = (before[0] + by_target, before[1] + by_draft)
        return read

    def retire(self) -> None:
        """Assign rows to new continuations, first those of finished ones, and close the remaining
        gaps."""
        begin = [
            (continuation, source)
            for continuation, source in self._beginning
            if not continuation.dropped
        ]
        free = {
            i
            for i, continuation in enumerate(self.continuations)
            if continuation.is_over
        }
        at = {id(continuation): i for i, continuation in enumerate(self.continuations)}
        copied = list[tuple[Continuation, int | None]]()
        for continuation, source in begin:
            place = at.get(id(source))
            if place in free:
                free.remove(place)
                self.continuations[place] = continuation
            else:
                copied.append((continuation, place))
        for continuation, place in copied:
            to = free.pop() if free else len(self.continuations)
            self.continuations[to : to + 1] = [continuation]
            if place is not None:
                self.session.copy(place, to)
                self.drafter.copy(place, to)
        for gap in sorted(free, reverse=True):
            last = self.continuations.pop()
            if gap < len(self.continuations):
                self.continuations[gap] = last
                self.session.move(len(self.continuations), gap)
                self.drafter.move(len(self.continuations), gap)
        self._beginning = []
