"""The protocols of a cycle: what drafts, and what decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from lenience.core.context import Context
from lenience.core.needs import Needs
from lenience.core.types import Draft, Reading, Verdict


class TrainedPart(Protocol):
    """Something fitted that lies in a folder: a rule's judge, a stop condition's head, a drafter's
    heads."""

    @property
    def path(self) -> str: ...

    @property
    def head(self) -> Any:
        """Return the trained part. It has a `fingerprint`, and `prompts`, the digests of the
        prompts it was trained on; None if someone else trained it."""
        ...


class FittedHead(TrainedPart, Protocol):
    """A head that a rule or a stop condition asks while decoding."""

    def check_temperature(self, temperature: float) -> None:
        """Raise InputError where it was mined at another temperature."""
        ...


class Drafter(Protocol):
    """Proposes windows."""

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        """Propose a window for each row of `ctx`, which may have `room` new tokens more, of which
        one follows a window that is not trusted; it may be empty."""
        ...

    def move(self, source: int, to: int) -> None:
        """Make the row at `source` the row at `to`."""
        return

    def copy(self, source: int, to: int) -> None:
        """Start the row at `to` as a copy of the row at `source`. State that is not copied is
        computed again."""
        return

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        """Receive the target's reading of the rows' windows, and the verdicts."""
        return


@runtime_checkable
class Rule(Protocol):
    """An acceptance rule, which decides how much of each row's window is kept. It declares its
    needs by overriding them. A rule is data: `str(rule)` is its spec."""

    @property
    def heads(self) -> tuple[FittedHead, ...]:
        """Return the fitted heads that it asks."""
        return ()

    @property
    def needs(self) -> Needs:
        """Return the inputs that the rule requires."""
        return Needs()

    @property
    def verifies(self) -> Literal["down", "up"] | None:
        """Return how it verifies trees that were drawn: token by token from the prefix down, or
        whole paths from their ends up; None where it takes their tokens as chosen for certain."""
        return None

    @property
    def goes_on_as_target(self) -> bool:
        """Return whether, when greedy, the token after those that are kept is the target's own:
        then an answer in which nothing was kept by lenience is the target's."""
        return False

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        """Raise InputError where a head of this rule cannot run on models of these fingerprints and
        hidden sizes, by role."""
        return

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        """Decide on the windows of all rows."""
        ...
