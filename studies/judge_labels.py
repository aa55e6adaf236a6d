"""Labels of judges at other temperatures and of other drafters, and budgets of risk, on any mined
run.

    python studies/judge_labels.py temperature|drafters|budget OUT [--run RUN] [--samples 400]
        [--problems 300] [--temperature 0.6] [--drafter medusa] [--max-drop 0.03]

Writes OUT/labels_NAME.json and prints it.

- temperature: the same samples are mined with answers sampled at --temperature, target and draft
  drawn with the same keys. Judges learn from the greedy answers, from the sampled ones, or from
  both, and score the mismatches of the sampled answers.
- drafters: the same samples are mined with another drafter. Judges of the target's states learn
  from the draft model's mismatches, from the other drafter's, or from both, and score the
  mismatches of each drafter.
- budget: a rule accepts a rejected token if its risk is at most a share of what is left of the
  answer's budget, and subtracts its risk from it. A share of 1 accepts until the budget is spent.
  A token's risk is the probability that it is important: the judge's score, calibrated by Platt
  scaling on samples that it has not learned from. Budgets are compared with fixed thresholds of the
  same judge on test problems. Each kind is tested from strict to lenient for a loss of at most
  --max-drop, each with the whole error.

In the first two, judges are the MLP of `lenience fit`, and score samples that they have not learned
from (five folds). The judge of `both, equal` learns from as many mismatches as that of the smaller
run. `auc` and `accepted` (the share of harmless mismatches accepted at a recall of 98 and 99.5 % of
the important ones) have 95 % intervals over resampled samples. `against_own` is a judge's value
minus that of the judge whose labels are of the scored kind, paired.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined import Mined, add_run, mined
from next_judges import by_mlp, figures
from numpy.typing import NDArray
from paired import as_text, mcnemar
from rich.progress import track
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from lenience.certification.sequential_tests import Binomial, fixed_sequence_test
from lenience.cli.console import progress_bars, with_bars
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.types import Draft, Reading
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples, FitConfig
from lenience.heads.head import Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.rules.judge import Judge
from lenience.rules.registry import RULES
from lenience.runs.journal import Journal
from lenience.runs.record import mined_first, mined_samples, read_run
from lenience.tasks import Sample, Task, take
from lenience.training.features import compute_features, load_features
from lenience.training.fit import HeadPlan, fit_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

FOLDS = 5
WINDOW = 8
BUDGETS: dict[float, tuple[float, ...]] = {
    1.0: (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8),
    0.1: (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
}
"""Budgets by the share of the rest that one token may take, from strict to lenient."""
JUDGED = (0.995, 0.99, 0.98, 0.95, 0.9, 0.8)
"""Recalls of the thresholds that budgets are compared with, from strict to lenient."""
LEARNED = 0.8
"""Share of the samples that the judge of the budgets learns from. The others calibrate it."""
CONFIDENCE = 0.95


# ---- labels of two kinds


@dataclass(frozen=True)
class Labelled:
    """The mismatches of a run, with the task's ids of their samples."""

    examples: Examples
    ids: NDArray[np.str_]
    """[mismatches]"""

    @classmethod
    def of(cls, pair: Pair, run: Path, inputs: Inputs) -> Labelled:
        """Compute the states of a run's mismatches."""
        with progress_bars() as show:
            compute_features(pair, run, inputs, progress=show)
        examples = load_features(run, inputs)
        names = [sample.id for sample in mined_samples(Journal(run / "journal.jsonl"))]
        return cls(examples, np.array(names)[examples.samples])

    def in_fold(self, fold: int, folds: Mapping[str, int]) -> NDArray[np.bool_]:
        """Return which mismatches [m] are of samples in a fold."""
        return np.array([folds[name] for name in self.ids]) == fold


def mined_too(
    source: Mined, pair: Pair, folder: Path, samples: int, **options: Any
) -> Path:
    """Mine the first samples of a run once more, with other options. Return the run folder. Raises
    InputError unless the run has greedy answers and tries of the draft model's tokens."""
    about = read_run(source.run)
    if about.temperature or about.drafter or about.labels or about.policy:
        raise InputError(
            f"{source.run}: was mined with other options; name a run that `lenience mine` made "
            "without --temperature, --drafter, --labels and --policy"
        )
    config = MineConfig(
        limit=samples,
        seed=about.seed,
        first=mined_first(source.run),
        max_new_tokens=about.max_new_tokens,
        **options,
    )
    with_bars(mine, pair, source.task, folder, config)
    return folder


