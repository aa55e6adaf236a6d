"""Speeds of decoders on the same prompts, and the uncertainty of their ratios."""

from __future__ import annotations

import math
import time
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
    """The timings of a decoder on some prompts, or batches of prompts."""

    setting: str
    """Decoder as text, see `Decoder.parse`."""
    tokens: list[int]
    seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def joined(self, other: Timed) -> Timed:
        """Return the timings followed by those of the same decoder on further prompts."""
        return Timed(
            setting=self.setting,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
        )

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
    batch_size: int = 1
    """Number of prompts per batch, which is one turn."""


def take_turns(
    pair: Pair,
    settings: Iterable[Decoder],
    prompts: Sequence[str | Messages],
    phase: str,
    progress: Progress = silent,
    *,
    batch_size: int = 1,
) -> dict[Decoder, Timed]:
    """Time decoders that take turns on each prompt, or on each `batch_size` prompts together, so
    that changes of the machine's speed affect all alike. Return the timings by decoder, one for
    each turn. Each decoder first decodes a few tokens, so that no timing includes a first pass."""
    settings = list(dict.fromkeys(settings))
    timed = {}
    for setting in settings:
        timed[setting] = Timed(setting=str(setting), tokens=[], seconds=[])
    batches = []
    for first in range(0, len(prompts) - batch_size + 1, batch_size):
        batches.append(prompts[first : first + batch_size])
    for setting in settings:
        progress(phase, 0, 0)
        _timed(pair, batches[0], replace(setting, max_new_tokens=WARM_UP))
    total = len(batches) * len(settings)
    for turn, (batch, setting) in enumerate(product(batches, settings)):
        progress(phase, turn, total)
        pair.reset_prefix_cache()
        tokens, seconds = _timed(pair, batch, setting)
        timed[setting].tokens.append(tokens)
        timed[setting].seconds.append(seconds)
    progress(phase, total, total)
    return timed


def _timed(
    pair: Pair, batch: Sequence[str | Messages], setting: Decoder
) -> tuple[int, float]:
    """Return the number of new tokens of a batch, and the seconds."""
    if len(batch) == 1:
        out = pair.generate(batch[0], setting)
        return len(out.tokens), out.seconds
    began = time.perf_counter()
    outs = pair.generate_batch(batch, setting, batch_size=len(batch))
    seconds = time.perf_counter() - began
    return sum(len(out.tokens) for out in outs), seconds
