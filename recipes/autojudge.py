"""AutoJudge's ablations (Garipov 2025) on the built-in pair, each with its table and plot.

    python recipes/autojudge.py inputs|classifiers|search|precision|transfer OUT [--samples N]
    [--problems N]

OUT/NAME.json and OUT/NAME.png are written, the table is printed. A judge is measured on folds by
sample that it was not fitted to: the AUC, with a 95 % interval from resampled problems, and
`accepted`, the share of harmless mismatches that it accepts at the threshold that rejects 98 % of
the important ones.

- inputs: after which token the states are read (the one before, the drafted, the target's own,
  both) and whose they are;
- classifiers: logistic regression over the L2 grid, a random forest of 128 trees, an MLP of 128
  units, and linear heads by gradient steps;
- search: which mismatches count as important when each is tried alone in the target's own answer
  (naive), from the draft's answer back to the target's (reversed), and one after the other
  (semi-greedy, algorithm 1); and what judges that learn from each keep of the accuracy;
- precision: states in float32 and in bfloat16, computed token by token as decoding does, or in one
  parallel pass;
- transfer: a judge that has seen one kind of problem, on each kind.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import expit
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold

from lenience import load_pair
from lenience.cli.console import progress_bars
from lenience.cli.steps import fit_run
from lenience.decoding.loading import EMBEDDED
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.table import FrontierRow
from lenience.heads.fitting import (
    L2_GRID,
    Examples,
    FitConfig,
    Kind,
    fit_mlp,
    fit_stopped,
    thresholds,
)
from lenience.heads.head import Inputs
from lenience.mining.features import compute_features, load_features
from lenience.mining.fit import HeadPlan
from lenience.models.session import Session
from lenience.runs.journal import Journal
from lenience.tasks import WordMath, wordmath_problems

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


# ---- what all ablations share


def shipped(folder: Path, samples: int) -> list[Record]:
    """A run folder of the first mined samples that are shipped, and their records."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(EMBEDDED / "run" / "run.json", folder)
    lines = (EMBEDDED / "run" / "journal.jsonl").read_text().splitlines(keepends=True)[:samples]
    (folder / "journal.jsonl").write_text("".join(lines))
    return [json.loads(line) for line in lines]


def states(pair: Pair, run: Path, inputs: Inputs) -> tuple[NDArray, NDArray, NDArray]:
    """The states of a run's mismatches, which of them are important, and their samples."""
    compute_features(pair, run, inputs)
    examples = load_features(run, inputs)
    return examples.x, ~examples.harmless, examples.samples


def logistic(c: float) -> Fit:
    return lambda x, harmless, samples: (
        LogisticRegression(max_iter=1000, C=c).fit(x, harmless).decision_function
    )


def out_of_fold(fit: Fit, x: NDArray, harmless: NDArray, samples: NDArray) -> NDArray:
    x, scores = ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32), np.zeros(len(x))
    for inside, outside in GroupKFold(FOLDS).split(x, harmless, samples):
        scores[outside] = expit(fit(x[inside], harmless[inside], samples[inside])(x[outside]))
    return scores


def measured(scores: NDArray, harmless: NDArray, samples: NDArray) -> dict[str, Any]:
    rng, kinds = (
        np.random.default_rng(0),
        [np.flatnonzero(samples == s) for s in np.unique(samples)],
    )
    drawn = []
    for _ in range(200):
        rows = np.concatenate([kinds[i] for i in rng.integers(0, len(kinds), len(kinds))])
        drawn.append(roc_auc_score(harmless[rows], scores[rows]))
    accepted = next(
        row["accepted"] for row in thresholds(scores, ~harmless) if row["recall"] == 0.98
    )
    return {
        "auc": float(roc_auc_score(harmless, scores)),
        "auc_interval": np.quantile(drawn, [0.025, 0.975]).tolist(),
        "accepted": accepted,
        "mismatches": len(harmless),
        "important": int((~harmless).sum()),
    }


