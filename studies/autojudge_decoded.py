"""AutoJudge's claims that need decoding (Garipov 2025), on any run's pair and task.

    python studies/autojudge_decoded.py windows|precision|transfer|roc OUT [--run RUN]
        [--samples N] [--problems N]

OUT/decoded_NAME.json is written and printed. Judges learn from the first samples of the run, and
decode test problems; decoders on the same problems are compared by the exact McNemar test.

- windows: strict decoding and judges at windows up to 64: tokens per pass, tokens per second and
  paired loss (the paper's largest window is 64);
- precision: accuracy against accepted tokens where the judge's states in training, and the models
  in decoding, are float32 or bfloat16 (the paper's figure 6);
- transfer: a judge of one kind of word problem on each kind, and a judge of all kinds but one on
  the kind that it has not seen (the paper's figure 7); the built-in task only;
- roc: the AUC of a logistic judge and of an MLP on its training samples and out of fold, and points
  of the ROC curves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from autojudge import (
    EVERY_KIND,
    Record,
    classifier_kinds,
    out_of_fold,
    standardised,
    states,
)
from mined import add_run, family, mined
from paired import as_text, mcnemar, right_answers
from rich.progress import track
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from lenience.cli.console import progress_bars, with_bars
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Inputs
from lenience.tasks import Sample, Task
from lenience.training.fit import HeadPlan, fit_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

WINDOWS = (4, 8, 16, 32, 64)
RECALLS = (0.8, 0.9, 0.95, 0.98, 0.995)
WINDOW = 8
STRICT_END = 0.98
"""Recall of the threshold at which judges of other kinds decode."""
KEPT = (
    "rule", "window", "n", "accuracy", "accuracy_interval", "paired_loss", "paired_loss_interval",
    "accepted_per_pass", "tokens_per_pass", "tokens_per_pass_interval", "tokens_per_second",
    "tokens_per_second_interval", "timed_n",
)  # fmt: skip


def fitted(pair: Pair, run: Path, folder: Path) -> dict[float, str]:
    """Train a judge on a run; return its rules by recall."""
    metrics = with_bars(
        fit_run, pair, run, HeadPlan(Inputs(), folder, FitConfig())
    ).metrics
    listed = {row["recall"]: row["threshold"] for row in metrics["thresholds"]}
    return {recall: f"judge:{folder}@{listed[recall]}" for recall in RECALLS}


def compared(
    pair: Pair, task: Task, config: CompareConfig, folder: Path
) -> tuple[list[Record], dict[tuple[str, int], str]]:
    """Compare decoders; return their rows, and the problems that each answers correctly."""
    with progress_bars() as show:
        rows = compare(pair, task, config, folder, show).rows
    right = right_answers(folder / "compare.jsonl")
    kept = [
        {key: value for key, value in row.to_json().items() if key in KEPT}
        for row in rows
    ]
    return kept, right


def windows(out: Path, given: argparse.Namespace) -> Record:
    source = mined(given.run)
    pair = source.pair()
    source.first(out / "run", given.samples)
    rules = fitted(pair, out / "run", out / "run" / "judge")
    wanted = ["exact", rules[0.9], rules[0.98]]
    config = CompareConfig(
        settings=tuple(f"{rule}; window={w}" for rule in wanted for w in WINDOWS),
        windows=(WINDOWS[0],),
        limit=given.problems,
        timed=given.timed,
    )
    rows, right = compared(pair, source.task, config, out / "windows")
    tests = []
    for rule in wanted[1:]:
        by_window = {f"{rule}; window={w}": right[rule, w] for w in WINDOWS}
        *narrower, widest = by_window
        tests += [mcnemar(name, widest, by_window).to_json() for name in narrower]
    recalls = {rules[recall]: recall for recall in (0.9, 0.98)}
    return {"recalls": recalls, "rows": rows, "paired": tests}


def precision(out: Path, given: argparse.Namespace) -> Record:
    source = mined(given.run)
    found: Record = {"rows": [], "paired": []}
    answers: dict[str, str] = {}
    for learned, decodes in (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
    ):
        name = f"{learned} → {decodes}"
        run = out / f"run-{learned}"
        source.first(run, given.samples)
        with_dtype(run, learned)
        judge = run / "judge"
        rules = fitted(source.pair(dtype=learned, compile=False), run, judge)
        config = CompareConfig(
            rules=("exact", *rules.values()),
            windows=(WINDOW,),
            limit=given.problems,
            timed=1,
            repeats=1,
        )
        pair = source.pair(dtype=decodes, compile=False)
        rows, right = compared(pair, source.task, config, out / f"{learned}-{decodes}")
        recalls = {rule: recall for recall, rule in rules.items()}
        for row in rows:
            if row["rule"] in recalls:
                recall = recalls[row["rule"]]
                answers[f"{name}, recall {recall}"] = right[row["rule"], WINDOW]
                found["rows"].append({"states": name, "recall": recall, **row})
    for recall in RECALLS:
        base = f"float32 → float32, recall {recall}"
        for name in ("bfloat16 → bfloat16", "float32 → bfloat16"):
            test = mcnemar(base, f"{name}, recall {recall}", answers)
            found["paired"].append(test.to_json())
    return found


def with_dtype(run: Path, dtype: str) -> None:
    """Let a run folder say that its models had another precision."""
    path = run / "run.json"
    about = json.loads(path.read_text())
    for model in about["models"].values():
        model["dtype"] = dtype
    path.write_text(json.dumps(about))


def transfer(out: Path, given: argparse.Namespace) -> Record:
    source = mined(given.run)
    pair = source.pair()
    records = source.first(out / "run", given.samples)
    kinds = sorted({family(record["id"]) for record in records})
    most = min(
        sum(len(r["mismatches"]) for r in records if family(r["id"]) == kind)
        for kind in kinds
    )
    learned_from = {kind: [kind] for kind in kinds} | {EVERY_KIND: kinds}
    learned_from |= {
        f"all but {kind}": [other for other in kinds if other != kind] for kind in kinds
    }
    rules = {}
    for name, members in learned_from.items():
        folder = out / name.replace(" ", "-")
        write_part(folder, out / "run", records, members, most)
        rules[name] = fitted(pair, folder, folder / "judge")[STRICT_END]
    samples = by_kind(source.task, kinds, given.problems)
    rows = []
    for kind in kinds:
        names = [kind, *(k for k in kinds if k != kind), EVERY_KIND, f"all but {kind}"]
        asked = {name: rules[name] for name in names}
        rows += asked_about(kind, answering(pair, source.task, samples[kind]), asked)
    return {"mismatches": most, "recall": STRICT_END, "rows": rows}


def by_kind(task: Task, kinds: Sequence[str], count: int) -> dict[str, list[Sample]]:
    """Return the first `count` test samples of each kind."""
    found: dict[str, list[Sample]] = {kind: [] for kind in kinds}
    for sample in task.samples("test"):
        own = found[family(sample.id)]
        if len(own) < count:
            own.append(sample)
        if all(len(part) == count for part in found.values()):
            break
    return found


def asked_about(
    kind: str,
    answer: Callable[[str], tuple[list[bool], float]],
    rules: dict[str, str],
) -> list[Record]:
    """Return a row per judge that decodes problems of one kind; the first is that of the kind."""
    target, _ = answer("target")
    _, strict_tokens = answer("exact")
    rows: list[Record] = []
    own: list[bool] = []
    for name, rule in track(rules.items(), kind):
        right, tokens = answer(rule)
        own = own or right
        lost = sum(a > b for a, b in zip(target, right))
        interval = binomtest(lost, len(target)).proportion_ci()
        test = mcnemar("own", "this", {"own": as_text(own), "this": as_text(right)})
        rows.append(
            {
                "learned_from": name,
                "asked_about": kind,
                "n": len(target),
                "lost": lost / len(target),
                "lost_interval": [interval.low, interval.high],
                "tokens_per_pass": tokens,
                "strict_tokens_per_pass": strict_tokens,
                "against_its_own": test.to_json(),
            }
        )
    return rows


def write_part(
    folder: Path, run: Path, records: Sequence[Record], kinds: Sequence[str], most: int
) -> None:
    """Write a run folder of samples of some kinds, in turns, with up to `most` mismatches."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text((run / "run.json").read_text())
    chosen = []
    count = 0
    for record in (record for record in records if family(record["id"]) in kinds):
        count += len(record["mismatches"])
        if count > most:
            break
        chosen.append(json.dumps(record) + "\n")
    (folder / "journal.jsonl").write_text("".join(chosen))


