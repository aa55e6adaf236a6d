"""Protocols of a cycle's parts: drafters, rules and trained heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from lenience.core.context import Context
from lenience.core.needs import Needs
from lenience.core.types import Draft, Reading, Verdict


class TrainedPart(Protocol):
    """A trained part stored in a folder: a rule's judge, a stop condition's head, a drafter's
    heads."""

    @property
    def path(self) -> str: ...

    @property
    def head(self) -> Any:
        """Return the trained part. It has a `fingerprint` and `prompts`, the digests of its
        training prompts; `prompts` is None if someone else trained the part."""
        ...


class FittedHead(TrainedPart, Protocol):
    """A head that a rule or a stop condition queries while decoding."""

    def check_temperature(self, temperature: float) -> None:
        """Raise InputError if the head's training data was mined at another temperature."""
        ...


class Drafter(Protocol):
    """A source of proposed windows."""

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        """Propose a window, possibly empty, for each row of `ctx`. `room[b]` is row b's remaining
        token budget; one of these tokens is reserved for the correction or bonus, unless the window
        is trusted."""
        ...

    def move(self, source: int, to: int) -> None:
        """Move a row's state from index `source` to index `to`."""
        return

    def copy(self, source: int, to: int) -> None:
        """Start row `to` as a copy of row `source`. State that is not copied is recomputed."""
        return

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        """Receive the target's reading of the rows' windows, and the rule's verdicts."""
        return


@runtime_checkable
class Rule(Protocol):
    """An acceptance rule: it decides how much of each row's window is kept. A rule declares its
    needs by overriding `needs`. A rule is data: `str(rule)` is its spec."""

    @property
    def heads(self) -> tuple[FittedHead, ...]:
        """Return the trained heads that the rule queries."""
        return ()

    @property
    def needs(self) -> Needs:
        """Return the inputs that the rule requires."""
        return Needs()

    @property
    def verifies(self) -> Literal["down", "up"] | None:
        """Return how the rule verifies sampled trees: "down", token by token from the prefix, or
        "up", whole paths from their leaves. None if it treats their tokens as chosen with
        probability 1."""
        return None

    @property
    def goes_on_as_target(self) -> bool:
        """Return True if, when greedy, the token after the accepted ones is always the target's
        own. Then an answer without leniently accepted tokens is the target's answer."""
        return False

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        """Raise InputError if a head of this rule cannot run on the models with these fingerprints
        and hidden sizes. Both are given by role."""
        return

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        """Return the verdicts on the windows of all rows."""
        ...
