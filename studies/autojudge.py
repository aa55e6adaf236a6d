"""AutoJudge's ablations (Garipov 2025) on the built-in pair, each with its table and plot.

    python studies/autojudge.py inputs|classifiers|search|precision|transfer OUT [--samples N]
    [--problems N] [--run RUN]

OUT/NAME.json and OUT/NAME.png are written, the table is printed. A judge is measured on folds by
sample that it was not fitted to: the AUC, with a 95 % interval from resampled problems, and
`accepted`, the share of harmless mismatches that it accepts at the threshold that rejects 98 % of
the important ones.

- inputs: after which token the states are read (the one before, the drafted, the target's own,
  both) and whose they are; `paired` holds differences of AUCs on the same resampled problems. The
  strength of regularization is chosen within the folds that a judge is fitted to;
- classifiers: logistic regression over the L2 grid, the paper's random forest (128 trees) and MLP
  (128 ReLU units, early stopping), and our own forest, MLP and linear heads;
- search: which mismatches count as important when each is tried alone in the target's own answer
  (naive), from the draft's answer back to the target's (reversed), and one after the other
  (semi-greedy, algorithm 1); and what judges that learn from each keep of the accuracy, with the
  exact McNemar test of algorithm 1's judge against each other's at all thresholds (`paired`);
- precision: states in float32 and in bfloat16, computed token by token, in one parallel pass, or as
  mining has them (the target's token by token, the draft's in parallel) and decoding (the reverse);
- transfer: a judge that has seen one kind of problem, on each kind; at its own threshold too, where
  it rejects 98 % of the important mismatches of the kind that it has seen.

All but `transfer`, which is between the families of the built-in task, take a run of any pair and
task.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mined import Mined, add_run, family, mined
from numpy.typing import NDArray
from paired import Paired, mcnemar, right_answers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import expit
from scipy.stats import binomtest
from sklearn.base import clone
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.neural_network import MLPClassifier

from lenience.cli.console import progress_bars, with_bars
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.decoding.pair import Pair
from lenience.decoding.response import completes_stop, until_stop
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.table import FrontierRow
from lenience.heads.fitting import (
    L2_GRID,
    Examples,
    FitConfig,
    HeadKind,
    Hyperparameters,
    fit_mlp,
    fit_stopped,
)
from lenience.heads.head import Inputs
from lenience.heads.scores import threshold_at, thresholds
from lenience.models.session import Session
from lenience.runs.journal import Journal
from lenience.runs.record import read_run
from lenience.tasks import Sample, Task
from lenience.training.features import compute_features, load_features
from lenience.training.fit import HeadPlan, fit_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

Record = dict[str, Any]
Fit = Callable[[NDArray, NDArray, NDArray], Callable[[NDArray], NDArray]]
"""States, whether they are harmless, and their samples → a function from states to scores."""
TOKENS = {
    "before": ("previous",),
    "drafted": ("draft",),
    "target's": ("target",),
    "drafted and before": ("draft", "previous"),
    "drafted and target's": ("draft", "target"),
}
MODELS = {"draft": ("draft",), "target": ("target",), "both": ("target", "draft")}
FOLDS = 5
RESAMPLES = 200


# ---- what all ablations share


def states(pair: Pair, run: Path, inputs: Inputs) -> tuple[NDArray, NDArray, NDArray]:
    """Return the states of a run's mismatches, which of them are important, and their samples."""
    compute_features(pair, run, inputs)
    examples = load_features(run, inputs)
    return examples.in_memory, ~examples.harmless, examples.samples


def logistic(c: float) -> Fit:
    return lambda x, harmless, samples: (
        LogisticRegression(max_iter=1000, C=c).fit(x, harmless).decision_function
    )


def standardised(x: NDArray) -> NDArray:
    return ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)


def out_of_fold(fit: Fit, x: NDArray, harmless: NDArray, samples: NDArray) -> NDArray:
    """Return the scores [n] of fits that have not seen the sample of a row, on states scaled by the
    rows that they have seen."""
    scores = np.zeros(len(x))
    for inside, outside in GroupKFold(FOLDS).split(x, harmless, samples):
        mean = x[inside].mean(0)
        scale = x[inside].std(0) + 1e-6
        scaled = ((x - mean) / scale).astype(np.float32)
        fitted = fit(scaled[inside], harmless[inside], samples[inside])
        scores[outside] = expit(fitted(scaled[outside]))
    return scores


