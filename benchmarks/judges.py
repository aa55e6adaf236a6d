"""What judges gain on the built-in pair, at which loss. Prints one JSON object.

    lenience mine --task wordmath --limit 10000 --out more
    python benchmarks/judges.py --out judges [--more more]

With a draft that was aligned with the target, the fastest that strict decoding has here:

    lenience fit RUN --drafter model --out aligned
    lenience mine --task wordmath --limit 4000 --target TARGET --draft aligned --out aligned-run
    python benchmarks/judges.py --out aligned-judges --draft aligned --run aligned-run

Judges are fitted to the mining run that comes with the pair, or to --run, some of them also to
resampled labels, to what a judge lost on answers of its own, or to a longer run. They are measured
on held-out problems that nothing was chosen on:

- `heads`: out of fold, what share of the harmless mismatches each accepts;
- `wide`: tokens per pass at a wide window, of each judge at the thresholds of two recalls, and of
  one with a second threshold for digits and operators; and what of one is certified;
- `ceiling`: tokens per pass of what accepts exactly the harmless mismatches of the mined samples;
- `fast`: tokens per second, one by one, of what `lenience tune` finds and certifies, of strict
  decoding at its fastest, of the target and of the draft alone.

`figures` has what of these is asked for first; `wide_over_strict` those that lose at most
`--limit`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recording import recorded

from lenience.certification.certificate import Certificate, TriedSetting
from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.certification.tune import TuneConfig, Tuned, tune
from lenience.cli.console import progress_bars
from lenience.core.files import EMBEDDED
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.pages import write_report
from lenience.evaluation.table import Frontier, FrontierRow
from lenience.heads.fitting import FitConfig, HeadKind
from lenience.heads.head import Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.runs.journal import Journal
from lenience.runs.record import mined_first, mined_samples
from lenience.tasks import WordMath
from lenience.training.fit import HeadPlan, fit_run


@dataclass(frozen=True)
class Recipe:
    """How a judge is made."""

    kind: HeadKind = "mlp"
    inputs: Inputs = field(default_factory=lambda: Inputs(ahead=12))
    soft: bool = False
    own: bool = False
    """Whether it also learns from the answers of the judge "ahead"."""
    more: bool = False
    """Whether it learns from the longer run."""


LAYERS = (4, 6, None)
HEADS = {
    "autojudge": Recipe("logistic", Inputs(tokens=("draft",))),
    "logistic": Recipe("logistic", Inputs()),
    "mlp": Recipe("mlp", Inputs()),
    "target's states": Recipe(inputs=Inputs(models=("target",), layers=LAYERS)),
    "ahead": Recipe(),
    "ahead, layers": Recipe(inputs=Inputs(layers=LAYERS, ahead=12)),
    "ahead, soft": Recipe(soft=True),
    "ahead, own answers": Recipe(own=True),
    "ahead, layers, more": Recipe(inputs=Inputs(layers=LAYERS, ahead=12), more=True),
    "target's states, more": Recipe(
        inputs=Inputs(models=("target",), layers=LAYERS), more=True
    ),
}
"""AutoJudge's own head, the same with the states before the drafted token, ones with a hidden
layer, and ones that look ahead too; further labels, and those of the longer run, for some."""
RESAMPLES = 2
POLICY_THRESHOLD = 0.98
POLICY_SAMPLES = 500
NUMERIC = r"[\d+*/=-]"
THRESHOLDS = tuple(
    round(1 / (1 + math.exp(-logit)), 5) for logit in (8, 7.5, 7, 6.5, 5, 4)
)
STRICTER = tuple(
    round(1 / (1 + math.exp(-logit)), 6) for logit in (11, 10, 9, 8.5, 8, 7.5, 7, 6.5)
)
"""Those that are certified, from strict to lenient; at the wide window, where more is doubtful,
stricter ones."""
TRIED = ("0.95", "0.98", "0.995")
"""At the thresholds of which recalls judges decode."""
TWO_THRESHOLDS = "0.95"
SURER = 2.5
"""At which recall's threshold the first that races is also tried with a second one for digits and
operators, and by how much, as a logit, it must be surer of these."""
RECALLS = ("0.9", "0.98", "0.995", "0.998")
STRICT = "strict"
WIDE = 32
MORE = ", more"
RACED = ("ahead, layers", "target's states")
"""The judges that race, where they are fitted: what accepts most, and what is asked fastest; those
of the longer run in their places, where there is one."""
STOPS = (0.5,)
RACED_ON = 128
WINDOWS = (4, 8, 16)


@dataclass(frozen=True)
class Judges:
    """The judges of a benchmark's folder, each fitted when it is first asked for."""

    pair: Pair
    out: Path
    longer: Path | None
    """A longer run, where there is one."""
    names: Sequence[str]
    """Which of HEADS."""

    @property
    def raced(self) -> list[str]:
        of_longer = [
            name + MORE if name + MORE in self.names else name for name in RACED
        ]
        return [name for name in of_longer if name in self.names]

    @property
    def run(self) -> Path:
        """Return the mining run that judges are fitted to."""
        return self.out / "run"

    def fitted(self, name: str) -> str:
        """Return a judge's folder."""
        folder = self._folder(name)
        recipe = HEADS[name]
        if not (folder / "judge.json").exists():
            run = self.longer if recipe.more and self.longer else self.run
            also = (self._own_answers(),) if recipe.own else ()
            config = FitConfig(recipe.kind)
            plan = HeadPlan(recipe.inputs, folder, config, also=also, soft=recipe.soft)
            with progress_bars() as show:
                if recipe.soft:
                    mined = sum(1 for _ in Journal(run / "journal.jsonl"))
                    resampled = MineConfig(
                        mined, resamples=RESAMPLES, first=mined_first(run)
                    )
                    mine(self.pair, WordMath(), run, resampled, show)
                fit_run(self.pair, run, plan, show)
        return str(folder)

    def _own_answers(self) -> Path:
        """Return a run of what the judge that looks ahead kept, on samples that it has not learned
        from."""
        own = self.out / "own"
        policy = Decoder.of(
            rule=f"judge:{self.fitted('ahead')}@{POLICY_THRESHOLD}", window=WIDE
        )
        config = MineConfig(limit=POLICY_SAMPLES, batch_size=32, policy=policy)
        with progress_bars() as show:
            mine(self.pair, WordMath(), own, config, show)
        return own

    def rule(self, name: str, recall: str) -> str:
        """Return a judge at the threshold that rejects so many of the important mismatches, out of
        fold."""
        listed = load_head(self.fitted(name)).metrics["thresholds"]
        (found,) = (
            row["threshold"] for row in listed if f"{row['recall']:g}" == recall
        )
        return f"judge:{self.fitted(name)}@{found}"

    def _folder(self, name: str) -> Path:
        return self.run / re.sub(r"\W+", "-", name)

    def stop_of(self, name: str, recall: str) -> str:
        """Return a stop's folder, fitted to what a judge rejects."""
        rule = self.rule(name, recall)
        folder = self._folder(f"stop of {name}")
        if not (folder / "stop.json").exists():
            plan = HeadPlan(
                Inputs(("draft",), ("previous",)),
                folder,
                FitConfig(role="stop"),
                of=Decoder.of(rule=rule).rule,
            )
            with progress_bars() as show:
                fit_run(self.pair, self.run, plan, show)
        return str(folder)

    def out_of_fold(self) -> dict[str, Any]:
        """Return what share of the harmless mismatches each accepts at recalls of important
        ones."""
        told = {}
        for name in self.names:
            metrics = load_head(self.fitted(name)).metrics
            accepted = {
                f"{row['recall']:g}": row["accepted"] for row in metrics["thresholds"]
            }
            told[name] = {
                "auc": metrics["auc_out_of_fold"],
                "mismatches": metrics["mismatches"],
                "important": metrics["important"],
                "accepted": {recall: accepted[recall] for recall in RECALLS},
            }
        return told


