"""The whole story on the built-in pair."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from lenience.compare import compare, discard
from lenience.errors import InputError
from lenience.heads import Inputs
from lenience.journal import Journal, read_json
from lenience.pair import EMBEDDED, Pair, load_pair
from lenience.report import probability, write_report
from lenience.rules import Judge
from lenience.steps import compile_pair, fit_run, follow, loading, mine_run, print_table, progress, screen
from lenience.tasks import Sample, Task, WordMath, take

RECALLS = (0.9, 0.95, 0.98, 0.99)
"""Of important tokens: the thresholds that are tried, from the paper's to one that hardly loses anything."""
WINDOWS = (4, 8, 32)


def tell(out: Path, fresh: int, limit: int) -> dict[str, Any]:
    """Mine `fresh` samples on top of those that come with the pair, fit a judge, pick a threshold, compare on `limit`
    held-out problems and write OUT/report.html. Returns the figures."""
    began = time.perf_counter()
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")
    with loading():
        pair = load_pair(compile=False)
    compile_pair(pair, None, long=True)
    task, folder = WordMath(), out / "run"
    shipped = _copy_shipped(folder)
    screen.rule(f"1. mining: {shipped} samples come with the pair, {fresh} are mined now")
    counts = mine_run(pair, task, folder, shipped + fresh)
    share = counts["important"] / (counts["mismatches"] - counts["abstained"])
    screen.print(f"{counts['mismatches']} mismatches, {share:.1%} of them change the answer", highlight=False)

    screen.rule("2. fitting the judge")
    head = fit_run(pair, folder, Inputs(), folder / "judge", kind="mlp", recall=0.9, seed=0)
    auc, sweep = head.metrics["auc_out_of_fold"], {row["recall"]: row["threshold"] for row in head.metrics["thresholds"]}
    screen.print(f"AUC {auc:.3f} on samples it was not fitted to", highlight=False)
    thresholds = [sweep[recall] for recall in RECALLS]
    judges = [str(Judge(str(folder / "judge"), threshold)) for threshold in thresholds]
    others = take(task, "train", None)[-2 * limit :]
    picked, lost = _pick(pair, task, judges, others)
    what = "the most lenient that loses" if lost <= _allowed(others) else "the strictest, since none loses"
    screen.print(
        f"picked: threshold {probability(thresholds[picked])}, {what} at most one in a hundred on {len(others)} other problems "
        f"(it lost {lost})",
        highlight=False,
    )

    screen.rule(f"3. comparing on {limit} held-out problems")
    rules = ["target", "draft", "exact", "topk:2", "topk:4", *judges]
    if (out / "compare.json").exists() and read_json(out / "compare.json")["rules"] != rules:
        discard(out)  # of another judge
    frontier = follow(compare(pair, task, rules, windows=WINDOWS, limit=limit, tuning=4, timed=8, repeats=1, out=out))
    write_report(out / "report.html", frontier, {**counts, "important_share": share, "judge_auc": auc})
    print_table(frontier)
    seconds = time.perf_counter() - began
    screen.print(f"report: {out / 'report.html'}   run folder: {folder}   {seconds:.0f} s", highlight=False, markup=False)
    by_rule = {row["rule"]: row for row in reversed(frontier["rows"])}
    return {
        "target_accuracy": by_rule["target"]["accuracy"],
        "draft_accuracy": by_rule["draft"]["accuracy"],
        "important_share": share,
        "judge_auc": auc,
        "threshold": thresholds[picked],
        "rows": frontier["rows"],
        "machine": frontier["machine"],
        "seconds": seconds,
    }


def _copy_shipped(folder: Path) -> int:
    """Start a run folder from the mining run that comes with the pair, unless there is one; how many samples that has."""
    if not (folder / "run.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("journal.jsonl", "run.json"):
            shutil.copyfile(EMBEDDED / "run" / name, folder / name)
    return sum(1 for _ in Journal(EMBEDDED / "run" / "journal.jsonl"))


def _allowed(samples: list[Sample]) -> int:
    """How many of the samples a threshold may lose: one in a hundred."""
    return len(samples) // 100


def _pick(pair: Pair, task: Task, judges: list[str], samples: list[Sample]) -> tuple[int, int]:
    """Which of `judges`, most lenient first, is the last, tried from the strictest on, to lose no more of the samples than
    allowed, and how many it loses; the strictest, if that loses more."""
    tried, each = ["exact", *reversed(judges)], len(samples)
    strict, losses = [True] * each, dict[str, int]()
    with progress() as show:
        for nth, rule in enumerate(tried):
            right = [False] * each
            decoding = pair.as_completed(
                [sample.prompt for sample in samples],
                batch_size=32,
                rule=rule,
                window=max(WINDOWS),
                max_new_tokens=task.max_new_tokens,
            )
            for done, (i, out) in enumerate(decoding, 1):
                right[i] = task.correct(out.text, samples[i])
                show("picking", nth * each + done, len(tried) * each)
            if rule == "exact":
                strict = right
                continue
            losses[rule] = sum(a and not b for a, b in zip(strict, right))
            if losses[rule] > _allowed(samples):
                break
        show("picking", len(tried) * each, len(tried) * each)  # what is left of the bar need not be tried
    kept = [rule for rule in losses if losses[rule] <= _allowed(samples)] or judges[-1:]
    return judges.index(kept[-1]), losses[kept[-1]]
