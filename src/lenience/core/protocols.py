"""The protocols of a cycle: what drafts, and what decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lenience.core.context import Context
from lenience.core.types import Draft, Reading, Verdict


class Drafter(Protocol):
    """Proposes windows."""

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        """A window for each row of `ctx`, which may have `room` new tokens more, of which one follows a window that is not
        trusted; it may be empty."""
        ...

    def move(self, source: int, to: int) -> None:
        """The row at `source` becomes the row at `to`."""
        ...


class Rule(Protocol):
    """Decides what of each row's window is kept. A rule is data: `str(rule)` is its spec."""

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]: ...