def crossed(runs: Mapping[str, Labelled], seed: int = 0) -> dict[str, Any]:
    """Return the figures of judges that learn from each kind of labels, and from both, on the
    mismatches of each kind. Folds are of whole samples, and the same for all kinds."""
    names = sorted({name for run in runs.values() for name in run.ids})
    drawn = np.random.default_rng(seed).permutation(len(names)) % FOLDS
    folds = dict(zip(names, map(int, drawn)))
    parts: dict[str, tuple[str, ...]] = {name: (name,) for name in runs}
    parts |= {"both": tuple(runs), "both, equal": tuple(runs)}
    scores = _scores(runs, parts, folds, seed)
    rows = []
    for (learned, scored), found in scores.items():
        examples = runs[scored].examples
        row: dict[str, Any] = {"learned_from": learned, "scored": scored}
        row |= figures(examples, found)
        if learned != scored:
            own = scores[scored, scored]
            row["against_own"] = figures(examples, found, own)
        rows.append(row)
    counts = {name: run.examples.harmless for name, run in runs.items()}
    return {
        "samples": len(names),
        "mismatches": {name: len(harmless) for name, harmless in counts.items()},
        "important": {
            name: int((~harmless).sum()) for name, harmless in counts.items()
        },
        "rows": rows,
    }


def _scores(
    runs: Mapping[str, Labelled],
    parts: Mapping[str, Sequence[str]],
    folds: Mapping[str, int],
    seed: int,
) -> dict[tuple[str, str], NDArray]:
    """Return the scores of each run's mismatches by each part's judge, out of fold."""
    smallest = min(len(run.examples) for run in runs.values())
    scores: dict[tuple[str, str], NDArray] = {}
    for learned, members in parts.items():
        most = smallest // len(members) if learned.endswith("equal") else None
        for scored, run in runs.items():
            scores[learned, scored] = np.zeros(len(run.examples))
        for fold in track(range(FOLDS), f"judge of {learned}"):
            inside = []
            for name in members:
                marks = ~runs[name].in_fold(fold, folds)
                inside.append(_some(runs[name], marks, most))
            for scored, run in runs.items():
                outside = run.in_fold(fold, folds)
                rows = run.examples.in_memory[outside]
                scores[learned, scored][outside] = by_mlp(_joined(inside), rows, seed)
    return scores


def _some(run: Labelled, marks: NDArray[np.bool_], most: int | None) -> Examples:
    """Return the marked mismatches, or `most` of them, drawn at random."""
    rows = np.flatnonzero(marks)
    if most is not None:
        share = most / len(run.examples)
        count = round(share * len(rows))
        rows = np.sort(np.random.default_rng(0).choice(rows, count, replace=False))
    return run.examples.rows(rows)


def _joined(parts: Sequence[Examples]) -> Examples:
    """Return the rows of several runs over the same samples."""
    return Examples(
        np.concatenate([part.in_memory for part in parts]),
        harmless=np.concatenate([part.harmless for part in parts]),
        samples=np.concatenate([part.samples for part in parts]),
    )


