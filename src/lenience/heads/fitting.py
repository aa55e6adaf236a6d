"""Fitting heads to labelled states, and reading thresholds off scores out of fold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from lenience.core.errors import InputError
from lenience.heads.head import Head, Inputs, Role

if TYPE_CHECKING:
    from numpy.typing import NDArray


Kind = Literal["logistic", "mlp", "adam", "adamw"]


GRID = tuple(10.0**k for k in range(-4, 3))
"""Values of C, the inverse strength of the L2 penalty, weakest last."""


MINE_MORE = "mine more samples (lenience mine --limit)"
"""The mend where there is too little to fit to; who fits to other data names another."""


RECALLS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 1.0)


@dataclass
class Fitted:
    """A head on standardised inputs: score = sigmoid(x · weight + bias), or with a hidden layer as `Head` has it."""

    weight: NDArray
    bias: float
    layer: tuple[NDArray, NDArray] | None = None

    def logits(self, x: NDArray) -> NDArray:
        if self.layer:
            x = torch.nn.functional.gelu(torch.from_numpy(x @ self.layer[0] + self.layer[1])).numpy()
        return x.astype(np.float64) @ self.weight.astype(np.float64) + self.bias

    def on_raw(self, mean: NDArray, scale: NDArray) -> tuple[Tensor, float, tuple[Tensor, Tensor] | None]:
        """Weight, bias and layer for inputs that are not standardised."""
        if not self.layer:
            weight, bias = self.weight / scale, self.bias - float((mean / scale) @ self.weight)
            return torch.from_numpy(weight.astype(np.float32)), bias, None
        inner = (self.layer[0] / scale[:, None], self.layer[1] - (mean / scale) @ self.layer[0])
        layer = (torch.from_numpy(inner[0].astype(np.float32)), torch.from_numpy(inner[1].astype(np.float32)))
        return torch.from_numpy(self.weight.astype(np.float32)), self.bias, layer


def fit_head(
    x: NDArray,
    important: NDArray,
    samples: NDArray,
    *,
    inputs: Inputs,
    fingerprints: dict[str, str],
    recall: float,
    seed: int,
    kind: Kind = "logistic",
    role: Role = "judge",
    more: str = MINE_MORE,
) -> Head:
    """Fit a judge, or a stop or a gate, to which tokens that the target rejects or that are not acceptable are what important
    mismatches are to a judge.

    Kinds: "logistic" regression (AutoJudge, section 3.2), its L2 penalty chosen on a tenth of the samples; "mlp", with a hidden
    layer; and the same linear head fitted by gradient steps until a tenth of the samples says to stop: "adamw" with the
    two classes weighted alike (Judge Decoding), "adam" without (SPRINTER).

    `x` [m, F] are the mismatches' states, `important` [m] bool, `samples` [m] the sample each came from. Thresholds are read
    off scores that no fold's own samples trained; the head that is kept is fitted to everything. Raises InputError where
    there is too little to learn from.
    """
    from scipy.special import expit
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold

    groups = len(set(samples[important].tolist()))
    if groups < 10 or important.all():
        kinds = {"judge": ("important", "mismatches"), "stop": ("rejected", "tokens"), "gate": ("unacceptable", "tokens")}[role]
        raise InputError(
            f"{int(important.sum())} {kinds[0]} of {len(x)} {kinds[1]}, in {groups} samples: too few to fit a {role}; {more}"
        )
    mean, scale = x.mean(0), x.std(0) + 1e-6
    x = ((x - mean) / scale).astype(np.float32)
    harmless = ~important

    train, valid = _split(x, harmless, samples, seed, more)
    curve = _curve(kind, x, harmless, samples, train, valid, seed)
    best = max(curve, key=curve.__getitem__)
    held_out = np.zeros(len(x))
    for inside, outside in GroupKFold(5).split(x, harmless, samples):
        held_out[outside] = expit(_fit(kind, x[inside], harmless[inside], samples[inside], best, seed).logits(x[outside]))
    metrics = {
        "auc": curve[best],
        "auc_out_of_fold": float(roc_auc_score(harmless, held_out)),
        **({"c": best, "auc_by_c": {f"{c:g}": value for c, value in curve.items()}} if kind == "logistic" else {}),
        "mismatches": len(x),
        "important": int(important.sum()),
        "samples": len(set(samples.tolist())),
        "validation": {"mismatches": len(valid), "important": int(important[valid].sum())},
        "thresholds": thresholds(held_out, important),
    }
    weight, bias, layer = _fit(kind, x, harmless, samples, best, seed).on_raw(mean, scale)
    threshold = threshold_at(held_out, important, recall) if role == "judge" else 0.5
    return Head(weight, bias, inputs, threshold, fingerprints, metrics, "", role, layer)


def _split(x: NDArray, harmless: NDArray, samples: NDArray, seed: int, more: str = MINE_MORE) -> tuple[NDArray, NDArray]:
    """Rows of nine tenths of the samples and of the rest, both kinds of mismatch in each."""
    from sklearn.model_selection import GroupShuffleSplit

    for train, valid in GroupShuffleSplit(n_splits=20, test_size=0.1, random_state=seed).split(x, harmless, samples):
        if len(set(harmless[valid])) == len(set(harmless[train])) == 2:
            return train, valid
    raise InputError(f"important mismatches sit in too few samples to set any aside; {more}")


def _curve(
    kind: Kind, x: NDArray, harmless: NDArray, samples: NDArray, train: NDArray, valid: NDArray, seed: int
) -> dict[float, float]:
    """The AUC on the rows `valid` by the C of the grid that the rows `train` were fitted with; other kinds have no C."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    if kind != "logistic":
        fitted = _fit(kind, x[train], harmless[train], samples[train], 0.0, seed)
        return {0.0: float(roc_auc_score(harmless[valid], fitted.logits(x[valid])))}
    model, curve = LogisticRegression(max_iter=500, warm_start=True), {}
    for c in GRID:
        model.set_params(C=c).fit(x[train], harmless[train])
        curve[c] = float(roc_auc_score(harmless[valid], model.decision_function(x[valid])))
    return curve


