"""The demo: every step on the built-in pair."""

from __future__ import annotations

import shutil
import time
from itertools import chain
from pathlib import Path
from typing import Any

from lenience.certification.question import CertifyConfig
from lenience.certification.tune import TuneConfig, Tuned
from lenience.cli.console import loading, say, screen, with_bars
from lenience.cli.live import race
from lenience.cli.options import check_folder
from lenience.cli.steps import compare_run, compile_pair, mine_run, tune_run
from lenience.cli.tables import gained
from lenience.core.files import EMBEDDED, read_json, write_json, write_text
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, discard
from lenience.evaluation.mined_texts import mined_texts
from lenience.evaluation.pages import Mining, write_report
from lenience.evaluation.table import Frontier
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs
from lenience.mining.search import MineConfig, MinedCounts
from lenience.rules.baselines import BASELINES
from lenience.rules.judge import Judge
from lenience.tasks import WordMath
from lenience.training.fit import HeadPlan

SHIPPED = 100
"""Number of shipped samples on which the demo trains its own judge, to save time. The judge that is
tuned comes with the pair and was trained on a hundred times as many."""
READ = Inputs(("target",))
"""States that the judge reads: those of the target only, which are computed anyway."""
THRESHOLDS = (0.993,)
"""Thresholds of the judge to test. Stricter thresholds gain less, and the paper's, at a recall of
0.9, loses too much."""
WINDOWS = (4, 16)
"""Draft windows that race."""
DRAFTERS = ("model", "ngram", "suffix", "medusa")
"""Drafters that race. Drafters made of the target's layers are left out, as their graphs take half
a minute to export."""
WIDEST = 16
"""Draft window that shows the gain if only target passes cost time."""
RACED = 48
"""Number of problems to race and time on."""
MAX_DROP = 0.03
"""Largest loss to certify."""
CERTIFIED_ON = 480
"""Maximum number of problems to certify on."""
DIFFERING = ("rule", "window", "stop", "drafter")
"""Fields in which the compared settings differ."""
PRINTED = (
    "certified", "max_drop", "confidence", "n", "losses", "upper_bound", "procedure", "binds",
)  # fmt: skip
"""Fields of the certificate that are printed."""


def show_race() -> tuple[Pair, list[dict[str, Any]]]:
    """Load the built-in pair and run the live race. Return the pair, and a record for each setting
    of the race."""
    with loading():
        pair = load_pair(compile=False)
    compile_pair(pair, True, 0)
    return pair, race(pair, WordMath())


def tell(out: Path, fresh: int, limit: int) -> dict[str, Any]:
    """Run the live race, mine `fresh` samples in addition to those that come with the pair, train a
    judge, find and certify the fastest setting, compare on `limit` held-out problems and write
    OUT/report.html. Return the figures."""
    began = time.perf_counter()
    check_folder(out)
    say(
        "about two minutes on two cores; lenience demo --quick shows the live race alone"
    )
    pair, raced = show_race()
    folder = out / "run"
    counts = _mine(pair, folder, fresh)
    head = _fit(pair, folder)
    tuned = _tune(pair, out)
    certificate = tuned.certificate
    frontier = _compare(pair, out, tuned, limit)
    mined = mined_texts(pair.models, WordMath(), folder)
    frontier = frontier.model_copy(update={"mined": mined})
    write_json(out / "frontier.json", frontier.to_json())
    mining = _mining(counts, head)
    gain = gained(tuned)
    write_report(out / "report.html", frontier, mining, certificate, headline=gain)
    seconds = time.perf_counter() - began
    screen.print(gain, style="bold", highlight=False, markup=False, soft_wrap=True)
    say(f"report: {out / 'report.html'}   run folder: {folder}   {seconds:.0f} s")
    accuracy = {row.rule: row.accuracy for row in frontier.rows}
    written = certificate.to_json()
    return {
        "live": raced,
        "target_accuracy": accuracy["target"],
        "draft_accuracy": accuracy["draft"],
        "important_share": mining.important_share,
        "judge_auc": mining.judge_auc,
        "gain": gain,
        "races": tuned.races.to_json(),
        "speeds": tuned.speeds and tuned.speeds.to_json(),
        "certificate": {key: written[key] for key in PRINTED},
        "rows": [row.model_dump(mode="json") for row in frontier.rows],
        "machine": frontier.machine,
        "seconds": seconds,
    }


