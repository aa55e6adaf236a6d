"""The whole story on the built-in pair."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from lenience.certification.question import CertifyConfig
from lenience.cli.console import loading, say, screen
from lenience.cli.steps import certify_run, compare_run, compile_pair, fit_run, mine_run
from lenience.core.errors import InputError
from lenience.core.files import read_json
from lenience.decoding.certified import Certificate
from lenience.decoding.loading import EMBEDDED, load_pair
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, discard
from lenience.evaluation.pages import Mining, write_report
from lenience.evaluation.table import Frontier
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs
from lenience.mining.fit import HeadPlan
from lenience.mining.search import MineConfig, MinedCounts
from lenience.rules.judge import Judge
from lenience.runs.journal import Journal
from lenience.tasks import WordMath

RECALLS = (0.998, 0.995, 0.98, 0.9)
"""Of important tokens: the thresholds that are tried, from one that hardly loses anything to the
paper's."""
WINDOWS = (4, 8, 32)
MAX_DROP = 0.03
"""What is certified, on at most three times as many problems as are compared."""
TOLD = (
    "certified", "max_drop", "confidence", "n", "losses", "upper_bound", "procedure", "binds",
)  # fmt: skip
"""What is told of the certificate."""


def tell(out: Path, fresh: int, limit: int) -> dict[str, Any]:
    """Mine `fresh` samples on top of those that come with the pair, fit a judge, certify a
    threshold, compare on `limit` held-out problems and write OUT/report.html. Returns the
    figures."""
    began = time.perf_counter()
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")
    with loading():
        pair = load_pair(compile=False)
    compile_pair(pair, None, long=True)
    folder = out / "run"
    counts = _mine(pair, folder, fresh)
    head = _fit(pair, folder)
    certificate = _certify(pair, folder, head, limit)
    frontier = _compare(pair, out, head, limit)
    mining = _mining(counts, head)
    write_report(out / "report.html", frontier, mining, certificate)
    seconds = time.perf_counter() - began
    say(f"report: {out / 'report.html'}   run folder: {folder}   {seconds:.0f} s")
    accuracy = {row.rule: row.accuracy for row in frontier.rows}
    told = certificate.to_json()
    return {
        "target_accuracy": accuracy["target"],
        "draft_accuracy": accuracy["draft"],
        "important_share": mining.important_share,
        "judge_auc": mining.judge_auc,
        "certificate": {key: told[key] for key in TOLD},
        "rows": [row.model_dump(mode="json") for row in frontier.rows],
        "machine": frontier.machine,
        "seconds": seconds,
    }


def _mine(pair: Pair, folder: Path, fresh: int) -> MinedCounts:
    shipped = _copy_shipped(folder)
    screen.rule(f"1. mining: {shipped} samples come with the pair, {fresh} are mined now")
    counts = mine_run(pair, WordMath(), folder, MineConfig(limit=shipped + fresh))
    share = _important_share(counts)
    say(f"{counts.mismatches} mismatches, {share:.1%} of them change the answer")
    return counts


def _important_share(counts: MinedCounts) -> float:
    return counts.important / (counts.mismatches - counts.abstained)


def _fit(pair: Pair, folder: Path) -> Head:
    screen.rule("2. fitting the judge")
    head = fit_run(pair, folder, HeadPlan(Inputs(), folder / "judge", FitConfig(kind="mlp")))
    say(f"AUC {head.metrics['auc_out_of_fold']:.3f} on samples it was not fitted to")
    return head


def _thresholds(head: Head) -> list[float]:
    by_recall = {row["recall"]: row["threshold"] for row in head.metrics["thresholds"]}
    return [by_recall[recall] for recall in RECALLS]


def _certify(pair: Pair, folder: Path, head: Head, limit: int) -> Certificate:
    screen.rule(f"3. certifying: a loss of at most {MAX_DROP:.0%}, with 95 % confidence")
    config = CertifyConfig(
        rules=(str(Judge(str(folder / "judge"))),),
        max_drop=MAX_DROP,
        thresholds=tuple(_thresholds(head)),
        options={"window": max(WINDOWS)},
        limit=3 * limit,
    )
    return certify_run(pair, WordMath(), folder, config)


def _compare(pair: Pair, out: Path, head: Head, limit: int) -> Frontier:
    screen.rule(f"4. comparing on {limit} held-out problems")
    judge = str(out / "run" / "judge")
    judges = [str(Judge(judge, threshold)) for threshold in _thresholds(head)]
    rules = ("target", "draft", "exact", "topk:2", *judges)
    config = CompareConfig(rules, windows=WINDOWS, limit=limit, tuning=4, timed=8, repeats=1)
    asked = out / "compare.json"
    if asked.exists() and not _asks_for(read_json(asked), rules):
        discard(out)  # of another judge, or of an earlier version
    return compare_run(pair, WordMath(), config, out)


def _asks_for(asked: dict[str, Any], rules: tuple[str, ...]) -> bool:
    return asked.get("rules") == list(rules) and "settings" in asked


def _mining(counts: MinedCounts, head: Head) -> Mining:
    return Mining(
        samples=counts.samples,
        mismatches=counts.mismatches,
        important_share=_important_share(counts),
        judge_auc=head.metrics["auc_out_of_fold"],
    )


def _copy_shipped(folder: Path) -> int:
    """Start a run folder from the mining run that comes with the pair, unless there is one; how
    many samples that has."""
    if not (folder / "run.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("journal.jsonl", "run.json"):
            shutil.copyfile(EMBEDDED / "run" / name, folder / name)
    return sum(1 for _ in Journal(EMBEDDED / "run" / "journal.jsonl"))
