"""Choice of the fastest window, stop condition and tree shape for given prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lenience.core.context import Context, Row
from lenience.core.protocols import Drafter, Rule
from lenience.decoding.loop import cycle
from lenience.drafting.stops import Likely, Stop
from lenience.drafting.trees.shapes import Chain, Tree
from lenience.heads.head import load_head
from lenience.models.session import Session

STOP_THRESHOLDS = (0.3, 0.5, 0.7)
"""Thresholds at which a stop head is tried."""
CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The windows that one is picked from."""
PILOT_PROMPTS = 8
PILOT_TOKENS = 64
"""On how many prompts, and of how many new tokens, it is counted what a rule keeps."""
MOST_SECONDS = 1.0
LEAST_ROUNDS = 2
MOST_ROUNDS = 21
"""Limits of timing cycles: seconds, and rounds over all windows, of which the first is a
warm-up."""


Cycle = tuple[int, int]
"""Numbers of drafted and of accepted tokens of a cycle."""


@dataclass(frozen=True)
class Drafting:
    """How drafting ends."""

    window: int
    stop: Stop
    tokens_per_second: float = 0.0
    """Estimated."""
    tree: Tree = field(default_factory=Chain)


def fastest_window(
    cycles: Sequence[Cycle], seconds: Mapping[int, float], stop: Stop
) -> Drafting:
    """Return the window with the most tokens per second, by `cycles` with a wide window and by the
    `seconds` of a cycle at each window.

    The tokens of a wide cycle are cut into narrow windows one after the other. The start of a wide
    cycle alone would mislead: a window within a long stretch of kept tokens is kept more often.
    """
    tokens = sum(
        kept + (stop.keeps_bonus or kept < drafted) for drafted, kept in cycles
    )

    def narrow(drafted: int, kept: int, window: int) -> int:
        """Return how many narrow cycles a wide one takes."""
        if stop.keeps_bonus or not window:
            return -(-(kept + 1) // (window + 1))
        if kept < drafted:
            return kept // window + 1
        return max(1, -(-kept // window))

    def tokens_per_second(window: int) -> float:
        count = sum(narrow(drafted, kept, window) for drafted, kept in cycles)
        return tokens / count / seconds[window]

    return max(
        (Drafting(window, stop, tokens_per_second(window)) for window in seconds),
        key=lambda measured: measured.tokens_per_second,
    )


def stopped(
    cycles: Sequence[Cycle], seconds: Mapping[int, float], stop: Stop
) -> Drafting:
    """Return the widest window with a stop condition that ended these `cycles`; `seconds` are of
    cycles that it was asked in, and did not end."""
    windows = sorted(seconds)
    took = np.interp(
        [drafted for drafted, _ in cycles], windows, [seconds[w] for w in windows]
    )
    tokens = sum(1 + kept for _, kept in cycles)
    return Drafting(max(windows), stop, tokens / float(took.sum()))


def learned_stops(rule: Rule) -> list[Likely]:
    """Return the stop head that lies next to the rule's judge and learned its rejections, at each
    tried threshold."""
    for judge in rule.heads:
        folder = Path(judge.path).parent / "stop"
        if (folder / "stop.json").is_file():
            learned_of = load_head(folder, "stop").metrics.get("of_heads", ())
            if judge.head.fingerprint in learned_of:
                return [Likely(str(folder), threshold) for threshold in STOP_THRESHOLDS]
    return []


def cycle_seconds(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, rows: list[Row]
) -> dict[int, float]:
    """Return the seconds of a cycle after the rows' prefixes at each of the windows to choose from:
    medians over several rounds."""
    seconds: dict[int, list[float]] = {window: [] for window in CANDIDATES}
    end = time.perf_counter() + MOST_SECONDS
    rounds = 0
    while rounds < LEAST_ROUNDS or (time.perf_counter() < end and rounds < MOST_ROUNDS):
        for window in CANDIDATES:
            began = time.perf_counter()
            # no cycle came before: a stop condition that adapts does not
            fresh = [replace(row, last=None) for row in rows]
            at_window = replace(ctx, rows=fresh, window=window)
            room = [min(window + 1, session.room(row.prefix)) for row in rows]
            cycle(session, drafter, rule, at_window, room)
            seconds[window].append(time.perf_counter() - began)
        rounds += 1
    return {window: statistics.median(taken[1:]) for window, taken in seconds.items()}
