"""Judge Decoding (Bachmann 2025) on the built-in pair: annotated answers, the judge, and the
paper's probes.

    python studies/judge_decoding.py OUT [--rows 500] [--probes 200] [--problems 300]
        [--run RUN --annotated FILE]

OUT/errors.jsonl: right solutions, and solutions with one slip at a known place, by either author,
of training problems that were not mined. OUT/judge: what `lenience fit --from annotated
OUT/errors.jsonl` fits. OUT/probes.json, printed too:

- `others`: how many tokens of a reference solution are accepted before the first that is not, and
  what share of all, by strict verification and by the judge, and what share of the target's own
  tokens the judge alone would reject; solutions are by the author that the target learned from and
  by the draft's;
- `first_objection`: of solutions with a slip, how often the judge's first objection comes at it,
  before it and after it or never;
- `families`: the AUC on one kind of problem of a judge that was fitted without it, and with it (out
  of fold), with 95 % intervals over rows;
- `decoded`: judges at the paper's threshold of 0.5 and at those of some recalls, on problems of the
  test split: this one; the same head, of the same state and settings, fitted to equally many mined
  samples, whose texts, positions and share of important tokens differ too; and AutoJudge's own.
  `right` has a 1 per problem that was answered correctly;
- `paired`: the exact McNemar test of the judge, and of AutoJudge's, against every other decoder.

With answers annotated for the pair and the task of a run of yours, only the judge and `decoded` are
made: the probes are about authors and slips of the built-in task.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined import Mined, add_run, mined
from numpy.typing import NDArray
from paired import Paired, mcnemar, right_answers
from rich.progress import track
from sklearn.metrics import roc_auc_score

from lenience.cli.console import progress_bars, with_bars
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.heads.fitting import Examples, FitConfig, Hyperparameters, fit_stopped
from lenience.heads.head import Head, Inputs, load_head
from lenience.heads.scores import auc_interval
from lenience.models.lm import States
from lenience.models.session import Session
from lenience.tasks import wordmath, wordmath_problems
from lenience.training.annotated import (
    Annotated,
    annotated_examples,
    marked_answers,
    read_annotated,
)
from lenience.training.fit import HeadPlan, fit_annotated, fit_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

DECODED_RECALLS = (0.9, 0.98, 0.995)
FIRST = 5000
"""The number of the first training problem that is used: those before are for mining."""
INPUTS = Inputs(("target",), ("draft",), (-1,))
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def slip(text: str, rng: random.Random) -> tuple[str, tuple[int, int]]:
    """Return the text with one number of one equation off by a little, and where that stands: its
    result, or an operand, in which case the result follows from it. The text holds an equation."""
    found = rng.choice(list(EQUATION.finditer(text)))
    x, y, result = (int(found[i]) for i in (1, 3, 4))
    off = rng.choice([-10, -3, -2, -1, 1, 2, 3, 10])
    if found[2] in "+-" and rng.random() < 0.5:
        wrong = x + off if x + off >= (y if found[2] == "-" else 1) else x + abs(off)
        result = wrong + y if found[2] == "+" else wrong - y
        said = f"{wrong} {found[2]} {y} = {result}"
        place = (found.start(), found.start() + len(str(wrong)))
    else:
        wrong = result + off if result + off >= 0 else result + abs(off)
        said = f"{x} {found[2]} {y} = {wrong}"
        place = (found.start() + len(said) - len(str(wrong)), found.start() + len(said))
    return text[: found.start()] + said + text[found.end() :], place


def annotated(split: str, first: int, n: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in itertools.count(first):
        if len(rows) == n:
            break
        made = wordmath.problem(split, i)
        rng = random.Random(f"annotated/{split}/{i}")
        right, base = (
            " " + wordmath.solution(made, rng.choice(("target", "draft")), rng)
            for _ in range(2)
        )
        if not EQUATION.search(base):
            continue  # nothing to slip on
        wrong, error = slip(base, rng)
        # as wordmath.problem draws it
        family = random.Random(f"wordmath/{split}/{i}").choice(
            wordmath_problems.FAMILIES
        )
        rows.append(
            {
                "question": wordmath.prompt(made),
                "correct": right,
                "wrong": wrong,
                "error": error,
                "family": family.__name__.strip("_"),
            }
        )
    return rows


def verdicts(
    pair: Pair, head: Head, prompt: list[int], ids: list[int]
) -> tuple[list[bool], list[float]]:
    """Return, for each token of an answer, whether it is the target's own choice, and the judge's
    score."""
    state = Session(pair.target, states=States(INPUTS.layers)).read(
        [prompt + ids], len(ids) + 1
    )
    reading = Session(pair.target).read([prompt + ids], len(ids) + 1)
    best = reading.greedy_tokens[0, :-1].tolist()
    return [a == b for a, b in zip(best, ids)], torch.sigmoid(
        head.logits(state.hidden[0, 1:])
    ).tolist()


def run_length(accepted: list[bool]) -> int:
    return accepted.index(False) if False in accepted else len(accepted)


def others(pair: Pair, head: Head, threshold: float, n: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for author in ("target", "draft"):
        runs: dict[str, list[int]] = {"strict": [], "judge": []}
        shares: dict[str, list[float]] = {"strict": [], "judge": []}
        refused = list[bool]()  # of the tokens that are the target's own
        for i in track(range(n), f"solutions by the {author}'s author"):
            made = wordmath.problem("test", i)
            text = " " + wordmath.solution(made, author, random.Random(i))
            ids = pair.target.tokenizer(text, add_special_tokens=False)["input_ids"]
            same, scores = verdicts(
                pair, head, pair.target.encode(wordmath.prompt(made)), ids
            )
            for name, accepted in (
                ("strict", same),
                ("judge", [a or s >= threshold for a, s in zip(same, scores)]),
            ):
                runs[name].append(run_length(accepted))
                shares[name].append(float(np.mean(accepted)))
            refused += [score < threshold for score, own in zip(scores, same) if own]
        told[f"{author}'s author"] = {
            name: {
                "tokens_before_a_rejection": float(np.mean(runs[name])),
                "share_accepted": float(np.mean(shares[name])),
            }
            for name in runs
        } | {
            "judge_rejects_of_the_target's_own": float(np.mean(refused)),
            "own": len(refused),
        }
    return told


def objections(
    pair: Pair, head: Head, threshold: float, rows: list[dict[str, Any]]
) -> dict[str, float]:
    counts = dict.fromkeys(("at the slip", "before it", "not by its end"), 0)
    for row in track(rows, "first objections"):
        marked = Annotated(
            row["question"], row["correct"], row["wrong"], tuple(row["error"]), "probe"
        )
        prompt, (_, answer) = marked_answers(pair.target, marked)
        same, scores = verdicts(pair, head, prompt, answer.ids)
        objects = run_length([a or s >= threshold for a, s in zip(same, scores)])
        where = "not by its end"
        if objects < len(answer.ids):
            where = "at the slip" if answer.wrong[objects] else "before it"
        counts[where] += 1
    return {name: count / len(rows) for name, count in counts.items()}


def families(pair: Pair, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return AUC by family: fitted without it, and out of fold when fitted with it."""
    given = [
        Annotated(
            row["question"], row["correct"], row["wrong"], tuple(row["error"]), "row"
        )
        for row in rows
    ]
    examples = annotated_examples(pair.target, given, INPUTS)
    x = examples.in_memory
    harmless = examples.harmless
    numbers = examples.samples
    x = ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)
    examples = replace(examples, x=x)
    kinds = np.array([rows[n]["family"] for n in numbers])
    within = np.zeros(len(x))
    told = {}

    def scores(kept: NDArray, asked: NDArray) -> NDArray:
        config = FitConfig("adamw")
        setting = Hyperparameters(decay=0.01)
        return fit_stopped(examples.rows(kept), config, setting).logits(x[asked])

    for k in track(range(5), "folds"):
        within[numbers % 5 == k] = scores(numbers % 5 != k, numbers % 5 == k)
    for kind in track(sorted(set(kinds)), "families"):
        held = kinds == kind
        told[kind] = {
            **aucs("without", scores(~held, held), examples.rows(held)),
            **aucs("with", within[held], examples.rows(held)),
            "tokens": int(held.sum()),
            "erroneous": int((~harmless[held]).sum()),
        }
    return told


