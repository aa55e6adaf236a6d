"""Forecast of the cost of mining, from a pilot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from lenience.core.errors import InputError
from lenience.runs.record import MinedSample

PILOT = 8
"""Number of samples in the pilot of a forecast."""


@dataclass(frozen=True)
class Forecast:
    """Estimated cost of mining a number of important mismatches on this machine, from a pilot of
    `pilot` samples."""

    labels: int
    pilot: int
    mismatches: float
    """Mean number of mismatches per sample; `important` is that of important mismatches, with its
    95 % interval by Student's t."""
    important: float
    important_interval: tuple[float, float]
    samples: int
    samples_interval: tuple[int, int | None]
    """Interval of the number of samples. The upper end is None if the pilot is consistent with no
    important mismatches at all."""
    target_passes: int
    target_tokens: int
    draft_tokens: int
    seconds: float


def forecast(mined: Sequence[MinedSample], labels: int) -> Forecast:
    """Return the estimated cost of mining `labels` important mismatches. Raises InputError if there
    are fewer than two samples or no important mismatch among them."""
    counts = np.array(
        [
            sum(bool(mismatch.important) for mismatch in sample.mismatches)
            for sample in mined
        ]
    )
    if len(mined) < 2 or not counts.any():
        raise InputError(
            f"--plan {labels}: {len(mined)} samples hold {int(counts.sum())} important "
            "mismatches, "
            "too few for an estimate; give --limit for a larger pilot"
        )
    n = len(counts)
    mean = float(counts.mean())
    half = float(t.ppf(0.975, n - 1) * counts.std(ddof=1) / math.sqrt(n))
    low = max(0.0, mean - half)
    high = mean + half
    samples = math.ceil(labels / mean)

    def whole(name: str) -> float:
        return samples * sum(float(getattr(sample.cost, name)) for sample in mined) / n

    return Forecast(
        labels=labels,
        pilot=n,
        mismatches=sum(len(sample.mismatches) for sample in mined) / n,
        important=mean,
        important_interval=(low, high),
        samples=samples,
        samples_interval=(
            math.ceil(labels / high),
            math.ceil(labels / low) if low else None,
        ),
        target_passes=round(whole("target_passes")),
        target_tokens=round(whole("target_tokens")),
        draft_tokens=round(whole("draft_tokens")),
        seconds=whole("seconds"),
    )