def _mine(pair: Pair, folder: Path, fresh: int) -> MinedCounts:
    shipped = _copy_shipped(folder)
    screen.rule(
        f"1. mining: {shipped} samples come with the pair, {fresh} are mined now"
    )
    counts = mine_run(pair, WordMath(), folder, MineConfig(limit=shipped + fresh))
    share = _important_share(counts)
    say(f"{counts.mismatches} mismatches, {share:.1%} of them change the answer")
    return counts


def _important_share(counts: MinedCounts) -> float:
    return counts.important / (counts.mismatches - counts.abstained)


def _fit(pair: Pair, folder: Path) -> Head:
    from lenience.training.fit import fit_run

    screen.rule("2. fitting a judge")
    head = with_bars(
        fit_run, pair, folder, HeadPlan(READ, folder / "judge", FitConfig())
    )
    ours = head.metrics
    theirs = Judge().head.metrics
    say(
        f"AUC {ours['auc_out_of_fold']:.3f} on samples it was not fitted to; the judge that comes "
        f"with the pair has {theirs['auc_out_of_fold']:.3f}, of {theirs['samples']:,} samples"
    )
    return head


def _tune(pair: Pair, out: Path) -> Tuned:
    folder = out / "run"
    screen.rule(
        f"3. what is fastest here at a loss of at most {MAX_DROP:.0%}, certified"
    )
    question = CertifyConfig(
        rules=(str(Judge()),),
        max_drop=MAX_DROP,
        thresholds=THRESHOLDS,
        limit=CERTIFIED_ON,
        horizon=CERTIFIED_ON,
        home=out,  # keeps the demo out of the user's ledger
    )
    config = TuneConfig(question, windows=WINDOWS, drafters=DRAFTERS, prompts=RACED)
    return tune_run(pair, WordMath(), folder, config)


def _compare(pair: Pair, out: Path, tuned: Tuned, limit: int) -> Frontier:
    """Compare the settings that won the race, the newly trained judge at the most lenient
    threshold, strict decoding and the most lenient setting at the widest window with the draft
    model, and topk:2. Return the figures."""
    screen.rule(f"4. comparing on {limit} held-out problems")
    raced = [
        tuned.races.strict,
        *chain.from_iterable(tuned.races.lenient),
    ]
    fastest = [Decoder.parse(entry.setting) for entry in raced]
    fitted = Judge(str(out / "run" / "judge"), THRESHOLDS[-1])
    widest = []
    for i in (0, -1):
        widest.append(fastest[i].with_options({"window": WIDEST, "drafter": "model"}))
    compared = [*fastest, fastest[-1].with_options({"rule": fitted}), *widest]
    compared.append(fastest[0].with_options({"rule": "topk:2"}))
    settings = []
    for figures in compared:
        decoder = f"{figures.rule}; window={figures.window}; stop={figures.stop}"
        settings.append(f"{decoder}; drafter={figures.drafter}")
    config = CompareConfig(
        settings=tuple(dict.fromkeys(settings)),
        limit=limit,
        timed=5,
        repeats=1,
        home=out,
    )
    asked = out / "compare.json"
    if asked.exists() and not _asks_for(read_json(asked), config):
        discard(out)  # a comparison of another judge, race or version
    return compare_run(pair, WordMath(), config, out)


def _asks_for(asked: dict[str, Any], config: CompareConfig) -> bool:
    settings = []
    for setting in asked.get("settings", []):
        if setting["rule"] not in BASELINES:
            settings.append(setting)
    kept = [tuple(str(setting[name]) for name in DIFFERING) for setting in settings]
    asked_now = [decoder.to_json() for decoder in config.decodings()]
    return kept == [tuple(str(row[name]) for name in DIFFERING) for row in asked_now]


def _mining(counts: MinedCounts, head: Head) -> Mining:
    return Mining(
        samples=counts.samples,
        mismatches=counts.mismatches,
        important_share=_important_share(counts),
        judge_auc=head.metrics["auc_out_of_fold"],
    )


def _copy_shipped(folder: Path) -> int:
    """Start a run folder, unless there is one, from the first samples of the mining run that comes
    with the pair. Return the number of these samples."""
    journal = (EMBEDDED / "run" / "journal.jsonl").read_text(encoding="utf-8")
    lines = [f"{line}\n" for line in journal.split("\n") if line]
    if not (folder / "run.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "journal.jsonl", "".join(lines[:SHIPPED]))
        shutil.copyfile(EMBEDDED / "run" / "run.json", folder / "run.json")
    return len(lines[:SHIPPED])