def tell(
    out: Path, name: str, rows: list[Record], columns: dict[str, str], figure: Figure, **more: Any
) -> None:
    """Print a table of some of the rows' columns, each formatted as asked, and write the rows and
    the figure."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({"rows": rows, **more}, indent=1))
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
    """AUC with its interval, and the share accepted."""
    figure = Figure(figsize=(9, 0.6 + 0.34 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    auc, low, high = np.array([[row["auc"], *row["auc_interval"]] for row in rows]).T
    left.errorbar(auc, range(len(rows)), xerr=[auc - low, high - auc], fmt="o", color="#059669")
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
    pair, run, rows = load_pair(compile=False), out / "run", []
    shipped(run, given.samples)
    for token, tokens in TOKENS.items():
        for model, models in MODELS.items():
            x, important, samples = states(pair, run, Inputs(models, tokens))
            best = max(
                (
                    measured(out_of_fold(logistic(c), x, ~important, samples), ~important, samples)
                    | {"c": c}
                    for c in (0.001, 0.01, 0.1)
                ),
                key=lambda row: row["auc"],
            )
            rows.append({"token": token, "model": model, "width": x.shape[1], **best})
    figure = bars(rows, [f"{row['token']}, {row['model']}" for row in rows])
    tell(out, "inputs", rows, {"token": "", "model": "", "width": "d", "c": "g"} | COLUMNS, figure)


def classifiers(out: Path, given: argparse.Namespace) -> None:
    pair, run, rows = load_pair(compile=False), out / "run", []
    shipped(run, given.samples)
    x, important, samples = states(pair, run, Inputs())

    def forest(x: NDArray, harmless: NDArray, _: NDArray) -> Callable[[NDArray], NDArray]:
        made = RandomForestClassifier(128, min_samples_leaf=5, n_jobs=-1, random_state=0).fit(
            x, harmless
        )
        return lambda x: (
            np.log(made.predict_proba(x)[:, 1] + 1e-6) - np.log(made.predict_proba(x)[:, 0] + 1e-6)
        )

    def by_gradient(kind: Kind) -> Fit:
        return lambda *examples: fit_stopped(Examples(*examples), FitConfig(kind)).logits

    def mlp(x: NDArray, harmless: NDArray, _: NDArray) -> Callable[[NDArray], NDArray]:
        return fit_mlp(torch.from_numpy(x), torch.from_numpy(harmless.astype(np.float32)), 0).logits

    kinds: dict[str, Fit] = {f"logistic, C = {c:g}": logistic(c) for c in L2_GRID}
    kinds |= {
        "random forest of 128": forest,
        "MLP of 128": mlp,
        "linear by Adam": by_gradient("adam"),
        "linear by AdamW, weighted": by_gradient("adamw"),
    }
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


def search(out: Path, given: argparse.Namespace) -> None:
    """Judges learn from the same problems, searched in three ways."""
    pair, task, rows = load_pair(), WordMath(), []
    records = shipped(out / "semi-greedy", given.samples)
    for name, way in (("naive", naive), ("reversed", reversed_)):
        (out / name).mkdir(exist_ok=True)
        shutil.copy(EMBEDDED / "run" / "run.json", out / name)
        journal = Journal(out / name / "journal.jsonl")
        done = {record["id"] for record in journal.resume()} if journal.path.exists() else set()
        for record in track([r for r in records if r["id"] not in done], name):
            journal.append(way(pair, task, record))
    rules = []
    for name in ("semi-greedy", "naive", "reversed"):
        head = fit_run(pair, out / name, HeadPlan(Inputs(), out / name / "judge", FitConfig()))
        listed = {row["recall"]: row["threshold"] for row in head.metrics["thresholds"]}
        rules += [
            f"judge:{out / name / 'judge'}@{listed[recall]}"
            for recall in (0.8, 0.9, 0.95, 0.98, 0.995)
        ]
        found = [r for r in Journal(out / name / "journal.jsonl")]
        rows.append(
            {
                "search": name,
                "auc": head.metrics["auc_out_of_fold"],
                "samples": len(found),
                "mismatches": head.metrics["mismatches"],
                "important": head.metrics["important"],
                "important_per_sample": head.metrics["important"] / len(found),
                "target_passes": sum(r["cost"]["target_passes"] for r in found),
            }
        )
    config = CompareConfig(
        rules=tuple(rules), windows=(8,), limit=given.problems, timed=1, repeats=1
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
    points = [row.to_json() for row in frontier.rows]
    tell(out, "search", rows, columns, by_search(frontier.rows), frontier=points)
    for point in points:
        keys = [key for key in ("accuracy", "paired_loss", "tokens_per_pass") if point[key]]
        print(point["rule"], *(f"{key} {point[key]:.4g}" for key in keys))


def by_search(rows: Sequence[FrontierRow]) -> Figure:
    """The paired loss against the tokens per pass of judges, a line for each search."""
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


def continued(
    pair: Pair, starts: list[list[int]], prompt: int, by: str, cost: dict[str, int]
) -> list[list[int]]:
    """Answers that begin as each of `starts` does, after a prompt of so many tokens, greedily by
    one of the models."""
    limit, eos = WordMath().max_new_tokens, pair.target.eos_ids
    going = [
        i for i, start in enumerate(starts) if start[-1] not in eos and len(start) - prompt < limit
    ]
    rooms = [limit - (len(starts[i]) - prompt) for i in going]
    rule = {"target": "exact", "draft": "draft"}[by]
    wholes = [start[prompt:] for start in starts]
    if going:
        outs = pair.generate_batch(
            [starts[i] for i in going],
            batch_size=16,
            rule=rule,
            window=4,
            max_new_tokens=max(rooms),
        )
        for i, room, out in zip(going, rooms, outs):
            wholes[i] = [*wholes[i], *out.tokens[:room]]
            cost["target_passes"] += out.target_passes
    return wholes


def differing(pair: Pair, record: Record, response: list[int], by: str) -> list[tuple[int, int]]:
    """Where, and with which token, a model would have gone on otherwise."""
    lm = getattr(pair, by)
    reading = Session(lm).read([record["prompt_ids"] + response[:-1]], len(response))
    greedy = reading.greedy_tokens[0].tolist()
    return [(i, token) for i, (token, said) in enumerate(zip(greedy, response)) if token != said]


def record_of(
    record: Record, final: list[int], mismatches: list[Record], cost: dict[str, int]
) -> Record:
    return {
        **record,
        "final_ids": final,
        "mismatches": mismatches,
        "cost": {**cost, "target_tokens": 0, "draft_tokens": 0, "seconds": 0.0},
    }


def naive(pair: Pair, task: WordMath, record: Record) -> Record:
    """Each mismatch of the target's own answer, alone. Trying them from right to left gives the
    same labels: what was swapped to the right of a mismatch is written anew when the target goes on
    from it."""
    own, prompt, cost = record["response_ids"], record["prompt_ids"], {"target_passes": 0}
    asked = differing(pair, record, own, "draft")
    wholes = continued(
        pair, [prompt + own[:i] + [token] for i, token in asked], len(prompt), "target", cost
    )
    mismatches = [
        {
            "position": i,
            "target_token": own[i],
            "draft_token": token,
            "important": _other(pair, task, record, whole),
        }
        for (i, token), whole in zip(asked, wholes)
    ]
    return record_of(record, own, mismatches, cost)


def reversed_(pair: Pair, task: WordMath, record: Record) -> Record:
    """From the draft's answer: the last mismatch from which the target still comes to its own
    answer is important, those before it are not; the draft goes on after the target's token, until
    its answer is the target's."""
    prompt, cost, settled = record["prompt_ids"], {"target_passes": 0}, 0
    response, mismatches = continued(pair, [prompt], len(prompt), "draft", cost)[0], list[Record]()
    while True:
        right = not _other(pair, task, record, response)
        asked = [
            (i, token) for i, token in differing(pair, record, response, "target") if i >= settled
        ]
        wholes = continued(
            pair,
            [prompt + response[:i] + [token] for i, token in asked],
            len(prompt),
            "target",
            cost,
        )
        back = [n for n, whole in enumerate(wholes) if not _other(pair, task, record, whole)]
        last = len(asked) if right or not back else back[-1]
        mismatches += [
            {"position": i, "target_token": token, "draft_token": response[i], "important": False}
            for i, token in asked[:last]
        ]
        if last == len(asked):
            return record_of(record, response, mismatches, cost)
        i, token = asked[last]
        mismatches.append(
            {"position": i, "target_token": token, "draft_token": response[i], "important": True}
        )
        settled = i + 1
        response = continued(pair, [prompt + response[:i] + [token]], len(prompt), "draft", cost)[0]


