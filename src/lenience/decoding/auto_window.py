"""Picking the draft window at which prompts are answered fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lenience.core.context import Context, Row
from lenience.core.protocols import Drafter, Rule
from lenience.decoding.loop import cycle
from lenience.models.session import Session

CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The windows that one is picked from."""
PILOT_PROMPTS, PILOT_TOKENS = 8, 64
"""On how many prompts, and of how many new tokens, it is counted what a rule keeps."""
MOST_SECONDS, LEAST_ROUNDS, MOST_ROUNDS = 1.0, 2, 21
"""How long cycles are timed at most, and for how many rounds over all windows; the first one is a
warm-up."""


def fastest_window(kept: Sequence[int], seconds: Mapping[int, float]) -> int:
    """The window with the most tokens per second, from how many tokens cycles with a wide window
    `kept`, and how many `seconds` a cycle takes at each window."""

    def tokens_per_second(window: int) -> float:
        tokens = 1 + sum(min(n, window) for n in kept) / len(kept)
        return tokens / seconds[window]

    return max(seconds, key=tokens_per_second)


def cycle_seconds(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, rows: list[Row]
) -> dict[int, float]:
    """The seconds of a cycle after the rows' prefixes at each of the windows to choose from:
    medians over several rounds."""
    seconds: dict[int, list[float]] = {window: [] for window in CANDIDATES}
    end = time.perf_counter() + MOST_SECONDS
    rounds = 0
    while rounds < LEAST_ROUNDS or (time.perf_counter() < end and rounds < MOST_ROUNDS):
        for window in CANDIDATES:
            began = time.perf_counter()
            at_window = replace(ctx, rows=rows, window=window)
            cycle(session, drafter, rule, at_window, [window + 1] * len(rows))
            seconds[window].append(time.perf_counter() - began)
        rounds += 1
    return {window: statistics.median(taken[1:]) for window, taken in seconds.items()}