def measured(
    pair: Pair, settings: Iterable[str], out: Path, limit: int, timed: int
) -> Frontier:
    """Return a comparison of settings that name their windows."""
    config = CompareConfig(
        settings=tuple(dict.fromkeys(settings)),
        windows=WINDOWS,
        limit=limit,
        tuning=10,
        timed=timed,
        repeats=2,
    )
    with progress_bars() as show:
        return compare(pair, WordMath(), config, out, show)


def drop(row: FrontierRow) -> float:
    """Return the target's accuracy minus a row's."""
    return row.paired_loss - row.paired_gain


def wide(judges: Judges, problems: int) -> list[dict[str, Any]]:
    """Return each judge at thresholds of some recalls, and one with two thresholds, on held-out
    problems at the wide window; with its tokens per pass over the strict rule's."""
    asked = [(STRICT, "", "exact")]
    for name in judges.names:
        asked += [(name, recall, judges.rule(name, recall)) for recall in TRIED]
    for name, recall, rule in asked[:]:
        if (name, recall) == (judges.raced[0], TWO_THRESHOLDS):
            judge, _, threshold = rule.partition("@")
            two = f'{judge},strict="{NUMERIC}",by={SURER}@{threshold}'
            asked.append((f"{name}, two thresholds", recall, two))
    settings = [f"{rule}; window={WIDE}" for *_, rule in asked]
    found = measured(judges.pair, settings, judges.out / "wide", problems, timed=1)
    rows = {row.rule: row for row in found.rows}
    strict = rows["exact"].tokens_per_pass or 1.0
    return [
        {
            "judge": name,
            "recall": None if name == STRICT else float(recall),
            "times_strict": (rows[rule].tokens_per_pass or 0.0) / strict,
            **rows[rule].to_json(),
        }
        for name, recall, rule in asked
    ]


