"""How FSD's thresholds are chosen, and what they bound (Holsman 2025, section 3 and appendix D).

    python studies/fuzzy_thresholds.py OUT [--run RUN] [--window 5] [--lengths 1.5 2.5 3.5]
        [--problems 200] [--temperature 1]

Writes OUT/fuzzy_thresholds.json and prints it:

- `kinds`: the divergences along the target's own answers by kind of sample, and the share of
  positions under each calibrated threshold: whether one threshold serves several data sets;
- `calibration`: a threshold for each wanted number L' of accepted tokens per pass. The share a of
  positions that must be accepted solves a + a² + … + a^L = L' for a window of L tokens, and the
  threshold is the a-quantile of the divergences. Each of three trials decodes 30 problems and
  corrects a by what it measured;
- `levels`: the calibrated thresholds (low, medium and high), `random` at the shares that give the
  numbers of accepted tokens measured in the trials, and strict decoding on other problems. With a
  temperature the draft drafts greedily and corrections are sampled, which is the paper's main
  setting; `paired` holds exact McNemar tests;
- `bound`: the divergence KL(target ‖ output) of whole answers where the draft samples, from the
  target's own sampled answers, beside the paper's bound N · %D · T. For a draft that drafts
  greedily the divergence is infinite, and TV is told instead. It is infinite everywhere for a
  draft with a draft vocabulary, and left out;
- `js_step`: two sequences of two tokens whose Jensen–Shannon divergence is above the sum of those
  of their tokens, so that the bound fails for JS.

OUT/calibration.json and OUT/compare keep what is done; the command resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fuzzy import Positions, positions
from mined import add_run, family, mined
from numpy.typing import NDArray
from paired import mcnemar, right_answers
from rich.progress import track
from scipy.optimize import brentq

from lenience.cli.console import progress_bars
from lenience.core.errors import InputError
from lenience.core.files import read_json, write_json
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.models.vocabulary import vocabulary_of
from lenience.tasks import Sample, Task, take

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

TRIALS = 3
TRIAL_PROBLEMS = 30
KL_SHARES = (0.7, 0.8, 0.9)
"""Shares of positions under the thresholds of KL."""
QUANTILES = (0.5, 0.75, 0.9)
KEPT = (
    "rule", "n", "accuracy", "accuracy_interval", "paired_loss", "paired_loss_interval",
    "accepted_per_pass", "accepted_per_pass_interval", "draft_share", "tokens_per_pass",
    "tokens_per_second", "tokens_per_second_interval", "timed_n",
)  # fmt: skip


def accepted(share: float, window: int) -> float:
    """Return the mean number of accepted tokens of a window whose positions are accepted with
    probability `share`, each independently of the others."""
    return float(sum(share**i for i in range(1, window + 1)))


def share_for(length: float, window: int) -> float:
    """Return the share of accepted positions at which `accepted` gives `length`."""
    return float(brentq(lambda share: accepted(share, window) - length, 0, 1))


@dataclass
class Chooser:
    """Thresholds of `fuzzy` for a wanted number of accepted tokens, on one pair and task."""

    pair: Pair
    task: Task
    divergences: NDArray
    """[n]: JS at positions of the target's own answers."""
    window: int
    options: dict[str, Any]
    trials_on: list[Sample]

    def choose(self, length: float) -> dict[str, Any]:
        """Return the trials for one wanted length, and the best of their thresholds."""
        aim = length
        trials = []
        for _ in range(TRIALS):
            share = share_for(min(max(aim, 0.05), self.window - 0.05), self.window)
            threshold = float(f"{np.quantile(self.divergences, share):.4g}")
            measured = self.measure(threshold)
            trials.append(
                {"share": share, "threshold": threshold, "accepted_per_pass": measured}
            )
            aim *= length / max(measured, 0.05)
        best = min(trials, key=lambda trial: abs(trial["accepted_per_pass"] - length))
        return {
            "wanted": length,
            "trials": trials,
            "threshold": best["threshold"],
            "share": share_for(best["accepted_per_pass"], self.window),
        }

    def resumed(self, lengths: Sequence[float], path: Path) -> list[dict[str, Any]]:
        """Return the choices for all lengths; those that `path` holds are not made again. Raises
        InputError if it holds choices of other settings."""
        asked = {"pair": self.pair.name, "window": self.window, **self.options}
        known: dict[float, dict[str, Any]] = {}
        if path.exists():
            before = read_json(path)
            if before["asked"] != asked:
                raise InputError(
                    f"{path}: holds choices of other settings; name another OUT"
                )
            known = {each["wanted"]: each for each in before["chosen"]}
        for length in track(lengths, "thresholds"):
            if length not in known:
                known[length] = self.choose(length)
                write_json(path, {"asked": asked, "chosen": list(known.values())})
        return [known[length] for length in lengths]

    def measure(self, threshold: float) -> float:
        """Return the accepted tokens per pass, without corrections and bonus tokens."""
        outs = self.pair.generate_batch(
            [sample.prompt for sample in self.trials_on],
            rule=f"fuzzy:js@{threshold}",
            window=self.window,
            max_new_tokens=self.task.max_new_tokens,
            stop_strings=self.task.stop_strings,
            **self.options,
        )
        kept = sum(out.accepted_exact + out.accepted_lenient for out in outs)
        return kept / sum(out.target_passes for out in outs)


