"""Earlier texts of a search: their continuations and the draft's mismatches. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MATCHES = (16, 12, 8, 6, 4, 3)
"""Lengths of text ends that are looked up, the longest first."""


@dataclass(frozen=True)
class Place:
    """A position in an earlier text."""

    text: int
    at: int


class Recollection:
    """The texts of a search, as they are finished."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._guesses: list[list[int | None]] = []
        self._places: dict[tuple[int, ...], Place] = {}

    def add(self, text: list[int], guesses: list[int | None], start: int) -> None:
        """Remember a text, with the draft's guess for each of its tokens where it is known; from
        `start` on it is new."""
        number = len(self._texts)
        self._texts.append(text)
        self._guesses.append(guesses)
        for at in range(start, len(text) + 1):
            for n in MATCHES:
                if n <= at:
                    self._places[tuple(text[at - n : at])] = Place(number, at)

    def find(self, end: Sequence[int], least: int) -> Place | None:
        """Return where the longest end of a text stood last, of `least` tokens or more."""
        for n in MATCHES:
            if least <= n <= len(end) and (place := self._places.get(tuple(end[-n:]))):
                return place
        return None

    def following(self, place: Place, most: int) -> tuple[list[int], list[int | None]]:
        """Return at most `n` tokens that followed a place, with the draft's guesses for them."""
        part = slice(place.at, place.at + most)
        return self._texts[place.text][part], self._guesses[place.text][part]


@dataclass
class Recall:
    """A text in progress, with access to the earlier texts of its search."""

    of: Recollection
    start: int
    """Position from which the text is new."""
    text: list[int]
    guesses: list[int | None] = field(default_factory=list)
    """The draft's, for each token of the text."""
    ahead: list[int | None] = field(default_factory=list)
    """Those for the tokens of the window that was drafted last, and the one after it."""
    last_read: list[int] = field(default_factory=list)
    """Text that the draft read last, so that repeated reading can be counted."""
    ended: bool = False

    def beginning_of(self, text: list[int]) -> Recall:
        """Return the recall of another text that shares this one's beginning."""
        same = next(
            (i for i, pair in enumerate(zip(self.text, text)) if pair[0] != pair[1]),
            min(len(self.text), len(text)),
        )
        guesses = [*self.guesses[:same], *[None] * (len(text) - same)]
        return Recall(self.of, same, list(text), guesses, last_read=self.last_read)

    def go_on(self, prefix: Sequence[int]) -> None:
        """Record the tokens of a cycle: the accepted part of the window, and the token after it."""
        for i, token in enumerate(prefix[len(self.text) :]):
            self.guesses.append(self.ahead[i] if i < len(self.ahead) else None)
            self.text.append(token)
        self.ahead = []

    def end(self, text: Sequence[int]) -> None:
        """Remember the text, which is finished."""
        if not self.ended:
            self.ended = True
            self.go_on(text)
            self.of.add(self.text, self.guesses, self.start)
