"""Training of heads on labelled states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lenience.core.errors import InputError
from lenience.heads.head import Head, Inputs, Role
from lenience.heads.scores import auc_interval, by_recall, threshold_at, thresholds
from lenience.heads.streaming import (
    LogisticProblem,
    Standardised,
    StreamedRows,
    fit_together,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sklearn.linear_model import LogisticRegression

HeadKind = Literal["logistic", "mlp", "adam", "adamw"]
MINE_MORE = "mine more samples (lenience mine --limit)"
"""Fix named in errors about too little training data; callers with other data name another fix."""
L2_GRID = tuple(10.0**k for k in range(-4, 3))
"""Values of C, the inverse strength of the L2 penalty, from the strongest penalty to the
weakest."""
LEAST_SAMPLES = 10
"""Minimum number of samples with an important mismatch, so that each fold has some."""
UNITS = 128
ROWS_PER_STEP = 512
"""Number of states in a step of gradient descent."""
EPOCHS = 15
LEAST_STEPS = 400
"""Minimum number of training steps of the MLP. On the built-in pair, 128 to 384 units, batches of
256 to 1,024 and weight decays of 0.05 to 0.3 gave the same results."""
DROPPED = 26
"""Share of the MLP's inputs dropped in each step, in 256ths."""
RATES = (1e-4, 1e-3, 1e-2)
DECAYS = (0.01, 0.1)
"""Learning rates and weight decays tried by "adamw", as Judge Decoding tunes both."""
PATIENCE = 5
MOST_EPOCHS = 200
"""Limits of training by gradient steps: epochs without a falling loss, and epochs in total."""


@dataclass(frozen=True)
class FitConfig:
    """Settings of a head's training."""

    kind: HeadKind = "logistic"
    """"logistic": logistic regression (AutoJudge, section 3.2), with the L2 penalty chosen on a
    tenth of the samples. "mlp": one hidden layer. "adam" and "adamw": a linear head trained by
    gradient steps, stopped early on a tenth of the samples. "adamw" weights both classes alike and
    tunes the learning rate and the weight decay (Judge Decoding); "adam" does neither
    (SPRINTER)."""
    role: Role = "judge"
    """Role of the head. A judge learns which mismatches are important, a stop which tokens the
    target rejects, and a gate which tokens are not acceptable."""
    recall: float | None = 0.9
    """Recall of important mismatches at a judge's own threshold; None for a threshold of 0.5 (Judge
    Decoding)."""
    weight: float | None = None
    """Weight of an important, rejected or unacceptable token relative to the others. None for 1 or,
    with "adamw", for equal total weight of both classes."""
    seed: int = 0
    fix: str = MINE_MORE
    """Fix to name in errors about too little data."""

    def weight_for(self, labels: NDArray) -> float | None:
        """Return the value of `weight` that applies to labels [m]."""
        if self.weight is not None or self.kind != "adamw":
            return self.weight
        share = float(labels.mean())
        return share / (1 - share)


