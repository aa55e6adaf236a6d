"""SelfJudge (2026) on any run's pair and task: labels by the target's own likelihoods beside labels
by the answer, for the same mismatches.

    python studies/selfjudge.py OUT [--run RUN] [--samples 300] [--problems 300] [--limits-on 100]
        [--asked MODEL]

Writes OUT/selfjudge.json and prints it:

- `run_labels`: the run's own labels of the same samples, by algorithm 1;
- `labels`: each mismatch of the target's own answers is labelled by the answer after the swap, as
  the naive search does, and scored by likelihood, as `lenience mine --labels likelihood` does. The
  AUC of the score for labels by the answer, with its interval over resampled problems; that of its
  first part alone, the difference of the two tokens' log-probabilities; and, for each limit, the
  shares of important and of harmless mismatches under it. Limits are quantiles of the important
  ones' scores on the first samples (--limits-on, 100), as the paper chooses its limit on 100
  problems;
- `by_prompt`, with --asked: the same AUC of a score by prompt: a chat model reads both answers, and
  the score is its logit of "Yes" minus that of "No" when it is asked whether they mean the same;
- `judges`: the same head on the same states, trained with either label;
- `decoded`: these judges on other problems at window 8, at thresholds of recalls on their own
  labels, and `paired`, exact McNemar tests of each judge against strict decoding, and of judges by
  likelihood against those by answers, at the same recall and at the nearest tokens per pass.

With --problems 0 nothing is trained or decoded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from autojudge import Search, measured, naive
from mined import add_run, mined
from numpy.typing import NDArray
from paired import Paired, mcnemar, right_answers
from rich.progress import track

from lenience import load_pair
from lenience.cli.console import progress_bars, with_bars
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Inputs
from lenience.mining.by_likelihood import scores
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.rules.parsing import parse_rule
from lenience.runs.journal import Journal
from lenience.runs.record import MinedSample
from lenience.tasks import Task
from lenience.training.fit import HeadPlan, fit_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

Record = dict[str, Any]
RECALLS = (0.8, 0.9, 0.95, 0.98, 0.995)
LIMIT_RECALLS = (0.5, 0.8, 0.9, 0.95, 0.98)
WINDOW = 8
SAID = ("Yes", "No")
QUESTION = (
    "Question: {question}\n\nAnswer A: {own}\n\nAnswer B: {swapped}\n\nDo the two answers mean the "
    "same? Reply with Yes or No."
)


def by_answers(using: Search, folder: Path, records: Sequence[Record]) -> list[Record]:
    """Label the mismatches of the target's own answers by the answer after the swap. Resumes."""
    journal = Journal(folder / "journal.jsonl")
    swapped = Journal(folder / "swapped.jsonl")
    kept = {row["id"] for row in swapped.resume()}
    done = {record["id"] for record in journal.resume() if record["id"] in kept}
    for record in track([r for r in records if r["id"] not in done], "labels"):
        answers = list[list[int]]()
        labelled = naive(using, record, answers.extend)
        swapped.write({"id": record["id"], "answers": answers})
        journal.write(labelled)
    labelled_by_id = {record["id"]: record for record in journal}
    found = [labelled_by_id[record["id"]] for record in records]
    return [record for record in found if record["answers"]["target"] is not None]


def score(pair: Pair, records: Sequence[Record]) -> tuple[NDArray, NDArray]:
    """Return each mismatch's score by likelihood, and its first part alone."""
    session = Session(pair.target)
    whole: list[float] = []
    first: list[float] = []
    for record in track(records, "likelihoods"):
        sample = MinedSample.read(record, "a record")
        swaps = sample.mismatches
        rated, _ = scores(session, sample.prompt_ids, sample.response_ids, swaps)
        whole += rated
        ids = [*sample.prompt_ids, *sample.response_ids]
        count = len(sample.response_ids) + 1
        logits = session.read([ids], count).logits[0].double().log_softmax(-1)
        first += [
            float(
                logits[s.position, s.draft_token] - logits[s.position, s.target_token]
            )
            for s in swaps
        ]
    return np.array(whole), np.array(first)