def question(judges: Judges, name: str, max_drop: float, prompts: int) -> CertifyConfig:
    """Return a question on at most so many prompts, the only one that its ledger knows."""
    home = judges.out / name / "ledger"
    return CertifyConfig(
        ("exact",), max_drop=max_drop, limit=prompts, horizon=prompts, home=home
    )


def certified_wide(judges: Judges, max_drop: float, prompts: int) -> Certificate:
    """Return what is certified at the wide window, of a judge's settings from strict to lenient."""
    judge = f"judge:{judges.fitted(judges.raced[0])}"
    chain = tuple(f"{judge}@{threshold}; window={WIDE}" for threshold in STRICTER)
    asked = question(judges, "certified-wide", max_drop, prompts)
    asked = replace(asked, rules=(), settings=(chain,))
    with progress_bars() as show:
        return certify(
            judges.pair, WordMath(), judges.out / "certified-wide", asked, show
        )


def tuned(judges: Judges, max_drop: float, prompts: int) -> Tuned:
    """Return what `lenience tune` finds for those that race, with a stop that has learned what the
    first rejects."""
    named = tuple(f"judge:{judges.fitted(name)}" for name in judges.raced)
    asked = question(judges, "certified-fast", max_drop, prompts)
    asked = replace(asked, rules=named, thresholds=THRESHOLDS)
    stop = judges.stop_of(judges.raced[0], "0.98")
    stops = ("fixed", *(f"head:{stop}@{least}" for least in STOPS))
    config = TuneConfig(asked, windows=WINDOWS, stops=stops, prompts=RACED_ON)
    with progress_bars() as show:
        return tune(
            judges.pair, WordMath(), judges.out / "certified-fast", config, show
        )


def fast(judges: Judges, won: Tuned, problems: int, timed: int) -> list[FrontierRow]:
    """Return what was raced, and strict decoding, AutoJudge's head and top-K beside it, on held-out
    problems."""
    other = judges.rule("autojudge", "0.98")
    races = won.races
    settings = [
        f"{rule}; window={window}" for rule in ("exact", other) for window in WINDOWS
    ]
    for raced in (
        races.alone,
        races.strict,
        *(rung for chain in races.lenient for rung in chain),
    ):
        raced_with = Decoder.parse(raced.setting)
        named = f"{raced_with.rule}; window={raced_with.window}; stop={raced_with.stop}"
        named += f"; drafter={raced_with.drafter}"
        settings.append(named.removesuffix("; stop=fixed; drafter=model"))
    settings.append("topk:2; window=4")
    out = judges.out / "fast"
    frontier = measured(judges.pair, settings, out, problems, timed)
    write_report(out / "report.html", frontier, certificate=won.certificate)
    return frontier.rows


def decoder(of: FrontierRow | TriedSetting) -> tuple[str, int, str, str]:
    """Return what tells the settings of a comparison and of a certificate apart."""
    options = of.options
    return (
        of.rule,
        of.window,
        options.get("stop", "fixed"),
        options.get("drafter", "model"),
    )


def speed_figures(
    won: Tuned, rows: Sequence[FrontierRow], limit: float
) -> dict[str, Any]:
    """Return tokens per second of what is certified, and of the fastest of all that passed, over
    strict decoding at its fastest and over the target alone; and what share of the draft's own the
    fastest has that loses at most `limit`."""
    alone = next(row for row in rows if row.rule == "target").tokens_per_second
    strict = max(row.tokens_per_second for row in rows if row.rule == "exact")
    usable = [row for row in rows if row.rule != "draft" and drop(row) <= limit]
    fastest = max(usable, key=lambda row: row.tokens_per_second)
    told: dict[str, Any] = {
        "strict_over_target": strict / alone,
        "share_of_draft_alone": fastest.share_of_cap,
        "by": fastest.rule,
    }
    if best := won.certificate.certified:
        speeds = {decoder(row): row.tokens_per_second for row in rows}
        passed = max(
            speeds[decoder(setting)]
            for setting in won.certificate.tried
            if setting.passed
        )
        for name, speed in (("certified", speeds[decoder(best)]), ("passed", passed)):
            told |= {
                f"{name}_over_strict": speed / strict,
                f"{name}_over_target": speed / alone,
            }
    return told


