"""How long work tells how far it has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Is called with a phase, how much of it is done, and how much there is in all."""


def silent(phase: str, done: int, total: int) -> None:
    """Do nothing."""
