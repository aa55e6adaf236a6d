"""Dialogues with a pair: searches that ask the target how it goes on, and the draft what it would
say instead, again and again; many are held together."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch

from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.recall import Recall, Recollection
from lenience.core.types import Step
from lenience.core.workers import Workers
from lenience.decoding.loop import Request, decode
from lenience.decoding.options import Decoding
from lenience.decoding.response import Response
from lenience.drafting.base import DrafterSpec
from lenience.drafting.recalled import Recalled
from lenience.models.generation_config import processors_of
from lenience.models.session import Session, common
from lenience.models.threads import torch_threads

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair

T = TypeVar("T")
K = TypeVar("K")
AT_ONCE = 8
"""Comparisons."""
WINDOW = 4
"""Tokens drafted in a cycle of a continuation in another engine; it is exact, so the window changes
its speed alone."""
LONGEST, LONGEST_ON_CPU = 32, 8
"""Those in our own loop, at most. A CPU takes the longer the more it reads, and all rows are read
as wide as the widest."""


@dataclass(frozen=True)
class Continue:
    """How does the target go on after `ids`, greedily, until EOS, which is included, a stop string
    or for `limit` new tokens?"""

    ids: list[int]
    limit: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predict:
    """Which token would the draft put at the place of each of `ids` from `start` on?"""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Compare:
    """What does a comparison of answers give that takes its time, and is made beside decoding?"""

    ask: Callable[[], bool | None]


Question = Continue | Predict | Compare
Dialogue = Generator[Question, Any, T]
"""Yields questions, wants sent what answers them (the tokens, or what was compared), and returns
what it was held for."""


@dataclass
class Cost:
    """What a dialogue took, as if it were held alone; `seconds` are shared among those held
    together."""

    target_passes: int = 0
    target_tokens: int = 0
    draft_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended(Generic[T]):
    """What came of a dialogue, the `number`-th that was given."""

    number: int
    result: T
    cost: Cost


class Talk(Generic[T]):
    """A dialogue while it is held, one of `together`."""

    def __init__(self, number: int, dialogue: Dialogue[T], together: int):
        self.number, self.cost = number, Cost()
        self.ended: Ended[T] | None = None
        self._dialogue, self._together = dialogue, together
        self._began = time.perf_counter()

    def ask(self, answer: Any) -> Question | None:
        """The next question, after the `answer` to the one before it, if any; None where it has
        ended."""
        try:
            return self._dialogue.send(answer)
        except StopIteration as end:
            seconds = (time.perf_counter() - self._began) / self._together
            self.cost.seconds = round(seconds, 3)
            self.ended = Ended(self.number, end.value, self.cost)
            return None


def converse(
    pair: Pair,
    dialogues: Iterable[Dialogue[T]],
    size: int,
    capacity: int,
    drafter: DrafterSpec | None = None,
    window: int | None = None,
) -> Iterator[Ended[T]]:
    """Hold dialogues in our own loop, `size` of them together, each as it ends; no question has
    more than `capacity` tokens with its answer. A dialogue keeps its row of the caches from one
    continuation to the next, so that only what changed is read. Continuations are drafted by what
    the dialogue recalls, as wide as pays on the device, where no `drafter` and `window` are
    named."""
    each_has = [pair.require_draft("mining")]
    if window is None:
        window = LONGEST_ON_CPU if pair.target.device.type == "cpu" else LONGEST
    setup = replace(pair.setup(Decoding(window=window)), drafter=drafter or Recalled())
    session, drafting = pair.engine(setup, window, size, capacity + window, beside=each_has)
    processors = processors_of(pair.target, sampling=False) or None
    ctx = Context(window=window, processors=processors)
    with _Held(pair, dialogues, size, capacity) as held:
        following = held.next_request
        try:
            while held.goes_on():
                for request, step in decode(
                    session, drafting, setup.rule, ctx, following, size=size
                ):
                    held.add(request, step)
                    yield from held.ended()
                yield from held.ended()
        except Exception:
            yield from held.ended()
            raise


class _Held(Generic[T]):
    """The dialogues that are held in our own loop: `size` of them decode, and as many more may
    compare meanwhile."""

    def __init__(self, pair: Pair, dialogues: Iterable[Dialogue[T]], size: int, capacity: int):
        self.pair, self.size, self.capacity = pair, size, capacity
        self._waiting = iter(enumerate(dialogues))
        self._held: dict[int, _InLoop[T]] = {}
        self._ended: list[Ended[T]] = []
        self._decoding: set[int] = set()
        self._comparisons = Comparisons[int]()
        self._begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._comparisons.close()

    def add(self, request: Request, step: Step) -> None:
        """Take note of what a cycle kept."""
        self._held[request.number].add(step)

    def ended(self) -> list[Ended[T]]:
        """Those that have ended since."""
        ended, self._ended = self._ended, []
        return ended

    def goes_on(self) -> bool:
        """Whether there is something to decode, perhaps after a comparison, which is waited for."""
        begun, self._begun = self._begun, True
        return not begun or self._comparisons.wait()

    def next_request(self, over: Request | None) -> Request | None:
        """What is decoded in place of a request that is over, or of none: its dialogue goes on, or
        one that has compared, or a new one."""
        if over:
            self._decoding.remove(over.number)
            if request := self._go_on(over.number, self._held[over.number].tokens):
                return request
        while number_answer := self._comparisons.next(wait=False) or self._new():
            if request := self._go_on(*number_answer):
                return request
        return None

    def _new(self) -> tuple[int, None] | None:
        """A dialogue that begins; None where there is none, or no room for it."""
        if len(self._held) >= 2 * self.size or not (new := next(self._waiting, None)):
            return None
        number, dialogue = new
        self._held[number] = _InLoop(self.pair, Talk(number, dialogue, self.size), self.capacity)
        return number, None

    def _go_on(self, number: int, answer: Any) -> Request | None:
        """The next request of a dialogue; None where it has ended, or compares first."""
        request = self._held[number].next_request(answer)
        if isinstance(request, Compare):
            self._comparisons.begin(number, request)
        elif request is None:
            self._ended.append(self._held.pop(number).result)
        else:
            self._decoding.add(number)
            return request
        return None


class Comparisons(Generic[K]):
    """Comparisons that are made in threads, beside decoding, each for a key."""

    def __init__(self) -> None:
        self._workers = Workers[bool | None](AT_ONCE)
        self._running: dict[Future[bool | None], K] = {}

    def close(self) -> None:
        """Leave those that run."""
        for future in self._running:
            future.cancel()
        self._workers.close()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, key: K, question: Compare) -> None:
        self._running[self._workers.submit(question.ask)] = key

    def wait(self) -> bool:
        """Until one is done; False where there are none."""
        futures.wait(self._running, return_when=futures.FIRST_COMPLETED)
        return bool(self._running)

    def next(self, wait: bool) -> tuple[K, bool | None] | None:
        """One that is done, with what it gave; None where none is, or where there are none. Raises
        what it raised."""
        if not self._running:
            return None
        done, _ = futures.wait(
            self._running, None if wait else 0, return_when=futures.FIRST_COMPLETED
        )
        if not done:
            return None
        first = next(future for future in self._running if future in done)
        return self._running.pop(first), first.result()


class _InLoop(Generic[T]):
    """A dialogue between one continuation and the next. Its cost is counted as if it were held
    alone, so that it does not depend on the company."""

    def __init__(self, pair: Pair, talk: Talk[T], capacity: int):
        self.talk, self.target = talk, pair.target
        draft = pair.require_draft("mining")
        self._draft = Session(draft, capacity=min(capacity, draft.context_length or capacity))
        self._threads = pair.torch_threads
        self._noise = Noise(0, b"")
        processors = processors_of(pair.target, sampling=False) or None
        self._ctx = Context([Row(self._noise)], processors=processors)
        self._ids, self._tokens = list[int](), list[int]()
        """The continuation that is being decoded."""
        self._target_unread = 0
        """How many tokens of it the target has not read."""
        self._earlier = Recollection()
        self._recall: Recall | None = None

    @property
    def result(self) -> Ended[T]:
        assert self.talk.ended is not None
        return self.talk.ended

    @property
    def tokens(self) -> list[int]:
        """What answers the last continuation."""
        return self._tokens

    def next_request(self, answer: Any) -> Request | Compare | None:
        """The next continuation to decode, or comparison to make, after the answer to the one
        before; None where the dialogue has ended."""
        question = self.talk.ask(answer)
        while isinstance(question, Predict):
            question = self.talk.ask(self._predict(question))
        if question is None or isinstance(question, Compare):
            return question
        if self._recall is not None:
            self._recall.end([*self._ids, *self._tokens])
        ids, before = list(question.ids), [*self._ids, *self._tokens]
        known = common(before[:-1], ids)
        self._target_unread = len(ids) - min(known, len(ids) - 1)
        self._ids, self._tokens = ids, []
        self._recall = Recall(self._earlier, common(before, ids), list(ids), [None] * len(ids))
        row = Row(self._noise, list(ids), recall=self._recall)
        response = Response(self.target, question.limit, len(ids), question.stop_strings)
        return Request(row, response, self.talk.number)

    def add(self, step: Step) -> None:
        """Take note of what a cycle kept."""
        self._tokens += step.tokens
        cost = self.talk.cost
        cost.target_passes += 1
        cost.target_tokens += self._target_unread + step.drafted
        self._target_unread = 1
        cost.draft_tokens += step.draft_tokens

    def _predict(self, question: Predict) -> list[int]:
        """The draft reads the tokens in one parallel pass."""
        before: Sequence[int] = question.ids[:-1]
        with torch_threads(self._threads):
            reading = self._draft.read([list(before)], len(question.ids) - question.start)
            # [1, len(ids) - start, V]
            logits = self._ctx.process(reading.logits, torch.tensor([before]))
            predicted = logits[0, :, : self.target.vocab_size].argmax(-1).tolist()
        self.talk.cost.draft_tokens += reading.tokens_read[0]
        return predicted
