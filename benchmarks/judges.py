"""What judges gain on the built-in pair, at which loss. Prints one JSON object.

    python benchmarks/judges.py --out judges

Judges are fitted to the mining run that comes with the pair, some of them also to resampled labels
or to what a judge lost on answers of its own. What is compared is picked on problems that none has
learned from, and then measured on held-out ones that nothing was chosen on:

- tokens per pass at a wide window, of each judge with one threshold, and with a second one for
  digits and operators, where at most a point of accuracy may be lost;
- tokens per second, one by one, of the judge with a stop that learned what it rejects, with one
  that learned what the strict rule rejects, and at fixed windows; and of strict decoding at its
  fastest.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lenience.cli.console import progress_bars
from lenience.decoding.loading import EMBEDDED, load_pair
from lenience.decoding.options import Decoding
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.pages import write_report
from lenience.evaluation.table import Frontier, FrontierRow
from lenience.heads.fitting import FitConfig, Kind
from lenience.heads.head import Inputs, load_head
from lenience.mining.fit import HeadPlan, fit_run
from lenience.mining.search import MineConfig, mine
from lenience.runs.journal import Journal
from lenience.runs.record import mined_first
from lenience.tasks import Sample, WordMath


@dataclass(frozen=True)
class Recipe:
    """How a judge is made."""

    kind: Kind = "mlp"
    inputs: Inputs = field(default_factory=lambda: Inputs(ahead=12))
    soft: bool = False
    own: bool = False
    """Whether it also learns from the answers of the judge "ahead"."""


HEADS = {
    "autojudge": Recipe("logistic", Inputs(tokens=("draft",))),
    "logistic": Recipe("logistic", Inputs()),
    "mlp": Recipe("mlp", Inputs()),
    "ahead": Recipe(),
    "ahead, soft": Recipe(soft=True),
    "ahead, own answers": Recipe(own=True),
}
"""AutoJudge's own head, the same with the states before the drafted token, one with a hidden layer,
and ones that look ahead too."""
RESAMPLES, POLICY_THRESHOLD, POLICY_SAMPLES = 2, 0.98, 500
NUMERIC = r"[\d+*/=-]"
THRESHOLDS = (0.98, 0.99, 0.995, 0.998, 0.9993)
TWO_THRESHOLDS, SURER = "ahead", (2.5,)
"""Which judge is also tried with a second threshold for digits and operators, and by how much, as a
logit, it must be surer of these."""
RECALLS = ("0.9", "0.98", "0.995", "0.998")
WIDE = 32
STOPS = (0.3, 0.5, 0.7)
WINDOWS = (4, 8, 16)


class Picking(WordMath):
    """Problems that are neither mined nor held out, to pick settings on."""

    name = "wordmath-picking"

    def __init__(self, runs: Sequence[Path]):
        self.mined = {record["id"] for run in runs for record in Journal(run / "journal.jsonl")}

    def samples(self, split: str) -> Iterator[Sample]:
        rows = [sample for sample in super().samples("train") if sample.id not in self.mined]
        yield from rows[:4000] if split == "test" else rows[4000:]


def fitted(pair: Pair, run: Path, name: str) -> str:
    """A judge's folder, fitted where it is not there yet."""
    folder, recipe = run / name.replace(", ", "-").replace(" ", "-"), HEADS[name]
    if not (folder / "judge.json").exists():
        also = (_own_answers(pair, run),) if recipe.own else ()
        plan = HeadPlan(recipe.inputs, folder, FitConfig(recipe.kind), also=also, soft=recipe.soft)
        with progress_bars() as show:
            if recipe.soft:
                mined = sum(1 for _ in Journal(run / "journal.jsonl"))
                config = MineConfig(limit=mined, resamples=RESAMPLES, first=mined_first(run))
                mine(pair, WordMath(), run, config, show)
            fit_run(pair, run, plan, show)
    return str(folder)


def _own_answers(pair: Pair, run: Path) -> Path:
    """A run of what the judge that looks ahead kept, on samples that it has not learned from."""
    own = run.parent / "own"
    policy = Decoding(rule=f"judge:{fitted(pair, run, 'ahead')}@{POLICY_THRESHOLD}", window=WIDE)
    config = MineConfig(limit=POLICY_SAMPLES, batch_size=32, policy=policy)
    with progress_bars() as show:
        mine(pair, WordMath(), own, config, show)
    return own


def stop_of(pair: Pair, run: Path, name: str, rule: str | None) -> str:
    """A stop's folder, fitted to what a rule rejects, or else to what the strict one does."""
    folder = run / name
    if not (folder / "stop.json").exists():
        inputs = Inputs(("draft",), ("previous",))
        with progress_bars() as show:
            plan = HeadPlan(inputs, folder, FitConfig(role="stop"), of=rule)
            fit_run(pair, run, plan, show)
    return str(folder)


def measured(
    pair: Pair, task: WordMath, settings: Sequence[str], out: Path, limit: int, timed: int
) -> Frontier:
    """A comparison of settings that name their windows, with the strict rule at its fastest."""
    config = CompareConfig(
        rules=("exact",),
        settings=tuple(settings),
        windows=WINDOWS,
        limit=limit,
        tuning=10,
        timed=timed,
        repeats=2,
    )
    with progress_bars() as show:
        return compare(pair, task, config, out, show)


