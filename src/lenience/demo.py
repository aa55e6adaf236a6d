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
from lenience.pair import EMBEDDED, load_pair
from lenience.report import probability, write_report
from lenience.rules import Judge
from lenience.steps import compile_pair, fit_run, follow, loading, mine_run, print_table, screen
from lenience.tasks import WordMath


def tell(out: Path, fresh: int, limit: int) -> dict[str, Any]:
    """Mine `fresh` samples on top of those that come with the pair, fit a judge, pick a threshold, compare on `limit`
    held-out problems and write OUT/report.html. Returns the figures."""
    began = time.perf_counter()
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")
    with loading():
        pair = load_pair()
    compile_pair(pair, None, long=True)
    task, folder = WordMath(), out / "run"
    shipped = _copy_shipped(folder)
    screen.rule(f"1. mining: {shipped} samples come with the pair, {fresh} are mined now")
    counts = mine_run(pair, task, folder, shipped + fresh)
    share = counts["important"] / (counts["mismatches"] - counts["abstained"])
    screen.print(f"{counts['mismatches']} mismatches, {share:.1%} of them change the answer", highlight=False)

    screen.rule("2. fitting the judge")
    head = fit_run(pair, folder, Inputs(), folder / "judge", kind="mlp", recall=0.9, seed=0)
    auc, each = head.metrics["auc_out_of_fold"], counts["important"] / counts["samples"]
    thresholds, picked = _thresholds(head.metrics["thresholds"], each)
    screen.print(
        f"AUC {auc:.3f}; an answer has {each:.2f} important mismatches, so a loss within a point needs a recall of "
        f"{1 - 0.01 / each:.3f}: threshold {probability(picked)}",
        highlight=False,
    )

    screen.rule(f"3. comparing on {limit} held-out problems")
    judges = [str(Judge(str(folder / "judge"), threshold)) for threshold in thresholds]
    rules = ["target", "draft", "exact", "topk:2", "topk:4", *judges]
    if (out / "compare.json").exists() and read_json(out / "compare.json")["rules"] != rules:
        discard(out)  # of another judge
    frontier = follow(compare(pair, task, rules, limit=limit, tuning=4, out=out))
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
        "threshold": picked,
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


def _thresholds(sweep: list[dict[str, float]], each: float) -> tuple[list[float], float]:
    """Three thresholds to show, and the one that is picked: with `each` important mismatches in an answer, a recall of
    1 - 0.01 / each loses about one answer in a hundred. The others are the paper's recall of 0.9 and one between."""
    picked = next((row for row in sweep if row["recall"] >= 1 - 0.01 / each), sweep[-1])
    between = next(row for row in reversed(sweep) if row["recall"] < (picked["recall"] + 0.9) / 2 or row is sweep[0])
    paper = next(row for row in sweep if row["recall"] == 0.9)
    return sorted({row["threshold"] for row in (paper, between, picked)}), picked["threshold"]
