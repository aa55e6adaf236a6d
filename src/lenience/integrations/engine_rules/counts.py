"""Counts of accepted tokens per request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """The counts of one request."""

    passes: int = 0
    """Number of target passes over a drafted window."""
    kept_strictly: int = 0
    """Number of accepted tokens that the strict rule accepts too, each at its position."""
    kept_leniently: int = 0
    unjudged: int = 0
    """Number of windows decided strictly because the rule lacked the draft's distribution."""
    non_finite: int = 0
    """Number of windows in which target logits are NaN or infinite; no token is kept from there."""
