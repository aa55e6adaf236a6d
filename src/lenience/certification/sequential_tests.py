"""Whether a mean loss in [0, 1] is at most a limit, told while losses come in, and bounds on it. No
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

if TYPE_CHECKING:
    from numpy.typing import NDArray

FUTILITY = 0.05
"""A setting is given up where its loss is above the limit but for a chance of this. It cannot make
a false certificate."""


@dataclass(frozen=True)
class Test:
    """A test of "the mean loss is above `limit`" of error at most `alpha` over all `looks`, numbers
    of losses seen so far. By the time of each, alpha · (n / last look)² of it is spent."""

    __test__ = False  # no test for pytest

    limit: float
    alpha: float
    looks: tuple[int, ...]
    name: ClassVar[str]
    said: ClassVar[str]

    def passes(self, look: int, losses: NDArray) -> bool:
        """Whether the first looks[look] losses [n], in the order fixed before, tell that the mean
        is at most the limit."""
        raise NotImplementedError

    def bound(self, look: int, losses: NDArray) -> float:
        """An upper bound of the mean with confidence 1 − alpha, where the test ended at this look:
        at most the limit where it passes."""
        raise NotImplementedError

    def futile(self, look: int, losses: NDArray) -> bool:
        """Whether going on is of no use."""
        return hoeffding_bentkus(1 - losses, 1 - self.limit) <= FUTILITY

    @cached_property
    def alpha_spent(self) -> list[float]:
        """The error allowed up to each look."""
        return [self.alpha * (n / self.looks[-1]) ** 2 for n in self.looks]


@dataclass(frozen=True)
class Binomial(Test):
    """For losses of 0 or 1: an exact group-sequential binomial test; with one look it is
    Clopper–Pearson's. The bound orders outcomes by look and then by losses (Jennison and Turnbull
    2000, section 12.4)."""

    name = "binomial"
    said = "an exact binomial test"

    @cached_property
    def most(self) -> list[int]:
        """How many losses pass at each look; −1 where none do."""
        found: list[int] = []
        for look in range(len(self.looks)):
            allowed, fits = self.alpha_spent[look], -1
            while self._reaches(self.limit, look, fits + 1, found) <= allowed:
                fits += 1
            found.append(fits)
        return found

    def _reaches(self, mean: float, look: int, losses: int, most: Sequence[int]) -> float:
        """The chance to pass at an earlier look, or else to have at most `losses` at this one."""
        size = max([losses, *most[:look]]) + 1
        state, passed, before = (
            np.eye(1, size)[0],
            0.0,
            0,
        )  # the chances of 0, 1, … losses, not having passed
        for n, fits in zip(self.looks[: look + 1], [*most[:look], losses]):
            steps = binom.pmf(np.arange(size), n - before, mean)
            state, before = np.convolve(state, steps)[:size], n
            passed += float(state[: fits + 1].sum())
            state[: fits + 1] = 0
        return passed

    def power(self, mean: float) -> float:
        """The chance that a setting of this mean loss passes."""
        if max(self.most) < 0:
            return 0.0
        return self._reaches(mean, len(self.looks) - 1, self.most[-1], self.most)

    def passes(self, look: int, losses: NDArray) -> bool:
        return int(losses.sum()) <= self.most[look]

    def bound(self, look: int, losses: NDArray) -> float:
        count = int(losses.sum())
        if count >= self.looks[look]:
            return 1.0
        return float(
            brentq(
                lambda mean: self._reaches(mean, look, count, self.most) - self.alpha,
                1e-12,
                1 - 1e-12,
            )
        )

    def futile(self, look: int, losses: NDArray) -> bool:
        return losses.sum() > max(self.most) or super().futile(look, losses)


@dataclass(frozen=True)
class HoeffdingBentkus(Test):
    """For losses in [0, 1]: Hoeffding–Bentkus p-values (Bates 2021; Angelopoulos 2021, section
    3.2), each look at the error that is spent there."""

    name = "hoeffding-bentkus"
    said = "a Hoeffding–Bentkus bound"

    def _level(self, look: int) -> float:
        return self.alpha_spent[look] - (self.alpha_spent[look - 1] if look else 0.0)

    def passes(self, look: int, losses: NDArray) -> bool:
        return hoeffding_bentkus(losses, self.limit) <= self._level(look)

    def bound(self, look: int, losses: NDArray) -> float:
        return _first(
            lambda mean: hoeffding_bentkus(losses, mean) <= self._level(look), float(losses.mean())
        )


@dataclass(frozen=True)
class Betting(Test):
    """For losses in [0, 1]: the wealth of bets against "the mean is above the limit", which ever
    reaches 1 / alpha with a chance of at most alpha (Waudby-Smith and Ramdas 2024, section 5):
    spread over many stakes, the diversified Kelly bet."""

    name = "betting"
    said = "a betting confidence sequence"

    def passes(self, look: int, losses: NDArray) -> bool:
        return bool(wealth(losses, self.limit).max() >= 1 / self.alpha)

    def bound(self, look: int, losses: NDArray) -> float:
        return _first(lambda mean: bool(wealth(losses, mean).max() >= 1 / self.alpha), 0.0)


TESTS: dict[str, type[Test]] = {test.name: test for test in (Binomial, HoeffdingBentkus, Betting)}


def hoeffding_bentkus(losses: NDArray, mean: float) -> float:
    """The p-value of "the mean is `mean` or more"."""
    n, seen = len(losses), min(float(losses.mean()), mean)
    if not 0 < mean < 1:
        return float(mean <= 0)
    h = (seen * math.log(seen / mean) if seen else 0.0) + (
        (1 - seen) * math.log((1 - seen) / (1 - mean)) if seen < 1 else 0.0
    )
    bentkus = math.e * float(binom.cdf(math.ceil(float(losses.sum()) - 1e-9), n, mean))
    return min(math.exp(-n * h), bentkus, 1.0)


STAKES = np.arange(1, 33) / 32
"""Of the most that can be staked without going into debt; evenly, as suits the bet that rare losses
are rarer still."""
SMALL = np.geomspace(1 / 256, 1, 14)
"""As suits the bet that rare losses are less rare."""


def wealth(losses: NDArray, mean: float, stakes: NDArray = STAKES) -> NDArray:
    """What a capital of 1 has come to after each of the losses […, n], by betting that they are
    below `mean` on average; where they are not, it is a supermartingale, whatever the order and the
    size of the losses in [0, 1]."""
    gains = (mean - np.asarray(losses, float)) / (1 - mean)  # −1 at a loss of 1
    with np.errstate(divide="ignore"):
        return sum(
            np.exp(np.minimum(np.log1p(stake * gains).cumsum(-1), 600)) for stake in stakes
        ) / len(stakes)


def _first(holds: Callable[[float], bool], low: float) -> float:
    """The least number above `low` from which on `holds`, which is monotone; 1 where there is none.
    Erring upwards."""
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass
class Alarm:
    """Watches losses in [0, 1] for ever: the chance that it ever goes off while their mean is at
    most `limit` is at most `alpha`. It starts to bet anew every EVERY losses, with shares 1 / (k (k
    + 1)) of its capital, so that a long good time does not hide a bad one that follows."""

    limit: float
    alpha: float
    logs: NDArray | None = None
    """[starts, stakes]"""
    seen: int = 0

    EVERY: ClassVar[int] = 200

    def add(self, loss: float) -> bool:
        """Whether it goes off with this loss."""
        if self.seen % self.EVERY == 0:
            fresh = np.zeros((1, len(SMALL)))
            self.logs = fresh if self.logs is None else np.concatenate([self.logs, fresh])
        assert self.logs is not None
        self.seen += 1
        with np.errstate(divide="ignore"):
            self.logs += np.log1p(SMALL * (loss - self.limit) / max(self.limit, 1e-9))
        return self.capital >= 1 / self.alpha

    @property
    def capital(self) -> float:
        if self.logs is None:
            return 1.0
        k = np.arange(1, len(self.logs) + 1)
        begun = np.exp(np.minimum(self.logs, 600)).mean(1) / (k * (k + 1))
        return float(begun.sum() + 1 / (len(k) + 1))  # what is kept for later starts


def sequence(losses: NDArray, alpha: float) -> tuple[float, float]:
    """A confidence sequence's interval for the mean now: at all times together it holds with
    confidence 1 − alpha, and wherever one stops. Its lower end is above its upper one where no one
    mean fits all the losses: it has changed."""
    if not len(losses):
        return 0.0, 1.0
    above = _first(lambda mean: bool(wealth(losses, mean).max() >= 2 / alpha), 0.0)
    below = _first(lambda mean: bool(wealth(1 - losses, mean, SMALL).max() >= 2 / alpha), 0.0)
    return 1 - below, above


def look_schedule(n: int) -> tuple[int, ...]:
    """When to look at up to `n` losses: ever twice as many, from about 50 or an eighth on."""
    found = [n]
    while found[0] // 2 >= 50 and len(found) < 4:
        found.insert(0, found[0] // 2)
    return tuple(found)


def sample_size(
    limit: float, alpha: float, mean: float, power: float = 0.8, most: int = 1_000_000
) -> int | None:
    """How many 0/1 losses it takes for a setting of this mean loss to pass `Binomial` with a chance
    of `power`; None where it takes more than `most`, as it does from the limit on."""
    if mean >= limit:
        return None
    n = math.ceil(math.log(alpha) / math.log1p(-limit))
    while n <= most:
        fits = int(binom.ppf(alpha, n, limit))
        fits -= int(binom.cdf(fits, n, limit) > alpha)
        if (
            fits >= 0 and binom.cdf(fits, n, mean) >= power
        ):  # at one look; several take a little more
            if n * limit > 1000:  # where counting takes long
                return math.ceil(1.05 * n)
            if Binomial(limit, alpha, look_schedule(n)).power(mean) >= power:
                return n
        n = math.ceil(n * 1.02) + 1
    return None


def sample_size_by_trial(
    test: Callable[[int], Test], losses: NDArray, power: float = 0.8, most: int = 50_000
) -> int | None:
    """As `sample_size`, for losses of any kind, by trying: about how many it takes for `test` of so
    many to pass with a chance of `power`, where losses are drawn from those seen; None where it
    takes more than `most`."""
    rng, n = np.random.default_rng(0), 100
    while n <= most:
        one = test(n)
        passed = [one.passes(len(one.looks) - 1, rng.choice(losses, n)) for _ in range(40)]
        if np.mean(passed) >= power:
            return n
        n = math.ceil(n * 1.3)
    return None


@dataclass(frozen=True)
class SettingResult:
    """How the test of one setting ended."""

    setting: int
    look: int
    n: int
    losses: float
    passed: bool
    futile: bool


def fixed_sequence_test(
    test: Test, settings: int, losses: Callable[[int, int], NDArray]
) -> list[SettingResult]:
    """Fixed-sequence testing (Bauer 1991; Angelopoulos 2021, section 3.1): settings from strict to
    lenient, each tested only once the one before has passed. `losses(j, n)` gives setting j's on
    the first n prompts. The last setting that passed has a mean loss above the limit with a chance
    of at most alpha, whatever the losses' curve: that takes the first setting above the limit to
    pass its own test."""
    tried: list[SettingResult] = []
    for setting in range(settings):
        for look, n in enumerate(test.looks):
            seen = losses(setting, n)
            passed = bool(test.passes(look, seen))
            over = passed or look == len(test.looks) - 1
            futile = not passed and bool(test.futile(look, seen))
            if over or futile:
                break
        result = SettingResult(
            setting, look, n, losses=float(seen.sum()), passed=passed, futile=futile
        )
        tried.append(result)
        if not passed:
            break
    return tried
