"""A growing index of the continuations of each part of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

END = -1
"""Separator after each of several texts."""


class Suffixes:
    """A suffix automaton (Blumer 1985) that counts how often the text of each state has occurred.
    It has at most two states per token. Adding a token takes amortised constant time, plus an
    increment for each state along the suffix links."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = 0

    def add(self, token: int) -> None:
        """Append a token to the text."""
        new = self._state({}, self._length[self._last] + 1, -1, 0)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at < 0:
            self._link[new] = 0
        else:
            self._link[new] = self._split(at, token)
        self._last = at = new
        while at >= 0:
            self._count[at] += 1
            at = self._link[at]

    def _split(self, at: int, token: int) -> int:
        """Return the state whose longest text is that of `at` extended by `token`. It is split off
        if only a longer text has a state."""
        old = self._next[at][token]
        length = self._length[at] + 1
        if self._length[old] == length:
            return old
        copy = self._state(
            dict(self._next[old]), length, self._link[old], self._count[old]
        )
        while at >= 0 and self._next[at].get(token) == old:
            self._next[at][token] = copy
            at = self._link[at]
        self._link[old] = copy
        return copy

    def _state(
        self, following: dict[int, int], length: int, link: int, count: int
    ) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        return len(self._next) - 1

    def matches(self, ahead: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Return the states of the text's ends, extended by the tokens `ahead`, that occurred
        earlier in the text, with their lengths. The longest comes first; the empty end is left
        out."""
        at, length = (
            (self._last, self._length[self._last])
            if ahead
            else self._shorter(self._last)
        )
        return self._ends(at, length, ahead)

    def matches_of(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Return the states of the ends of other tokens that occur in the text, as `matches`
        does."""
        return self._ends(0, 0, tokens)

    def _ends(
        self, at: int, length: int, ahead: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        for token in ahead:
            while at > 0 and token not in self._next[at]:
                at, length = self._shorter(at)
            if token in self._next[at]:
                at = self._next[at][token]
                length = length + 1
        while at > 0:
            yield at, length
            at, length = self._shorter(at)

    def _shorter(self, at: int) -> tuple[int, int]:
        """Return the state of the next shorter suffix of a state's text, and that suffix's size."""
        link = max(self._link[at], 0)
        return link, self._length[link]

    def followers(self, state: int) -> list[tuple[int, float, int]]:
        """Return the continuations of a state's text: each token, its share, and the state after
        the token."""
        after = {token: at for token, at in self._next[state].items() if token != END}
        total = sum(self._count[child] for child in after.values())
        found = list[tuple[int, float, int]]()
        for token, child in after.items():
            found.append((token, self._count[child] / total, child))
        return found
