"""Dialogues in lenience's own decoding loop, with their continuations batched.

Continuations that a dialogue is likely to request next are decoded in advance, so that a search
takes fewer target passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

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
from lenience.decoding.guesses import guess, guesses_of
from lenience.decoding.loop import cycle
from lenience.decoding.response import Response
from lenience.drafting.base import DrafterSpec
from lenience.drafting.earlier_texts import Recalled
from lenience.models.lm import LM
from lenience.models.session import Session, common

T = TypeVar("T")
LONGEST = 32
LONGEST_ON_CPU = 8
"""Maximum number of tokens drafted per cycle, on a GPU and on a CPU. A CPU pass takes longer the
more tokens it reads, and all rows are as wide as the widest."""
IN_FLIGHT = 3
IN_FLIGHT_ON_CPU = 1
"""Maximum number of a dialogue's continuations in flight, on a GPU and on a CPU: the requested one
and those that build on its expected outcome. A wrong expectation discards the latter, so more of
them save passes but cost tokens."""


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
    """Limits and sampling options of concurrent dialogues."""

    size: int
    """Number of concurrent dialogues."""
    capacity: int
    """Maximum number of tokens of a request with its answer."""
    sampling: Decoder = field(default_factory=Decoder)
    """Temperature, truncation and seed of continuations, and the drafter whose guesses are
    requested."""
    guesses: bool = True
    """True if dialogues request guesses."""
    in_flight: int | None = None
    """Maximum number of a dialogue's continuations in flight. Default: depends on the device."""
    drafter: DrafterSpec = field(default_factory=Recalled)
    """Drafter of the continuations."""
    window: int | None = None
    """Number of tokens drafted per cycle. Default: depends on the device."""


@dataclass(eq=False)
class Continuation:
    """A continuation in flight."""

    dialogue: int
    """Index of the dialogue."""
    question: Continue
    row: Row
    response: Response
    recall: Recall
    unread: int
    """Number of tokens that the target has not read yet."""
    tokens_read: int = 0
    """Number of tokens that the target has read."""
    dropped: bool = False
    searched: int = 0
    """Position up to which the text was searched for a mismatch with the draft."""

    def __post_init__(self) -> None:
        self.searched = len(self.question.ids)

    @property
    def text(self) -> list[int]:
        return self.row.prefix

    @property
    def tokens(self) -> list[int]:
        """Return the new tokens so far."""
        return self.text[len(self.question.ids) :]

    @property
    def is_over(self) -> bool:
        return self.dropped or self.response.finish is not None

    def keep(self, step: Step) -> int:
        """Record the step of a cycle. Return the number of tokens that the target read for it."""
        self.row.keep(step)
        self.recall.go_on(self.text)
        read = self.unread + step.drafted
        self.unread = 1
        self.tokens_read += read
        return read

    def next_question(self, eos: frozenset[int]) -> Continue | None:
        """Return the request for the continuation after the draft's token at the next mismatch;
        None if no further mismatch is known yet."""
        asked = self.question
        while asked.searches and self.searched < len(self.text):
            at = self.searched
            self.searched = self.searched + 1
            guess = self.recall.guesses[at]
            left = asked.limit - (at + 1 - len(asked.ids))
            if guess in (None, self.text[at]) or guess in eos or left < 1:
                continue  # nothing can be continued after an EOS
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
    """A scheduler of dialogues. At most `size` dialogues have continuations in flight, and up to
    twice as many are active; the rest of these wait for comparisons."""

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
        if not guessing.proposes_as_draft:  # these come after a continuation
            in_flight = 1
        how = replace(how, in_flight=in_flight)
        strict = how.sampling.for_strict().with_parts(window=window)
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
        """Indices of dialogues with continuations in flight."""
        self._compared = list[tuple[int, Any]]()
        """Indices of dialogues that wait for rows, with the results of their comparisons."""
        self._ended = list[FinishedDialogue[T]]()
        self._comparisons = Comparisons[int]()

    def close(self) -> None:
        self._comparisons.close()

    def ended(self) -> list[FinishedDialogue[T]]:
        """Return the dialogues that have ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    @property
    def decodes(self) -> bool:
        """Return True if continuations are in flight."""
        return bool(self._slots.continuations)

    def wait(self) -> bool:
        """Wait until a comparison is finished. Return False if none is running."""
        return self._comparisons.wait()

    def cycle(self) -> None:
        """Run one cycle of all continuations, and resume the dialogues whose answers are ready."""
        read = self._slots.cycle(self._ctx)
        for number in list(self._in_slots):
            held = self._held[number]
            held.count(*read[number])
            if held.has_answer:
                self._ask(number, held.take_answer())
            held.search()
        self._settle()

    def admit(self) -> None:
        """Resume dialogues with finished comparisons, then start new ones, while rows are free."""
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
        """Return the next dialogue to admit: one with a finished comparison and its result, or a
        new one with None. Return None if there is none or too many wait for comparisons."""
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
        """Assign rows to new continuations, and free the rows of finished ones."""
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
        """Continuations in flight. Each after the first builds on the text of the one before and
        assumes that its final answer is unchanged."""
        self._waits = False
        """True if the dialogue waits for the first continuation."""
        self._earlier = Recollection()
        self._last: Continuation | None = None
        """Continuation that was started last."""

    @property
    def has_answer(self) -> bool:
        """Return True if the requested continuation is finished."""
        return self._waits and self._continuations[0].is_over

    def take_answer(self) -> list[int]:
        """Return the answer to the pending request."""
        self._waits = False
        return self._continuations.pop(0).tokens

    def count(self, target_tokens: int, draft_tokens: int) -> None:
        """Add the cost of a cycle: the numbers of tokens that the target and the draft read."""
        cost = self.talk.cost
        cost.target_passes += 1
        cost.target_tokens += target_tokens
        cost.draft_tokens += draft_tokens
        for continuation in self._continuations:
            if continuation.is_over:
                continuation.recall.end(continuation.text)

    def go_on(self, answer: Any) -> Compare | None:
        """Answer the dialogue's requests until it must wait for a continuation. Return a comparison
        if the dialogue requests one."""
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
        """Start the requested continuation, unless it is already in flight."""
        self._waits = True
        if self._continuations and self._continuations[0].question == question:
            return
        self._drop()
        self._continuations = [self._continuation(question)]

    def _drop(self) -> None:
        """Discard all continuations, and count their tokens as unused."""
        for continuation in self._continuations:
            continuation.dropped = True
            continuation.recall.end(continuation.text)
            self.talk.cost.unused_tokens += continuation.tokens_read
        self._continuations = []

    def _continuation(
        self, question: Continue, like: Continuation | None = None
    ) -> Continuation:
        """Return a new continuation of `question`. It reuses the row, or a copy of the row, that
        shares the longest prefix. Its recalled guesses come from `like`, if given."""
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
        """Return the drafter's guesses, and add their cost."""
        assert self._guesses
        seed = self._how.sampling.seed
        predicted, read = guess(self._guesses, question, self._ctx, seed, self._threads)
        self.talk.cost.draft_tokens += read
        return predicted


