"""Fitting a judge: thresholds known by hand, a problem with a known answer, saving and loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import expit
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from lenience import InputError
from lenience.core.context import Context
from lenience.core.types import Draft, Reading
from lenience.heads.fitting import (
    DECAYS,
    RATES,
    Examples,
    FitConfig,
    fit_head,
)
from lenience.heads.head import Head, Inputs, load_head
from lenience.heads.scores import auc_interval, by_recall, threshold_at, thresholds
from lenience.rules.names import bound_text

DRAFTED = Inputs(tokens=("draft",))
PRINTS = {"target": "a", "draft": "b", "tokenizer": "c"}


def fit(x: np.ndarray, important: np.ndarray, samples: np.ndarray, **config) -> Head:
    return fit_head(
        Examples(x, ~important, samples), DRAFTED, PRINTS, FitConfig(**config)
    )


def test_thresholds_known_by_hand() -> None:
    scores = np.array([0.1, 0.2, 0.3, 0.4, 0.9, 0.35, 0.95])
    important = np.array([True] * 5 + [False] * 2)
    # four of five are below it
    assert 0.4 < threshold_at(scores, important, 0.8) < 0.4 + 1e-9
    assert 0.9 < threshold_at(scores, important, 1.0) < 0.9 + 1e-9
    assert threshold_at(scores, important, 0.81) == threshold_at(scores, important, 1.0)
    accepted = {row["recall"]: row["accepted"] for row in thresholds(scores, important)}
    assert accepted[0.8] == 0.5 and accepted[1.0] == 0.5 and accepted[0.5] == 1.0


@given(
    hnp.arrays(float, st.integers(1, 40), elements=st.floats(0, 1)),
    st.floats(0.01, 1),
    st.randoms(),
)
def test_a_threshold_rejects_the_wanted_share_and_the_next_lower_does_not(
    scores, recall: float, random
) -> None:
    important = np.array([random.random() < 0.5 for _ in scores])
    important[0] = True
    at = threshold_at(scores, important, recall)
    rejected = (scores[important] < at) | (at == 1)  # a threshold of 1 accepts nothing
    assert rejected.mean() >= recall - 1e-9
    lower = scores[important][rejected].max()
    assert (scores[important] < lower).mean() < recall


def synthetic(seed: int, m: int = 3000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States of two clouds 2 apart along one direction, far from the origin and badly scaled; the
    AUC of the best linear score is Φ(2/√2) = 0.921."""
    rng = np.random.default_rng(seed)
    important = rng.random(m) < 0.2
    x = rng.normal(size=(m, 6))
    x[:, 0] += np.where(important, 0.0, 2.0)
    scale, shift = np.array([1, 100, 1e-3, 5, 1, 1]), np.array([50, 0, 3, -7, 0, 0])
    return (x * scale + shift).astype(np.float32), important, np.arange(m) // 6


def test_the_best_linear_head_is_found() -> None:
    x, important, samples = synthetic(1)
    head = fit(x, important, samples)
    assert head.metrics["auc_out_of_fold"] == pytest.approx(0.921, abs=0.015)
    direction = head.weight.numpy() * x.std(0)
    assert abs(direction[0]) > 5 * np.abs(direction[1:]).max()
    # the saved threshold keeps its promise on fresh data
    fresh, wanted, _ = synthetic(2, 20_000)
    states, n = torch.tensor(np.vstack([fresh[:1], fresh]))[None], len(fresh)
    draft = Draft(
        torch.zeros(1, n, dtype=torch.long), torch.tensor([n]), None, states[..., 4:]
    )
    rejected = (
        torch.sigmoid(
            head.window_logits(
                draft, Reading(torch.zeros(1, n + 1, 1), states[..., :4]), Context()
            ).double()
        )[0]
        < head.threshold
    ).numpy()
    assert rejected[wanted].mean() == pytest.approx(0.9, abs=0.03)


