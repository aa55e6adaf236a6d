"""Speeds of decoders on the same prompts, and the uncertainty of their ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import norm, t

from lenience.core.progress import Progress, silent
from lenience.core.records import Record
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.tasks.base import Messages

if TYPE_CHECKING:
    from numpy.typing import NDArray

BOOTSTRAPS = 10_000
SEED = 0
WARM_UP = 16
"""Number of tokens that each decoder generates before it is timed."""


class Times(NamedTuple):
    """The speed of one decoder as a multiple of another's, with its 95 % interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f}) times"


class Timed(Record):
    """The timings of a decoder on some prompts."""

    setting: str
    """Decoder as text, see `Decoder.parse`."""
    tokens: list[int]
    seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def times(self, other: Timed) -> Times:
        """Return the speed as a multiple of another decoder's on the same prompts.

        The interval is a bootstrap interval over prompts. Its quantiles are widened by Student's t
        for the number of prompts (Hesterberg 2015, expanded percentiles)."""
        n = len(self.tokens)
        draws = np.random.default_rng(SEED).integers(0, n, (BOOTSTRAPS, n))
        ratios = self._resampled(draws) / other._resampled(draws)
        tail = norm.cdf(-math.sqrt(n / (n - 1)) * t.ppf(0.975, n - 1))
        low, high = np.quantile(ratios, [tail, 1 - tail])
        return Times(
            self.tokens_per_second / other.tokens_per_second, float(low), float(high)
        )

    def _resampled(self, draws: NDArray) -> NDArray:
        """Return the tokens per second [draws] on the prompts of each row of `draws` [draws, n]."""
        tokens = np.array(self.tokens)
        seconds = np.array(self.seconds)
        return tokens[draws].sum(1) / seconds[draws].sum(1)


class TimedTurns(Record):
    """The timings of decoders that took turns on some prompts, with the machine."""

    machine: str
    timed: list[Timed]


class Speeds(Record):
    """The speed of the certified setting compared with lossless decoding, on prompts on which
    nothing was chosen."""

    machine: str
    certified: Timed
    strict: Timed
    """Strict decoding in the form that won the race."""
    alone: Timed
    """The target alone."""
    passed: list[Timed]
    """Settings that passed and may be the fastest, timed on the prompts of that choice. Empty if
    only one remained, or the choice was made on another machine."""


def warm_up(pair: Pair, settings: Iterable[Decoder], prompt: str | Messages) -> None:
    """Decode a few tokens with each decoder, so that no timing includes a first pass."""
    for setting in settings:
        pair.generate(prompt, replace(setting, max_new_tokens=WARM_UP))


def take_turns(
    pair: Pair,
    settings: Iterable[Decoder],
    prompts: Sequence[str | Messages],
    phase: str,
    progress: Progress = silent,
) -> dict[Decoder, Timed]:
    """Time decoders that take turns on each prompt, so that changes of the machine's speed affect
    all alike. Return the timings by decoder."""
    settings = list(dict.fromkeys(settings))
    timed = {
        setting: Timed(setting=str(setting), tokens=[], seconds=[])
        for setting in settings
    }
    total = len(prompts) * len(settings)
    for turn, (prompt, setting) in enumerate(product(prompts, settings)):
        progress(phase, turn, total)
        out = pair.generate(prompt, setting)
        timed[setting].tokens.append(len(out.tokens))
        timed[setting].seconds.append(out.seconds)
    progress(phase, total, total)
    return timed
