"""Sequential tests and bounds against closed forms, brute force, MAPIE and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from capabilities import needs
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from lenience.certification.sequential_tests import (
    TESTS,
    Alarm,
    Betting,
    Binomial,
    PairedBetting,
    SettingResult,
    fixed_sequence_test,
    hoeffding_bentkus,
    paired_wealth,
    sample_size,
    sample_size_by_trial,
    sequence,
    wealth,
)


def outcome(n: int, losses: int) -> np.ndarray:
    return np.r_[np.ones(losses), np.zeros(n - losses)]


@given(st.integers(1, 400), st.data(), st.floats(0.005, 0.3), st.floats(0.01, 0.2))
def test_a_bound_before_anything_may_pass_is_clopper_pearsons(
    n: int, data: st.DataObject, limit: float, alpha: float
) -> None:
    test = Binomial(limit, alpha, 2000)
    losses = data.draw(st.integers(0, n))
    upper = beta.ppf(1 - alpha, losses + 1, n - losses) if losses < n else 1.0
    bound = test.bound(outcome(n, losses))
    if n <= test.boundary[0]:
        assert bound == pytest.approx(upper, abs=1e-9)
    else:
        assert bound >= upper - 1e-9, "each look costs something"


def test_the_error_is_spent_exactly_by_brute_force() -> None:
    """All 2^12 sequences of losses at the limit: those that have passed by any time weigh at most
    what may be spent by then, and nothing could pass any sooner."""
    limit, alpha, horizon = 0.4, 0.2, 12
    test = Binomial(limit, alpha, horizon)

    def passed_at(path: tuple[int, ...], boundary: list[int]) -> int | None:
        ends = (
            n
            for n in range(1, horizon + 1)
            for c in range(len(boundary))
            if n >= boundary[c]
            if sum(path[:n]) <= c
        )
        return next(ends, None)

    def weights(boundary: list[int]) -> np.ndarray:
        """[n]: of all that have passed by then."""
        passed = np.zeros(horizon + 1)
        for path in itertools.product((0, 1), repeat=horizon):
            if at := passed_at(path, boundary):
                passed[at:] += math.prod(limit if x else 1 - limit for x in path)
        return passed

    allowed = np.array([test.spent(n) for n in range(horizon + 1)])
    assert len(test.boundary) > 1 and (weights(test.boundary) <= allowed + 1e-12).all()
    for c, n in enumerate(test.boundary):
        sooner = [*test.boundary[:c], n - 1]
        assert (c and n - 1 == sooner[c - 1]) or (
            weights(sooner) > allowed + 1e-12
        ).any()
    for path in itertools.product((0, 1), repeat=horizon):
        assert test.passed_at(np.array(path)) == passed_at(path, test.boundary)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("limit", [0.001, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("share", [1.0, 0.9, 0.06, 0.001])
def test_a_false_certificate_is_as_rare_as_promised(
    limit: float, confidence: float, share: float
) -> None:
    """By a recursion of its own over prompts and losses, at a loss just at the limit, for every
    number of prompts that a question may have gone on to: the chance that it has passed by then."""
    alpha, horizon = (1 - confidence) * share, math.ceil(50 / limit)
    test = Binomial(limit, alpha, horizon)
    fits = np.searchsorted(test.boundary, np.arange(horizon + 1), side="right") - 1
    # by losses, none having passed
    left, passed = (
        np.eye(1, len(test.boundary) + 1)[0],
        0.0,
    )
    for n in range(1, horizon + 1):
        left = left * (1 - limit) + np.r_[0.0, left[:-1]] * limit
        passed += left[: fits[n] + 1].sum()
        left[: fits[n] + 1] = 0
        assert passed <= test.spent(n) + 1e-12
    assert 0.8 * alpha < passed <= alpha


def test_a_ladder_is_wrong_as_rarely_as_one_setting() -> None:
    """Exactly, by all outcomes of three settings of 4 prompts each, apart: the chance that any that
    loses too much passes, in every order of good and bad ones."""
    limit, alpha, n = 0.4, 0.25, 4
    test = Binomial(limit, alpha, n)
    paths = [np.array(path) for path in itertools.product((0, 1), repeat=n)]
    passed = {}
    for drawn in itertools.product(range(len(paths)), repeat=3):
        tried = fixed_sequence_test(
            test, 3, lambda j, m, drawn=drawn: paths[drawn[j]][:m], n
        )
        passed[drawn] = [found.setting for found in tried if found.passed]
    for means in itertools.product((0.0, 0.2, 0.4, 0.7), repeat=3):
        false = 0.0
        for drawn, settings in passed.items():
            if any(means[setting] >= limit for setting in settings):
                false += math.prod(
                    mean ** paths[i].sum() * (1 - mean) ** (n - paths[i].sum())
                    for mean, i in zip(means, drawn)
                )
        assert false <= alpha + 1e-12


@given(st.integers(50, 800), st.floats(0.01, 0.2))
def test_a_bound_is_under_the_limit_where_the_test_passes(n: int, limit: float) -> None:
    rng = np.random.default_rng(n)
    losses = (rng.random(n) < limit / 3).astype(float)
    for kind in (*TESTS.values(), PairedBetting):
        one = (1 + limit) / 2 if kind is PairedBetting else limit
        test, seen = (
            kind(one, 0.05, n),
            (1 + losses) / 2 if kind is PairedBetting else losses,
        )
        passed = test.passed_at(seen)
        if passed is None:
            assert test.bound(seen) > one
        else:
            assert test.bound(seen[:passed]) <= one + 1e-9
            assert test.passed_at(seen[: passed - 1]) is None


@needs("mapie")
def test_p_values_are_mapies() -> None:
    from mapie.risk_control import methods

    rng = np.random.default_rng(0)
    for n, mean in itertools.product((20, 200, 1000), (0.01, 0.1, 0.5)):
        losses = rng.beta(1, 3, n) * mean
        theirs = methods.compute_hoeffding_bentkus_p_value(
            np.array([losses.mean()]), n, mean
        )[0, 0]
        assert hoeffding_bentkus(losses, mean) == pytest.approx(
            min(1, theirs), rel=1e-9
        )


class OneLook(Binomial):
    """A look at the horizon alone."""

    def passed_at(self, losses: np.ndarray) -> int | None:
        n = self.horizon
        most = binom.cdf(losses.sum(), n, self.limit)
        return n if len(losses) == n and most <= self.alpha else None

    def futile(self, losses: np.ndarray, most: int) -> bool:
        return False


@needs("mapie")
def test_fixed_sequences_are_mapies() -> None:
    from mapie.risk_control import control_fwer as control

    rng = np.random.default_rng(1)
    for _ in range(50):
        losses = (rng.random((6, 300)) < np.sort(rng.random(6) * 0.03)[:, None]).astype(
            float
        )
        tried = fixed_sequence_test(
            OneLook(0.02, 0.05, 300), 6, lambda j, n, losses=losses: losses[j, :n], 300
        )
        p = binom.cdf(losses.sum(1), 300, 0.02)
        passed = [one.setting for one in tried if one.passed]
        assert passed == control(p, 0.05, "fixed_sequence").tolist()


def test_climbing_stops_at_the_first_that_does_not_pass() -> None:
    asked = []

    def losses(j: int, n: int) -> np.ndarray:
        asked.append((j, n))
        return outcome(n, 0 if j != 1 else n // 4)

    tried = list(fixed_sequence_test(Binomial(0.1, 0.05, 200), 4, losses, 200))
    assert [(one.setting, one.passed) for one in tried] == [(0, True), (1, False)]
    assert 0.9 ** tried[0].n <= 0.05 and tried[0].n < 64, "no more than it takes"
    assert tried[1] == SettingResult(1, 32, 8, False, True), "hopeless at once"
    assert max(j for j, _ in asked) == 1


def test_wealth_of_one_stake_by_hand() -> None:
    got = wealth(np.array([0.0, 1.0, 0.0]), 0.2, np.array([0.5]))
    assert got == pytest.approx([1.125, 1.125 * 0.5, 1.125 * 0.5 * 1.125])


@pytest.mark.parametrize("drawn", ["rare", "spread"])
def test_wealth_is_a_martingale_at_the_limit(drawn: str) -> None:
    """E[wealth] = 1 exactly for two-point losses of that mean; enumerated."""
    mean, n = 0.3, 8
    low, high, chance = (0.0, 1.0, 0.3) if drawn == "rare" else (0.1, 0.6, 0.4)
    total = 0.0
    for path in itertools.product((0, 1), repeat=n):
        weight = math.prod(chance if x else 1 - chance for x in path)
        total += weight * wealth(np.array([high if x else low for x in path]), mean)[-1]
    assert total == pytest.approx(1)


def test_a_confidence_sequence_covers_at_all_times() -> None:
    rng, misses = np.random.default_rng(2), 0
    for _ in range(60):
        losses = (rng.random(200) < 0.1).astype(float)
        low, high = zip(
            *(sequence(losses[:n], 0.1) for n in (10, 20, 40, 70, 110, 200))
        )
        misses += max(low) > 0.1 or min(high) < 0.1
    assert misses <= binom.ppf(0.999, 60, 0.1)
    assert sequence(np.array([]), 0.05) == (0, 1)


def test_an_alarm_is_rare_while_all_is_well_and_comes_after_a_drift() -> None:
    rng, false = np.random.default_rng(3), 0
    for _ in range(60):
        alarm = Alarm(0.05, 0.05)
        false += any([alarm.add(float(x)) for x in rng.random(800) < 0.05])
    assert false <= binom.ppf(0.999, 60, 0.05)
    alarm = Alarm(0.05, 0.05)
    assert not any([alarm.add(0.0) for _ in range(1000)])
    assert any([alarm.add(float(x)) for x in rng.random(150) < 0.3])


def test_an_alarms_capital_is_one_on_average() -> None:
    """Enumerated over all sequences, some of which make it bet anew."""

    total, starts = 0.0, []
    for path in itertools.product((0, 1), repeat=10):
        alarm = Alarm(0.25, 0.05)
        for x in path:
            alarm.add(float(x))
        total += alarm.capital * math.prod(0.25 if x else 0.75 for x in path)
        starts.append(len(alarm.logs))
    assert total == pytest.approx(1) and max(starts) > 2


def test_how_many_prompts_are_needed() -> None:
    test = Binomial(0.05, 0.05, 1000)
    assert sample_size(test, 0.05) is None
    assert 0.95 ** sample_size(test, 0.0) <= test.spent(sample_size(test, 0.0))
    n, rng = sample_size(test, 0.02), np.random.default_rng(4)
    assert n is not None
    ended = [test.passed_at((rng.random(n) < 0.02).astype(float)) for _ in range(1000)]
    assert 0.77 < np.mean([one is not None for one in ended]) < 0.87
    assert test.power(0.02, test.boundary[0] - 1) == 0, "nothing can pass so soon"


def test_how_many_prompts_other_losses_take() -> None:
    """Half are ties, a little more is gained than lost: what the count of losses alone would not
    tell."""
    seen = np.repeat([0.5, 1.0, 0.0], [90, 4, 6])
    test, rng = Betting(0.505, 0.05, 50_000), np.random.default_rng(5)
    n = sample_size_by_trial(test, seen)
    assert n is not None and n > 100
    passed = [
        test.passed_at(rng.choice(seen, size)) for size in [n] * 100 + [n // 2] * 100
    ]
    assert np.mean([one is not None for one in passed[:100]]) > 0.65
    assert np.mean([one is not None for one in passed[100:]]) < 0.6
    assert sample_size_by_trial(Betting(0.505, 0.05, 500), np.full(50, 0.6)) is None


def test_stakes_on_paired_answers_make_no_money_at_the_limit() -> None:
    """E[wealth] = 1 at the limit, enumerated over all sequences of gains, ties and losses."""
    limit, chances = 0.55, {0.0: 0.1, 0.5: 0.7, 1.0: 0.2}
    total = 0.0
    for path in itertools.product(chances, repeat=7):
        weight = math.prod(chances[x] for x in path)
        total += weight * paired_wealth(np.array(path), limit, limit)[-1]
    assert total == pytest.approx(1)


def test_stakes_on_paired_answers_follow_those_before() -> None:
    """By a loop over prompts, one after the other."""
    rng = np.random.default_rng(6)
    losses = rng.choice([0.0, 0.5, 1.0], 40, p=[0.1, 0.8, 0.1])
    wanted = []
    for part in (0.35, 0.7):
        capital, differ = [1.0], 0
        for n, loss in enumerate(losses):
            stake = min(part * 0.1 / ((differ + 50 * 0.2) / (n + 50)), 0.8 / 0.9)
            capital.append(capital[-1] * (1 + stake * (0.1 - (2 * loss - 1))))
            differ += loss != 0.5
        wanted.append(capital[1:])
    assert paired_wealth(losses, 0.55, 0.55) == pytest.approx(np.mean(wanted, axis=0))