@dataclass(frozen=True)
class Examples:
    """Labelled states, the training data of a head."""

    x: NDArray | StreamedRows
    """[m, F] float32: states, in memory or in files."""
    harmless: NDArray
    """[m] bool: True if the token is not important, not rejected, or acceptable."""
    samples: NDArray
    """[m]: number of the sample that each row came from."""
    shares: NDArray | None = None
    """[m] float32: soft labels, each the probability that the token is harmless; None to learn from
    `harmless`."""

    @property
    def in_memory(self) -> NDArray:
        """Return the states [m, F] of examples that are in memory."""
        assert isinstance(self.x, np.ndarray)
        return self.x

    def rows(self, which: NDArray) -> Examples:
        shares = None if self.shares is None else self.shares[which]
        return Examples(
            self.x[which], self.harmless[which], self.samples[which], shares
        )

    @property
    def labels(self) -> NDArray:
        """Return the labels [m] float32 to learn: `shares` if given, else `harmless`."""
        return self.harmless.astype(np.float32) if self.shares is None else self.shares

    def weighted(self, weight: float | None) -> tuple[NDArray, NDArray]:
        """Return labels and row weights, both [m] float32. Rows that are not harmless have weight
        `weight`."""
        good = self.labels
        bad = (1 - self.labels) * np.float32(1 if weight is None else weight)
        return good / (good + bad), good + bad

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class TrainedHead:
    """A head on standardised inputs: score = sigmoid(x · weight + bias), or with a hidden layer as
    in `Head`."""

    weight: NDArray
    bias: float
    layer: tuple[NDArray, NDArray] | None = None

    def logits(self, x: NDArray) -> NDArray:
        if self.layer:
            inner = torch.from_numpy(x @ self.layer[0] + self.layer[1])
            x = torch.nn.functional.gelu(inner).numpy()
        return x.astype(np.float64) @ self.weight.astype(np.float64) + self.bias

    def on_raw(self, mean: NDArray, scale: NDArray) -> TrainedHead:
        """Return an equal head for inputs before standardisation."""
        if not self.layer:
            weight = (self.weight / scale).astype(np.float32)
            return TrainedHead(weight, self.bias - float((mean / scale) @ self.weight))
        inner = (self.layer[0] / scale[:, None]).astype(np.float32)
        bias = (self.layer[1] - (mean / scale) @ self.layer[0]).astype(np.float32)
        return TrainedHead(self.weight.astype(np.float32), self.bias, (inner, bias))


