"""Metrics of scores on labelled mismatches: thresholds by recall, and the AUC's interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

THRESHOLD_RECALLS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 1.0)
"""Recalls of important mismatches for which a trained head lists its thresholds."""
TELLING = 100
"""Minimum number of important mismatches at which a recall of 0.99 differs from 1 by at least a
single mismatch."""
BOOTSTRAPS = 200
"""Number of bootstrap draws of samples per interval."""


def threshold_at(scores: NDArray, important: NDArray, recall: float) -> float:
    """Return the lowest threshold that rejects at least a share `recall` of the important
    mismatches."""
    ranked = np.sort(scores[important])
    caught = int(np.ceil(recall * len(ranked) - 1e-9))
    # a threshold of 1 accepts nothing, whatever the score
    return 0.0 if caught == 0 else float(np.nextafter(ranked[caught - 1], 1.0))


def by_recall(scores: NDArray, important: NDArray) -> dict[str, float]:
    """Return the threshold for each recall of important mismatches, from 0.5 in steps of 0.01 and
    from 0.99 in steps of 0.001, keyed by the recall."""
    recalls = [*(n / 100 for n in range(50, 99)), *(n / 1000 for n in range(990, 1001))]
    found = dict[str, float]()
    for recall in recalls:
        found[f"{recall:g}"] = threshold_at(scores, important, recall)
    return found


def thresholds(scores: NDArray, important: NDArray) -> list[dict[str, Any]]:
    """Return a row for each recall in THRESHOLD_RECALLS: the threshold, the exact binomial 95 %
    interval of the recall on other samples, and the share of unimportant mismatches that are
    accepted."""
    from scipy.stats import binomtest

    rows: list[dict[str, Any]] = []
    n = int(important.sum())
    for recall in THRESHOLD_RECALLS:
        threshold = threshold_at(scores, important, recall)
        kept = (scores >= threshold) & (threshold < 1)
        accepted = float(kept[~important].mean())
        caught = int((~kept[important]).sum())
        interval = binomtest(caught, n).proportion_ci()
        row = {"recall": recall, "threshold": threshold, "accepted": accepted}
        rows.append(
            {**row, "recall_interval": (float(interval.low), float(interval.high))}
        )
    return rows


def auc_interval(
    scores: NDArray, harmless: NDArray, samples: NDArray, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the AUC of scores [m], which should be high where
    `harmless` [m] is True. Whole samples are drawn, given by `samples` [m], because mismatches of
    the same sample are correlated."""
    from scipy.stats import rankdata

    rng = np.random.default_rng(seed)
    _, groups = np.unique(samples, return_inverse=True)
    n = int(groups.max()) + 1
    ranks = rankdata(scores)
    order = np.argsort(ranks, kind="stable")
    aucs = []
    for _ in range(BOOTSTRAPS):
        times = np.bincount(rng.integers(0, n, n), minlength=n)[groups].astype(float)
        good = np.where(harmless, times, 0)[order]
        bad = np.where(harmless, 0, times)[order]
        if good.sum() and bad.sum():
            aucs.append(_weighted_auc(good, bad, ranks[order]))
    low, high = np.quantile(aucs, [0.025, 0.975])
    return float(low), float(high)


def _weighted_auc(good: NDArray, bad: NDArray, ranks: NDArray) -> float:
    """Return the probability that a harmless row has a higher score than an important row, with
    ties counted half. Both weights [m] are in ascending order of the scores' `ranks`."""
    starts = np.flatnonzero(np.diff(ranks, prepend=-1.0))
    good = np.add.reduceat(good, starts)
    bad = np.add.reduceat(bad, starts)
    below = np.cumsum(bad) - bad
    return float((good * (below + bad / 2)).sum() / (good.sum() * bad.sum()))
