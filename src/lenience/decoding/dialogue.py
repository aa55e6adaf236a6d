"""Dialogues: searches that request continuations of the target and guesses of a drafter."""

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
COMPARISONS_AT_ONCE = 8
"""Maximum number of concurrent comparisons."""
WINDOW = 4
"""Number of tokens drafted per cycle of a continuation in another engine. Verification is exact, so
the window affects speed only."""


@dataclass(frozen=True)
class Continue:
    """A request for the target's continuation of `ids` to EOS (included), a stop string or `limit`
    new tokens."""

    ids: list[int]
    limit: int
    stop_strings: tuple[str, ...] = ()
    prompt_length: int = 0
    """Number of `ids` that belong to the prompt. The others are new tokens; they set the position
    of the next random draw."""
    searches: bool = False
    """True if the next request is likely to be the continuation after the draft's token at this
    answer's first mismatch."""


@dataclass(frozen=True)
class Predict:
    """A request for the drafter's token at the position of each of `ids` from `start` on."""

    ids: list[int]
    start: int
    prompt_length: int = 0


@dataclass(frozen=True)
class Compare:
    """A request for a slow comparison of answers, which runs while other dialogues decode."""

    ask: Callable[[], bool | None]


Question = Continue | Predict | Compare
Dialogue = Generator[Question, Any, T]
"""Generator that yields requests, receives each result (tokens, guesses or a comparison), and
returns the outcome of its search."""


@dataclass
class Cost:
    """Cost of a dialogue as if it ran alone. Concurrent dialogues share `seconds`."""

    target_passes: int = 0
    """Number of target passes; continuations in flight at the same time share passes."""
    target_tokens: int = 0
    unused_tokens: int = 0
    """Number of these tokens in continuations that were started but not needed."""
    draft_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class FinishedDialogue(Generic[T]):
    """Result of the dialogue with index `number`."""

    number: int
    result: T
    cost: Cost


class ActiveDialogue(Generic[T]):
    """A dialogue in progress, one of `together` concurrent dialogues."""

    def __init__(self, number: int, dialogue: Dialogue[T], together: int):
        self.number = number
        self.cost = Cost()
        self.ended: FinishedDialogue[T] | None = None
        self._dialogue = dialogue
        self._together = together
        self._began = time.perf_counter()

    def ask(self, answer: Any) -> Question | None:
        """Send the `answer` to the previous request, if any, and return the next request; None if
        the dialogue has ended."""
        try:
            return self._dialogue.send(answer)
        except StopIteration as end:
            seconds = (time.perf_counter() - self._began) / self._together
            self.cost.seconds = round(seconds, 3)
            self.ended = FinishedDialogue(self.number, end.value, self.cost)
            return None


class Comparisons(Generic[K]):
    """Comparisons that run in threads, each with a key."""

    def __init__(self) -> None:
        self._workers = Workers[bool | None](COMPARISONS_AT_ONCE)
        self._running: dict[Future[bool | None], K] = {}

    def close(self) -> None:
        """Cancel waiting comparisons and abandon running ones."""
        for future in self._running:
            future.cancel()
        self._workers.close()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, key: K, question: Compare) -> None:
        self._running[self._workers.submit(question.ask)] = key

    def wait(self) -> bool:
        """Wait until a comparison is finished. Return False if none is running."""
        futures.wait(self._running, return_when=futures.FIRST_COMPLETED)
        return bool(self._running)

    def next(self, wait: bool) -> tuple[K, bool | None] | None:
        """Return the key and result of a finished comparison; None if there is none. With `wait`,
        wait for a running comparison. Raises the comparison's exception."""
        if not self._running:
            return None
        done, _ = futures.wait(
            self._running, None if wait else 0, return_when=futures.FIRST_COMPLETED
        )
        if not done:
            return None
        first = next(future for future in self._running if future in done)
        return self._running.pop(first), first.result()