class _Slots:
    """The continuations in flight. They occupy the first rows of the caches, without gaps."""

    def __init__(self, session: Session, drafter: Drafter, rule: Rule):
        self.session = session
        self.drafter = drafter
        self.rule = rule
        self.continuations = list[Continuation]()
        self._beginning = list[tuple[Continuation, Continuation | None]]()

    def of(self, dialogue: int) -> list[Continuation]:
        """Return a dialogue's continuations that have rows, including those that have just
        finished."""
        found = list[Continuation]()
        for continuation in self.continuations:
            if continuation.dialogue == dialogue:
                found.append(continuation)
        return found

    def admit(self, continuation: Continuation, source: Continuation | None) -> None:
        """Assign a row to a continuation at the next `retire`: the row of `source`, or a copy of
        it."""
        self._beginning.append((continuation, source))

    def cycle(self, ctx: Context) -> dict[int, tuple[int, int]]:
        """Run one cycle of all continuations. Return the numbers of tokens that the target and the
        draft read, by dialogue."""
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
        begin = []
        for continuation, source in self._beginning:
            if not continuation.dropped:
                begin.append((continuation, source))
        free = set()
        for i, continuation in enumerate(self.continuations):
            if continuation.is_over:
                free.add(i)
        at = {id(continuation): i for i, continuation in enumerate(self.continuations)}
        copied = list[tuple[Continuation, int | None]]()
        for continuation, source in begin:
            place = at.get(id(source))
            if place in free:  # its row already holds the text to continue
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
        # from the end, so that a row that moves is not itself a gap
        for gap in sorted(free, reverse=True):
            last = self.continuations.pop()
            if gap < len(self.continuations):
                self.continuations[gap] = last
                self.session.move(len(self.continuations), gap)
                self.drafter.move(len(self.continuations), gap)
        self._beginning = []