def aucs(name: str, scores: NDArray, examples: Examples) -> dict[str, Any]:
    """Return the AUC of scores [m], and its interval."""
    auc = float(roc_auc_score(examples.harmless, scores))
    return {
        name: auc,
        f"{name}_interval": auc_interval(scores, examples.harmless, examples.samples),
    }


def decoded(
    source: Mined, out: Path, samples: int, problems: int
) -> list[dict[str, Any]]:
    """Return what the judges lose and keep; that of OUT/judge is there."""
    run = out / "run"
    pair = source.pair(compile=True)
    source.first(run, samples)
    with_bars(
        fit_run,
        pair,
        run,
        HeadPlan(INPUTS, out / "mined", FitConfig("adamw", recall=None)),
    )
    with_bars(
        fit_run,
        pair,
        run,
        HeadPlan(Inputs(tokens=("draft",)), out / "autojudge", FitConfig()),
    )
    rules = ["exact"]
    for name in ("judge", "mined", "autojudge"):
        head = load_head(str(out / name))
        listed = {row["recall"]: row["threshold"] for row in head.metrics["thresholds"]}
        thresholds = [listed[recall] for recall in DECODED_RECALLS]
        thresholds += [] if name == "autojudge" else [0.5]
        rules += [f"judge:{out / name}@{threshold}" for threshold in thresholds]
    config = CompareConfig(
        rules=tuple(rules), windows=(8,), limit=problems, timed=1, repeats=1
    )
    with progress_bars() as progress:
        rows = compare(pair, source.task, config, out / "compare", progress).rows
    right = right_answers(out / "compare" / "compare.jsonl")
    return [
        {
            "rule": row.rule.replace(f"{out}/", ""),
            "n": row.n,
            "accuracy": row.accuracy,
            "paired_loss": row.paired_loss,
            "paired_loss_interval": row.paired_loss_interval,
            "tokens_per_pass": row.tokens_per_pass,
            "right": right[row.rule, row.window],
        }
        for row in rows
    ]