def fit_head(
    examples: Examples,
    inputs: Inputs,
    fingerprints: Mapping[str, str],
    config: FitConfig,
) -> Head:
    """Train a head on examples of the states that `inputs` names. `fingerprints` are those of the
    models.

    Thresholds are computed from out-of-fold scores; the returned head is trained on all examples.
    Raises InputError if the examples are too few.
    """
    _check_enough(examples, config)
    fit = _fit_in_files if isinstance(examples.x, StreamedRows) else _fit_in_memory
    fitted, scores, tried, valid = fit(examples, config)
    metrics = _metrics(examples, scores, examples.rows(valid))
    best = _best(tried)
    metrics["auc"] = tried[best].auc
    if config.kind == "logistic":
        metrics |= {
            "c": best.c,
            "auc_by_c": {f"{setting.c:g}": tried[setting].auc for setting in tried},
        }
    if config.kind == "adamw":
        metrics |= {"rate": best.rate, "decay": best.decay}
    if config.weight is not None:
        metrics["weight"] = config.weight
    important = ~examples.harmless
    recall = config.recall if config.role == "judge" else None
    return Head(
        weight=torch.from_numpy(fitted.weight),
        bias=fitted.bias,
        inputs=inputs,
        threshold=0.5 if recall is None else threshold_at(scores, important, recall),
        fingerprints=dict(fingerprints),
        metrics=metrics,
        role=config.role,
        layer=_tensors(fitted.layer),
    )


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters chosen on held-out samples."""

    c: float = 0.0
    """Inverse strength of the L2 penalty of "logistic"."""
    rate: float = 1e-3
    """Learning rate of "adam" and "adamw"."""
    decay: float = 0.0
    """Weight decay of "adamw"."""


def settings_of(kind: HeadKind) -> list[Hyperparameters]:
    """Return the hyperparameters to try for a kind of head."""
    if kind == "logistic":
        return list(map(Hyperparameters, L2_GRID))
    if kind == "adamw":
        found = list[Hyperparameters]()
        for rate in RATES:
            for decay in DECAYS:
                found.append(Hyperparameters(rate=rate, decay=decay))
        return found
    return [Hyperparameters()]


@dataclass(frozen=True)
class Tried:
    """Result of a setting on the held-out samples."""

    auc: float
    merit: float
    """Measure by which settings are chosen: the AUC for "logistic" (AutoJudge), the negative loss
    for the other kinds."""


def _best(tried: Mapping[Hyperparameters, Tried]) -> Hyperparameters:
    return max(tried, key=lambda setting: tried[setting].merit)


FitOutcome = tuple[TrainedHead, "NDArray", dict[Hyperparameters, Tried], "NDArray"]
"""Outcome of a training: a head for raw inputs, out-of-fold scores [m], the result of each setting,
and the rows held out to choose it."""


def _fit_in_memory(examples: Examples, config: FitConfig) -> FitOutcome:
    assert isinstance(examples.x, np.ndarray)
    mean = examples.x.mean(0)
    scale = examples.x.std(0) + 1e-6
    standardised = ((examples.x - mean) / scale).astype(np.float32)
    examples = replace(examples, x=standardised)
    train, valid = _split(examples, config)
    tried = _tried(examples.rows(train), examples.rows(valid), config)
    best = _best(tried)
    scores = _scores_out_of_fold(examples, best, config)
    return _fit(examples, best, config).on_raw(mean, scale), scores, tried, valid


def _fit_in_files(examples: Examples, config: FitConfig) -> FitOutcome:
    """Train a logistic head on states that stay in their files: first the heads of all penalties in
    shared passes, then those of all folds."""
    from scipy.special import expit

    assert isinstance(examples.x, StreamedRows)
    if config.kind != "logistic":
        raise InputError(
            f"head {config.kind}: {len(examples)} rows of {examples.x.width} numbers "
            "do not fit into memory; use --head logistic, which trains from files, or "
            "fewer samples"
        )
    x = Standardised.of(examples.x)
    m = len(examples)
    train, valid = _split(examples, config)
    by_c, tried = _grid_in_files(x, examples, config, (train, valid))
    c = _best(tried).c
    folds = [outside for _, outside in _folds(examples)]
    problems = []
    for outside in folds:
        problems.append(LogisticProblem(c, ~np.isin(np.arange(m), outside)))
    problems.append(LogisticProblem(c, np.ones(m, dtype=bool)))
    begin = np.repeat(by_c[:, [L2_GRID.index(c)]], len(problems), 1)
    weights = fit_together(x, examples.weighted(config.weight), problems, begin)
    logits = x.logits(weights)
    scores = np.zeros(m)
    for k, outside in enumerate(folds):
        scores[outside] = expit(logits[outside, k])
    fitted = TrainedHead(weights[:-1, -1], float(weights[-1, -1]))
    return fitted.on_raw(x.mean, x.scale), scores, tried, valid


def _grid_in_files(
    x: Standardised,
    examples: Examples,
    config: FitConfig,
    split: tuple[NDArray, NDArray],
) -> tuple[NDArray, dict[Hyperparameters, Tried]]:
    """Train a head for each penalty on the first rows of `split`. Return the weights [F + 1, K] and
    the results on the second rows."""
    from sklearn.metrics import roc_auc_score

    train, valid = split
    inside = np.isin(np.arange(len(examples)), train)
    problems = [LogisticProblem(c, inside) for c in L2_GRID]
    weights = fit_together(x, examples.weighted(config.weight), problems)
    logits = x.logits(weights)[valid]
    labels = examples.harmless[valid]
    aucs = [float(roc_auc_score(labels, of_head)) for of_head in logits.T]
    return weights, {
        setting: Tried(auc, auc) for setting, auc in zip(settings_of("logistic"), aucs)
    }


def _folds(examples: Examples) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield five pairs: rows of four fifths of the samples, and rows of the remaining fifth."""
    from sklearn.model_selection import GroupKFold

    return GroupKFold(5).split(examples.harmless, examples.harmless, examples.samples)


def _tensors(layer: tuple[NDArray, NDArray] | None) -> tuple[Tensor, Tensor] | None:
    return (
        None
        if layer is None
        else (torch.from_numpy(layer[0]), torch.from_numpy(layer[1]))
    )


def _check_enough(examples: Examples, config: FitConfig) -> None:
    important = ~examples.harmless
    groups = len(set(examples.samples[important].tolist()))
    if groups >= LEAST_SAMPLES and not important.all():
        return
    if not len(examples):
        raise InputError(
            f"no labels to train a {config.role} on; if the run has mismatches, the target's "
            "responses hold no answer: check --answer and --max-new-tokens"
        )
    what, among = {
        "judge": ("important", "mismatches"),
        "stop": ("rejected", "tokens"),
        "gate": ("unacceptable", "tokens"),
    }[config.role]
    raise InputError(
        f"{int(important.sum())} {what} of {len(examples)} {among}, in {groups} "
        f"samples: too few to train a {config.role}, which needs {LEAST_SAMPLES} such "
        f"samples; {config.fix}"
    )


