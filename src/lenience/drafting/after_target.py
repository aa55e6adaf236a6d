"""Drafters that continue from the target's own states."""

from __future__ import annotations

from collections.abc import Sequence

from lenience.core.context import Context
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.models.session import Session


class TargetSession(Session):
    """A session of a model that continues from the target's own states."""

    def begin(self, prefixes: Sequence[list[int]]) -> list[bool]:
        """Return [B]: True for each prefix of which the target has read all but the last token, so
        that drafting can start. The next call of `read` takes these prefixes, continued."""
        raise NotImplementedError


class AfterTarget(Drafter):
    """A drafter that proposes nothing in the first cycle of an answer, as the target has read
    nothing of it. A prompt of an earlier answer in the row's cache does not count, so that
    proposals do not depend on earlier answers."""

    def __init__(self, drafter: Drafter, session: TargetSession):
        self.drafter = drafter
        self.session = session

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        ready = self.session.begin([row.prefix for row in ctx.rows])
        begun = [can and row.position > row.ahead for can, row in zip(ready, ctx.rows)]
        return self.drafter.propose(
            ctx, [left if can else 1 for left, can in zip(room, begun)]
        )

    def move(self, source: int, to: int) -> None:
        self.drafter.move(source, to)