def by_prompt(
    lm: LM, using: Search, folder: Path, records: Sequence[Record]
) -> NDArray:
    """Return the score by prompt of each answer after a swap, high for "Yes"."""
    yes, no = (
        lm.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in SAID
    )
    swapped = {row["id"]: row["answers"] for row in Journal(folder / "swapped.jsonl")}
    decode = using.pair.target.decode
    found = []
    for record in track(records, "asking"):
        own = decode(record["response_ids"])
        prompt = using.samples[record["id"]].prompt
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        for answer in swapped[record["id"]]:
            text = QUESTION.format(question=question, own=own, swapped=decode(answer))
            ids = lm.encode([{"role": "user", "content": text}])
            logits = Session(lm).read([ids]).logits[0, -1]
            found.append(float(logits[yes] - logits[no]))
    return np.array(found)


def labels(
    rated: NDArray, first: NDArray, important: NDArray, samples: NDArray, limits_on: int
) -> dict[str, Any]:
    """Compare scores with the labels by the answer. Limits are chosen on the first `limits_on`
    samples."""
    chosen_on = samples < limits_on
    rows = []
    for recall in LIMIT_RECALLS:
        limit = float(np.quantile(rated[chosen_on & important], recall))
        rest = ~chosen_on
        rows.append(
            {
                "recall": recall,
                "limit": limit,
                "important_under": float((rated[rest & important] < limit).mean()),
                "harmless_under": float((rated[rest & ~important] < limit).mean()),
            }
        )
    return {
        "score": measured(rated, ~important, samples),
        "first_difference": measured(first, ~important, samples),
        "limits": rows,
    }


def write_labelled(
    folder: Path, source: Path, records: Sequence[Record], labelled: Sequence[bool]
) -> None:
    """Write a run folder whose records have other labels."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text((source / "run.json").read_text())
    left = iter(labelled)
    lines = []
    for record in records:
        mismatches = [
            {**swap, "important": bool(next(left))} for swap in record["mismatches"]
        ]
        lines.append(json.dumps({**record, "mismatches": mismatches}) + "\n")
    (folder / "journal.jsonl").write_text("".join(lines))


def judged(pair: Pair, run: Path) -> tuple[Record, dict[float, str]]:
    """Return a judge's figures, and its rules by recall."""
    plan = HeadPlan(Inputs(), run / "judge", FitConfig())
    metrics = with_bars(fit_run, pair, run, plan).metrics
    listed = {row["recall"]: row["threshold"] for row in metrics["thresholds"]}
    figures = {
        "auc_on_own_labels": metrics["auc_out_of_fold"],
        "mismatches": metrics["mismatches"],
        "important": metrics["important"],
    }
    judge = f'judge:"{run / "judge"}"'
    rules = {recall: str(parse_rule(f"{judge}@{listed[recall]}")) for recall in RECALLS}
    return figures, rules


def decode(
    pair: Pair,
    task: Task,
    rules: dict[str, dict[float, str]],
    given: argparse.Namespace,
) -> dict[str, Any]:
    """Decode other problems with the judges."""
    out: Path = given.out
    wanted = [
        "exact",
        *(rule for by_recall in rules.values() for rule in by_recall.values()),
    ]
    config = CompareConfig(
        rules=tuple(wanted),
        windows=(WINDOW,),
        limit=given.problems,
        timed=1,
        repeats=1,
    )
    with progress_bars() as show:
        rows = compare(pair, task, config, out / "compare", show).rows
    found = right_answers(out / "compare" / "compare.jsonl")
    right = {rule: found[rule, WINDOW] for rule in wanted}
    names = {
        rule: f"{name}, recall {recall}"
        for name, by_recall in rules.items()
        for recall, rule in by_recall.items()
    } | {"exact": "exact"}
    speed = {row.rule: row.tokens_per_pass or 0.0 for row in rows}
    tests = pairs_of(rules, speed, right)
    points = [
        {
            "judge": names[row.rule],
            "n": row.n,
            "paired_loss": row.paired_loss,
            "paired_loss_interval": row.paired_loss_interval,
            "tokens_per_pass": row.tokens_per_pass,
            "right": right[row.rule],
        }
        for row in rows
        if row.rule in names
    ]
    paired = [
        {**test.to_json(), "first": names[test.first], "second": names[test.second]}
        for test in tests
    ]
    return {"decoded": points, "paired": paired}


