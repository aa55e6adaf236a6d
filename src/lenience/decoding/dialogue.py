"""Dialogues: searches that ask for the target's continuations and a drafter's guesses."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lenience.core.workers import Workers

T = TypeVar("T")
K = TypeVar("K")
AT_ONCE = 8
"""Comparisons."""
WINDOW = 4
"""Tokens drafted in a cycle of a continuation in another engine; it is exact, so the window changes
its speed alone."""


@dataclass(frozen=True)
class Continue:
    """A request for the target's continuation of `ids` to EOS (included), a stop string or `limit`
    new tokens."""

    ids: list[int]
    limit: int
    stop_strings: tuple[str, ...] = ()
    prompt_length: int = 0
    """Number of `ids` that belong to the prompt. The others are new tokens, whose draws are
    counted."""
    searches: bool = False
    """True if the next question is likely to be the continuation after the draft's token at its
    first mismatch."""


@dataclass(frozen=True)
class Predict:
    """Which token would the drafter put at the position of each of `ids` from `start` on?"""

    ids: list[int]
    start: int
    prompt_length: int = 0


@dataclass(frozen=True)
class Compare:
    """A request for a slow comparison of answers, which runs while others decode."""

    ask: Callable[[], bool | None]


Question = Continue | Predict | Compare
Dialogue = Generator[Question, Any, T]
"""Yields questions, wants sent what answers them (the tokens, or what was compared), and returns
what it was held for."""


@dataclass
class Cost:
    """Cost of a dialogue as if it ran alone; `seconds` are shared among concurrent dialogues."""

    target_passes: int = 0
    """Continuations that are in flight together share their passes."""
    target_tokens: int = 0
    unused_tokens: int = 0
    """Number of these tokens in continuations that were started and then not needed."""
    draft_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class FinishedDialogue(Generic[T]):
    """Result of the `number`-th dialogue."""

    number: int
    result: T
    cost: Cost


class ActiveDialogue(Generic[T]):
    """A dialogue while it is held, one of `together`."""

    def __init__(self, number: int, dialogue: Dialogue[T], together: int):
        self.number = number
        self.cost = Cost()
        self.ended: FinishedDialogue[T] | None = None
        self._dialogue = dialogue
        self._together = together
        self._began = time.perf_counter()

    def ask(self, answer: Any) -> Question | None:
        """Return the next question, after the `answer` to the one before it, if any; None where it
        has ended."""
        try:
            return self._dialogue.send(answer)
        except StopIteration as end:
            seconds = (time.perf_counter() - self._began) / self._together
            self.cost.seconds = round(seconds, 3)
            self.ended = FinishedDialogue(self.number, end.value, self.cost)
            return None


class Comparisons(Generic[K]):
    """Comparisons in threads, each for a key."""

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
        """Wait until a comparison is finished; False if none is running."""
        futures.wait(self._running, return_when=futures.FIRST_COMPLETED)
        return bool(self._running)

    def next(self, wait: bool) -> tuple[K, bool | None] | None:
        """Return a finished comparison with its result; None if none is finished or running. Raises
        the comparison's exception."""
        if not self._running:
            return None
        done, _ = futures.wait(
            self._running, None if wait else 0, return_when=futures.FIRST_COMPLETED
        )
        if not done:
            return None
        first = next(future for future in self._running if future in done)
        return self._running.pop(first), first.result()