def _metrics(examples: Examples, scores: NDArray, valid: Examples) -> dict[str, Any]:
    """Return the metrics of a trained head from its out-of-fold scores [m]."""
    from sklearn.metrics import roc_auc_score

    important = ~examples.harmless
    return {
        "auc_out_of_fold": float(roc_auc_score(examples.harmless, scores)),
        "auc_interval": auc_interval(scores, examples.harmless, examples.samples),
        "mismatches": len(examples),
        "important": int(important.sum()),
        "samples": len(set(examples.samples.tolist())),
        "validation": {
            "mismatches": len(valid),
            "important": int((~valid.harmless).sum()),
        },
        "thresholds": thresholds(scores, important),
        "by_recall": by_recall(scores, important),
    }


def _split(examples: Examples, config: FitConfig) -> tuple[NDArray, NDArray]:
    """Return the rows of nine tenths of the samples and the rows of the rest; both parts have
    harmless and important rows."""
    from sklearn.model_selection import GroupShuffleSplit

    splitter = GroupShuffleSplit(n_splits=20, test_size=0.1, random_state=config.seed)
    harmless = examples.harmless
    for train, valid in splitter.split(harmless, harmless, examples.samples):
        if len(set(harmless[valid])) == len(set(harmless[train])) == 2:
            return train, valid
    raise InputError(
        f"important mismatches sit in too few samples to set any aside; {config.fix}"
    )


def _tried(
    train: Examples, valid: Examples, config: FitConfig
) -> dict[Hyperparameters, Tried]:
    """Return the result of each setting on `valid` after training on `train`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    tried = dict[Hyperparameters, Tried]()
    model = LogisticRegression(max_iter=500, warm_start=True)
    for setting in settings_of(config.kind):
        if config.kind == "logistic":
            _fit_logistic(model.set_params(C=setting.c), train, config.weight)
            logits = model.decision_function(valid.x)
        else:
            logits = _fit(train, setting, config).logits(valid.in_memory)
        auc = float(roc_auc_score(valid.harmless, logits))
        merit = auc if config.kind == "logistic" else -_loss(logits, valid, config)
        tried[setting] = Tried(auc, merit)
    return tried


def _loss(logits: NDArray, examples: Examples, config: FitConfig) -> float:
    """Return the mean cross-entropy of logits [m] on the examples."""
    labels, counts = examples.weighted(config.weight_for(examples.labels))
    return float(np.average(np.logaddexp(0, logits) - labels * logits, weights=counts))


def _scores_out_of_fold(
    examples: Examples, setting: Hyperparameters, config: FitConfig
) -> NDArray:
    """Return each example's score [m] by a head trained on other samples."""
    from scipy.special import expit

    scores = np.zeros(len(examples))
    for inside, outside in _folds(examples):
        scores[outside] = expit(
            _fit(examples.rows(inside), setting, config).logits(
                examples.in_memory[outside]
            )
        )
    return scores


def _fit(
    examples: Examples, setting: Hyperparameters, config: FitConfig
) -> TrainedHead:
    from sklearn.linear_model import LogisticRegression

    if config.kind in ("adam", "adamw"):
        return fit_stopped(examples, config, setting)
    if config.kind == "mlp":
        labels, counts = map(torch.from_numpy, examples.weighted(config.weight))
        return fit_mlp(
            torch.from_numpy(examples.in_memory), labels, counts, config.seed
        )
    model = LogisticRegression(max_iter=1000, C=setting.c)
    _fit_logistic(model, examples, config.weight)
    return TrainedHead(model.coef_[0], float(model.intercept_[0]))