def by_kind(
    pair: Pair,
    task: Task,
    samples: list[Sample],
    temperature: float,
    limits: list[float],
) -> dict[str, Any]:
    """Return quantiles of JS by kind of sample, and the share of positions under each threshold."""
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(kind_of(task, sample), []).append(sample)
    found = {}
    for kind, members in sorted(kinds.items()):
        js = positions(pair, members, temperature).values["js"]
        found[kind] = {
            "samples": len(members),
            "positions": len(js),
            "quantiles": np.quantile(js, QUANTILES).round(4).tolist(),
            "under": [round(float((js < limit).mean()), 4) for limit in limits],
        }
    return {"quantiles": list(QUANTILES), "thresholds": limits, "kinds": found}


def kind_of(task: Task, sample: Sample) -> str:
    """Return the kind of a sample: its `category`, or the kind of a word problem."""
    if task.name == "wordmath":
        return family(sample.id)
    return str(sample.metadata.get("category", "all"))


def levels(
    pair: Pair, task: Task, chosen: list[dict[str, Any]], given: argparse.Namespace
) -> dict[str, Any]:
    """Compare the chosen thresholds with strict decoding and with random acceptance of as many
    tokens."""
    options: dict[str, Any] = {"temperature": given.temperature}
    strict = "exact"
    if given.temperature:
        options |= {"draft_temperature": 0.0, "seed": 0}
        strict = "speculative"
    rules = [strict, *(f"fuzzy:js@{each['threshold']}" for each in chosen)]
    rules += [f"random:{each['share']:.3g}" for each in chosen]
    config = CompareConfig(
        settings=tuple(f"{rule}; window={given.window}" for rule in rules),
        windows=(given.window,),
        options=options,
        limit=given.problems,
        timed=given.timed,
        repeats=3,
    )
    with progress_bars() as progress:
        rows = compare(pair, task, config, given.out / "compare", progress).rows
    found = right_answers(given.out / "compare" / "compare.jsonl")
    right = {rule: found[rule, given.window] for rule in rules}
    tests = [mcnemar(strict, rule, right) for rule in rules[1:]]
    n = len(chosen)
    tests += [mcnemar(rules[1 + i], rules[1 + n + i], right) for i in range(n)]
    return {
        "rows": [
            {key: value for key, value in row.to_json().items() if key in KEPT}
            | {"right": found[row.rule, row.window]}
            for row in rows
        ],
        "paired": [test.to_json() for test in tests],
    }


