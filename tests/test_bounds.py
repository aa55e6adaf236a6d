"""Sequential tests and bounds against closed forms, brute force, MAPIE and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from lenience.certification.sequential_tests import (
    TESTS,
    Alarm,
    Betting,
    Binomial,
    SettingResult,
    fixed_sequence_test,
    hoeffding_bentkus,
    look_schedule,
    sample_size,
    sample_size_by_trial,
    sequence,
    wealth,
)


def outcome(n: int, losses: int) -> np.ndarray:
    return np.r_[np.ones(losses), np.zeros(n - losses)]


@given(st.integers(1, 400), st.data(), st.floats(0.005, 0.3), st.floats(0.01, 0.2))
def test_one_look_is_clopper_pearson(
    n: int, data: st.DataObject, limit: float, alpha: float
) -> None:
    losses = data.draw(st.integers(0, n))
    test = Binomial(limit, alpha, (n,))
    upper = beta.ppf(1 - alpha, losses + 1, n - losses) if losses < n else 1.0
    assert test.bound(0, outcome(n, losses)) == pytest.approx(upper, abs=1e-9)
    assert test.passes(0, outcome(n, losses)) == (binom.cdf(losses, n, limit) <= alpha)


def test_looks_spend_the_error_exactly_by_brute_force() -> None:
    """All 2^12 sequences of losses at the limit: those that pass at any look weigh at most alpha,
    and one more loss allowed at any look would spend more than is allowed there."""
    limit, alpha, at = 0.4, 0.2, (3, 6, 12)
    test = Binomial(limit, alpha, at)

    def weight(most: list[int]) -> list[float]:
        passed = np.zeros(len(at))
        for path in itertools.product((0, 1), repeat=at[-1]):
            for look, n in enumerate(at):
                if sum(path[:n]) <= most[look]:
                    passed[look:] += math.prod(limit if x else 1 - limit for x in path)
                    break
        return passed.tolist()

    spent = weight(test.most)
    assert all(used <= allowed + 1e-12 for used, allowed in zip(spent, test.alpha_spent))
    for look in range(len(at)):
        looser = [*test.most[:look], test.most[look] + 1]
        assert weight([*looser, *[-1] * (len(at) - look - 1)])[look] > test.alpha_spent[look]


@given(st.integers(50, 800), st.floats(0.01, 0.2))
def test_a_bound_is_under_the_limit_where_the_test_passes(n: int, limit: float) -> None:
    rng = np.random.default_rng(n)
    losses = (rng.random(n) < limit / 3).astype(float)
    for kind in TESTS.values():
        test = kind(limit, 0.05, look_schedule(n))
        for look, seen in enumerate(test.looks):
            passes, bound = test.passes(look, losses[:seen]), test.bound(look, losses[:seen])
            assert (
                bound >= losses[:seen].mean() - 1e-9 or kind is Betting
            )  # betting remembers better times
            if passes:
                assert bound <= limit + 1e-9
                break


def test_p_values_are_mapies() -> None:
    methods = pytest.importorskip("mapie.risk_control.methods")
    rng = np.random.default_rng(0)
    for n, mean in itertools.product((20, 200, 1000), (0.01, 0.1, 0.5)):
        losses = rng.beta(1, 3, n) * mean
        theirs = methods.compute_hoeffding_bentkus_p_value(np.array([losses.mean()]), n, mean)[0, 0]
        assert hoeffding_bentkus(losses, mean) == pytest.approx(min(1, theirs), rel=1e-9)


def test_fixed_sequences_are_mapies() -> None:
    control = pytest.importorskip("mapie.risk_control").control_fwer
    rng = np.random.default_rng(1)
    for _ in range(50):
        losses = (rng.random((6, 300)) < np.sort(rng.random(6) * 0.03)[:, None]).astype(float)
        test = Binomial(0.02, 0.05, (300,))
        passed = [
            one.setting
            for one in fixed_sequence_test(test, 6, lambda j, n, losses=losses: losses[j, :n])
            if one.passed
        ]
        p = binom.cdf(losses.sum(1), 300, 0.02)
        assert passed == control(p, 0.05, "fixed_sequence").tolist()


def test_climbing_stops_at_the_first_that_does_not_pass() -> None:
    asked = []

    def losses(j: int, n: int) -> np.ndarray:
        asked.append((j, n))
        return outcome(n, 0 if j != 1 else n // 4)

    tried = fixed_sequence_test(Binomial(0.1, 0.05, (50, 100, 200)), 4, losses)
    assert [(one.setting, one.passed) for one in tried] == [(0, True), (1, False)]
    assert tried[1] == SettingResult(1, 0, 50, 12, False, True)  # hopeless at once
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
        low, high = zip(*(sequence(losses[:n], 0.1) for n in (10, 20, 40, 70, 110, 200)))
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
    """Enumerated over all sequences that straddle a second start."""

    class Often(Alarm):
        EVERY = 3

    total = 0.0
    for path in itertools.product((0, 1), repeat=7):
        alarm = Often(0.25, 0.05)
        for x in path:
            alarm.add(float(x))
        total += alarm.capital * math.prod(0.25 if x else 0.75 for x in path)
    assert total == pytest.approx(1)


def test_how_many_prompts_are_needed() -> None:
    assert sample_size(0.01, 0.05, 0.0) == 299  # 0.99^n ≤ 0.05, the rule of three
    assert sample_size(0.01, 0.05, 0.01) is None
    n = sample_size(0.05, 0.05, 0.02)
    assert n is not None
    test, rng = Binomial(0.05, 0.05, (n,)), np.random.default_rng(4)
    passed = np.mean([rng.binomial(n, 0.02) <= test.most[0] for _ in range(4000)])
    assert 0.77 < passed < 0.9


def test_how_many_prompts_other_losses_take() -> None:
    """Half are ties, a little more is gained than lost: what the count of losses alone would not
    tell."""
    seen = np.repeat([0.5, 1.0, 0.0], [90, 4, 6])

    def bets(n: int) -> Betting:
        return Betting(0.505, 0.05, (n,))

    n, rng = sample_size_by_trial(bets, seen), np.random.default_rng(5)
    assert n is not None and n > 100
    passed = [bets(size).passes(0, rng.choice(seen, size)) for size in [n] * 200 + [n // 2] * 200]
    assert np.mean(passed[:200]) > 0.65 > 0.6 > np.mean(passed[200:])
    assert sample_size_by_trial(bets, np.full(50, 0.6), most=500) is None


def test_looks_grow() -> None:
    assert look_schedule(30) == (30,)
    assert look_schedule(1000) == (125, 250, 500, 1000)
    assert look_schedule(210) == (52, 105, 210)
