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
"""Thresholds tried for a stop head."""
CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Windows to choose from."""
PILOT_PROMPTS = 8
PILOT_TOKENS = 64
"""Number of prompts, and of new tokens per prompt, on which accepted tokens are counted."""
MOST_SECONDS = 1.0
LEAST_ROUNDS = 2
MOST_ROUNDS = 21
"""Limits of timing cycles: seconds, and rounds over all windows. The first round is a warm-up."""


Cycle = tuple[int, int]
"""Numbers of drafted and accepted tokens of a cycle."""


@dataclass(frozen=True)
class Drafting:
    """A window, a stop condition and a tree, with their estimated speed."""

    window: int
    stop: Stop
    tokens_per_second: float = 0.0
    """Estimated speed in tokens per second."""
    tree: Tree = field(default_factory=Chain)


def fastest_window(
    cycles: Sequence[Cycle], seconds: Mapping[int, float], stop: Stop
) -> Drafting:
    """Return the window with the most tokens per second. `cycles` were run with a wide window;
    `seconds` is the time of a cycle at each window.

    The tokens of a wide cycle are cut into consecutive narrow windows. The start of each wide cycle
    alone would mislead: a window within a long run of accepted tokens is accepted more often.
    """
    tokens = sum(
        kept + (stop.keeps_bonus or kept < drafted) for drafted, kept in cycles
    )

    def narrow(drafted: int, kept: int, window: int) -> int:
        """Return the number of narrow cycles that decode the tokens of a wide cycle."""
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
    """Return the widest window with a stop condition, and their estimated speed. The stop condition
    ended these `cycles`; `seconds` are times of cycles in which it was queried but ended
    nothing."""
    windows = sorted(seconds)
    took = np.interp(
        [drafted for drafted, _ in cycles], windows, [seconds[w] for w in windows]
    )
    tokens = sum(1 + kept for _, kept in cycles)
    return Drafting(max(windows), stop, tokens / float(took.sum()))


def learned_stops(rule: Rule) -> list[Likely]:
    """Return the stop head stored next to the rule's judge, once per threshold to try. Only a stop
    head that learned this judge's rejections counts."""
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
    """Return the median seconds of a cycle at each of CANDIDATES, for windows after the rows'
    prefixes. The first round is not counted."""
    seconds: dict[int, list[float]] = {window: [] for window in CANDIDATES}
    end = time.perf_counter() + MOST_SECONDS
    rounds = 0
    while rounds < LEAST_ROUNDS or (time.perf_counter() < end and rounds < MOST_ROUNDS):
        for window in CANDIDATES:
            began = time.perf_counter()
            # without a last step, so that an adaptive stop condition does not adapt
            fresh = [replace(row, last=None) for row in rows]
            at_window = replace(ctx, rows=fresh, window=window)
            room = [min(window + 1, session.room(row.prefix)) for row in rows]
            cycle(session, drafter, rule, at_window, room)
            seconds[window].append(time.perf_counter() - began)
        rounds += 1
    return {window: statistics.median(taken[1:]) for window, taken in seconds.items()}
