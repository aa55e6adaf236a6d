"""Earlier texts of a search, with the draft's guesses for their tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MATCHES = (16, 12, 8, 6, 4, 3)
"""Numbers of tokens at a text's end that are looked up, in descending order."""


@dataclass(frozen=True)
class Place:
    """A position in an earlier text, given by the text's number."""

    text: int
    at: int


class Recollection:
    """The finished texts of a search, indexed by their token n-grams."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._guesses: list[list[int | None]] = []
        self._places: dict[tuple[int, ...], Place] = {}

    def add(self, text: list[int], guesses: list[int | None], start: int) -> None:
        """Add a text, with the draft's guess for each of its tokens, None if unknown. Tokens before
        `start` are already known from another text."""
        number = len(self._texts)
        self._texts.append(text)
        self._guesses.append(guesses)
        for at in range(start, len(text) + 1):
            for n in MATCHES:
                if n <= at:
                    self._places[tuple(text[at - n : at])] = Place(number, at)

    def find(self, end: Sequence[int], least: int) -> Place | None:
        """Return the latest place in the earlier texts that follows the same tokens as `end` ends
        with. The longest match of at least `least` tokens counts; None if there is no match."""
        for n in MATCHES:
            if least <= n <= len(end) and (place := self._places.get(tuple(end[-n:]))):
                return place
        return None

    def following(self, place: Place, most: int) -> tuple[list[int], list[int | None]]:
        """Return at most `most` tokens after a position, with the draft's guesses for them."""
        part = slice(place.at, place.at + most)
        return self._texts[place.text][part], self._guesses[place.text][part]


@dataclass
class Recall:
    """A text in progress, with access to the earlier texts of its search."""

    of: Recollection
    start: int
    """Position of the first new token: earlier ones are shared with another text."""
    text: list[int]
    guesses: list[int | None] = field(default_factory=list)
    """Draft's guess for each token of the text; None if unknown."""
    ahead: list[int | None] = field(default_factory=list)
    """Draft's guesses for the tokens of the last window, and for the token after the window."""
    last_read: list[int] = field(default_factory=list)
    """Text that the draft model read last, so that only new tokens are counted."""
    ended: bool = False

    def beginning_of(self, text: list[int]) -> Recall:
        """Return the recall of another text. It takes over the guesses for the beginning that both
        texts share."""
        same = next(
            (i for i, pair in enumerate(zip(self.text, text)) if pair[0] != pair[1]),
            min(len(self.text), len(text)),
        )
        guesses = [*self.guesses[:same], *[None] * (len(text) - same)]
        return Recall(self.of, same, list(text), guesses, last_read=self.last_read)

    def go_on(self, prefix: Sequence[int]) -> None:
        """Add the tokens of a cycle: the accepted part of the window, and the token after it."""
        for i, token in enumerate(prefix[len(self.text) :]):
            self.guesses.append(self.ahead[i] if i < len(self.ahead) else None)
            self.text.append(token)
        self.ahead = []

    def end(self, text: Sequence[int]) -> None:
        """Add the finished text to the earlier texts."""
        if not self.ended:
            self.ended = True
            self.go_on(text)
            self.of.add(self.text, self.guesses, self.start)
