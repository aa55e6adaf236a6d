"""The number of requests in flight to an endpoint, adapted to its errors and its latency."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

SLOWER = 4.0
"""Multiple of the best latency per token above which fewer requests are kept in flight."""


@dataclass
class Flow:
    """The number of requests sent to an endpoint at once, `allowed`. It grows by one after
    `allowed` answers, shrinks by 0.5 after a slow answer (down to half of `most`), and halves after
    an overload error."""

    most: int
    allowed: float = 0.0
    running: int = 0
    best: float = float("inf")
    """Lowest seconds per token so far."""
    down_since: float | None = None
    """Time from which the server was unreachable or overloaded; None while it answers."""
    free: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.allowed = float(self.most)

    async def __aenter__(self) -> None:
        async with self.free:
            await self.free.wait_for(lambda: self.running < max(1, int(self.allowed)))
            self.running += 1

    async def __aexit__(self, *_: object) -> None:
        async with self.free:
            self.running -= 1
            self.free.notify_all()

    def answered(self, seconds: float, tokens: int) -> None:
        """Adjust the number of requests after an answer."""
        self.down_since = None
        each = seconds / max(1, tokens)
        self.best = min(self.best, each)
        if each > SLOWER * self.best and self.allowed > self.most / 2:
            self.allowed = max(1.0, self.allowed - 0.5)
        else:
            self.allowed = min(float(self.most), self.allowed + 1 / self.allowed)

    def refused(self) -> None:
        """Halve the number of requests after an overload error."""
        self.allowed = max(1.0, self.allowed / 2)