def _other(pair: Pair, task: WordMath, record: Record, response: list[int]) -> bool:
    return not task.same(task.answer(pair.target.decode(response)), record["answers"]["target"])


def precision(out: Path, given: argparse.Namespace) -> None:
    records, found = shipped(out / "run", given.samples), {}
    for dtype in ("float32", "bfloat16"):
        pair = load_pair(dtype=dtype, compile=False)
        for how in ("parallel", "sequential"):
            x = [
                one_by_one(pair, record, how == "sequential")
                for record in track(records, f"{dtype}, {how}")
            ]
            found[f"{dtype}, {how}"] = torch.cat(x).numpy()
    labelled = [
        [m for m in record["mismatches"] if m["important"] is not None] for record in records
    ]
    harmless = np.array([not m["important"] for one in labelled for m in one])
    samples = np.repeat(np.arange(len(records)), [len(one) for one in labelled])
    rows = []
    for fitted, x in found.items():
        mean, scale, scores = x.mean(0), x.std(0) + 1e-6, {name: np.zeros(len(x)) for name in found}
        for inside, outside in GroupKFold(FOLDS).split(x, harmless, samples):
            model = logistic(0.01)((x[inside] - mean) / scale, harmless[inside], samples[inside])
            for name, other in found.items():
                scores[name][outside] = expit(model((other[outside] - mean) / scale))
        at = next(
            row["threshold"]
            for row in thresholds(scores[fitted], ~harmless)
            if row["recall"] == 0.98
        )
        for name in found:
            rows.append(
                {
                    "fitted_to": fitted,
                    "asked_with": name,
                    **measured(scores[name], harmless, samples),
                    "other_verdicts": float(
                        ((scores[name] >= at) != (scores[fitted] >= at)).mean()
                    ),
                    "largest_difference": float(np.abs(found[name] - x).max()),
                }
            )
    figure = bars(rows, [f"{row['fitted_to']} → {row['asked_with']}" for row in rows])
    columns = (
        {"fitted_to": "", "asked_with": ""}
        | COLUMNS
        | {"other_verdicts": ".2%", "largest_difference": ".2g"}
    )
    tell(out, "precision", rows, columns, figure)


