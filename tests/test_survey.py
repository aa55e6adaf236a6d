"""The studies of the survey's methods and of FSD's thresholds, against definitions."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from lenience.core.errors import InputError
from lenience.decoding.pair import Pair

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
pytest.importorskip("matplotlib")

import fuzzy_thresholds
import survey

DISTRIBUTIONS = st.lists(st.floats(0.02, 1), min_size=4, max_size=4).map(
    lambda weights: np.array(weights) / sum(weights)
)


def accepted(p: np.ndarray, q: np.ndarray, k: int, replace: bool, seed: int) -> float:
    """The share of trials in which one of k draws is kept by recursive rejection."""
    rng = np.random.default_rng(seed)
    trials = np.arange(20_000)
    left, drafts = np.tile(p, (len(trials), 1)), np.tile(q, (len(trials), 1))
    kept = 0
    for _ in range(k):
        now = drafts / drafts.sum(1, keepdims=True)
        x = (rng.random((len(now), 1)) > now.cumsum(1)).sum(1)
        at = np.arange(len(x))
        rejected = rng.random(len(x)) >= left[at, x] / now[at, x]
        kept += (~rejected).sum()
        if not replace:
            drafts[at, x] = 0
        rest = np.maximum(left - now, 0)
        goes_on = rejected & (rest.sum(1) >= 1e-12)
        drafts, rest = drafts[goes_on], rest[goes_on]
        left = rest / rest.sum(1, keepdims=True)
    return kept / len(trials)


@pytest.mark.parametrize("seed", range(3))
def test_several_draws_are_kept_as_often_as_in_trials(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([1] * 5), rng.dirichlet([1] * 5)
    for k in (1, 2):
        wanted = accepted(p, q, k, replace=True, seed=seed)
        assert survey.recursive(p, q, k) == pytest.approx(wanted, abs=0.015)
        wanted = accepted(p, q, k, replace=False, seed=seed)
        assert survey.without_replacement(p, q, k) == pytest.approx(wanted, abs=0.015)


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS)
def test_two_draws_reach_at_most_what_a_linear_program_finds(
    p: np.ndarray, q: np.ndarray
) -> None:
    """The program moves the mass of each pair of draws to one of its two tokens."""
    pairs = [(x, y) for x in range(4) for y in range(4)]
    flows = [(n, token) for n, pair in enumerate(pairs) for token in sorted({*pair})]
    limits = np.zeros((len(pairs) + 4, len(flows)))
    for column, (n, token) in enumerate(flows):
        limits[n, column] = limits[len(pairs) + token, column] = 1
    most = [q[x] * q[y] for x, y in pairs] + list(p)
    best = -linprog(-np.ones(len(flows)), A_ub=limits, b_ub=most).fun
    assert survey.best_of_two(p, q) == pytest.approx(best, abs=1e-6)
    overlap = np.minimum(p, q).sum()
    for method in (survey.k_seq, survey.recursive):
        assert overlap - 1e-9 <= method(p, q, 2) <= best + 1e-6
    assert survey.k_seq(p, q, 1) == pytest.approx(overlap)


def test_lookahead_decoding_ends_at_an_eos_inside_a_guess(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever token of the answer is the end, there are not more passes than tokens."""
    prompt = [5, 9, 3, 7]
    own = llama.generate(prompt, rule="target", max_new_tokens=60).tokens
    for end in sorted(set(own)):
        monkeypatch.setattr(llama.target, "eos_ids", frozenset({end}))
        answer, passes, _ = survey.lookahead_answer(llama, prompt, 60, (5, 4, 6))
        assert answer == own[: own.index(end) + 1]
        assert passes <= len(answer)


def test_lookahead_decoding_answers_as_the_target(llama: Pair) -> None:
    rng = np.random.default_rng(0)
    passes = tokens = 0
    for _ in range(4):
        prompt = rng.integers(1, 40, 9).tolist()
        own = llama.generate(prompt, rule="target", max_new_tokens=40).tokens
        for size in ((3, 2, 2), (5, 3, 4)):
            answer, count, read = survey.lookahead_answer(llama, prompt, 40, size)
            # each pass keeps a token at least, also where a guess goes on after an EOS
            assert answer == own and count <= len(own) <= read
            passes += count
            tokens += len(own)
    assert passes < tokens, "some guesses are kept"


@given(length=st.floats(0.1, 4.8))
def test_the_share_gives_the_wanted_length(length: float) -> None:
    share = fuzzy_thresholds.share_for(length, 5)
    assert sum(share**i for i in range(1, 6)) == pytest.approx(length, abs=1e-6)


def test_a_calibration_resumes_and_refuses_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[float]()

    def measure(self: fuzzy_thresholds.Chooser, threshold: float) -> float:
        tried.append(threshold)
        return 2.0

    monkeypatch.setattr(fuzzy_thresholds.Chooser, "measure", measure)

    def chosen(lengths: list[float], window: int) -> list[dict]:
        chooser = fuzzy_thresholds.Chooser(
            SimpleNamespace(name="pair"),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            np.linspace(0, 0.6, 100),
            window=window,
            options={"temperature": 1.0},
            trials_on=[],
        )
        return chooser.resumed(lengths, tmp_path / "calibration.json")

    first = chosen([1.0, 2.0], 5)
    assert len(tried) == 6
    # `random` keeps as many tokens as were measured
    assert sum(first[0]["share"] ** i for i in range(1, 6)) == pytest.approx(2.0)
    assert chosen([2.0, 1.0], 5) == first[::-1] and len(tried) == 6
    with pytest.raises(InputError, match="other settings; name another OUT"):
        chosen([1.0], 4)


def test_js_of_a_sequence_may_exceed_the_sum_of_its_tokens() -> None:
    told = fuzzy_thresholds.js_step()
    p1 = np.array(told["first"])
    sure = np.array([1.0, 0.0])
    other = np.array(told["second"])

    def js(p: np.ndarray, q: np.ndarray) -> float:
        middle = (p + q) / 2
        terms = [np.where(x > 0, x * np.log(x / middle), 0) for x in (p, q)]
        return float(sum(term.sum() for term in terms) / 2)

    with np.errstate(divide="ignore", invalid="ignore"):
        assert js(p1, p1[::-1]) == pytest.approx(told["js_of_a_token"])
        assert js(sure, other) == pytest.approx(told["js_of_a_token"])
        # P: the first token, then `sure` after 0 and `other` after 1; Q: the reverse
        p = np.concatenate([p1[0] * sure, p1[1] * other])
        q = np.concatenate([p1[1] * other, p1[0] * sure])
        assert js(p, q) == pytest.approx(told["js_of_the_sequence"])
    assert told["js_of_the_sequence"] > 1.02 * told["bound"]
