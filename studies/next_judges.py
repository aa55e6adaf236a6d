"""What limits a judge: the kind of head, and the noise of its labels, on any mined run.

    python studies/next_judges.py OUT [--run RUN] [--samples 1000] [--resampled 300] [--times 4]
    [--seeds 2]

All heads read the same rows (states of both models after the previous and the drafted token, three
layers of the target, and the logits at up to 12 later drafted tokens), and score samples that they
were not trained on (five folds). Writes OUT/next_judges.json and prints it:

- `heads`: AUC, and the share of harmless mismatches accepted at a recall of 98 and 99.5 %, of a
  logistic head, an MLP with one hidden layer, and a small transformer. The transformer's first
  position has the states, the numbers of the mismatch and the pooled numbers of later tokens; its
  other positions have the numbers of the later drafted tokens. Each seed draws the folds and the
  weights anew. Intervals are 95 % over resampled samples; `more` is the transformer's value minus
  the MLP's, paired;
- `labels`: for swaps of the first --resampled samples, in how many of --times continuations at
  temperature 0.6 the answer changes. The swaps are all important ones, as many harmless ones, drawn
  at random, and, as the control, the target's own tokens in place of the important ones. A label is
  *confirmed* if more than half of the continuations agree with it;
- `without_unconfirmed`: the share of harmless mismatches accepted by the MLP if the recall counts
  every important mismatch of these samples, or the confirmed ones alone; the share of important
  mismatches that are unconfirmed; and how many of the important mismatches that a judge at each
  recall accepts are unconfirmed. The head still learned from all labels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined import Mined, add_run, mined
from numpy.typing import NDArray
from rich.progress import track
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from lenience.cli.console import progress_bars
from lenience.decoding.pair import Pair
from lenience.heads import lookahead
from lenience.heads.fitting import Examples, fit_mlp
from lenience.heads.head import Inputs
from lenience.heads.scores import threshold_at
from lenience.mining.resampling import Resampling, resample, resamples
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples, read_run
from lenience.tasks import take
from lenience.training.features import compute_features, load_features

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

AHEAD = 12
RECALLS = (0.98, 0.995)
FOLDS = 5
RESAMPLES = 500
BATCH = 512
EPOCHS = 15
WIDTH = 64
"""Width of the transformer."""
PENALTY = 1e-3
"""Inverse strength of the logistic head's L2 penalty; not tuned."""


# ---- heads


