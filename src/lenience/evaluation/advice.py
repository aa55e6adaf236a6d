"""The recommendation that a comparison's report begins with, and its cost."""

from __future__ import annotations

from lenience.evaluation.names import NamedRow, named
from lenience.evaluation.table import Frontier
from lenience.rules.baselines import BASELINES

MOST_LOST = 0.01
"""Largest loss of a recommended setting, as a share of the prompts."""


def recommended(frontier: Frontier) -> str:
    """Return a sentence about the fastest setting that lost at most MOST_LOST of the prompts: its
    speed compared with the target alone and with the fastest strict decoding, and what remains
    uncertain."""
    rows = named(frontier.rows)
    alone = next(row for row in rows if row.rule == "target")
    drafting = [row for row in rows if row.rule not in BASELINES]
    strict = [row for row in drafting if row.rule == "exact"]
    fastest_strict = max(strict, key=lambda row: row.tokens_per_second, default=None)
    allowed = [alone, *(row for row in drafting if row.paired_loss <= MOST_LOST)]
    best = max(allowed, key=lambda row: row.tokens_per_second)
    if best is alone:
        return (
            f"Recommended here: the target alone, {_speed(best)}; nothing that lost at most "
            f"{MOST_LOST:.0%} was faster."
        )
    faster = [
        f"{best.tokens_per_second / alone.tokens_per_second:.2f} times the target alone"
    ]
    if best is fastest_strict:
        return (
            f"Recommended here: strict decoding, {_setting(best)}, {_speed(best)}, {faster[0]}; it "
            f"loses nothing, and no lenient setting that lost at most {MOST_LOST:.0%} was faster."
        )
    if fastest_strict is not None:
        gain = best.tokens_per_second / fastest_strict.tokens_per_second
        faster.append(f"{gain:.2f} times the fastest strict decoding")
    _, most = best.paired_loss_interval
    return (
        f"Recommended here: {_setting(best)}, {_speed(best)}, {' and '.join(faster)}. It lost "
        f"{best.paired_loss:.1%} of {best.n} prompts, at most {most:.1%} with 95 % confidence had "
        "it not been picked from this table; certify bounds the loss of what is picked."
    )


def _setting(row: NamedRow) -> str:
    return f"{row.name} at window {row.window}" if row.window else row.name


def _speed(row: NamedRow) -> str:
    return f"{row.tokens_per_second:.0f} tokens/s"