def test_a_hidden_layer_finds_what_no_linear_head_can() -> None:
    """Important where two coordinates have the same sign: each alone, and any sum of them, says
    nothing."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(4000, 6)).astype(np.float32)
    important = x[:, 0] * x[:, 1] > 0
    x = x * np.array([1, 100, 1e-3, 5, 1, 1], np.float32) + np.array(
        [50, 0, 3, -7, 0, 0], np.float32
    )
    linear, mlp = (
        fit(x, important, np.arange(4000) // 4, kind=kind)
        for kind in ("logistic", "mlp")
    )
    assert (
        linear.metrics["auc_out_of_fold"] < 0.6
        and mlp.metrics["auc_out_of_fold"] > 0.95
    )
    # what decoding computes on raw states is what was fitted on standardised ones
    fresh = rng.normal(size=(2000, 6)).astype(np.float32)
    wanted = fresh[:, 0] * fresh[:, 1] > 0
    raw = fresh * np.array([1, 100, 1e-3, 5, 1, 1], np.float32) + np.array(
        [50, 0, 3, -7, 0, 0], np.float32
    )
    states, n = torch.tensor(np.vstack([raw[:1], raw]))[None], len(raw)
    draft = Draft(
        torch.zeros(1, n, dtype=torch.long), torch.tensor([n]), None, states[..., 4:]
    )
    rejected = (
        torch.sigmoid(
            mlp.window_logits(
                draft, Reading(torch.zeros(1, n + 1, 1), states[..., :4]), Context()
            ).double()
        )[0]
        < mlp.threshold
    ).numpy()
    assert (
        rejected[wanted].mean() == pytest.approx(0.9, abs=0.04)
        and rejected[~wanted].mean() < 0.15
    )


def test_an_mlp_scores_as_its_definition_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    weight, bias, inner, shift = (
        rng.normal(size=7),
        0.25,
        rng.normal(size=(3, 7)),
        rng.normal(size=7),
    )
    layer = (
        torch.tensor(inner, dtype=torch.float32),
        torch.tensor(shift, dtype=torch.float32),
    )
    head = Head(
        torch.tensor(weight, dtype=torch.float32),
        bias,
        DRAFTED,
        0.5,
        PRINTS,
        layer=layer,
    )
    head.save(tmp_path)
    again = load_head(tmp_path)
    assert again.fingerprint == head.fingerprint and again.kind == "mlp"
    states = rng.normal(size=(1, 4, 3))
    draft = Draft(
        torch.zeros(1, 3, dtype=torch.long),
        torch.tensor([3]),
        None,
        torch.tensor(states[..., 2:]),
    )
    z = states[0, 1:] @ inner + shift
    gelu = z * norm.cdf(z)
    scores = torch.sigmoid(
        again.window_logits(
            draft,
            Reading(torch.zeros(1, 4, 1), torch.tensor(states[..., :2])),
            Context(),
        ).double()
    )[0]
    np.testing.assert_allclose(scores.numpy(), expit(gelu @ weight + bias), atol=1e-5)
    with pytest.raises(InputError, match="reads 3 numbers, these models give 5"):
        again.check(PRINTS, {"target": 4, "draft": 1})


@pytest.mark.parametrize("kind", ["logistic", "mlp"])
def test_fitting_is_repeatable(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lenience.heads.fitting.LEAST_STEPS", 60)
    given = synthetic(3)
    a, b = (fit(*given, seed=5, kind=kind) for _ in range(2))
    assert torch.equal(a.weight, b.weight) and a.threshold == b.threshold


@pytest.mark.parametrize("soft", [False, True])
def test_what_is_important_counts_as_much_as_is_said(soft: bool) -> None:
    """As scikit-learn's class_weight has it; a soft label is each label, as sure as it is."""
    x, important, samples = synthetic(3)
    shares = (
        np.clip(1 - important + 0.2 * important, 0, 1).astype(np.float32)
        if soft
        else None
    )
    examples = Examples(x.astype(np.float32), ~important, samples, shares)
    config = FitConfig(weight=6.0)
    head = fit_head(examples, DRAFTED, PRINTS, config)
    scaled = (x - x.mean(0)) / x.std(0)
    rows, labels = np.concatenate([scaled, scaled]), np.repeat([True, False], len(x))
    sure = ~important if shares is None else shares
    model = LogisticRegression(
        C=head.metrics["c"], max_iter=2000, class_weight={False: 6.0}
    )
    model.fit(rows, labels, np.concatenate([sure, 1.0 - sure]))
    np.testing.assert_allclose(
        head.weight.numpy() * x.std(0), model.coef_[0], rtol=0.02, atol=5e-3
    )
    assert head.metrics["weight"] == 6.0


def test_judge_decodings_head_is_tuned_on_what_is_set_aside() -> None:
    head = fit(*synthetic(3), kind="adamw")
    assert head.metrics["rate"] in RATES and head.metrics["decay"] in DECAYS
    assert head.metrics["auc_out_of_fold"] == pytest.approx(0.921, abs=0.03)