def pairs_of(
    rules: dict[str, dict[float, str]], speed: dict[str, float], right: dict[str, str]
) -> list[Paired]:
    """Compare each judge with strict decoding, and each judge by likelihood with the judge by
    answers at the same recall and with the one of the nearest number of tokens per pass."""
    own = rules["answer"]
    tests = []
    for name, by_recall in rules.items():
        for recall, rule in by_recall.items():
            tests.append(mcnemar("exact", rule, right))
            if name == "answer":
                continue
            gap = {other: abs(speed[other] - speed[rule]) for other in own.values()}
            for other in dict.fromkeys((own[recall], min(gap, key=lambda r: gap[r]))):
                tests.append(mcnemar(other, rule, right))
    return tests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run(parser)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--limits-on", type=int, default=100)
    parser.add_argument(
        "--asked", help="chat model that is asked whether answers mean the same"
    )
    given = parser.parse_args()
    about = study(given)
    write_results(given.out / "selfjudge.json", about)
    print(json.dumps(about, indent=1))


def study(given: argparse.Namespace) -> dict[str, Any]:
    """Label, train, decode, and return all figures."""
    out: Path = given.out
    source = mined(given.run)
    pair = source.pair()
    records = source.first(out / "mined", given.samples)
    (out / "answer").mkdir(parents=True, exist_ok=True)
    (out / "answer" / "run.json").write_text((out / "mined" / "run.json").read_text())
    using = Search.of(source, pair, records)
    found = by_answers(using, out / "answer", records)
    told, rated = rate(using, found, given)
    about = {
        "pair": pair.name,
        "task": source.task.label,
        "run_labels": counts(records),
        "labels": told,
    }
    if not given.problems:
        return about
    figures = {}
    rules = {}
    figures["answer"], rules["answer"] = judged(pair, out / "answer")
    for row in told["limits"]:
        name = f"likelihood {row['limit']:.1f}"
        write_labelled(out / name, out / "answer", found, rated < row["limit"])
        figures[name], rules[name] = judged(pair, out / name)
    return {**about, "judges": figures, **decode(pair, source.task, rules, given)}


def counts(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of labelled mismatches of a run's records, and of important ones."""
    labelled = [
        swap["important"]
        for record in records
        for swap in record["mismatches"]
        if swap["important"] is not None
    ]
    return {"mismatches": len(labelled), "important": sum(labelled)}


def rate(
    using: Search, found: Sequence[Record], given: argparse.Namespace
) -> tuple[dict[str, Any], NDArray]:
    """Score labelled mismatches. Return the figures, and the scores by likelihood."""
    rated, first = score(using.pair, found)
    important = np.array([s["important"] for r in found for s in r["mismatches"]])
    samples = np.repeat(range(len(found)), [len(r["mismatches"]) for r in found])
    told = labels(rated, first, important, samples, given.limits_on)
    if given.asked:
        asked = load_pair(given.asked, compile=False).target
        by_asked = by_prompt(asked, using, given.out / "answer", found)
        told["by_prompt"] = measured(by_asked, ~important, samples)
        told["says_yes"] = float((by_asked > 0).mean())
    return told, rated


if __name__ == "__main__":
    main()
