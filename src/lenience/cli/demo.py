"""The whole story on the built-in pair."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from lenience.certification.question import Question
from lenience.cli.console import follow, loading, screen
from lenience.cli.steps import certify_run, compile_pair, fit_run, mine_run
from lenience.cli.tables import print_table
from lenience.core.errors import InputError
from lenience.core.files import read_json
from lenience.decoding.certified import KEYS
from lenience.decoding.loading import EMBEDDED, load_pair
from lenience.evaluation.compare import compare, discard
from lenience.evaluation.pages import write_report
from lenience.heads.head import Inputs
from lenience.rules.judge import Judge
from lenience.runs.journal import Journal
from lenience.tasks import WordMath

RECALLS = (0.998, 0.995, 0.98, 0.9)
"""Of important tokens: the thresholds that are tried, from one that hardly loses anything to the paper's."""
WINDOWS = (4, 8, 32)
MAX_DROP = 0.03
"""What is certified, on at most three times as many problems as are compared."""


def tell(out: Path, fresh: int, limit: int) -> dict[str, Any]:
    """Mine `fresh` samples on top of those that come with the pair, fit a judge, certify a threshold, compare on `limit`
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

    screen.rule(f"3. certifying: a loss of at most {MAX_DROP:.0%}, with 95 % confidence")
    question = Question((str(Judge(str(folder / "judge"))),), MAX_DROP, 0.95, thresholds=tuple(thresholds),
                        window=max(WINDOWS), limit=3 * limit)  # fmt: skip
    certificate = certify_run(pair, task, folder, question)

    screen.rule(f"4. comparing on {limit} held-out problems")
    rules = ["target", "draft", "exact", "topk:2", *judges]
    if (out / "compare.json").exists() and read_json(out / "compare.json")["rules"] != rules:
        discard(out)  # of another judge
    frontier = follow(compare(pair, task, rules, windows=WINDOWS, limit=limit, tuning=4, timed=8, repeats=1, out=out))
    mining = {**counts, "important_share": share, "judge_auc": auc}
    write_report(out / "report.html", frontier, mining, certificate)
    print_table(frontier)
    seconds = time.perf_counter() - began
    screen.print(f"report: {out / 'report.html'}   run folder: {folder}   {seconds:.0f} s", highlight=False, markup=False)
    by_rule = {row["rule"]: row for row in reversed(frontier["rows"])}
    return {
        "target_accuracy": by_rule["target"]["accuracy"],
        "draft_accuracy": by_rule["draft"]["accuracy"],
        "important_share": share,
        "judge_auc": auc,
        "certificate": {key: certificate[key] for key in KEYS},
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