def one_by_one(pair: Pair, record: Record, sequential: bool) -> torch.Tensor:
    """[m, F]: both models' states after the drafted token and the one before, of the labelled
    mismatches; the response is read whole, or token by token."""
    whole, start, parts = record["prompt_ids"] + record["final_ids"], len(record["prompt_ids"]), {}
    asked = [m for m in record["mismatches"] if m["important"] is not None]
    for model in Inputs().models:
        session = Session(getattr(pair, model), capacity=len(whole) + 1)
        after: dict[int, torch.Tensor] = {}  # by how many new tokens were read
        off: dict[int, torch.Tensor] = {}
        ends = range(start, len(whole) + 1) if sequential else [len(whole)]
        for end in ends:
            states = (
                session.read([whole[:end]], 1 if sequential else len(whole) - start + 1)
                .hidden[0]
                .float()
            )
            after |= {end - start - len(states) + 1 + i: row for i, row in enumerate(states)}
            for m in (
                asked if not sequential else [m for m in asked if start + m["position"] == end]
            ):
                ids = [*whole[: start + m["position"]], m["draft_token"]]
                off[m["position"]] = session.read([ids]).hidden[0, 0].float()
        parts[model] = [[off[m["position"]], after[m["position"]]] for m in asked]
    rows = [
        torch.cat([parts[model][n][k] for k in (0, 1) for model in Inputs().models])
        for n in range(len(asked))
    ]
    return (
        torch.stack(rows)
        if rows
        else torch.empty(0, sum(getattr(pair, m).hidden_size for m in Inputs().models) * 2)
    )


def transfer(out: Path, given: argparse.Namespace) -> None:
    pair, run, rows = load_pair(compile=False), out / "run", []
    records = shipped(run, given.samples)
    x, important, samples = states(pair, run, Inputs())
    x = ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)
    kinds = np.array([family(record["id"]) for record in records])[samples]
    names, fold = sorted(set(kinds)), samples % FOLDS
    smallest = min(
        int(((kinds == kind) & (fold != k)).sum()) for kind in names for k in range(FOLDS)
    )
    grid = np.zeros((len(names) + 1, len(names)))
    for row, learned in enumerate([*names, "all kinds"]):
        scores = np.zeros(len(x))
        for k in range(FOLDS):
            inside = np.flatnonzero((fold != k) & ((kinds == learned) | (learned == "all kinds")))
            inside = np.random.default_rng(k).permutation(inside)[
                :smallest
            ]  # equally many from each
            scores[fold == k] = expit(
                logistic(0.01)(x[inside], ~important[inside], samples[inside])(x[fold == k])
            )
        for column, asked in enumerate(names):
            at = kinds == asked
            found = measured(scores[at], ~important[at], samples[at])
            rows.append({"learned_from": learned, "asked_about": asked, **found})
            grid[row, column] = found["auc"]
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(grid, cmap="viridis", vmin=0.5, vmax=1)
    for (row, column), value in np.ndenumerate(grid):
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            color="white" if value < 0.85 else "black",
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names) + 1), [*names, "all kinds"])
    axes.set(
        xlabel="asked about",
        ylabel=f"learned from ({smallest} mismatches)",
        title="AUC by kind of problem",
    )
    tell(
        out,
        "transfer",
        rows,
        {"learned_from": "", "asked_about": ""} | COLUMNS,
        figure,
        fitted_to=smallest,
    )


def family(sample: str) -> str:
    """The kind of problem that a sample is, as wordmath.problem draws it."""
    split, number = sample.split("-")
    return (
        random.Random(f"wordmath/{split}/{number}")
        .choice(wordmath_problems.FAMILIES)
        .__name__.strip("_")
    )


ABLATIONS = {one.__name__: one for one in (inputs, classifiers, search, precision, transfer)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ablation", choices=ABLATIONS)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--samples", type=int, default=1000, help="how many mined samples are learned from"
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