def temperature(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    source = mined(given.run)
    pair = source.pair(compile=True)
    source.first(out / "greedy", given.samples)
    sampled = mined_too(
        source, pair, out / "sampled", given.samples, temperature=given.temperature
    )
    folders = {"greedy": out / "greedy", "sampled": sampled}
    runs = {name: Labelled.of(pair, run, Inputs()) for name, run in folders.items()}
    return {"temperature": given.temperature, **crossed(runs)}


def drafters(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    source = mined(given.run)
    pair = source.pair(compile=True)
    source.first(out / "model", given.samples)
    drafter = Decoder.of(drafter=given.drafter).drafter
    other = mined_too(source, pair, out / "other", given.samples, drafter=drafter)
    inputs = Inputs(("target",))
    runs = {
        "model": Labelled.of(pair, out / "model", inputs),
        given.drafter: Labelled.of(pair, other, inputs),
    }
    return crossed(runs)


# ---- budgets of risk


@dataclass(frozen=True)
class Spending(Judge):
    """Accept a mismatch whose risk is at most a share of the rest of the answer's budget. The rest
    is `risk` minus the risks of the accepted mismatches. The risk of a mismatch is
    1 − sigmoid(slope · logit + offset), with the judge's logit. The
    rule must have no other lenient term."""

    risk: float = field(default=0.0, kw_only=True)
    share: float = field(default=1.0, kw_only=True)
    slope: float = field(default=1.0, kw_only=True)
    offset: float = field(default=0.0, kw_only=True)
    name = "spending"

    def ask(
        self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.head.window_logits(draft, reading, ctx)
        risks = torch.sigmoid(-(self.slope * logits.double() + self.offset))
        risks = torch.where(exact, 0.0, risks)
        # [B, W]: the risk spent before and after each position, if all before it is accepted
        before_window = [self._spent(row) for row in ctx.rows]
        spent = torch.tensor(before_window, dtype=risks.dtype, device=risks.device)
        after = spent[:, None] + risks.cumsum(1)
        accepted = exact | (risks <= self.share * (self.risk - (after - risks)))
        for row, before, total, lenient in zip(
            ctx.rows, before_window, after, accepted & ~exact
        ):
            row.memory[self] = (row.lenient, [before, *total[lenient].tolist()])
        return accepted, logits

    def _spent(self, row: Any) -> float:
        """Return the risk of a row's lenient acceptances so far. The memory holds their number
        before the last window, and the risk after 0, 1, … of the window's."""
        before, sums = row.memory.get(self, (0, [0.0]))
        return sums[row.lenient - before]


def calibrated(scores: NDArray, harmless: NDArray) -> tuple[float, float]:
    """Return slope and offset of Platt scaling: the probability that a mismatch is harmless is
    sigmoid(slope · score + offset)."""
    model = LogisticRegression(C=1e6).fit(scores[:, None], harmless)
    return float(model.coef_[0, 0]), float(model.intercept_[0])


@dataclass(frozen=True)
class Problems:
    """Test problems of a task, and how a pair answers them."""

    pair: Pair
    task: Task
    samples: Sequence[Sample]

    def answered(self, rule: str) -> dict[str, Any]:
        """Return which problems a rule answers correctly, and its tokens per pass."""
        outs = self.pair.generate_batch(
            [sample.prompt for sample in self.samples],
            rule=rule,
            window=WINDOW,
            batch_size=32,
            max_new_tokens=self.task.max_new_tokens,
            stop_strings=self.task.stop_strings,
        )
        right = [
            self.task.correct(out.text, sample)
            for out, sample in zip(outs, self.samples)
        ]
        tokens = sum(len(out.tokens) for out in outs)
        lenient = sum(out.accepted_lenient for out in outs)
        return {
            "right": as_text(right),
            "tokens_per_pass": tokens / sum(out.target_passes for out in outs),
            "lenient_per_answer": lenient / len(outs),
        }


def budget(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    RULES["spending"] = Spending
    source = mined(given.run)
    pair = source.pair(compile=True)
    learned = round(LEARNED * given.samples)
    run = out / "run"
    source.first(run, learned)
    folder = run / "judge"
    plan = HeadPlan(Inputs(), folder, FitConfig("mlp"))
    metrics = with_bars(fit_run, pair, run, plan).metrics
    slope, offset, held_out = _calibration(source, pair, out, learned, given.samples)
    listed = {row["recall"]: row["threshold"] for row in metrics["thresholds"]}
    rules = {
        "target": "target",
        "exact": "exact",
        **_budgets(f"{folder},slope={slope},offset={offset}"),
        **{f"recall {each:g}": f"judge:{folder}@{listed[each]}" for each in JUDGED},
    }
    problems = Problems(pair, source.task, take(source.task, "test", given.problems))
    rows = {
        name: problems.answered(rule) for name, rule in track(rules.items(), "rules")
    }
    return {
        "learned_from": learned,
        "calibration": {"slope": slope, "offset": offset, **held_out},
        "problems": len(problems.samples),
        "rows": {name: {**row, **_loss(rows, name)} for name, row in rows.items()},
        "nearest": list(_nearest(rows)),
        "certified": {
            kind: _certified(rows, kind, given.max_drop)
            for kind in ("recall", *(f"share {share:g}" for share in BUDGETS))
        },
    }


def _budgets(judge: str) -> dict[str, str]:
    """Return the rules with budgets, by name. Rules of one share go from strict to lenient."""
    rules = {}
    for share, budgets in BUDGETS.items():
        for most in budgets:
            name = f"share {share:g} budget {most:g}"
            rules[name] = f"spending:{judge},risk={most},share={share}"
    return rules


def leave_out(source: Mined, run: Path, learned: int, samples: int) -> None:
    """Make a run folder of the first `samples` of a run without the first `learned`."""
    source.first(run, samples)
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[learned:]))


def _calibration(
    source: Mined, pair: Pair, out: Path, learned: int, samples: int
) -> tuple[float, float, dict[str, Any]]:
    """Return slope and offset from the samples that the judge has not learned from, and how many
    mismatches and important ones these have."""
    run = out / "calibration"
    leave_out(source, run, learned, samples)
    head = load_head(str(out / "run" / "judge"), "judge")
    labelled = Labelled.of(pair, run, Inputs())
    x = torch.from_numpy(labelled.examples.in_memory).float()
    scores = head.logits(x).double().numpy()
    harmless = labelled.examples.harmless
    slope, offset = calibrated(scores, harmless)
    counts = {"mismatches": len(harmless), "important": int((~harmless).sum())}
    return slope, offset, counts


def _loss(rows: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the share of problems that the target answers correctly and a rule does not."""
    lost = _lost(rows, name)
    interval = binomtest(int(lost.sum()), len(lost)).proportion_ci()
    return {"lost": int(lost.sum()), "lost_interval": [interval.low, interval.high]}


def _lost(rows: Mapping[str, Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    pairs = zip(rows["target"]["right"], rows[name]["right"])
    return np.array([own == "1" and other == "0" for own, other in pairs], float)


def _nearest(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare each budget with the threshold that has the nearest number of tokens per pass, by the
    exact McNemar test."""
    right = {name: row["right"] for name, row in rows.items()}
    recalls = [name for name in rows if name.startswith("recall")]
    for name in rows:
        if not name.startswith("share"):
            continue
        speed = rows[name]["tokens_per_pass"]
        nearest = min(
            recalls, key=lambda other: abs(rows[other]["tokens_per_pass"] - speed)
        )
        found = mcnemar(name, nearest, right).to_json()
        speeds = [rows[each]["tokens_per_pass"] for each in (name, nearest)]
        yield {**found, "tokens_per_pass": speeds}


def _certified(
    rows: Mapping[str, Mapping[str, Any]], kind: str, max_drop: float
) -> dict[str, Any] | None:
    """Return the most lenient setting of a kind whose loss is certified, tested in the order of
    `rows`, from strict to lenient; None if none is."""
    names = [name for name in rows if name.startswith(f"{kind} ")]
    losses = [_lost(rows, name) for name in names]
    n = len(losses[0])
    test = Binomial(max_drop, 1 - CONFIDENCE, n)
    results = fixed_sequence_test(test, len(names), lambda j, m: losses[j][:m], n)
    passed = [result for result in results if result.passed]
    if not passed:
        return None
    name = names[passed[-1].setting]
    return {
        "setting": name,
        "max_drop": max_drop,
        "tokens_per_pass": rows[name]["tokens_per_pass"],
    }


STUDIES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    study.__name__: study for study in (temperature, drafters, budget)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("out", type=Path)
    add_run(parser)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--drafter", default="medusa", help="the other drafter")
    drop_help = "largest loss that the budgets are tested for"
    parser.add_argument("--max-drop", type=float, default=0.03, help=drop_help)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = STUDIES[given.study](given.out, given)
    write_results(given.out / f"labels_{given.study}.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