def test_samples_are_never_split() -> None:
    """Rows of a sample share a random state and a random label: memorising them helps only where
    they are split."""
    rng = np.random.default_rng(0)
    samples = np.repeat(np.arange(150), 8)
    x = rng.normal(size=(150, 40))[samples].astype(np.float32)
    important = (rng.random(150) < 0.3)[samples]
    head = fit(x, important, samples)
    assert head.metrics["auc_out_of_fold"] < 0.65


def test_too_little_to_learn_from_is_refused() -> None:
    x, important, samples = synthetic(1, 60)
    with pytest.raises(InputError, match="too few"):
        fit(x, important & (samples < 2), samples)


def test_a_head_is_saved_and_loaded(tmp_path: Path) -> None:
    head = Head(
        torch.randn(5),
        -0.5,
        Inputs(("draft",), ("previous",)),
        0.75,
        PRINTS,
        {"auc": 0.9},
    )
    head.save(tmp_path)
    again = load_head(tmp_path)
    assert torch.equal(again.weight, head.weight)
    assert (again.bias, again.inputs, again.threshold, again.metrics) == (
        -0.5,
        head.inputs,
        0.75,
        {"auc": 0.9},
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "judge.json",
        "judge.safetensors",
    ]


def test_previous_token_heads_read_the_row_before() -> None:
    head = Head(
        torch.tensor([1.0]), 0.0, Inputs(("target",), ("previous",)), 0.5, PRINTS
    )
    reading = Reading(torch.zeros(1, 3, 1), torch.tensor([[[1.0], [2.0], [3.0]]]))
    draft = Draft(torch.tensor([[0, 0]]), torch.tensor([2]))
    torch.testing.assert_close(
        torch.sigmoid(head.window_logits(draft, reading, Context()).double()),
        torch.sigmoid(torch.tensor([[1.0, 2.0]]).double()),
    )


def test_heads_that_cannot_decode_here_are_refused() -> None:
    with pytest.raises(InputError, match="target's own token"):
        Head(torch.zeros(2), 0.0, Inputs(tokens=("target",)), 0.5, PRINTS).check(
            PRINTS, {"target": 1, "draft": 1}
        )
    with pytest.raises(InputError, match="reads 2 numbers, these models give 3"):
        Head(torch.zeros(2), 0.0, DRAFTED, 0.5, PRINTS).check(
            PRINTS, {"target": 2, "draft": 1}
        )
    with pytest.raises(InputError, match="name one or more of target, draft"):
        Inputs(("both",))


def test_the_interval_of_an_auc_is_over_samples() -> None:
    """Against scikit-learn's AUC of the same draws; rows of one sample come and go together."""
    rng = np.random.default_rng(4)
    samples = np.repeat(np.arange(30), 5)
    harmless = rng.random(150) < 0.8
    scores = np.round(rng.random(150) + 0.3 * harmless, 1)  # with ties
    aucs, draws = [], np.random.default_rng(7)
    for _ in range(200):
        times = np.bincount(draws.integers(0, 30, 30), minlength=30)[samples]
        aucs.append(roc_auc_score(harmless, scores, sample_weight=times))
    wanted = np.quantile(aucs, [0.025, 0.975])
    assert auc_interval(scores, harmless, samples, seed=7) == pytest.approx(
        tuple(wanted)
    )
    low, high = auc_interval(scores, harmless, np.arange(150))
    assert low < roc_auc_score(harmless, scores) < high


def test_a_recall_has_an_interval() -> None:
    """Of 20 important ones none may be missed, and 14 % of others still may: 1 - 0.025^(1/20)."""
    scores, important = np.arange(40) / 100, np.arange(40) < 20
    last = thresholds(scores, important)[-1]
    assert last["recall_interval"] == pytest.approx((0.025 ** (1 / 20), 1.0))


def test_no_threshold_exceeds_one() -> None:
    """An important mismatch with a score of 1 leaves nothing to accept at a recall of 1."""
    scores, important = np.array([0.2, 0.5, 1.0, 1.0]), np.array([1, 0, 1, 0], bool)
    rows = {row["recall"]: row for row in thresholds(scores, important)}
    assert rows[1.0]["threshold"] == 1.0
    assert (rows[1.0]["accepted"], rows[0.5]["accepted"]) == (0.0, 1.0)
    assert max(row["threshold"] for row in rows.values()) <= 1
    assert max(by_recall(scores, important).values()) <= 1


def test_thresholds_are_shown_in_few_digits() -> None:
    for threshold, shown in (
        (0.93, "0.93"),
        (0.9995, "0.9995"),
        (1 - 3e-14, "logit=31.1"),
        (2e-9, "logit=-20"),
        (1.0, "1"),
    ):
        assert bound_text(threshold) == shown