def answering(
    pair: Pair, task: Task, samples: Sequence[Sample]
) -> Callable[[str], tuple[list[bool], float]]:
    """Return a function from a rule to which problems it answers correctly, and its tokens per
    pass."""

    def answer(rule: str) -> tuple[list[bool], float]:
        outs = pair.generate_batch(
            [sample.prompt for sample in samples],
            rule=rule,
            window=WINDOW,
            batch_size=32,
            max_new_tokens=task.max_new_tokens,
            stop_strings=task.stop_strings,
        )
        right = [task.correct(out.text, sample) for out, sample in zip(outs, samples)]
        tokens = sum(len(out.tokens) for out in outs)
        return right, tokens / sum(out.target_passes for out in outs)

    return answer


def roc(out: Path, given: argparse.Namespace) -> Record:
    source = mined(given.run)
    source.first(out / "run", given.samples)
    pair = source.pair(compile=False)
    x, important, samples = states(pair, out / "run", Inputs())
    harmless = ~important
    wanted = ("logistic, C = 0.01", "MLP of 128, GELU, one cycle")
    rows = []
    for name, fit in classifier_kinds().items():
        if name not in wanted:
            continue
        scaled = standardised(x)
        seen = fit(scaled, harmless, samples)(scaled)
        unseen = out_of_fold(fit, x, harmless, samples)
        for part, scores in (("training", seen), ("out of fold", unseen)):
            false, true, _ = roc_curve(harmless, scores)
            at = np.searchsorted(false, np.linspace(0, 1, 21)).clip(max=len(true) - 1)
            rows.append(
                {
                    "classifier": name,
                    "part": part,
                    "auc": float(roc_auc_score(harmless, scores)),
                    "important_accepted": false[at].round(4).tolist(),
                    "harmless_accepted": true[at].round(4).tolist(),
                }
            )
    return {"mismatches": len(x), "important": int(important.sum()), "rows": rows}


STUDIES: dict[str, Callable[[Path, argparse.Namespace], Record]] = {
    study.__name__: study for study in (windows, precision, transfer, roc)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    add_run(parser)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--timed", type=int, default=20)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = STUDIES[given.study](given.out, given)
    write_results(given.out / f"decoded_{given.study}.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