def resampled(
    scores: NDArray, harmless: NDArray, samples: NDArray
) -> NDArray[np.float64]:
    """Return the AUCs [RESAMPLES] on resampled problems: the same problems for the same `samples`,
    so that the AUCs of two scores can be subtracted."""
    rng = np.random.default_rng(0)
    kinds = [np.flatnonzero(samples == s) for s in np.unique(samples)]
    drawn = []
    for _ in range(RESAMPLES):
        rows = np.concatenate(
            [kinds[i] for i in rng.integers(0, len(kinds), len(kinds))]
        )
        drawn.append(roc_auc_score(harmless[rows], scores[rows]))
    return np.array(drawn)


def measured(scores: NDArray, harmless: NDArray, samples: NDArray) -> dict[str, Any]:
    drawn = resampled(scores, harmless, samples)
    accepted = next(
        row["accepted"]
        for row in thresholds(scores, ~harmless)
        if row["recall"] == 0.98
    )
    return {
        "auc": float(roc_auc_score(harmless, scores)),
        "auc_interval": np.quantile(drawn, [0.025, 0.975]).tolist(),
        "accepted": accepted,
        "mismatches": len(harmless),
        "important": int((~harmless).sum()),
    }


def tell(
    out: Path,
    name: str,
    rows: list[Record],
    columns: dict[str, str],
    figure: Figure,
    **more: Any,
) -> None:
    """Print a table of some of the rows' columns, each formatted as asked, and write the rows and
    the figure."""
    out.mkdir(parents=True, exist_ok=True)
    write_results(out / f"{name}.json", {"rows": rows, **more})
    figure.savefig(out / f"{name}.png", dpi=130)
    table = Table(title=f"AutoJudge: {name}")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        interval = row.get("auc_interval")
        cells = {
            key: "–" if row.get(key) is None else format(row[key], how)
            for key, how in columns.items()
        }
        if interval and "auc" in cells:
            cells["auc"] += f" ({interval[0]:.3f}–{interval[1]:.3f})"
        table.add_row(*cells.values())
    Console(width=140).print(table)