class WindowTransformer(nn.Module):
    """A transformer with two layers over a mismatch and the later tokens of its window.

    The first position has all states and the numbers of the mismatch. Position i has the numbers of
    the i-th later token, and is masked if that token is not known. The output is read at the first
    position.
    """

    def __init__(self, features: int, states: int, numbers: int):
        super().__init__()
        self.states = states
        self.numbers = numbers
        self.here = nn.Linear(states + numbers, WIDTH)
        self.later = nn.Linear(numbers, WIDTH)
        self.pooled = nn.Linear(features - states - numbers * (1 + AHEAD), WIDTH)
        self.places = nn.Parameter(torch.zeros(1 + AHEAD, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        """Return logits [m] from features [m, F] and the known later tokens [m, AHEAD] bool."""
        front, rest = self.drop(x).split(
            [self.states + self.numbers, x.shape[1] - self.states - self.numbers], 1
        )
        # the layout of lookahead.with_later: known, numbers of later tokens, pooled numbers
        later = rest[:, AHEAD : AHEAD * (1 + self.numbers)]
        pooled = torch.cat([rest[:, :AHEAD], rest[:, AHEAD * (1 + self.numbers) :]], 1)
        first = self.here(front) + self.pooled(pooled)
        others = self.later(later.unflatten(1, (AHEAD, self.numbers)))
        sequence = torch.cat([first[:, None], others], 1) + self.places
        hidden = torch.cat([torch.zeros_like(known[:, :1]), ~known], 1)
        out = self.layers(sequence, src_key_padding_mask=hidden)
        return self.out(self.norm(out[:, 0]))[:, 0]


@dataclass(frozen=True)
class Layout:
    """The layout of a row's features."""

    states: int
    numbers: int

    def known(self, x: NDArray) -> Tensor:
        """Return which later tokens are known, [m, AHEAD] bool."""
        first = self.states + self.numbers
        return torch.from_numpy(x[:, first : first + AHEAD] > 0)


Scores = Callable[[Examples, NDArray, int], NDArray]
"""Function that trains a head on examples and returns its scores of other rows. The last argument
is the seed."""


def by_logistic(inside: Examples, outside: NDArray, seed: int) -> NDArray:
    """Score with logistic regression. The seed changes the folds alone."""
    scale = StandardScaler().fit(inside.in_memory)
    model = LogisticRegression(max_iter=1000, C=PENALTY)
    model.fit(scale.transform(inside.in_memory), inside.harmless)
    return model.decision_function(scale.transform(outside))


def by_mlp(inside: Examples, outside: NDArray, seed: int) -> NDArray:
    """Score with the MLP of `lenience fit`, which standardises its inputs too."""
    scale = StandardScaler().fit(inside.in_memory)
    labels, counts = map(torch.from_numpy, inside.weighted(None))
    x = torch.from_numpy(scale.transform(inside.in_memory).astype(np.float32))
    head = fit_mlp(x, labels, counts, seed)
    return head.logits(scale.transform(outside).astype(np.float32))


def by_transformer(layout: Layout) -> Scores:
    def scores(inside: Examples, outside: NDArray, seed: int) -> NDArray:
        torch.manual_seed(seed)
        scale = StandardScaler().fit(inside.in_memory)
        x = torch.from_numpy(scale.transform(inside.in_memory).astype(np.float32))
        known = layout.known(inside.in_memory)
        labels = torch.from_numpy(inside.labels)
        model = WindowTransformer(x.shape[1], layout.states, layout.numbers)
        _trained(model, x, known, labels)
        held_out = torch.from_numpy(scale.transform(outside).astype(np.float32))
        with torch.no_grad():
            parts = [
                model(rows, marks)
                for rows, marks in zip(
                    held_out.split(BATCH), layout.known(outside).split(BATCH)
                )
            ]
        return torch.cat(parts).numpy()

    return scores


def _trained(model: nn.Module, x: Tensor, known: Tensor, labels: Tensor) -> None:
    """Train by AdamW on a one-cycle schedule."""
    loss_of = nn.functional.binary_cross_entropy_with_logits
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = loss_of(model(x[rows], known[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()


def out_of_fold(examples: Examples, kind: Scores, seed: int, what: str) -> NDArray:
    """Return each row's score [m] by a head trained on other samples."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(examples.samples.max() + 1)[examples.samples]
    scores = np.zeros(len(examples))
    folds = GroupKFold(FOLDS).split(shuffled, groups=shuffled)
    for inside, outside in track(list(folds), what):
        rows = examples.in_memory[outside]
        scores[outside] = kind(examples.rows(inside), rows, seed)
    return scores


def accepted(scores: NDArray, important: NDArray, recall: float) -> float:
    """Return the share of harmless mismatches at or above the threshold of a recall."""
    ranks = _ranks(scores)
    kept = ranks[~important] >= threshold_at(ranks, important, recall)
    return float(kept.mean())


def _ranks(scores: NDArray) -> NDArray:
    """Return the ranks of scores in [0, 1), as thresholds are below 1."""
    return scores.argsort().argsort() / len(scores)


def figures(
    examples: Examples, scores: NDArray, less: NDArray | None = None
) -> dict[str, Any]:
    """Return AUC and shares accepted, with intervals over resampled samples; minus those of the
    scores `less`, if given."""
    important = ~examples.harmless

    def shares(rows: NDArray) -> dict[str, float]:
        of = _shares(scores[rows], important[rows])
        if less is None:
            return of
        other = _shares(less[rows], important[rows])
        return {name: value - other[name] for name, value in of.items()}

    rows_of = defaultdict(list)
    for row, sample in enumerate(examples.samples):
        rows_of[int(sample)].append(row)
    groups = [np.array(rows) for rows in rows_of.values()]
    rng = np.random.default_rng(0)
    drawn: dict[str, list[float]] = defaultdict(list)
    for _ in range(RESAMPLES):
        picked = rng.integers(len(groups), size=len(groups))
        rows = np.concatenate([groups[i] for i in picked])
        for name, value in shares(rows).items():
            drawn[name].append(value)
    return {
        name: {
            "value": value,
            "interval": np.percentile(drawn[name], [2.5, 97.5]).tolist(),
        }
        for name, value in shares(np.arange(len(scores))).items()
    }


def _shares(scores: NDArray, important: NDArray) -> dict[str, float]:
    found = {"auc": float(roc_auc_score(~important, scores))}
    for recall in RECALLS:
        found[f"accepted at {recall:g}"] = accepted(scores, important, recall)
    return found


# ---- labels


@dataclass(frozen=True)
class Swaps:
    """Continuations of swaps of one label."""

    keys: Sequence[tuple[str, int]]
    """Sample and position of each swap."""
    changed: NDArray[np.int64]
    """Number of continuations that change the answer."""
    known: NDArray[np.int64]
    """Number of continuations whose answer could be compared."""

    def confirmed(self, important: bool) -> NDArray[np.bool_]:
        """Return True for labels that more than half of the continuations agree with."""
        agreeing = self.changed if important else self.known - self.changed
        return 2 * agreeing > self.known

    def to_json(self, important: bool) -> dict[str, Any]:
        counts = np.bincount(self.changed, minlength=int(self.known.max()) + 1)
        return {
            "swaps": len(self.keys),
            "by_changes": counts.tolist(),
            "changed": float(self.changed.sum() / self.known.sum()),
            "confirmed": float(self.confirmed(important).mean()),
        }


@dataclass(frozen=True)
class Continuing:
    """Settings of the continued swaps."""

    source: Mined
    pair: Pair
    split: str
    samples: int
    times: int


def continued(asked: Continuing, folder: Path, label: str) -> Swaps:
    """Continue swaps of the first samples: "important" ones, "harmless" ones, or the target's own
    tokens ("control"). `resample` continues what a run marks as important, so the runs of the last
    two are changed."""
    records = asked.source.first(folder, asked.samples)
    if label != "important":
        change = _exchange if label == "harmless" else _own_tokens
        change(records)
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "journal.jsonl").write_text(text)
    own = {record["id"] for record in records}
    task = asked.source.task
    samples = [each for each in take(task, asked.split, None) if each.id in own]
    resampling = Resampling(asked.times, task.max_new_tokens or 256, 32)
    with progress_bars() as show:
        resample(asked.pair, task, folder, samples, resampling, progress=show)
    return _changed(folder, records)


def _changed(folder: Path, records: Sequence[dict[str, Any]]) -> Swaps:
    """Return how often the continuations of each swap change the answer."""
    found: dict[tuple[str, int], list[bool]] = {}
    for record in records:
        for each in record["mismatches"]:
            if each["important"]:
                found[record["id"], each["position"]] = []
    for line in resamples(folder):
        key = (line.id, line.position)
        if line.same is not None and key in found:
            found[key].append(not line.same)
    known = {key: each for key, each in found.items() if each}
    changed = np.array([sum(each) for each in known.values()])
    return Swaps(list(known), changed, np.array([len(each) for each in known.values()]))


def _exchange(records: Sequence[dict[str, Any]]) -> None:
    """Exchange the labels: mark as many random harmless mismatches as important as there are
    important ones, and all others as harmless."""
    mismatches = [each for record in records for each in record["mismatches"]]
    harmless = [i for i, each in enumerate(mismatches) if each["important"] is False]
    wanted = sum(each["important"] is True for each in mismatches)
    drawn = np.random.default_rng(0).choice(harmless, wanted, replace=False)
    for each in mismatches:
        each["important"] = False
    for i in drawn:
        mismatches[i]["important"] = True


def _own_tokens(records: Sequence[dict[str, Any]]) -> None:
    """Put the target's own token in place of each drafted token."""
    for record in records:
        for each in record["mismatches"]:
            each["draft_token"] = each["target_token"]


def without_unconfirmed(
    run: Path, examples: Examples, scores: NDArray, swaps: Swaps, resampled: int
) -> dict[str, Any]:
    """Return what the MLP accepts if unconfirmed labels count, and if they do not."""
    keys = [
        (sample.id, mismatch.position)
        for sample in mined_samples(Journal(run / "journal.jsonl"))
        for mismatch in sample.mismatches
        if mismatch.important is not None
    ]
    assert len(keys) == len(examples)
    verdict = dict(zip(swaps.keys, swaps.confirmed(important=True)))
    important = ~examples.harmless
    # swaps to an EOS cannot be continued, and count as confirmed
    unconfirmed = np.array(
        [
            bool(label) and not verdict.get(key, True)
            for key, label in zip(keys, important)
        ]
    )
    part = examples.samples < resampled
    found: dict[str, Any] = {
        "important": int(important[part].sum()),
        "unconfirmed": float(unconfirmed[part & important].mean()),
    }
    ranks = _ranks(scores[part])
    for recall in RECALLS:
        threshold = threshold_at(ranks, important[part], recall)
        missed = important[part] & (ranks >= threshold)
        sure = part & ~unconfirmed
        found[f"at {recall:g}"] = {
            "accepted": accepted(scores[part], important[part], recall),
            "accepted_if_confirmed": accepted(scores[sure], important[sure], recall),
            "missed": int(missed.sum()),
            "missed_unconfirmed": int((missed & unconfirmed[part]).sum()),
        }
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    add_run(parser)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--resampled", type=int, default=300)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    layers_help = "layers of the target whose states are read, next to the final ones"
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[4, 6], help=layers_help
    )
    return parser.parse_args()


def compare_heads(
    examples: Examples, seeds: int, told: dict[str, Any], path: Path
) -> list[NDArray]:
    """Add the figures of all heads to the results, and write them after each head. Return the MLP's
    scores by seed."""
    states = examples.in_memory.shape[1] - lookahead.width(True, AHEAD)
    layout = Layout(states, lookahead.numbers(True))
    kinds: dict[str, Scores] = {
        "logistic": by_logistic,
        "mlp": by_mlp,
        "transformer": by_transformer(layout),
    }
    scores: dict[tuple[str, int], NDArray] = {}
    told["heads"] = {}
    for name, kind in kinds.items():
        for seed in range(seeds):
            head = f"{name}, seed {seed}"
            scores[name, seed] = out_of_fold(examples, kind, seed, head)
            told["heads"][head] = figures(examples, scores[name, seed])
            write_results(path, told)
    told["more"] = [
        figures(examples, scores["transformer", seed], scores["mlp", seed])
        for seed in range(seeds)
    ]
    return [scores["mlp", seed] for seed in range(seeds)]


def main() -> None:
    given = arguments()
    source = mined(given.run)
    run = given.out / "run"
    source.first(run, given.samples)
    pair = source.pair(compile=True)
    inputs = Inputs(layers=(*given.layers, None), ahead=AHEAD)
    with progress_bars() as show:
        compute_features(pair, run, inputs, progress=show)
    examples = load_features(run, inputs)
    told: dict[str, Any] = {
        "mismatches": len(examples),
        "important": int((~examples.harmless).sum()),
    }
    path = given.out / "next_judges.json"
    of_mlp = compare_heads(examples, given.seeds, told, path)
    split = read_run(given.run).split
    asked = Continuing(source, pair, split, given.resampled, given.times)
    swaps = {
        label: continued(asked, given.out / label, label)
        for label in ("important", "harmless", "control")
    }
    told["labels"] = {
        label: found.to_json(label == "important") for label, found in swaps.items()
    }
    told["without_unconfirmed"] = [
        without_unconfirmed(run, examples, scores, swaps["important"], given.resampled)
        for scores in of_mlp
    ]
    write_results(path, told)
    shutil.rmtree(run / "features")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