def bound(found: Positions, thresholds: list[float]) -> list[dict[str, float]]:
    """Return, for each threshold T of KL, the divergence of whole answers and the bound N · %D · T,
    both means over the target's own answers.

    If the draft samples, a position whose KL is under T has the draft's distribution, and every
    other position the target's. By the chain rule KL(target ‖ output) is the mean of the sum of KL
    over the former. Windows are taken as endless; a window's bonus token comes from the target, and
    makes both figures smaller.
    """
    rows = []
    ends = np.flatnonzero(np.diff(found.answers)) + 1
    for limit in thresholds:
        drafted = found.values["kl"] < limit
        sums = [
            part.sum()
            for part in np.split(np.where(drafted, found.values["kl"], 0.0), ends)
        ]
        counts = [part.sum() for part in np.split(drafted, ends)]
        lost = np.where(drafted, 1 - found.likely, 0.0)
        rows.append(
            {
                "threshold": limit,
                "drafted": float(drafted.mean()),
                "kl": float(np.mean(sums)),
                "bound": float(np.mean(counts) * limit),
                "greedy_tv": float(
                    np.mean([part.sum() for part in np.split(lost, ends)])
                ),
            }
        )
    return rows


def js_step() -> dict[str, Any]:
    """Return a pair of distributions over two tokens in sequence whose JS is above twice the JS of
    either token.

    The second token is certain under one of them: after the first token 0 under P, after the first
    token 1 under Q. JS of sequences weighs the second token's distributions by how likely each of
    the two is after the first, not equally.
    """
    first = 0.62
    p1 = np.array([first, 1 - first])
    step = _js(p1, p1[::-1])
    sure = np.array([1.0, 0.0])
    rare = brentq(lambda e: _js(sure, np.array([1 - e, e])) - step, 1e-9, 1 - 1e-9)
    other = np.array([1 - rare, rare])
    p = np.concatenate([p1[0] * sure, p1[1] * other])
    q = np.concatenate([p1[1] * other, p1[0] * sure])
    return {
        "first": p1.tolist(),
        "second": other.tolist(),
        "js_of_a_token": step,
        "bound": 2 * step,
        "js_of_the_sequence": _js(p, q),
    }


def _js(p: NDArray, q: NDArray) -> float:
    middle = (p + q) / 2
    return (_kl(p, middle) + _kl(q, middle)) / 2


def _kl(p: NDArray, q: NDArray) -> float:
    inside = p > 0
    return float((p[inside] * np.log(p[inside] / q[inside])).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run(parser)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--chosen-on", type=int, default=100)
    parser.add_argument("--timed", type=int, default=12)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--lengths", type=float, nargs=3, default=[1.5, 2.5, 3.5])
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    about = study(given)
    write_results(given.out / "fuzzy_thresholds.json", about)
    print(json.dumps(about, indent=1))


def study(given: argparse.Namespace) -> dict[str, Any]:
    """Choose thresholds, and return all figures."""
    source = mined(given.run)
    pair = source.pair()
    task = source.task
    samples = take(task, "train", None)[-given.chosen_on - TRIAL_PROBLEMS :]
    chosen_on = samples[TRIAL_PROBLEMS:]
    found = positions(pair, chosen_on, given.temperature)
    options: dict[str, Any] = {"temperature": given.temperature}
    if given.temperature:
        options |= {"draft_temperature": 0.0, "seed": 0}
    chooser = Chooser(
        pair,
        task,
        found.values["js"],
        window=given.window,
        options=options,
        trials_on=samples[:TRIAL_PROBLEMS],
    )
    chosen = chooser.resumed(given.lengths, given.out / "calibration.json")
    limits = [each["threshold"] for each in chosen]
    kl_limits: list[float] = []
    if vocabulary_of(pair.require_draft("FSD").model) is None:
        kl_limits = np.quantile(found.values["kl"], KL_SHARES).round(4).tolist()
    return {
        "pair": pair.name,
        "task": task.label,
        "temperature": given.temperature,
        "window": given.window,
        "calibration": chosen,
        "kinds": by_kind(pair, task, chosen_on, given.temperature, limits),
        "bound": bound(found, kl_limits),
        "js_step": js_step(),
        "levels": levels(pair, task, chosen, given),
    }


if __name__ == "__main__":
    main()