def bars(rows: list[Record], names: Sequence[str]) -> Figure:
    """Return AUC with its interval, and the share accepted."""
    figure = Figure(figsize=(9, 0.6 + 0.34 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    auc, low, high = np.array([[row["auc"], *row["auc_interval"]] for row in rows]).T
    left.errorbar(
        auc, range(len(rows)), xerr=[auc - low, high - auc], fmt="o", color="#059669"
    )
    right.barh(range(len(rows)), [row["accepted"] for row in rows], color="#059669")
    left.set_yticks(range(len(rows)), names)
    left.invert_yaxis()
    left.set_xlabel("AUC out of fold")
    right.set_xlabel("harmless accepted where 98 % of important are rejected")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25)
    return figure


COLUMNS = {"auc": ".3f", "accepted": ".1%", "mismatches": "d", "important": "d"}


# ---- the ablations


def inputs(out: Path, given: argparse.Namespace) -> None:
    source = mined(given.run)
    run = out / "run"
    rows = []
    source.first(run, given.samples)
    pair = source.pair(compile=False)
    aucs = dict[tuple[str, str], NDArray]()
    for token, tokens in TOKENS.items():
        for model, models in MODELS.items():
            x, important, samples = states(pair, run, Inputs(models, tokens))
            scores = out_of_fold(logistic_chosen, x, ~important, samples)
            aucs[token, model] = resampled(scores, ~important, samples)
            told = measured(scores, ~important, samples)
            rows.append({"token": token, "model": model, "width": x.shape[1], **told})
    figure = bars(rows, [f"{row['token']}, {row['model']}" for row in rows])
    columns = {"token": "", "model": "", "width": "d"} | COLUMNS
    paired = by_inputs(rows, aucs)
    tell(out, "inputs", rows, columns, figure, paired=paired)
    for row in paired:
        low, high = row["interval"]
        what = f"{row['first']} minus {row['second']}"
        print(f"{what}: AUC {row['difference']:+.4f} ({low:+.4f} to {high:+.4f})")


def logistic_chosen(
    x: NDArray, harmless: NDArray, samples: NDArray
) -> Callable[[NDArray], NDArray]:
    """Fit logistic regression. Its strength of regularization is the one whose fit to four fifths
    of these samples has the highest AUC on the last fifth."""
    inside, outside = next(GroupKFold(FOLDS).split(x, harmless, samples))

    def ranked(c: float) -> float:
        fitted = logistic(c)(x[inside], harmless[inside], samples[inside])
        return float(roc_auc_score(harmless[outside], fitted(x[outside])))

    return logistic(max(L2_GRID, key=ranked))(x, harmless, samples)


def by_inputs(
    rows: Sequence[Record], aucs: dict[tuple[str, str], NDArray]
) -> list[Record]:
    """Return differences of AUCs with their 95 % intervals over resampled problems: the state after
    the drafted token against others, and both models' states against one's."""
    whole = {(row["token"], row["model"]): row["auc"] for row in rows}
    asked = []
    for model in MODELS:
        for token in ("before", "target's"):
            asked.append((("drafted", model), (token, model)))
        asked.append((("drafted and before", model), ("before", model)))
    for token in TOKENS:
        for model in ("draft", "target"):
            asked.append(((token, "both"), (token, model)))
    found = []
    for first, second in asked:
        low, high = np.quantile(aucs[first] - aucs[second], [0.025, 0.975])
        found.append(
            {
                "first": ", ".join(first),
                "second": ", ".join(second),
                "difference": whole[first] - whole[second],
                "interval": [float(low), float(high)],
            }
        )
    return found


def classifier_kinds() -> dict[str, Fit]:
    """Return how each kind of classifier is fitted: the paper's, with scikit-learn's defaults for
    what it does not state, and ours."""

    def by_sklearn(model: Any) -> Fit:
        def fit(
            x: NDArray, harmless: NDArray, _: NDArray
        ) -> Callable[[NDArray], NDArray]:
            made = clone(model).fit(x, harmless)
            return lambda x: np.diff(np.log(made.predict_proba(x) + 1e-6))[:, 0]

        return fit

    def by_gradient(kind: HeadKind) -> Fit:
        setting = Hyperparameters(decay=0.01 if kind == "adamw" else 0.0)
        return lambda *examples: (
            fit_stopped(Examples(*examples), FitConfig(kind), setting).logits
        )

    def mlp(x: NDArray, harmless: NDArray, _: NDArray) -> Callable[[NDArray], NDArray]:
        labels = torch.from_numpy(harmless.astype(np.float32))
        return fit_mlp(
            torch.from_numpy(x), labels, torch.ones_like(labels), seed=0
        ).logits

    kinds: dict[str, Fit] = {f"logistic, C = {c:g}": logistic(c) for c in L2_GRID}
    kinds |= {
        "random forest, 128 trees (the paper's)": by_sklearn(
            RandomForestClassifier(128, n_jobs=-1, random_state=0)
        ),
        "random forest, 128 trees, 5 in a leaf": by_sklearn(
            RandomForestClassifier(128, min_samples_leaf=5, n_jobs=-1, random_state=0)
        ),
        "MLP, 128 ReLU units, stopped early (the paper's)": by_sklearn(
            MLPClassifier(
                (128,), activation="relu", early_stopping=True, random_state=0
            )
        ),
        "MLP of 128, GELU, one cycle": mlp,
        "linear by Adam": by_gradient("adam"),
        "linear by AdamW, weighted": by_gradient("adamw"),
    }
    return kinds


def classifiers(out: Path, given: argparse.Namespace) -> None:
    source = mined(given.run)
    run = out / "run"
    source.first(run, given.samples)
    pair = source.pair(compile=False)
    x, important, samples = states(pair, run, Inputs())
    kinds = classifier_kinds()
    rows = []
    for name, fit in track(kinds.items(), "classifiers"):
        began = time.perf_counter()
        scores = out_of_fold(fit, x, ~important, samples)
        rows.append(
            {
                "classifier": name,
                **measured(scores, ~important, samples),
                "seconds": time.perf_counter() - began,
            }
        )
    tell(
        out,
        "classifiers",
        rows,
        {"classifier": ""} | COLUMNS | {"seconds": ".0f"},
        bars(rows, list(kinds)),
    )


SEARCHES = ("semi-greedy", "naive", "reversed")
RECALLS = (0.8, 0.9, 0.95, 0.98, 0.995)
"""Of the thresholds at which the judges of a search decode."""


def search(out: Path, given: argparse.Namespace) -> None:
    """Train judges on the same problems, searched in three ways, and compare them."""
    source = mined(given.run)
    pair = source.pair()
    task = source.task
    records = source.first(out / "semi-greedy", given.samples)
    search_again(Search.of(source, pair, records), out, records)
    judged = [judge_of_search(pair, out, name) for name in SEARCHES]
    rules = tuple(rule for _, of_search in judged for rule in of_search)
    config = CompareConfig(
        rules=rules, windows=(8,), limit=given.problems, timed=1, repeats=1
    )
    with progress_bars() as show:
        frontier = compare(pair, task, config, out / "compare", show)
    columns = {
        "search": "",
        "samples": "d",
        "mismatches": "d",
        "important": "d",
        "important_per_sample": ".2f",
        "auc": ".3f",
        "target_passes": "d",
    }
    right = right_answers(out / "compare" / "compare.jsonl")
    points = [
        row.to_json()
        | {"rule": row.rule.replace(f"{out}/", ""), "right": right[row.rule, 8]}
        for row in frontier.rows
        if (row.rule, 8) in right
    ]
    paired = [test.to_json() for test in tests(points)]
    rows = [row for row, _ in judged]
    tell(
        out,
        "search",
        rows,
        columns,
        by_search(frontier.rows),
        frontier=points,
        paired=paired,
    )
    for point in points:
        keys = [
            key for key in ("accuracy", "paired_loss", "tokens_per_pass") if point[key]
        ]
        print(point["rule"], *(f"{key} {point[key]:.4g}" for key in keys))


def tests(points: Sequence[Record]) -> list[Paired]:
    """Compare the judges of algorithm 1 with those of the other searches."""
    right = {point["rule"]: point["right"] for point in points}
    own = [rule for rule in right if "semi-greedy/" in rule]
    others = [rule for rule in right if rule not in own]
    return [mcnemar(rule, other, right) for rule in own for other in others]


def search_again(using: Search, out: Path, records: Sequence[Record]) -> None:
    """Search mined samples in the two other ways, each into its own run folder. Resumes from the
    samples that are there."""
    for name, way in (("naive", naive), ("reversed", reversed_)):
        (out / name).mkdir(exist_ok=True)
        shutil.copy(out / "semi-greedy" / "run.json", out / name)
        journal = Journal(out / name / "journal.jsonl")
        done = {record["id"] for record in journal.resume()}
        for record in track([r for r in records if r["id"] not in done], name):
            journal.write(way(replace(using, cost={"target_passes": 0}), record))


def judge_of_search(pair: Pair, out: Path, name: str) -> tuple[Record, list[str]]:
    """Return a judge that learns from what a search found: its figures, and its rules."""
    folder = out / name / "judge"
    metrics = with_bars(
        fit_run, pair, out / name, HeadPlan(Inputs(), folder, FitConfig())
    ).metrics
    listed = {row["recall"]: row["threshold"] for row in metrics["thresholds"]}
    found = list(Journal(out / name / "journal.jsonl"))
    row = {
        "search": name,
        "auc": metrics["auc_out_of_fold"],
        "samples": len(found),
        "mismatches": metrics["mismatches"],
        "important": metrics["important"],
        "important_per_sample": metrics["important"] / len(found),
        "target_passes": sum(record["cost"]["target_passes"] for record in found),
    }
    return row, [f"judge:{folder}@{listed[recall]}" for recall in RECALLS]


def by_search(rows: Sequence[FrontierRow]) -> Figure:
    """Return the paired loss against the tokens per pass of judges, a line for each search."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, mark in (("semi-greedy", "o-"), ("naive", "s--"), ("reversed", "^:")):
        points = [row for row in rows if f"/{name}/" in row.rule]
        passes = [row.tokens_per_pass or 0.0 for row in points]
        axes.plot(passes, [row.paired_loss for row in points], mark, label=name)
    axes.set_title("judges by the search they learned from")
    axes.set_xlabel("tokens per pass")
    axes.set_ylabel(f"paired loss, {rows[0].n} problems")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    return figure


@dataclass(frozen=True)
class Search:
    """The pair, the task and the limits of a search."""

    pair: Pair
    task: Task
    samples: dict[str, Sample]
    """The task's samples by their ids."""
    max_new_tokens: int
    cost: dict[str, int] = field(default_factory=lambda: {"target_passes": 0})

    @classmethod
    def of(cls, source: Mined, pair: Pair, records: Sequence[Record]) -> Search:
        """Return a search of the samples of some of a run's records. Raises InputError if the task
        has a sample no longer."""
        wanted = {record["id"] for record in records}
        found = {
            sample.id: sample
            for sample in source.task.samples("train")
            if sample.id in wanted
        }
        if missing := sorted(wanted - set(found)):
            raise InputError(
                f"{source.run}: sample {missing[0]} is not among the task's; name the data it was "
                "mined on"
            )
        return cls(pair, source.task, found, read_run(source.run).max_new_tokens)

    def other(self, record: Record, response: list[int]) -> bool:
        """True if a response's answer is not the target's own."""
        sample = self.samples[record["id"]]
        _, text = until_stop(self.pair.target, response, self.task.stop_strings)
        answer = self.task.answer(text, sample)
        return not self.task.same(answer, record["answers"]["target"], sample)

    def ends(self, response: list[int]) -> bool:
        """True if a response ends with its last token."""
        target = self.pair.target
        if (response and response[-1] in target.eos_ids) or len(
            response
        ) >= self.max_new_tokens:
            return True
        return completes_stop(target, response, self.task.stop_strings)


def continued(
    using: Search, starts: list[list[int]], prompt: int, by: str
) -> list[list[int]]:
    """Return whole answers that begin as each of `starts` does after a prompt of `prompt` tokens,
    written greedily by the target or the draft up to an end token, a stop string or the length
    limit."""
    pair = using.pair
    wholes = [start[prompt:] for start in starts]
    going = [i for i, whole in enumerate(wholes) if not using.ends(whole)]
    if not going:
        return wholes
    rooms = [using.max_new_tokens - len(wholes[i]) for i in going]
    outs = pair.generate_batch(
        [starts[i] for i in going],
        batch_size=16,
        rule={"target": "exact", "draft": "draft"}[by],
        window=4,
        max_new_tokens=max(rooms),
        stop_strings=using.task.stop_strings,
    )
    for i, room, out in zip(going, rooms, outs):
        whole = [*wholes[i], *out.tokens[:room]]
        # a stop string may have begun before the tokens that were written now
        wholes[i], _ = until_stop(pair.target, whole, using.task.stop_strings)
        using.cost["target_passes"] += out.target_passes
    return wholes


def differing(
    pair: Pair, record: Record, response: list[int], by: str
) -> list[tuple[int, int]]:
    """Return where, and with which token, a model would have gone on otherwise."""
    lm = getattr(pair, by)
    reading = Session(lm).read([record["prompt_ids"] + response[:-1]], len(response))
    greedy = reading.greedy_tokens[0].tolist()
    return [
        (i, token)
        for i, (token, said) in enumerate(zip(greedy, response))
        if token != said
    ]


def record_of(
    record: Record, final: list[int], mismatches: list[Record], cost: dict[str, int]
) -> Record:
    return {
        **record,
        "final_ids": final,
        "mismatches": mismatches,
        "cost": {**cost, "target_tokens": 0, "draft_tokens": 0, "seconds": 0.0},
    }


def naive(
    using: Search,
    record: Record,
    keep: Callable[[list[list[int]]], None] | None = None,
) -> Record:
    """Try each mismatch of the target's own answer alone. No mismatch is labelled if the target's
    answer is not found. Trying them from right to left gives the same labels, as the target writes
    anew what follows a mismatch. `keep` receives the answers after the swaps."""
    own = record["response_ids"]
    prompt = record["prompt_ids"]
    answered = record["answers"]["target"] is not None
    asked = differing(using.pair, record, own, "draft")
    starts = [prompt + own[:i] + [token] for i, token in asked]
    wholes = continued(using, starts, len(prompt), "target") if answered else starts
    if keep is not None:
        keep(wholes)
    mismatches = [
        {
            "position": i,
            "target_token": own[i],
            "draft_token": token,
            "important": using.other(record, whole) if answered else None,
        }
        for (i, token), whole in zip(asked, wholes)
    ]
    return record_of(record, own, mismatches, using.cost)


def reversed_(using: Search, record: Record) -> Record:
    """Search from the draft's answer: the last mismatch from which the target still reaches its own
    answer is important, earlier ones are not; the draft continues behind it."""
    prompt = record["prompt_ids"]
    settled = 0
    mismatches = list[Record]()
    if record["answers"]["target"] is None:
        return record_of(record, record["response_ids"], [], using.cost)
    response = continued(using, [prompt], len(prompt), "draft")[0]
    while True:
        right = not using.other(record, response)
        differ = differing(using.pair, record, response, "target")
        asked = [(i, token) for i, token in differ if i >= settled]
        starts = [prompt + response[:i] + [token] for i, token in asked]
        wholes = continued(using, starts, len(prompt), "target")
        back = [n for n, whole in enumerate(wholes) if not using.other(record, whole)]
        last = len(asked) if right or not back else back[-1]
        mismatches += [
            {
                "position": i,
                "target_token": token,
                "draft_token": response[i],
                "important": False,
            }
            for i, token in asked[:last]
        ]
        if last == len(asked):
            return record_of(record, response, mismatches, using.cost)
        i, token = asked[last]
        mismatches.append(
            {
                "position": i,
                "target_token": token,
                "draft_token": response[i],
                "important": True,
            }
        )
        settled = i + 1
        start = prompt + response[:i] + [token]
        response = continued(using, [start], len(prompt), "draft")[0]


def precision(out: Path, given: argparse.Namespace) -> None:
    source = mined(given.run)
    found = dict[str, NDArray]()
    records = source.first(out / "run", given.samples)
    for dtype in ("float32", "bfloat16"):
        pair = source.pair(dtype=dtype, compile=False)
        for how, states_of in (
            ("parallel", read_whole),
            ("sequential", read_one_by_one),
        ):
            said = track(records, f"{dtype}, {how}")
            found[f"{dtype}, {how}"] = torch.cat(
                [states_of(pair, answer) for answer in said]
            ).numpy()
        whole, each = (found[f"{dtype}, {how}"] for how in ("parallel", "sequential"))
        found[f"{dtype}, as mined"] = by_model(pair, target=each, draft=whole)
        found[f"{dtype}, as decoded"] = by_model(pair, target=whole, draft=each)
    labels = [[m["important"] for m in labelled(record)] for record in records]
    harmless = np.array([not important for label in labels for important in label])
    samples = np.repeat(np.arange(len(records)), [len(label) for label in labels])
    rows = [
        row
        for name in found
        for row in asked_with_others(found, name, harmless, samples)
    ]
    figure = bars(rows, [f"{row['fitted_to']} → {row['asked_with']}" for row in rows])
    columns = {"fitted_to": "", "asked_with": "", **COLUMNS}
    columns |= {
        "other_verdicts": ".2%",
        "largest_difference": ".2g",
        "relative_difference": ".2g",
    }
    tell(out, "precision", rows, columns, figure)


def by_model(pair: Pair, target: NDArray, draft: NDArray) -> NDArray:
    """Return [m, F]: states of which each model's are taken from its own reading."""
    sizes = {"target": target, "draft": draft}
    mixed = []
    at = 0
    for _ in Inputs().tokens:
        for model in Inputs().models:
            width = getattr(pair, model).hidden_size
            mixed.append(sizes[model][:, at : at + width])
            at += width
    return np.concatenate(mixed, 1)


def asked_with_others(
    found: dict[str, NDArray], fitted: str, harmless: NDArray, samples: NDArray
) -> list[Record]:
    """Return judges that are fitted to one kind of states and asked with each kind."""
    x = found[fitted]
    mean = x.mean(0)
    scale = x.std(0) + 1e-6
    scores = {name: np.zeros(len(x)) for name in found}
    for inside, outside in GroupKFold(FOLDS).split(x, harmless, samples):
        model = logistic(0.01)(
            (x[inside] - mean) / scale, harmless[inside], samples[inside]
        )
        for name, other in found.items():
            scores[name][outside] = expit(model((other[outside] - mean) / scale))
    listed = {
        row["recall"]: row["threshold"] for row in thresholds(scores[fitted], ~harmless)
    }
    verdicts = {name: scores[name] >= listed[0.98] for name in found}
    return [
        {
            "fitted_to": fitted,
            "asked_with": name,
            **measured(scores[name], harmless, samples),
            "other_verdicts": float((verdicts[name] != verdicts[fitted]).mean()),
            "largest_difference": float(np.abs(found[name] - x).max()),
            "relative_difference": float(
                np.median(
                    np.linalg.norm(found[name] - x, axis=1) / np.linalg.norm(x, axis=1)
                )
            ),
        }
        for name in found
    ]


def labelled(record: Record) -> list[Record]:
    return [m for m in record["mismatches"] if m["important"] is not None]


States = dict[int, torch.Tensor]
"""By how many new tokens were read."""


def read_whole(pair: Pair, record: Record) -> torch.Tensor:
    """Return [m, F]: both models' states after the drafted token and the one before, of the
    labelled mismatches; the response is read in one pass."""
    after = {}
    drafted = {}
    for model in Inputs().models:
        session = Session(getattr(pair, model))
        whole = record["prompt_ids"] + record["final_ids"]
        read = session.read([whole], len(record["final_ids"]) + 1).hidden[0].float()
        after[model] = dict(enumerate(read))
        drafted[model] = read_drafted(session, record, labelled(record))
    return joined(pair, record, after, drafted)


def read_one_by_one(pair: Pair, record: Record) -> torch.Tensor:
    """Compute states as `read_whole` does, but token by token, as decoding does."""
    prompt = record["prompt_ids"]
    final = record["final_ids"]
    after = {}
    drafted = {}
    for model in Inputs().models:
        session = Session(getattr(pair, model), capacity=len(prompt) + len(final) + 1)
        after[model] = States()
        drafted[model] = States()
        for n in range(len(final) + 1):
            after[model][n] = session.read([prompt + final[:n]]).hidden[0, 0].float()
            here = [
                mismatch for mismatch in labelled(record) if mismatch["position"] == n
            ]
            drafted[model] |= read_drafted(session, record, here)
    return joined(pair, record, after, drafted)


def read_drafted(
    session: Session, record: Record, mismatches: Sequence[Record]
) -> States:
    """Return the states after the drafted tokens of mismatches, by their positions."""
    found = {}
    for mismatch in mismatches:
        before = record["prompt_ids"] + record["final_ids"][: mismatch["position"]]
        read = session.read([[*before, mismatch["draft_token"]]])
        found[mismatch["position"]] = read.hidden[0, 0].float()
    return found


def joined(
    pair: Pair, record: Record, after: dict[str, States], drafted: dict[str, States]
) -> torch.Tensor:
    """Return [m, F] from the states of each model."""
    models = Inputs().models
    places = [mismatch["position"] for mismatch in labelled(record)]
    rows = [
        torch.cat(
            [states[model][at] for states in (drafted, after) for model in models]
        )
        for at in places
    ]
    width = 2 * sum(getattr(pair, model).hidden_size for model in models)
    return torch.stack(rows) if rows else torch.empty(0, width)


def transfer(out: Path, given: argparse.Namespace) -> None:
    source = mined(EMBEDDED / "run")
    run = out / "run"
    records = source.first(run, given.samples)
    pair = source.pair(compile=False)
    x, important, samples = states(pair, run, Inputs())
    x = standardised(x)
    kinds = np.array([family(record["id"]) for record in records])[samples]
    learned_from, smallest = outside_of_folds(kinds, samples)
    asked_about = sorted(set(kinds))
    rows = []
    for learned, folds in learned_from.items():
        scores = np.zeros(len(x))
        for k, inside in enumerate(folds):
            # as many of each
            drawn = np.random.default_rng(k).permutation(inside)[:smallest]
            model = logistic(0.01)(x[drawn], ~important[drawn], samples[drawn])
            scores[samples % FOLDS == k] = expit(model(x[samples % FOLDS == k]))
        own = kinds == learned if learned in kinds else np.ones_like(important)
        threshold = threshold_at(scores[own], important[own], 0.98)
        for asked in asked_about:
            at = kinds == asked
            found = measured(scores[at], ~important[at], samples[at])
            found |= at_threshold(scores[at], important[at], threshold)
            rows.append({"learned_from": learned, "asked_about": asked, **found})
    tell_transfer(out, rows, smallest)


def tell_transfer(out: Path, rows: list[Record], smallest: int) -> None:
    learned_from, asked_about = (
        list(dict.fromkeys(row[key] for row in rows))
        for key in ("learned_from", "asked_about")
    )
    grid = np.array([row["auc"] for row in rows]).reshape(len(learned_from), -1)
    figure = as_grid(grid, asked_about, learned_from)
    figure.axes[0].set_ylabel(f"learned from ({smallest} mismatches)")
    columns = {"learned_from": "", "asked_about": "", **COLUMNS}
    columns |= {"own_recall": ".1%", "own_accepted": ".1%"}
    tell(out, "transfer", rows, columns, figure, fitted_to=smallest)


def at_threshold(
    scores: NDArray, important: NDArray, threshold: float
) -> dict[str, Any]:
    """Return what a judge does at a threshold that was not read here: the share of important
    mismatches that it rejects, with its interval, and of harmless ones that it accepts."""
    caught = int((scores[important] < threshold).sum())
    interval = binomtest(caught, int(important.sum())).proportion_ci()
    return {
        "own_recall": caught / int(important.sum()),
        "own_recall_interval": [interval.low, interval.high],
        "own_accepted": float((scores[~important] >= threshold).mean()),
    }


def outside_of_folds(
    kinds: NDArray, samples: NDArray
) -> tuple[dict[str, list[NDArray]], int]:
    """Return the mismatches outside of each fold, by kind of problem and for all kinds, and the
    number of mismatches of the rarest kind."""
    found = {
        kind: [
            np.flatnonzero((kinds == kind) & (samples % FOLDS != k))
            for k in range(FOLDS)
        ]
        for kind in sorted(set(kinds))
    }
    smallest = min(len(inside) for folds in found.values() for inside in folds)
    found[EVERY_KIND] = [np.flatnonzero(samples % FOLDS != k) for k in range(FOLDS)]
    return found, smallest


EVERY_KIND = "all kinds"


def as_grid(grid: NDArray, asked: Sequence[str], learned: Sequence[str]) -> Figure:
    """Return AUCs [learned, asked] as colours and figures."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(grid, cmap="viridis", vmin=0.5, vmax=1)
    for (row, column), value in np.ndenumerate(grid):
        color = "white" if value < 0.85 else "black"
        text = f"{value:.2f}"
        axes.text(column, row, text, color=color, ha="center", va="center")
    axes.set_xticks(range(len(asked)), asked)
    axes.set_yticks(range(len(learned)), learned)
    axes.set(xlabel="asked about", title="AUC by kind of problem")
    return figure


ABLATIONS = {
    part.__name__: part for part in (inputs, classifiers, search, precision, transfer)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ablation", choices=ABLATIONS)
    add_run(parser)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--samples",
        type=int,
        default=1000,
        help="how many mined samples are learned from",
    )
    parser.add_argument(
        "--problems",
        type=int,
        default=500,
        help="how many held-out problems judges decode (search)",
    )
    given = parser.parse_args()
    ABLATIONS[given.ablation](given.out, given)


if __name__ == "__main__":
    main()
