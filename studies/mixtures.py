"""Rules that verify against a mixture of both models, on any run's pair and task: speculative
cascades (Narasimhan 2025), ensembles, DIVERSED's learned weight (2026), and a limit on overshoot
(Zhou 2026).

    python studies/mixtures.py OUT [--run RUN] [--problems 300] [--temperature 0]
        [--acceptance 0.01 0.1 0.3]

Writes OUT/mixtures.json and prints it:

- `heads`: DIVERSED's heads, trained on the run's samples with each weight of acceptance; mean
  reward and expected rejections of the first and the last fifth of the updates;
- `rows`: each rule at window 8: accuracy, paired loss, accepted tokens and tokens per pass; with a
  temperature, ensembles with a limit on overshoot too;
- `paired`: exact McNemar tests of each rule against strict decoding, and of each of DIVERSED's
  heads against the ensemble with the next larger number of tokens per pass, or the
  fastest; of each token-specific cascade against the nearest one with a decision for all tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from autojudge_decoded import Record, compared
from mined import add_run, mined
from paired import mcnemar

from lenience.cli.console import with_bars
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig
from lenience.heads.head import load_head
from lenience.rules.parsing import parse_rule
from lenience.tasks import Task
from lenience.training.mixture import MixturePlan, fit_mixture

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

WINDOW = 8
CASCADES = tuple(
    f"cascade:{kind}@{alpha}"
    for kind, alphas in {
        "chow": (0.1, 0.3, 0.5),
        "diff": (0, 0.1, 0.3),
        "opt": (0, 0.1, 0.3),
        "token1": (0, 0.1, 0.3),
        "token2": (0.2, 0.4, 0.8),
        "token3": (0.3, 0.6, 0.9),
    }.items()
    for alpha in alphas
)
WHOLE = ("cascade:chow", "cascade:diff", "cascade:opt")
"""Cascades with one decision for all tokens."""
ENSEMBLES = tuple(
    f"ensemble:{w}" for w in (0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.3)
)
CAPPED = tuple(f"ensemble:0.4,overshoot={most}" for most in (1.5, 2.0, 4.0))


def heads(
    pair: Pair, task: Task, run: Path, out: Path, given: argparse.Namespace
) -> tuple[list[Record], list[str]]:
    """Train DIVERSED's heads; return their figures and their rules."""
    told = []
    rules = []
    for acceptance in given.acceptance:
        folder = out / f"mixture-{acceptance:g}"
        done = folder / f"done-{given.updates}"
        if not done.is_file():
            plan = MixturePlan(folder, acceptance=acceptance, updates=given.updates)
            with_bars(fit_mixture, pair, task, run, plan)
            done.touch()
        history = load_head(folder, "mixture").metrics["history"]
        part = max(1, len(history) // 5)
        figures: Record = {"acceptance": acceptance, "updates": len(history)}
        for name, rows in (("first", history[:part]), ("last", history[-part:])):
            for key in ("reward", "rejected"):
                figures[f"{name}_{key}"] = float(np.mean([row[key] for row in rows]))
        told.append(figures)
        rules.append(str(parse_rule(f'diversed:"{folder}"')))
    return told, rules


def tests(rows: list[Record], right: dict[str, str], strict: str) -> list[Record]:
    """Compare each rule with strict decoding, and learned weights with ensembles."""
    found = [mcnemar(strict, rule, right) for rule in right if rule != strict]
    speed = {row["rule"]: row["tokens_per_pass"] for row in rows}
    for rule in right:
        if not rule.startswith("diversed"):
            continue
        faster = [other for other in ENSEMBLES if speed[other] >= speed[rule]]
        fastest = max(ENSEMBLES, key=lambda other: speed[other])
        nearest = min(faster, key=lambda other: speed[other], default=fastest)
        found.append(mcnemar(nearest, rule, right))
    whole = [rule for rule in right if rule.startswith(WHOLE)]
    for rule in right:
        if rule.startswith("cascade:token"):
            nearest = min(whole, key=lambda other: abs(speed[other] - speed[rule]))
            found.append(mcnemar(nearest, rule, right))
    return [test.to_json() for test in found]


def study(given: argparse.Namespace) -> dict[str, Any]:
    out: Path = given.out
    source = mined(given.run)
    pair = source.pair()
    run = out / "run"
    if not run.is_dir():
        run.mkdir(parents=True)
        for name in ("run.json", "journal.jsonl"):
            shutil.copy(source.run / name, run)
    told, learned = heads(pair, source.task, run, out, given)
    strict = "speculative" if given.temperature else "exact"
    capped = CAPPED if given.temperature else ()
    named = (strict, *CASCADES, *ENSEMBLES, *capped, *learned)
    rules = tuple(str(parse_rule(rule)) for rule in named)
    config = CompareConfig(
        rules=rules,
        windows=(WINDOW,),
        options={"temperature": given.temperature, "seed": 0},
        limit=given.problems,
        timed=1,
        repeats=1,
    )
    rows, found = compared(pair, source.task, config, out / f"at-{given.temperature:g}")
    right = {rule: found[rule, WINDOW] for rule in rules}
    kept = [row for row in rows if row["rule"] in right]
    return {
        "pair": pair.name,
        "task": source.task.label,
        "temperature": given.temperature,
        "heads": told,
        "rows": [{**row, "right": right[row["rule"]]} for row in kept],
        "paired": tests(kept, right, strict),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run(parser)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.01, 0.1, 0.3])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    about = study(given)
    write_results(given.out / f"mixtures-at-{given.temperature:g}.json", about)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