def _fit_logistic(
    model: LogisticRegression, examples: Examples, weight: float | None
) -> None:
    if examples.shares is None:
        model.fit(examples.x, examples.harmless, examples.weighted(weight)[1])
        return
    # each row once with each label, weighted by the label's probability
    weights = np.concatenate([examples.shares, (1 - examples.shares) * (weight or 1)])
    rows = np.flatnonzero(weights)
    labels = rows < len(examples)
    model.fit(examples.x[rows % len(examples)], labels, weights[rows])


def fit_mlp(x: Tensor, harmless: Tensor, counts: Tensor, seed: int) -> TrainedHead:
    """Train an MLP with one hidden layer on x [m, F], labels [m] and row weights [m]. The loss is
    cross-entropy, with dropout before and after the hidden layer, by AdamW on a one-cycle
    schedule."""
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    with torch.random.fork_rng(devices=[]):  # the caller's draws stay as they are
        torch.manual_seed(seed)
        inner = torch.nn.Linear(x.shape[1], UNITS)
        outer = torch.nn.Linear(UNITS, 1)
        model = torch.nn.Sequential(
            inner, torch.nn.GELU(), torch.nn.Dropout(0.3), outer
        )
        steps = max(LEAST_STEPS, EPOCHS * len(x) // ROWS_PER_STEP)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=4e-3, weight_decay=0.05, fused=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 4e-3, total_steps=steps
        )
        # whole permutations, so that rows are read equally often
        order = torch.cat(
            [torch.randperm(len(x)) for _ in range(-(-steps * ROWS_PER_STEP // len(x)))]
        )
        for rows in order[: steps * ROWS_PER_STEP].split(ROWS_PER_STEP):
            loss = loss_of(model(_thinned(x[rows]))[:, 0], harmless[rows], counts[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    parameters = (inner.weight.T, inner.bias, outer.weight[0])
    matrix, bias, weight = (parameter.detach().numpy() for parameter in parameters)
    return TrainedHead(weight, float(outer.bias.detach()), (matrix, bias))


def _thinned(x: Tensor) -> Tensor:
    """Return inputs [n, F] with about a tenth dropped. The random bytes are drawn eight at a time,
    since PyTorch's dropout takes longer than the rest of a step."""
    coins = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    kept = coins.view(torch.uint8)[: x.numel()].view(x.shape) >= DROPPED
    return x * kept * (256 / (256 - DROPPED))


def fit_stopped(
    examples: Examples, config: FitConfig, setting: Hyperparameters
) -> TrainedHead:
    """Train a linear head by Adam or AdamW, and keep the weights with the lowest loss on a tenth of
    the samples."""
    train, valid = _split(examples, config)
    inputs = torch.from_numpy(examples.x)
    weighted = examples.weighted(config.weight_for(examples.labels[train]))
    labels, counts = map(torch.from_numpy, weighted)
    counts = counts / counts[train].mean()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = torch.nn.Linear(inputs.shape[1], 1)

        def loss_on(rows: Tensor) -> Tensor:
            return torch.nn.functional.binary_cross_entropy_with_logits(
                model(inputs[rows])[:, 0], labels[rows], counts[rows]
            )

        optimizer_class = (
            torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
        )
        optimizer = optimizer_class(
            model.parameters(), lr=setting.rate, weight_decay=setting.decay
        )
        _train_until_worse(model, optimizer, loss_on, train, valid)
    return TrainedHead(model.weight.detach()[0].numpy(), float(model.bias.detach()))


def _train_until_worse(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_on: Callable[[Tensor], Tensor],
    train: NDArray,
    valid: NDArray,
) -> None:
    """Train until the loss on the `valid` rows has not fallen for PATIENCE epochs, and restore the
    parameters of the best epoch."""
    least = np.inf
    epochs_since = 0
    best = deepcopy(model.state_dict())
    for _ in range(MOST_EPOCHS):
        for rows in torch.from_numpy(train)[torch.randperm(len(train))].split(
            ROWS_PER_STEP
        ):
            optimizer.zero_grad()
            loss_on(rows).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(loss_on(torch.from_numpy(valid)))
        if loss < least:
            least = loss
            epochs_since = 0
            best = deepcopy(model.state_dict())
            continue
        epochs_since += 1
        if epochs_since == PATIENCE:
            break
    model.load_state_dict(best)