def ceiling(run: Path) -> dict[str, float]:
    """Return tokens per pass, at each window, of what would accept the harmless mismatches of a run
    and no others."""
    found = {}
    for window in (*WINDOWS, WIDE):
        tokens = 0
        passes = 0
        for sample in mined_samples(Journal(run / "journal.jsonl")):
            important = {
                mismatch.position
                for mismatch in sample.mismatches
                if mismatch.important
            }
            begin = 0
            end = len(sample.final_ids)
            while begin < end:
                kept = range(begin, min(begin + window, end))
                begin = (
                    next((place for place in kept if place in important), kept.stop) + 1
                )
                passes += 1
            tokens += end
        found[str(window)] = tokens / passes
    return found


def built_in_pair(draft: str | None) -> Pair:
    """Return the built-in target with its own draft, or with another."""
    if draft is None:
        return load_pair(compile=True)
    return load_pair(str(EMBEDDED / "target"), draft, compile=True, dtype="float32")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("judges"), help="finished work stays there"
    )
    parser.add_argument(
        "--draft", help="another draft for the built-in target, with its --run"
    )
    parser.add_argument(
        "--run", type=Path, default=EMBEDDED / "run", help="to fit judges to"
    )
    parser.add_argument("--more", type=Path, help="a longer run of the same pair")
    judge_help = "one of those that are fitted, may be given again; by default all"
    parser.add_argument("--judge", action="append", choices=HEADS, help=judge_help)
    parser.add_argument("--problems", type=int, default=500, help="held-out problems")
    parser.add_argument(
        "--prompts", type=int, default=2000, help="to certify on, at most"
    )
    parser.add_argument(
        "--raced", type=int, default=200, help="of them, those for the speeds"
    )
    parser.add_argument(
        "--timed", type=int, default=40, help="of these, how many are timed"
    )
    parser.add_argument("--limit", type=float, default=0.01, help="what may be lost")
    parser.add_argument(
        "--heads", action="store_true", help="fit and tell of the heads alone"
    )
    return parser


def results(judges: Judges, given: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements, those that were asked for first."""
    at_width = wide(judges, given.problems)
    won = tuned(judges, given.limit, given.prompts)
    speeds = fast(judges, won, given.raced, given.timed)
    sure = certified_wide(judges, given.limit, given.prompts)
    heads = judges.out_of_fold()
    strict = at_width[0]["tokens_per_pass"]
    told = {
        "wide_over_strict": {
            f"{row['judge']}, {row['recall']}": row["times_strict"]
            for row in at_width
            if row["judge"] != STRICT
            and row["paired_loss"] - row["paired_gain"] <= given.limit
        },
        "certified_wide_over_strict": sure.certified
        and sure.certified.tokens_per_pass / strict,
        **speed_figures(won, speeds, given.limit),
        "accepted_at_0.995": {
            name: head["accepted"]["0.995"] for name, head in heads.items()
        },
    }
    return {
        "figures": told,
        "heads": heads,
        "ceiling": ceiling(judges.run),
        "wide": at_width,
        "certified_wide": certificate_figures(sure),
        "races": won.races.to_json(),
        "certified_fast": certificate_figures(won.certificate),
        "speeds": won.speeds and won.speeds.to_json(),
        "fast": [row.to_json() for row in speeds],
    }


def main() -> None:
    given = (parser := options()).parse_args()
    if not given.more and (
        of_more := [name for name in given.judge or () if HEADS[name].more]
    ):
        parser.error(
            f"--judge {of_more[0]!r}: learns from a longer run; name it with --more"
        )
    known = [name for name in HEADS if given.more or not HEADS[name].more]
    judges = Judges(
        built_in_pair(given.draft), given.out, given.more, given.judge or known
    )
    if not (judges.raced or given.heads):
        parser.error(
            f"--judge: name one of those that race too, {' or '.join(map(repr, RACED))}"
        )
    judges.run.mkdir(parents=True, exist_ok=True)
    for name in ("run.json", "journal.jsonl"):
        if not (judges.run / name).exists():
            shutil.copy(given.run / name, judges.run)
    told = {"heads": judges.out_of_fold()} if given.heads else results(judges, given)
    print(json.dumps(recorded(told), indent=1))


def certificate_figures(certificate: Certificate) -> dict[str, Any]:
    """Return what a certificate came to."""
    told = certificate.to_json()
    named = (
        "certified",
        "max_drop",
        "confidence",
        "n",
        "losses",
        "upper_bound",
        "tried",
        "reason",
    )
    if told["certified"]:
        del told["certified"]["heads"]  # where they lie on this machine
    return {name: told[name] for name in named}


if __name__ == "__main__":
    main()
