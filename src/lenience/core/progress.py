"""Progress callbacks of long-running work."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Callback that receives a phase, the amount of it that is done, and the total."""


def silent(phase: str, done: int, total: int) -> None:
    """Do nothing: the callback of work whose progress nobody watches."""