def most_lenient(rows: Sequence[FrontierRow], limit: float) -> FrontierRow | None:
    """The row of the most tokens per pass that loses at most `limit`, net of what it gains."""
    usable = [row for row in rows if row.paired_loss - row.paired_gain <= limit]
    return max(usable, key=lambda row: row.tokens_per_pass or 0.0, default=None)


def picked_settings(pair: Pair, out: Path, problems: int, limit: float) -> dict[str, FrontierRow]:
    """Each judge's setting of the most tokens per pass at the wide window that loses at most
    `limit`, with one threshold and with two, by its name."""
    kinds = {}
    for name in HEADS:
        judge = f"judge:{fitted(pair, out / 'run', name)}"
        for threshold in THRESHOLDS:
            kinds[f"{judge}@{threshold}"] = name
            for by in SURER if name == TWO_THRESHOLDS else ():
                two = f'{judge},strict="{NUMERIC}",by={by}@{threshold}'
                kinds[two] = f"{name}, two thresholds"
    named = [f"{setting}; window={WIDE}" for setting in ("exact", *kinds)]
    task = Picking([out / "run", out / "own"])
    rows = measured(pair, task, named, out / "picking", limit=problems, timed=1).rows
    best = {}
    for name in dict.fromkeys(kinds.values()):
        if row := most_lenient([row for row in rows if kinds.get(row.rule) == name], limit):
            best[name] = row
    return best


def wide(
    pair: Pair, out: Path, picked: dict[str, FrontierRow], problems: int
) -> list[dict[str, Any]]:
    """What was picked on held-out problems at the wide window."""
    held_out = [
        f"{rule}; window={WIDE}" for rule in ("exact", *(one.rule for one in picked.values()))
    ]
    rows = measured(pair, WordMath(), held_out, out / "held-out", limit=problems, timed=1).rows
    return _times_strict(rows, {row.rule: name for name, row in picked.items()})


def out_of_fold(pair: Pair, run: Path) -> dict[str, Any]:
    """What share of the harmless mismatches each judge accepts at recalls of important ones."""
    told = {}
    for name in HEADS:
        metrics = load_head(fitted(pair, run, name)).metrics
        accepted = {f"{row['recall']:g}": row["accepted"] for row in metrics["thresholds"]}
        told[name] = {
            "auc": metrics["auc_out_of_fold"],
            "mismatches": metrics["mismatches"],
            "important": metrics["important"],
            "accepted": {recall: accepted[recall] for recall in RECALLS},
        }
    return told


def _times_strict(rows: Sequence[FrontierRow], names: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of the rules that have `names`, with their tokens per pass over the strict rule's at
    the wide window."""
    by_rule = {row.rule: row for row in rows if row.window == WIDE}
    strict = by_rule["exact"].tokens_per_pass or 1.0
    return [
        {
            "judge": name,
            "times_strict": (by_rule[rule].tokens_per_pass or 0.0) / strict,
            **by_rule[rule].to_json(),
        }
        for rule, name in names.items()
    ]


def fast(
    pair: Pair, out: Path, rules: Sequence[str], problems: int, timed: int
) -> list[dict[str, Any]]:
    """Tokens per second of judges at some windows, of the first also by a stop that learned what it
    rejects, and by one that learned what the strict rule rejects; of strict decoding likewise, and
    of top-K."""
    run, best = out / "run", rules[0]
    settings = [f"{rule}; window={window}" for rule in rules for window in WINDOWS]
    by_its_own = f"window=16; stop=head:{stop_of(pair, run, 'stop-judge', best)}"
    by_strict = f"window=16; stop=head:{stop_of(pair, run, 'stop-strict', None)}"
    settings += [f"{best}; {by_its_own}@{least}" for least in STOPS]
    settings += [f"{rule}; {by_strict}@{least}" for rule in (best, "exact") for least in STOPS]
    settings += [f"topk:{k}; window=4" for k in (2, 4)]
    frontier = measured(pair, WordMath(), settings, out / "fast", limit=problems, timed=timed)
    write_report(out / "fast" / "report.html", frontier)
    return [row.to_json() for row in frontier.rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("judges"), help="finished work stays there"
    )
    parser.add_argument("--picking", type=int, default=300, help="problems to pick settings on")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems")
    parser.add_argument("--raced", type=int, default=200, help="of them, those for the speeds")
    parser.add_argument("--timed", type=int, default=40, help="of these, how many are timed")
    parser.add_argument("--limit", type=float, default=0.01, help="what may be lost")
    given = parser.parse_args()
    run = given.out / "run"
    run.mkdir(parents=True, exist_ok=True)
    for name in ("run.json", "journal.jsonl"):
        shutil.copy(EMBEDDED / "run" / name, run)
    pair = load_pair(compile=True)
    picked = picked_settings(pair, given.out, given.picking, given.limit)
    held_out = wide(pair, given.out, picked, given.problems)
    best = max(picked.values(), key=lambda row: row.tokens_per_pass or 0.0).rule
    rules = dict.fromkeys([best, picked["autojudge"].rule])
    speeds = fast(pair, given.out, list(rules), given.raced, given.timed)
    heads = out_of_fold(pair, run)
    print(json.dumps({"heads": heads, "wide": held_out, "fast": speeds}, indent=1))


if __name__ == "__main__":
    main()