def _fit(kind: Kind, x: NDArray, harmless: NDArray, samples: NDArray, c: float, seed: int) -> Fitted:
    from sklearn.linear_model import LogisticRegression

    if kind in ("adam", "adamw"):
        return fit_stopped(kind, x, harmless, samples, seed)
    if kind == "mlp":
        return fit_mlp(torch.from_numpy(x), torch.from_numpy(harmless.astype(np.float32)), seed)
    model = LogisticRegression(max_iter=1000, C=c).fit(x, harmless)
    return Fitted(model.coef_[0], float(model.intercept_[0]))


UNITS, BATCH, EPOCHS, LEAST_STEPS = 128, 512, 15, 400
"""Of the MLP: on the built-in pair 128 to 384 units, batches of 256 to 1,024 and weight decay of 0.05 to 0.3 came out alike."""


def fit_mlp(x: Tensor, harmless: Tensor, seed: int) -> Fitted:
    """One hidden layer, dropout on its inputs and outputs, cross-entropy, AdamW on a one-cycle schedule."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner, outer = torch.nn.Linear(x.shape[1], UNITS), torch.nn.Linear(UNITS, 1)
        model = torch.nn.Sequential(torch.nn.Dropout(0.1), inner, torch.nn.GELU(), torch.nn.Dropout(0.3), outer)
        steps = max(LEAST_STEPS, EPOCHS * len(x) // BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
        order = torch.cat([torch.randperm(len(x)) for _ in range(-(-steps * BATCH // len(x)))])
        for rows in order[: steps * BATCH].split(BATCH):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x[rows])[:, 0], harmless[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    weights = [parameter.detach().numpy() for parameter in (inner.weight.T, inner.bias, outer.weight[0])]
    return Fitted(weights[2], float(outer.bias.detach()), (weights[0], weights[1]))


PATIENCE, MOST_EPOCHS = 5, 200
"""Of the heads that are fitted by gradient steps: for how many epochs the loss may not fall, and how many there are at most."""


def fit_stopped(kind: Kind, x: NDArray, harmless: NDArray, samples: NDArray, seed: int) -> Fitted:
    """A linear head by Adam or AdamW, as it was when its loss on a tenth of the samples was least."""
    train, valid = _split(x, harmless, samples, seed)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(harmless.astype(np.float32))
    share = labels[train].mean()
    weights = torch.where(labels > 0, 0.5 / share, 0.5 / (1 - share)) if kind == "adamw" else torch.ones_like(labels)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Linear(x.shape[1], 1)
        optimizer = (torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)(model.parameters(), lr=1e-3)
        best, since, kept = np.inf, 0, {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(MOST_EPOCHS):
            for rows in torch.from_numpy(train)[torch.randperm(len(train))].split(BATCH):
                loss = loss_of(model(inputs[rows])[:, 0], labels[rows], weights[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                now = float(loss_of(model(inputs[valid])[:, 0], labels[valid], weights[valid]))
            since = 0 if now < best else since + 1
            if since == 0:
                best, kept = now, {name: value.clone() for name, value in model.state_dict().items()}
            elif since == PATIENCE:
                break
    return Fitted(kept["weight"][0].numpy(), float(kept["bias"]))


def threshold_at(scores: NDArray, important: NDArray, recall: float) -> float:
    """The lowest threshold that rejects at least a share `recall` of the important mismatches."""
    ranked = np.sort(scores[important])
    caught = int(np.ceil(recall * len(ranked) - 1e-9))
    return 0.0 if caught == 0 else float(np.nextafter(ranked[caught - 1], 2.0))


def thresholds(scores: NDArray, important: NDArray) -> list[dict[str, float]]:
    """For each wanted recall of important tokens: its threshold, and the share of unimportant ones still accepted."""
    rows = []
    for recall in RECALLS:
        at = threshold_at(scores, important, recall)
        rows.append({"recall": recall, "threshold": at, "accepted": float((scores[~important] >= at).mean())})
    return rows