def tests(rows: list[dict[str, Any]]) -> list[Paired]:
    """Compare the judges of errors and AutoJudge's with all others."""
    right = {row["rule"]: row["right"] for row in rows}
    ours = [
        rule for rule in right if rule.startswith(("judge:judge@", "judge:autojudge@"))
    ]
    return [
        mcnemar(first, other, right)
        for first in ours
        for other in right
        if other != first
    ]


def probed(
    pair: Pair, head: Head, rows: list[dict[str, Any]], n: int
) -> dict[str, Any]:
    """Return the probes on the built-in task, of `n` solutions each."""
    told: dict[str, Any] = {"metrics": head.metrics, "probes": n}
    for threshold in dict.fromkeys((0.5, head.threshold)):
        told[f"at {threshold:.4g}"] = {
            "others": others(pair, head, threshold, n),
            "first_objection": objections(
                pair, head, threshold, annotated("test", 0, n)
            ),
        }
    return {**told, "families": families(pair, rows)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    add_run(parser)
    parser.add_argument(
        "--annotated", type=Path, help="answers of your own, see docs/rules.md"
    )
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--problems", type=int, default=300)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    source = mined(given.run)
    path = given.annotated
    rows = [] if path else annotated("train", FIRST, given.rows)
    if not path:
        path = given.out / "errors.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = source.pair(compile=False)
    answers = read_annotated(path)
    # without a recall the threshold is the paper's, 0.5
    plan = HeadPlan(INPUTS, given.out / "judge", FitConfig("adamw", recall=None))
    head = with_bars(fit_annotated, pair, answers, plan)
    told: dict[str, Any] = {"rows": len(answers), "metrics": head.metrics}
    if rows:
        told |= probed(pair, head, rows, given.probes)
    told["decoded"] = decoded(source, given.out, len(answers), given.problems)
    told["paired"] = [test.to_json() for test in tests(told["decoded"])]
    write_results(given.out / "probes.json", told)
    shown = {
        key: value for key, value in told.items() if key not in ("metrics", "paired")
    }
    print(json.dumps(shown, indent=1))
    print(
        f"AUC out of fold {head.metrics['auc_out_of_fold']:.3f}; use it as "
        f"judge:{given.out / 'judge'}@0.5"
    )


if __name__ == "__main__":
    main()
