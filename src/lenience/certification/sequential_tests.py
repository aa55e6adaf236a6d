"""Sequential tests and bounds of a mean loss in [0, 1]. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

if TYPE_CHECKING:
    from numpy.typing import NDArray

FUTILITY = 0.05
"""P-value of "the loss is at most the limit" at which a setting is given up. Giving up cannot cause
a false certificate."""
LOSSES_PER_LOOK = 32
"""Number of losses between looks of a sequential test."""
COMMON = 0.6
"""Share of the horizon by which most tests should have ended."""
EARLY = 0.9
"""Share of the error budget spent by then."""


@dataclass(frozen=True)
class Test:
    """A sequential test that a mean loss is at most `limit`. If the mean is above the limit, the
    test passes within `horizon` losses with probability at most `alpha`."""

    __test__ = False  # no test for pytest

    limit: float
    alpha: float
    horizon: int
    name: ClassVar[str]
    said: ClassVar[str]

    def passed_at(self, losses: NDArray) -> int | None:
        """Return the number of losses after which the test first passes; None if it never does.
        `losses` [n] are in [0, 1], in an order fixed beforehand."""
        raise NotImplementedError

    def bound(self, losses: NDArray) -> float:
        """Return an upper bound of the mean with confidence 1 − alpha, if the test ended after
        these losses [n]; at most the limit if the test passes then."""
        raise NotImplementedError

    def futile(self, losses: NDArray, most: int) -> bool:
        """Return True if continuing to `most` losses is pointless."""
        return hoeffding_bentkus(1 - losses, 1 - self.limit) <= FUTILITY

    def spent(self, n: float) -> float:
        """Return the error allowed up to n losses, whatever the looks: about half of alpha by a
        sixth of the horizon, so that a clear case ends soon."""
        most = min(1.0, n / (COMMON * self.horizon)) ** 0.5
        return self.alpha * (EARLY * most + (1 - EARLY) * min(1.0, n / self.horizon))


@dataclass(frozen=True)
class Binomial(Test):
    """A test for losses of 0 or 1: an exact binomial test after each loss. The bound orders
    outcomes by when they end and then by losses (Jennison and Turnbull 2000, section 12.4)."""

    name = "binomial"
    said = "an exact binomial test"

    @cached_property
    def boundary(self) -> list[int]:
        """Return the decision boundary: entry c is the number of prompts from which c losses pass.
        Losses only grow, so a test can pass only at these numbers."""
        found = list[int]()
        # this many losses or more never pass
        size = math.ceil(self.horizon * self.limit) + 1
        # probabilities of 0, 1, … losses without having passed
        chances = np.eye(1, size)[0]
        passed = 0.0
        now = 0
        for fits in range(size):
            left = self._prompts_left(now, passed, float(chances[fits]))
            if left is None:
                break
            chances = _after(chances, left, self.limit, size)
            now = now + left
            passed += float(chances[fits])
            chances[fits] = 0.0
            found.append(now)
        return found

    def _prompts_left(self, now: int, passed: float, chance: float) -> int | None:
        """Return the smallest number of prompts after `now`, none of them lost, that may pass; None
        if beyond the horizon. At the limit, the losses so far have probability `chance`, and
        `passed` of the error is spent."""

        def affordable(more: int) -> bool:
            return passed + chance * (1 - self.limit) ** more <= self.spent(now + more)

        return _first_true(affordable, self.horizon - now)

    def passed_at(self, losses: NDArray) -> int | None:
        so_far = losses.cumsum()
        for fits, n in enumerate(self.boundary):
            if n > len(losses):
                return None
            if so_far[n - 1] <= fits:
                return n
        return None

    def chance(self, mean: float, n: int, losses: int) -> float:
        """Return the probability of passing before n prompts, or else of at most `losses` losses
        among n, at this mean loss."""
        size = max(losses, len(self.boundary)) + 1
        chances = np.ones(1)
        passed = 0.0
        now = 0
        for fits, at in enumerate(self.boundary):
            if at >= n:
                break
            chances = _after(chances, at - now, mean, size)
            passed = passed + float(chances[: fits + 1].sum())
            now = at
            chances[: fits + 1] = 0
        return passed + float(_after(chances, n - now, mean, size)[: losses + 1].sum())

    def power(self, mean: float, n: int) -> float:
        """Return the probability that a setting of this mean loss passes within n prompts."""
        reached = [at for at in self.boundary if at <= n]
        return self.chance(mean, reached[-1], len(reached) - 1) if reached else 0.0

    def bound(self, losses: NDArray) -> float:
        n = len(losses)
        count = int(losses.sum())
        if count >= n:
            return 1.0
        return float(
            brentq(
                lambda mean: self.chance(mean, n, count) - self.alpha, 1e-12, 1 - 1e-12
            )
        )

    def futile(self, losses: NDArray, most: int) -> bool:
        reached = sum(at <= most for at in self.boundary)
        return losses.sum() >= reached or super().futile(losses, most)


def _after(chances: NDArray, more: int, mean: float, size: int) -> NDArray:
    """Return the probabilities [size] of 0, 1, … losses after `more` further prompts."""
    steps = binom.pmf(np.arange(size), more, mean)
    return np.pad(np.convolve(chances, steps), (0, size))[:size]


def _first_true(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` for which the monotone `holds` is true; None if
    there is none."""
    if most < 1 or not holds(most):
        return None
    low = 0
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class HoeffdingBentkus(Test):
    """A test for losses in [0, 1] by Hoeffding–Bentkus p-values (Bates 2021; Angelopoulos 2021,
    section 3.2), at a few looks, each at the level that is spent there."""

    name = "hoeffding-bentkus"
    said = "Hoeffding–Bentkus bounds"

    @cached_property
    def looks(self) -> list[tuple[int, float]]:
        """Return the number of losses and the level of each look. The numbers double, and the last
        is the horizon."""
        numbers = [round(COMMON * self.horizon), self.horizon]
        while numbers[0] * self.limit > 2:
            numbers.insert(0, numbers[0] // 2)
        levels = np.diff([0.0, *map(self.spent, numbers)])
        return list(zip(numbers, levels.tolist()))

    def passed_at(self, losses: NDArray) -> int | None:
        looks = ((n, level) for n, level in self.looks if n <= len(losses))
        return next(
            (
                n
                for n, level in looks
                if hoeffding_bentkus(losses[:n], self.limit) <= level
            ),
            None,
        )

    def bound(self, losses: NDArray) -> float:
        done = [look for look in self.looks if look[0] <= len(losses)]
        if not done:
            return 1.0
        n, level = done[-1]
        seen = losses[:n]
        return _first(
            lambda mean: hoeffding_bentkus(seen, mean) <= level, float(seen.mean())
        )


@dataclass(frozen=True)
class Betting(Test):
    """A test for losses in [0, 1] by bets against "the mean is above the limit". If the mean is
    above it, the wealth ever reaches 1 / alpha with probability at most alpha (Waudby-Smith and
    Ramdas 2024, section 5). The bet is spread over many stakes (diversified Kelly)."""

    name = "betting"
    said = "a betting confidence sequence"

    def wealth(self, losses: NDArray, mean: float) -> NDArray:
        """Return the wealth after each of the losses […, n], starting from 1, of a bet that their
        mean is below `mean`."""
        return wealth(losses, mean)

    def passed_at(self, losses: NDArray) -> int | None:
        rich = self.wealth(losses, self.limit) >= 1 / self.alpha
        return int(rich.argmax()) + 1 if rich.any() else None

    def bound(self, losses: NDArray) -> float:
        return _first(
            lambda mean: bool(self.wealth(losses, mean).max() >= 1 / self.alpha), 0.0
        )


@dataclass(frozen=True)
class PairedBetting(Betting):
    """A betting test for the net loss of paired answers: 0 for a gain, 1/2 for a tie, 1 for a loss.
    The stakes follow the share of answers that differ, as Kelly stakes would if it were known."""

    said = "a betting confidence sequence whose stakes follow the share of answers that differ"

    def wealth(self, losses: NDArray, mean: float) -> NDArray:
        return paired_wealth(losses, mean, self.limit)


TESTS: dict[str, type[Test]] = {
    test.name: test for test in (Binomial, HoeffdingBentkus, Betting)
}


def hoeffding_bentkus(losses: NDArray, mean: float) -> float:
    """Return the p-value of "the mean is `mean` or more" for losses [n] in [0, 1] (Bates 2021)."""
    n = len(losses)
    seen = min(float(losses.mean()), mean)
    if not 0 < mean < 1:
        return float(mean <= 0)
    h = (seen * math.log(seen / mean) if seen else 0.0) + (
        (1 - seen) * math.log((1 - seen) / (1 - mean)) if seen < 1 else 0.0
    )
    bentkus = math.e * float(binom.cdf(math.ceil(float(losses.sum()) - 1e-9), n, mean))
    return min(math.exp(-n * h), bentkus, 1.0)


STAKES = np.arange(1, 33) / 32
"""Stakes for the bet that rare losses are rarer still: evenly spaced shares of the largest stake
without debt."""
SMALL = np.geomspace(1 / 256, 1, 14)
"""Stakes, many of them small, for the bet that rare losses are less rare."""


def wealth(losses: NDArray, mean: float, stakes: NDArray = STAKES) -> NDArray:
    """Return the wealth after each of the losses […, n], starting from 1, of a bet that their mean
    is below `mean`. If the mean is not below, the wealth is a supermartingale, for any order and
    size of losses in [0, 1]."""
    gains = (mean - np.asarray(losses, float)) / (1 - mean)  # −1 at a loss of 1
    with np.errstate(divide="ignore"):
        return sum(
            np.exp(np.minimum(np.log1p(stake * gains).cumsum(-1), 600))
            for stake in stakes
        ) / len(stakes)


PAIRED_STAKES = (0.35, 0.7)
"""Stakes as shares of limit / (share of answers that differ), the best stake if nothing is lost."""
PRIOR = 50
"""Number of answers assumed before the first; twice the limit is the share of them that differ."""


def paired_wealth(losses: NDArray, mean: float, limit: float) -> NDArray:
    """Return the wealth of `wealth` for losses of 0, 1/2 and 1 […, n]. Each stake is fixed by the
    share of the earlier losses that are not 1/2, and is at most 0.8 of the largest stake that
    cannot lose everything."""
    net = 2 * np.asarray(losses, float) - 1
    above = 2 * mean - 1
    allowed = 2 * limit - 1
    differ = np.abs(net)
    before = differ.cumsum(-1) - differ
    share = (before + PRIOR * 2 * allowed) / (np.arange(net.shape[-1]) + PRIOR)
    stakes = (
        np.minimum(part * allowed / share, 0.8 / (1 - above)) for part in PAIRED_STAKES
    )
    grown = [np.log1p(stake * (above - net)).cumsum(-1) for stake in stakes]
    return np.exp(np.minimum(grown, 600)).mean(0)


def _first(holds: Callable[[float], bool], low: float) -> float:
    """Return the smallest number between `low` and 1 for which the monotone `holds` is true,
    rounded up; 1 if there is none."""
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass
class Alarm:
    """An alarm on an endless sequence of losses in [0, 1]. While their mean is at most `limit`, the
    probability that the alarm is ever raised is at most `alpha`.

    If losses cluster, the k-th bet starts with a share 1 / (k (k + 1)) of the capital, so that a
    long good time does not hide a later bad one. Only earlier losses decide whether a bet starts,
    so the total stays a supermartingale.
    """

    limit: float
    alpha: float
    logs: NDArray | None = None
    """Logarithms of the wealth of all bets, [starts, stakes]."""
    since: float = math.inf
    """Number of losses since the last loss above the limit."""
    anew: bool = False
    """True if the next loss starts a new bet."""

    @cached_property
    def stakes(self) -> NDArray:
        """Return stakes [5] that suit means of two to seventeen times the limit."""
        return np.minimum(self.limit * 2.0 ** np.arange(5), 0.9)

    def add(self, loss: float) -> bool:
        """Return True if this loss raises the alarm."""
        if self.logs is None or self.anew:
            fresh = np.zeros((1, len(self.stakes)))
            self.logs = (
                fresh if self.logs is None else np.concatenate([self.logs, fresh])
            )
        self.logs += np.log1p(self.stakes * (loss - self.limit) / self.limit)
        crowded = self.since < 1 / self.limit
        self.anew = False
        self.since += 1
        if loss <= self.limit:  # the capital has not grown
            return False
        self.since = 0
        self.anew = crowded and float(self._of_each[-1]) < 1
        return self.capital >= 1 / self.alpha

    @property
    def _of_each(self) -> NDArray:
        """Return the wealth [starts] of each start, as a multiple of its share."""
        assert self.logs is not None
        return np.exp(np.minimum(self.logs, 600)).mean(1)

    @property
    def capital(self) -> float:
        if self.logs is None:
            return 1.0
        k = np.arange(1, len(self.logs) + 1)
        # shares of bets that have not started are kept
        return float((self._of_each / (k * (k + 1))).sum() + 1 / (len(k) + 1))


def sequence(losses: NDArray, alpha: float) -> tuple[float, float]:
    """Return the present interval of a confidence sequence for the mean loss. All intervals hold
    simultaneously with confidence 1 − alpha, so one may stop at any time. If the lower end is above
    the upper end, no single mean fits the losses: the mean has changed."""
    if not len(losses):
        return 0.0, 1.0
    above = _first(lambda mean: bool(wealth(losses, mean).max() >= 2 / alpha), 0.0)
    below = _first(
        lambda mean: bool(wealth(1 - losses, mean, SMALL).max() >= 2 / alpha), 0.0
    )
    return 1 - below, above


def sample_size(test: Binomial, mean: float, power: float = 0.8) -> int | None:
    """Return the number of prompts with which a setting of this mean 0/1 loss passes with
    probability `power`; None if more than the horizon, as for any mean from the limit on."""
    if mean >= test.limit:
        return None
    return next((n for n in test.boundary if test.power(mean, n) >= power), None)


def sample_size_by_trial(test: Test, losses: NDArray, power: float = 0.8) -> int | None:
    """Return the sample size as `sample_size` does, but for losses of any kind: it is estimated by
    resampling the losses seen. None if it exceeds the horizon."""
    rng = np.random.default_rng(0)
    trials = 40
    ends = [test.passed_at(rng.choice(losses, test.horizon)) for _ in range(trials)]
    passed = sorted(n for n in ends if n is not None)
    enough = math.ceil(power * trials)
    return passed[enough - 1] if len(passed) >= enough else None


@dataclass(frozen=True)
class SettingResult:
    """The outcome of one setting's test."""

    setting: int
    n: int
    losses: float
    passed: bool
    futile: bool


def fixed_sequence_test(
    test: Test, settings: int, losses: Callable[[int, int], NDArray], most: int
) -> Iterator[SettingResult]:
    """Test settings from strict to lenient, up to the first that does not pass, and yield each
    result (fixed-sequence testing; Bauer 1991; Angelopoulos 2021, section 3.1). `losses(j, n)`
    returns setting j's losses [n] on the first n of at most `most` prompts.

    A setting with a mean loss above the limit passes with probability at most alpha, even if the
    losses do not grow from strict to lenient: the first setting above the limit would have to pass
    its own test.
    """
    for setting in range(settings):
        for n in (*range(LOSSES_PER_LOOK, most, LOSSES_PER_LOOK), most):
            seen = losses(setting, n)
            passed_at = test.passed_at(seen)
            seen = seen[:passed_at]
            futile = passed_at is None and test.futile(seen, most)
            if passed_at or futile:
                break
        passed = passed_at is not None
        yield SettingResult(
            setting, len(seen), float(seen.sum()), passed=passed, futile=futile
        )
        if not passed:
            break
